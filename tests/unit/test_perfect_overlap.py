"""The bound that pipelines are measured against, on cases that can be counted by hand."""

from __future__ import annotations

import pytest

from benchmarks.perfect_overlap import WIRE_OVERHEAD, Boundary, step_s
from benchmarks.pipeline import boundaries_of
from fusion.base.errors import ConfigError
from fusion.plan.schedule import make_schedule, parse_schedule

FREE = Boundary(1e12, 0.0)
BYTES = 1_000_000


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (1, 5), (4, 8), (6, 12)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_without_transfers_a_step_is_all_micro_batches_and_the_way_through(name, stages, micro_batches):
    found = step_s(make_schedule(name, stages, micro_batches), 1.0, 2.0, BYTES, [FREE] * (stages - 1))
    assert found == pytest.approx((micro_batches + stages - 1) * 3.0, abs=1e-3)


def test_one_micro_batch_pays_every_transfer_and_delay_both_ways():
    slow = Boundary(8.0, 0.5)
    transfer_s = BYTES * WIRE_OVERHEAD / 1e6
    assert slow.transfer_s(BYTES) == pytest.approx(transfer_s)
    found = step_s(make_schedule("gpipe", 2, 1), 1.0, 2.0, BYTES, [slow])
    assert found == pytest.approx(2 * (1.0 + 2.0) + 2 * (transfer_s + 0.5))


def test_a_link_carries_one_tensor_at_a_time():
    slow = Boundary(0.8, 0.0)  # ten seconds a tensor, far more than the computing
    found = step_s(make_schedule("gpipe", 2, 3), 0.001, 0.001, BYTES, [slow])
    # three tensors there; the first gradient leaves when the last has come (GPipe), then three back
    assert found == pytest.approx(6 * slow.transfer_s(BYTES), rel=1e-3)


def test_schedules_that_wait_for_each_other_are_refused():
    schedules = [parse_schedule("F0 B0 F1 B1"), parse_schedule("F0 F1 B0 B1")]
    with pytest.raises(ConfigError, match="wait for each other"):
        step_s(schedules, 1.0, 1.0, BYTES, [FREE])


def test_the_links_of_an_order_are_read_as_the_lab_reads_them():
    topology = {
        "hosts": {"a0": "A", "a1": "A", "b0": "B"},
        "defaults": {"rate_mbps": 1000, "delay_ms": 0.5},
        "links": [{"a": "a1", "b": "b0", "rate_mbps": 12}, {"a": "A", "b": "B", "rate_mbps": 100, "delay_ms": 20}],
    }
    assert boundaries_of(topology, ["a0", "a1", "b0", "a0"]) == [
        Boundary(1000, 0.0005),
        Boundary(12, 0.020),
        Boundary(100, 0.020),
    ]
