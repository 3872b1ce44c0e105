"""Whatever nodes report: estimates stay within what was measured, sites partition the nodes, probes come to an end."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
from hypothesis import given

from fusion.links import LinkBook, next_probes, view_of
from fusion.links.estimate import RATES_KEPT, LinkRecord, goodput, robust_rate
from fusion.links.probing import MOST_BYTES
from fusion.links.sites import SITE_ROUND_TRIP_S, infer_sites

rates = st.floats(1.0, 1e12)


@given(st.lists(rates, min_size=1, max_size=RATES_KEPT), st.data())
def test_the_rate_is_a_sample_and_no_single_slow_one_lowers_it(samples: list[float], data: st.DataObject):
    rate = robust_rate(samples)
    assert rate in samples
    if len(samples) >= 2:
        place = data.draw(st.integers(0, len(samples) - 1))
        others = samples[:place] + samples[place + 1 :]
        slowed = robust_rate([*others, 0.5])
        assert slowed >= sorted(others, reverse=True)[(len(samples) - 1) // 2]


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 10**6)), max_size=40))
def test_goodput_is_never_below_the_whole_burst_and_never_negative(pieces: list[tuple[float, int]]):
    arrivals = sorted(pieces)
    found = goodput(arrivals)
    assert found >= 0
    if len(arrivals) >= 2 and arrivals[-1][0] > arrivals[0][0]:
        whole = sum(count for _, count in arrivals[1:]) / (arrivals[-1][0] - arrivals[0][0])
        assert found >= whole


@given(st.lists(st.tuples(st.integers(0, 2**40), st.floats(-1, 1e9)), max_size=30))
def test_transfers_keep_the_last_samples_only_and_time_never_goes_back(transfers: list[tuple[int, float]]):
    record = LinkRecord()
    for now_s, (count, busy_s) in enumerate(transfers):
        record = record.with_transfer(count, busy_s, float(now_s))
        assert len(record.rates) <= RATES_KEPT
        assert record.measured_s <= now_s


@st.composite
def maps(draw: st.DrawFn) -> tuple[list[str], dict[frozenset[str], float]]:
    nodes = [f"n{number}" for number in range(draw(st.integers(1, 8)))]
    near_or_far = st.one_of(st.floats(0.0001, 0.02), st.none())
    seconds = {
        frozenset(pair): found for pair in itertools.combinations(nodes, 2) if (found := draw(near_or_far)) is not None
    }
    return nodes, seconds


@given(maps())
def test_every_site_has_a_member_that_stands_for_it_and_all_members_are_near_that_one(
    drawn: tuple[list[str], dict[frozenset[str], float]],
):
    nodes, seconds = drawn
    site = infer_sites(nodes, lambda one, other: seconds.get(frozenset((one, other))))
    assert list(site) == nodes
    for node, head in site.items():
        if head is not None:
            assert site[head] == head
            assert node == head or seconds[frozenset((node, head))] <= SITE_ROUND_TRIP_S


@given(maps(), st.data())
def test_measuring_ends_whoever_cannot_be_reached_and_every_wish_is_one_that_may_be_given(
    drawn: tuple[list[str], dict[frozenset[str], float]], data: st.DataObject
):
    nodes, seconds = drawn
    pairs = list(itertools.permutations(nodes, 2))
    deaf = data.draw(st.sets(st.sampled_from(pairs))) if pairs else set()
    idle = data.draw(st.sets(st.sampled_from(nodes)))
    book = LinkBook()
    for number in range(400):
        wishes = next_probes(book, nodes, idle, (), number * 0.01)
        if not wishes:
            break
        for wish in wishes:
            assert wish.target in idle
            assert wish.source != wish.target
            assert 0 <= wish.size_bytes <= MOST_BYTES
            if (wish.source, wish.target) in deaf:
                book.failed(wish.source, wish.target, number * 0.01, "refused")
                continue
            book.probed(
                wish.source,
                wish.target,
                number * 0.01,
                round_trip_s=seconds.get(frozenset((wish.source, wish.target)), 0.03),
                there_bytes_per_s=1e6 if wish.size_bytes else 0.0,
                back_bytes_per_s=1e6 if wish.size_bytes else 0.0,
                probe_bytes=wish.size_bytes,
            )
    else:
        raise AssertionError("it never ends")
    view = view_of(book, nodes)
    assert all(view.pairs[pair] is None for pair in deaf if pair in view.pairs and not book.record(*pair).round_trips_s)
