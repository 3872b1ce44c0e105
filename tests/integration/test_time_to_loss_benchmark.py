"""`python -m benchmarks.time_to_loss`: from plans' step times and real loss curves to times until a loss."""

from __future__ import annotations

import pytest

from benchmarks.convergence import Runs
from benchmarks.time_to_loss import CLUSTER, Pace, loss_at, measure, steps_to
from benchmarks.time_to_loss_emulation import at_speed, slowed
from fusion.plan.cluster_file import parse_cluster

CURVE = [(10.0, 3.0), (20.0, 2.0), (30.0, 2.5), (40.0, 1.0)]


def test_a_run_takes_each_phases_step_time_for_its_steps() -> None:
    pace = Pace(((1, 0.5), (11, 2.0)), "none")
    assert [pace.seconds(steps) for steps in (0, 4, 10, 12.5)] == [0.0, 2.0, 5.0, 10.0]


def test_a_loss_between_two_measurements_is_reached_between_them() -> None:
    assert [steps_to(loss, CURVE) for loss in (3.5, 2.5, 2.0, 1.75, 1.0)] == [10.0, 15.0, 20.0, 35.0, 40.0]


def test_the_loss_after_a_time_is_read_from_the_curve() -> None:
    pace = Pace(((1, 0.5), (21, 1.0)), "none")
    assert [loss_at(seconds, pace, CURVE) for seconds in (1.0, 7.5, 10.0, 15.0, 99.0)] == [3.0, 2.5, 2.0, 2.25, 1.0]


def test_an_emulated_cluster_takes_as_many_times_longer_for_everything() -> None:
    cluster = at_speed(parse_cluster(CLUSTER, "cluster"), 20e9)
    slow = slowed(cluster, 5.0)
    assert {node.flops for node in slow.nodes} == {4e9}
    for one in cluster.nodes:
        for other in cluster.nodes:
            before, after = cluster.links.between(one, other), slow.links.between(one, other)
            if before is not None and after is not None:
                assert after.rate_bytes_per_s == pytest.approx(before.rate_bytes_per_s / 5)
                assert after.delay_s == pytest.approx(before.delay_s * 5)
    assert slow.links.default is not None


@pytest.mark.slow
def test_on_slow_links_autos_steps_are_faster_than_nones_and_its_losses_lower_than_adatopks() -> None:
    result = measure(Runs(None, quick=True), 1, 12, parse_cluster(CLUSTER, "cluster"), quick=True)
    none, auto, adatopk = (result["kinds"][kind] for kind in ("none", "auto", "adatopk:100"))
    assert [first for first, _ in auto["step_s"]] == [1, 9]  # masks until 70 % of the 12 steps are done
    assert auto["step_s"][0][1] < auto["step_s"][1][1] < none["step_s"][0][1]
    assert none["last_loss"] < auto["last_loss"] == result["auto_vs_none_loss"] < adatopk["last_loss"]
    assert result["auto_vs_adatopk"] > 1
    assert "0>1=adatopk" in adatopk["compression"]
