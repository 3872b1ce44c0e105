"""Whether any stage has contact with the coordinator: only when all say that they have none, and all are heard."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise

import pytest

from fusion.base.errors import WireError
from fusion_node.contact import ContactBook, contact_bytes

FENCE_S = 24.0  #: a stage speaks from 6 s on, every 2 s, and counts for 8 s


def books(contact_s: Sequence[float]) -> list[ContactBook]:
    """One for each stage; `contact_s`: when its node last had an answer."""
    return [ContactBook(stage, len(contact_s), at_s, FENCE_S) for stage, at_s in enumerate(contact_s)]


def talk(chain: Sequence[ContactBook], now_s: float, deaf: Sequence[int] = ()) -> None:
    """Let neighbours tell each other what they know, often enough for a word to get from one end to the other."""
    for _ in chain:
        for left, right in pairwise(chain):
            for source, target in ((left, right), (right, left)):
                if source.is_quiet(now_s) and not {source.stage, target.stage} & set(deaf):
                    target.take(source.message(now_s), now_s)


def test_nobody_has_contact_once_all_have_said_so_even_far_down_the_pipeline():
    chain = books([100.0, 103.0, 101.0, 98.0])
    talk(chain, 107.0)
    assert [book.quiet_s(107.0) for book in chain] == [None] * 4  # the second had an answer 4 s ago
    talk(chain, 110.0)
    assert [book.quiet_s(110.0) for book in chain] == [pytest.approx(7.0)] * 4


def test_one_stage_that_is_answered_leaves_all_others_in_doubt():
    chain = books([100.0, 119.0, 100.0, 100.0])
    talk(chain, 124.0)
    assert [book.quiet_s(124.0) for book in chain] == [None] * 4


def test_a_stage_that_is_heard_of_no_more_may_have_contact():
    chain = books([100.0, 100.0, 100.0])
    talk(chain, 110.0)
    talk(chain, 117.0, deaf=[2])
    assert chain[0].quiet_s(117.0) == pytest.approx(17.0)  # its word is 7 s old
    talk(chain, 118.5, deaf=[2])
    assert [book.quiet_s(118.5) for book in chain[:2]] == [None, None]


def test_a_stage_alone_is_all_stages():
    (book,) = books([100.0])
    assert book.quiet_s(105.9) is None
    assert book.quiet_s(106.0) == pytest.approx(6.0)


def test_an_older_word_that_took_the_long_way_round_changes_nothing():
    first, second, third = books([100.0, 100.0, 100.0])
    second.take(third.message(108.0), 108.0)
    old = second.message(108.0)  # with what the third said then
    second.take(third.message(112.0), 112.0)
    first.take(second.message(112.0), 112.0)
    assert not first.take(old, 112.0)
    assert first.quiet_s(119.9) == pytest.approx(19.9)  # by what it said 7.9 s ago
    first.take(second.message(112.0), 112.0)
    assert not first.take(second.message(112.5), 112.5)  # not worth telling at once
    assert first.take(second.message(114.0), 114.0)


def test_before_a_lease_was_stated_nothing_is_known():
    assert not ContactBook(0, 1).is_quiet(1e6)
    assert ContactBook(0, 1).quiet_s(1e6) is None


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\x02\0\0\0" + struct.pack("<I", 0),
        b"\x01\0\0\0" + struct.pack("<I", 2) + struct.pack("<I4xdd", 0, 1.0, 1.0),
        b"\x01\0\0\0" + struct.pack("<I", 1) + struct.pack("<I4xdd", 2, 1.0, 1.0),  # of two stages
        b"\x01\0\0\0" + struct.pack("<I", 1) + struct.pack("<I4xdd", 1, 1.0, 2.0),  # it spoke before its contact
        b"\x01\0\0\0" + struct.pack("<I", 1) + struct.pack("<I4xdd", 1, float("nan"), 0.0),
        b"\x01\0\0\0" + struct.pack("<I", 1) + struct.pack("<I4xdd", 1, float("inf"), 0.0),
        b"\x01\0\0\0" + struct.pack("<I", 1) + struct.pack("<I4xdd", 1, 1.0, -1.0),
    ],
)
def test_what_makes_no_sense_is_refused(message: bytes):
    with pytest.raises(WireError, match="contact"):
        ContactBook(0, 2, 0.0, FENCE_S).take(message, 10.0)


def test_messages_of_a_full_book_fit_their_limit():
    chain = books([100.0] * 5)
    talk(chain, 110.0)
    assert len(chain[0].message(110.0)) == contact_bytes(5)
