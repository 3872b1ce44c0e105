"""Links between sites that are long, lossy, cut, or slow: by a relay that every connection goes through."""

from __future__ import annotations

import time

import pytest

from tests.faults.test_coordinator_faults import goes_on_undisturbed
from tests.support.chaos import COORDINATOR
from tests.support.faultcluster import FaultCluster, make_job

pytestmark = pytest.mark.faults

#: What TCP makes of 5 % loss at 200 ms (Mathis et al. 1997, MSS 1460): 1.22 * 1460 / (0.2 * sqrt(0.05)).
LOSSY_BYTES_PER_S = 40_000


def test_f14_a_lossy_link_that_flaps_raises_no_suspicion(far_cluster: FaultCluster) -> None:
    chaos = far_cluster.chaos
    assert chaos is not None
    job = make_job(12)
    with far_cluster.running(job, step=1) as run:
        names = [stage.node_name for stage in run.status().stages]
        for other in (names[1], COORDINATOR):
            chaos.shape(names[0], other, LOSSY_BYTES_PER_S, delay_s=0.1, jitter_s=0.05)
        for _ in range(3):
            time.sleep(2.0)
            for other in (names[1], COORDINATOR):
                chaos.cut(names[0], other)
            time.sleep(2.0)
            chaos.heal()
            for other in (names[1], COORDINATOR):
                chaos.shape(names[0], other, LOSSY_BYTES_PER_S, delay_s=0.1, jitter_s=0.05)
        history = far_cluster.finishes(run, job)
    goes_on_undisturbed(history)


def test_f37_a_stream_that_breaks_in_the_middle_of_a_tensor_costs_at_most_that_step(far_cluster: FaultCluster) -> None:
    """Whether it is taken up again or the job makes another plan: what arrives is what was sent."""
    chaos = far_cluster.chaos
    assert chaos is not None
    job = make_job(30, stages=3)
    with far_cluster.running(job, step=2) as run:
        names = [stage.node_name for stage in run.status().stages]
        chaos.shape(names[0], names[1], 60_000)  # every value takes a while
        for _ in range(3):
            time.sleep(1.5)
            chaos.cut(names[0], names[1], "reset")
            chaos.cut(names[1], names[0], "reset")
        chaos.heal()
        history = far_cluster.finishes(run, job, 180.0)
    assert history.lost_steps() <= 3
    assert history.nodes_gone() == []
