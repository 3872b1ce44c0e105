"""The arithmetic of benchmarks.paper_testbed, by hand-counted cases."""

from __future__ import annotations

import pytest

from benchmarks.lab import link_between
from benchmarks.paper_testbed import gap_pct, seconds_per_step, summary, training
from benchmarks.paper_testbed_orders import Ranking, cluster_of
from benchmarks.paper_testbed_training import rate_factors

TOPOLOGY = {
    "hosts": {"a0": "A", "a1": "A", "b0": "B"},
    "defaults": {"rate_mbps": 1000, "delay_ms": 0.5},
    "links": [{"a": "a1", "b": "b0", "rate_mbps": 12}, {"a": "A", "b": "B", "rate_mbps": 100, "delay_ms": 20}],
}


def test_the_first_steps_do_not_count() -> None:
    assert seconds_per_step([9, 8, 1, 2, 3], []) == 2


def test_each_part_of_a_run_counts_by_its_share_of_the_steps() -> None:
    # Six steps of 1 s, then two of 5 s, of which the first took longer because the codecs changed.
    assert seconds_per_step([9, 9, 1, 1, 1, 1, 7, 5], [7]) == (6 * 1 + 2 * 5) / 8


def test_ratios_are_times_over_ours_and_gaps_are_against_the_dense_run() -> None:
    def run(step_s: float, loss: float | None = None) -> dict[str, object]:
        return {"step_s": [step_s] * 4, "changes": {}, "served_loss": loss, "losses": [loss or 3.0] * 4}

    runs: dict[str, dict[str, object]] = {
        "dense": {"served_loss": 2.0, "losses": [2.0] * 4},
        "equal_number": run(9),
        "equal_compute": run(4),
        "equal_number_by_site": run(7.5),
        "paper": run(3, 2.5),
        "ours": run(1.5, 2.01),
        "orders": {"median": ["a0"]},
    }
    result = summary(runs)
    assert (result["vs_equal_number_dense"], result["vs_paper"]) == (6, 2)
    assert result["vs_equal_compute_dense"] == pytest.approx(8 / 3)
    assert result["vs_equal_number_dense_by_site"] == 5
    assert result["vs_equal_compute_dense_by_site"] is None
    assert result["loss_gap_pct"] == pytest.approx(0.5)
    assert result["paper_loss_gap_pct"] == pytest.approx(25)
    assert gap_pct(1.98, 2.0) == pytest.approx(-1)


def test_a_run_that_stops_early_learns_at_the_rates_of_a_whole_one() -> None:
    short, whole = training("equal_number", 24), training("ours", 24)
    assert (short.steps, short.length, whole.steps) == (5, 24, 24)
    factors = rate_factors(24, 24)
    assert rate_factors(6, 24) == factors[:6]
    assert factors[3] == 1
    assert factors[-1] == pytest.approx(0.05)


def test_an_entry_for_hosts_goes_before_one_for_their_sites() -> None:
    assert link_between(TOPOLOGY, "b0", "a0") == {"a": "A", "b": "B", "rate_mbps": 100, "delay_ms": 20}
    assert link_between(TOPOLOGY, "b0", "a1")["rate_mbps"] == 12
    assert link_between(TOPOLOGY, "b0", "a1")["delay_ms"] == 20
    assert link_between(TOPOLOGY, "a0", "a1") == {"rate_mbps": 1000, "delay_ms": 0.5}


def test_planners_see_the_nodes_in_the_order_in_which_they_join() -> None:
    cluster = cluster_of(TOPOLOGY, ["b0", "a1", "a0"], {"a0": 3.0, "a1": 2.0, "b0": 1.0})
    assert [(node.name, node.flops) for node in cluster.nodes] == [("b0", 1.0), ("a1", 2.0), ("a0", 3.0)]
    link = cluster.links.between(cluster.nodes[0], cluster.nodes[1])
    assert link is not None
    assert link.rate_bytes_per_s == pytest.approx(12e6 / 8 * 0.955)
    assert link.delay_s == pytest.approx(0.02)


def test_the_median_order_has_as_many_faster_as_slower_ones() -> None:
    ranking = Ranking(tuple((float(seconds), (f"order {seconds}",)) for seconds in range(5)))
    assert ranking.median == ["order 2"]
    assert [ranking.seconds(share) for share in (0, 0.25, 1)] == [0, 1, 4]
