"""Replicas leave the link to values and gradients most of the time, and between any two of their parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusion.base.ids import StageIndex
from fusion.protocol.job import BlobRef
from fusion.transport.base import Outgoing
from fusion_node import replicas
from fusion_node.replicas import Answer, ReplicaSender
from fusion_node.statefiles import Kept


class Clock:
    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


def kept(step: int, size: int) -> Kept:
    return Kept("job-1", 1, 0, step, BlobRef(f"{step:064x}", size))


def answer(item: Kept) -> bytes:
    return replicas._ANSWER.pack(replicas._VERSION, Answer.HELD, bytes.fromhex(item.blob.digest))


def test_after_a_replica_the_link_rests_for_nine_times_as_long_as_it_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, sent = Clock(), list[Outgoing]()
    monkeypatch.setattr(replicas, "time", clock)
    sender = ReplicaSender(StageIndex(1), "b", lambda _target, outgoing: sent.append(outgoing), lambda *_: None)
    first = kept(1, 200_000)
    sender.send(first, tmp_path / "state")
    assert len(sent) == 1 + 4  # the announcement, and parts of 64 KiB
    assert all(outgoing.background for outgoing in sent)
    clock.now_s += 1.0  # values and gradients go first
    for part in sent[1:]:
        part.prepare()
        clock.now_s += 0.5
        part.sent(1)
    clock.now_s += 1.0  # the holder's disk is slow
    assert not sender.settled(first)
    sender.answered(answer(first))
    assert not sender.settled(first)  # the holder has it, and the next one waits
    clock.now_s += 15.9  # of the 20 s that make 2 s a tenth, 4 have passed
    assert not sender.settled(first)
    clock.now_s += 0.2
    assert sender.settled(first)
    assert not sender.settled(kept(2, 200_000))
