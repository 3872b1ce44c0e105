"""Links from noisy samples, sites from latency, what to measure next, and what planners are told of it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from math import inf

import pytest

from fusion.links import LinkBook, LinkEstimate, next_probes, under_load, view_of
from fusion.links.estimate import LinkRecord, goodput, most_rate, robust_rate
from fusion.links.probing import ALL_PAIRS_NODES, FIRST_BYTES, MOST_BYTES, REFRESH_S, all_measured, probe_size
from fusion.links.sites import infer_sites
from fusion.links.view import LEAST_SHARE

MB = 1_000_000.0


# ---- estimates ----


def test_goodput_leaves_the_first_piece_out_and_counts_the_half_at_full_speed():
    # 10 pieces of 1000 bytes; the first five 0.1 s apart, as a connection comes up to speed, then 0.01 s apart
    times = [0.0, 0.1, 0.2, 0.3, 0.4, 0.41, 0.42, 0.43, 0.44, 0.45]
    assert goodput([(at, 1000) for at in times]) == pytest.approx(4 * 1000 / 0.04)
    steady = [(0.1 * number, 1000) for number in range(10)]
    assert goodput(steady) == pytest.approx(10_000.0)


def test_a_half_that_came_out_of_a_buffer_at_once_does_not_count_alone():
    times = [0.0, 0.1, 0.2, 0.3, 0.4, 0.4001, 0.4002, 0.4003, 0.4004, 0.4005]
    assert goodput([(at, 1000) for at in times]) == pytest.approx(9000 / 0.4005)


@pytest.mark.parametrize("arrivals", [[], [(1.0, 1000)], [(1.0, 1000), (1.0, 1000)]])
def test_too_little_tells_no_goodput(arrivals: list[tuple[float, int]]):
    assert goodput(arrivals) == 0.0


def test_nothing_was_faster_than_the_time_since_it_was_asked_for_allows():
    # 28 KiB are two first flights of a connection: one doubling, and one round trip for the request
    assert most_rate(28 * 1024, 0.5, 0.1) == pytest.approx(28 * 1024 / 0.3)
    assert most_rate(1024, 0.5, 0.1) == pytest.approx(1024 / 0.4)
    late = [(10.29 + 0.001 * number, 100_000) for number in range(10)]  # 1 MB in 0.3 s, all read in the last 10 ms
    assert goodput(late) > 50 * MB
    assert most_rate(1_000_000, 0.3, 0.001) == pytest.approx(3.33 * MB, rel=0.05)
    assert most_rate(1_000_000, 0.3, 0.1) == inf  # a link so long may have needed all of it to come up to speed


def test_one_slow_sample_and_one_fast_one_change_nothing_but_a_link_that_got_slow_is_found_out():
    assert robust_rate([10.0, 1.0]) == 10.0
    assert robust_rate([10.0, 10.0, 1.0, 10.0]) == 10.0
    assert robust_rate([10.0, 90.0, 10.0, 10.0]) == 10.0
    record = LinkRecord()
    for _ in range(8):
        record = record.with_rate(10.0, 0.0)
    slow = [record := record.with_rate(1.0, 0.0) for _ in range(3)]
    assert [one.rate_bytes_per_s for one in slow] == [10.0, 10.0, 1.0]


def test_round_trip_is_the_shortest_of_the_last_three():
    record = LinkRecord()
    for seconds in (0.010, 0.090, 0.080):
        record = record.with_round_trip(seconds)
    assert record.round_trip_s == 0.010
    assert record.with_round_trip(0.085).round_trip_s == 0.080


def test_small_transfers_say_nothing_and_short_ones_only_what_a_link_can_do_at_least():
    record = LinkRecord().with_rate(10 * MB, 0.0)
    assert record.with_transfer(1000, 1.0, 0.0) == record
    assert record.with_transfer(65_536, 0.0001, 0.0).rate_bytes_per_s == pytest.approx(65_536 / 0.005)
    fast = LinkRecord().with_rate(100 * MB, 0.0)
    assert fast.with_transfer(65_536, 0.0001, 0.0) == fast
    assert LinkRecord().with_transfer(1_000_000, 0.5, 0.0).rate_bytes_per_s == pytest.approx(2 * MB)


def test_small_messages_move_a_rate_only_where_it_is_outside_of_what_they_can_mean():
    """Eight of 32 KiB, 16 KiB of each timed, on a link of 10 ms: slow start takes log2(1 + 16/14) = 1.1 round trips."""
    count, messages = 8 * 16_384, 8
    record = LinkRecord().with_round_trip(0.010).with_rate(10 * MB, 0.0)
    assert record.with_transfer(count, 0.080, 1.0, messages) == record  # 1.6 MB/s as seen: all of it may be the delay
    slow = record.with_transfer(count, 0.500, 1.0, messages)
    assert slow.rates[-1] == pytest.approx(count / (0.500 - 8 * 1.0995 * 0.010), rel=1e-3)
    assert record.with_transfer(count, 0.010, 1.0, messages).rates[-1] == pytest.approx(count / 0.010)  # 13 MB/s
    assert record.with_transfer(8 * 65_536, 0.080, 1.0, messages).rates[-1] == pytest.approx(8 * 65_536 / 0.080)
    assert LinkRecord().with_transfer(count, 0.5, 1.0, messages).rates == ()  # nothing is known that could be corrected


def test_figures_that_no_network_has_are_not_believed():
    book = LinkBook()
    book.probed("a", "b", 0.0, round_trip_s=-1.0, there_bytes_per_s=float("inf"), back_bytes_per_s=float("nan"))
    book.transferred("a", "b", 0.0, 2**62, 0.01)
    book.transferred("a", "b", 0.0, 2**20, float("nan"))
    assert book.estimate("a", "b") is None
    assert book.record("a", "b").rates == ()


def test_a_pair_is_absent_after_its_only_try_or_two_failures_in_a_row_and_present_once_it_answers():
    book = LinkBook()
    book.failed("a", "b", 0.0, "refused")
    assert book.record("a", "b").absent
    book.probed("a", "b", 1.0, round_trip_s=0.01)
    assert not book.record("a", "b").absent
    book.failed("a", "b", 2.0, "refused")
    assert not book.record("a", "b").absent
    book.failed("a", "b", 3.0, "refused")
    assert book.record("a", "b").absent
    assert not book.record("b", "a").absent


# ---- sites ----


def table(places: Mapping[str, int]):
    """Nodes of one place are 1 ms apart, others 50 ms."""
    return lambda one, other: 0.001 if places[one] == places[other] else 0.050


def test_nodes_near_each_other_are_one_site_named_by_the_first_of_them():
    places = {"a": 1, "b": 2, "c": 1, "d": 2, "e": 3}
    assert infer_sites(list(places), table(places)) == {"a": "a", "b": "b", "c": "a", "d": "b", "e": "e"}


def test_a_node_joins_the_nearest_of_several_near_sites():
    seconds = {frozenset("ab"): 0.006, frozenset("ac"): 0.004, frozenset("bc"): 0.003}
    assert infer_sites("abc", lambda x, y: seconds[frozenset((x, y))]) == {"a": "a", "b": "b", "c": "b"}


def test_a_node_of_unknown_latency_has_no_site_unless_one_it_is_near_to_is_known():
    known = {frozenset("ab"): 0.050, frozenset("bc"): 0.001}
    lookup = lambda x, y: known.get(frozenset((x, y)))  # noqa: E731
    assert infer_sites("abcd", lookup) == {"a": "a", "b": "b", "c": "b", "d": None}


# ---- what to measure next ----


class World:
    """Answers every wish at once, and counts what it cost."""

    def __init__(self, places: dict[str, int], rates: Mapping[tuple[int, int], float] | None = None) -> None:
        self.nodes, self.places, self.rates = list(places), places, rates or {}
        self.book, self.now_s = LinkBook(), 0.0
        self.pings = self.bulk = self.bytes = 0
        self.deaf: set[tuple[str, str]] = set()  #: (source, target) that cannot connect

    def answer(self, wish) -> None:
        if (wish.source, wish.target) in self.deaf:
            self.book.failed(wish.source, wish.target, self.now_s, "refused")
            return
        here, there = self.places[wish.source], self.places[wish.target]
        rate = self.rates.get((here, there), 100 * MB if here == there else 2 * MB)
        self.pings += 1
        self.bulk += wish.size_bytes > 0
        self.bytes += wish.size_bytes
        self.book.probed(
            wish.source,
            wish.target,
            self.now_s,
            round_trip_s=0.001 if here == there else 0.050,
            there_bytes_per_s=rate if wish.size_bytes else 0.0,
            back_bytes_per_s=rate if wish.size_bytes else 0.0,
            probe_bytes=wish.size_bytes,
        )

    def run(self, rounds: int = 10_000) -> int:
        """Answer until nothing is wanted; return the number of rounds."""
        for number in range(rounds):
            wishes = next_probes(self.book, self.nodes, self.nodes, (), self.now_s)
            involved = [node for wish in wishes for node in (wish.source, wish.target)]
            assert len(involved) == len(set(involved))
            if not wishes:
                return number
            for wish in wishes:
                self.answer(wish)
            self.now_s += 0.5
        raise AssertionError("it never ends")


def test_a_small_cluster_is_measured_whole_both_ways_and_then_left_alone():
    world = World({"a": 1, "b": 1, "c": 2, "d": 3})
    assert not all_measured(world.book, world.nodes, world.nodes, 0.0)
    world.run()
    for one, other in itertools.permutations(world.nodes, 2):
        assert world.book.estimate(one, other) is not None
        assert world.book.record(one, other).dialled_s is not None
    assert all_measured(world.book, world.nodes, world.nodes, world.now_s)
    assert next_probes(world.book, world.nodes, world.nodes, (), world.now_s + REFRESH_S / 2) == []


def test_a_large_cluster_costs_a_probe_for_each_node_and_pair_of_sites_not_for_each_pair():
    count, sites = 120, 4
    world = World({f"n{number:03}": number % sites for number in range(count)})
    world.run()
    pairs = count - sites + sites * (sites - 1) // 2
    assert count > ALL_PAIRS_NODES
    assert world.bulk <= 3 * pairs
    assert world.bytes <= pairs * (FIRST_BYTES + 2 * MOST_BYTES)
    assert world.pings < count * (count - 1) // 4


def test_fast_links_get_larger_probes_until_those_are_long_enough_and_slow_ones_do_not():
    slow, fast = World({"a": 1, "b": 2}, {(1, 2): 0.5 * MB}), World({"a": 1, "b": 2}, {(1, 2): 100 * MB})
    slow.run()
    fast.run()
    assert slow.bytes == FIRST_BYTES
    assert fast.bytes == FIRST_BYTES + MOST_BYTES
    assert probe_size(1e12) == MOST_BYTES
    assert 0 < probe_size(1.0) < FIRST_BYTES


def test_busy_nodes_dial_but_are_not_dialled_and_engaged_ones_do_neither():
    nodes = ["a", "b", "c"]
    wishes = next_probes(LinkBook(), nodes, {"b"}, (), 0.0)
    assert {wish.target for wish in wishes} == {"b"}
    assert next_probes(LinkBook(), nodes, nodes, {"a", "b"}, 0.0) == []


def test_a_pair_that_cannot_connect_is_tried_the_other_way_then_rarely():
    world = World({"a": 1, "b": 2})
    world.deaf = {("a", "b")}
    world.run(60)
    assert world.book.estimate("a", "b") is not None  # measured over b's connection
    world.now_s += 2
    world.run(60)
    assert world.book.record("a", "b").absent
    tries = world.book.record("a", "b").failures
    assert tries == 2
    world.now_s += 30
    assert next_probes(world.book, world.nodes, world.nodes, (), world.now_s) == []
    world.now_s += 60
    (wish,) = next_probes(world.book, world.nodes, world.nodes, (), world.now_s)
    assert (wish.source, wish.target, wish.size_bytes) == ("a", "b", 0)


def test_one_node_that_nobody_reaches_does_not_keep_the_others_from_being_measured():
    world = World({"a": 1, "b": 2, "c": 2})
    world.deaf = {pair for pair in itertools.permutations("abc", 2) if "a" in pair}
    world.run(60)
    assert world.book.estimate("b", "c") is not None
    view = view_of(world.book, world.nodes)
    assert all(view.pairs[pair] is None for pair in world.deaf)


def test_what_no_transfer_refreshes_is_measured_again_after_a_while():
    world = World({"a": 1, "b": 2, "c": 3})
    world.run()
    later_s = world.now_s + REFRESH_S
    for one, other in (("a", "b"), ("b", "a")):
        world.book.transferred(one, other, later_s - 1, 1_000_000, 0.5)
    wishes = next_probes(world.book, world.nodes, world.nodes, (), later_s)
    assert wishes
    assert all({wish.source, wish.target} != {"a", "b"} and wish.size_bytes for wish in wishes)


# ---- what planners are told ----


def test_unmeasured_pairs_are_like_their_sites_and_nodes_of_unknown_place_are_behind_the_slowest_link():
    world = World({"a": 1, "b": 2, "c": 1, "d": 2}, {(1, 2): 2 * MB, (2, 1): 2 * MB})
    for source, target in (("a", "b"), ("a", "c"), ("b", "d"), ("a", "d")):
        world.answer(type("Wish", (), {"source": source, "target": target, "size_bytes": 1 if target != "d" else 0})())
    world.book.probed("b", "d", 0.0, round_trip_s=0.001, there_bytes_per_s=100 * MB, back_bytes_per_s=100 * MB)
    view = view_of(world.book, [*world.nodes, "e"])
    assert view.site == {"a": "a", "c": "a", "b": "b", "d": "b"}
    assert view.sites["a", "b"] == LinkEstimate(2 * MB, 0.050)
    assert ("c", "d") not in view.pairs  # so it is taken for what lies between the sites
    assert view.default == LinkEstimate(2 * MB, 0.050)


def test_a_node_behind_a_slow_connection_of_its_own_limits_its_unmeasured_pairs():
    book = LinkBook()
    book.probed("a", "b", 0.0, round_trip_s=0.050, there_bytes_per_s=20 * MB, back_bytes_per_s=20 * MB)
    book.probed("a", "c", 0.0, round_trip_s=0.002, there_bytes_per_s=50 * MB, back_bytes_per_s=1 * MB)
    view = view_of(book, ["a", "b", "c"])
    assert view.pairs["c", "b"] == LinkEstimate(1 * MB, 0.050)  # it sends slowly ...
    assert ("b", "c") not in view.pairs  # ... and receives as fast as its site


def test_idle_links_are_not_preferred_for_having_been_probed_while_nobody_worked():
    book = LinkBook()
    nodes = ["a", "b", "c", "d"]
    for one, other in itertools.combinations(nodes, 2):
        book.probed(
            one, other, 0.0, round_trip_s=0.05, there_bytes_per_s=10 * MB, back_bytes_per_s=10 * MB, probe_bytes=1
        )
    for rate, pair in ((8 * MB, ("a", "b")), (8 * MB, ("b", "a")), (1 * MB, ("b", "c"))):
        for _ in range(5):
            book.transferred(*pair, 1.0, 1_000_000, 1_000_000 / rate)
    view = under_load(view_of(book, nodes), book)
    rates = {pair: link.rate_bytes_per_s for pair, link in view.pairs.items() if link is not None}
    assert (rates["a", "b"], rates["b", "c"]) == (pytest.approx(8 * MB), pytest.approx(1 * MB))  # as they were seen
    assert rates["c", "d"] == pytest.approx(8 * MB)  # the usual share of those in use is 0.8
    for pair in (("a", "b"), ("b", "a")):
        for _ in range(5):
            book.transferred(*pair, 1.0, 1_000_000, 1.0)
    found = under_load(view_of(book, nodes), book).pairs["c", "d"]
    assert found is not None
    assert found.rate_bytes_per_s == pytest.approx(LEAST_SHARE * 10 * MB)  # all in use fell: that is not all load


def test_without_any_measurement_there_is_nothing_to_plan_by():
    view = view_of(LinkBook(), ["a", "b"])
    assert not view.anything
    assert view.default is None


# ---- through the coordinator's relay ----


def test_where_only_one_end_can_dial_its_connection_carries_both_ways_and_no_relay_is_measured():
    book = LinkBook()
    relayed = {"round_trip_s": 0.09, "there_bytes_per_s": MB, "back_bytes_per_s": MB, "probe_bytes": FIRST_BYTES}
    direct = {"round_trip_s": 0.02, "there_bytes_per_s": 9 * MB, "back_bytes_per_s": 8 * MB, "probe_bytes": MOST_BYTES}
    book.probed("b", "a", 0.0, relayed=True, **relayed)
    assert book.estimate("b", "a") == LinkEstimate(MB, 0.09)
    assert not book.called("b", "a")
    book.probed("a", "b", 1.0, **direct)
    book.probed("b", "a", 2.0, relayed=True, **relayed)
    assert book.estimate("b", "a") == LinkEstimate(8 * MB, 0.02)
    assert book.estimate("a", "b") == LinkEstimate(9 * MB, 0.02)
    assert book.called("b", "a")
    assert not book.called("a", "b")
    assert next_probes(book, ["b", "a"], {"a", "b"}, set(), 3.0) == []  # nothing is measured over and over

    book.probed("b", "a", 4.0, round_trip_s=0.03, there_bytes_per_s=7 * MB, back_bytes_per_s=9 * MB)
    assert book.record("b", "a").direct  # its owner has opened the port
    assert not book.called("b", "a")
    assert book.estimate("b", "a") == LinkEstimate(7 * MB, 0.03)


def test_without_a_relay_too_a_node_that_cannot_dial_has_a_link_to_one_that_can():
    book = LinkBook()
    book.probed("a", "b", 0.0, round_trip_s=0.02, there_bytes_per_s=9 * MB, back_bytes_per_s=8 * MB)
    book.failed("b", "a", 1.0, "no answer")
    book.failed("b", "a", 9.0, "no answer")
    assert book.record("b", "a").absent
    assert view_of(book, ["a", "b"]).pairs["b", "a"] == LinkEstimate(8 * MB, 0.02)
    book.failed("a", "b", 10.0, "no answer")
    book.failed("a", "b", 11.0, "no answer")
    assert view_of(book, ["a", "b"]).pairs == {("a", "b"): None, ("b", "a"): None}


def test_two_nodes_that_both_need_the_relay_have_a_link_in_the_plan():
    book = LinkBook()
    for source, target in (("a", "b"), ("b", "a")):
        book.probed(source, target, 0.0, round_trip_s=0.05, there_bytes_per_s=MB, back_bytes_per_s=MB, relayed=True)
    assert view_of(book, ["a", "b"]).pairs == {
        ("a", "b"): LinkEstimate(MB, 0.05),
        ("b", "a"): LinkEstimate(MB, 0.05),
    }
