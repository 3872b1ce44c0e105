"""The lab's device, for planners: what a worker that stretches its passes to FLOPs over a speed looks like."""

from __future__ import annotations

from fusion.graph.operators import TABLE
from fusion.wire.v1 import node_pb2

#: Far more than any operator moves for each operation: moving bytes takes no time of its own.
_BYTES_PER_FLOP, _MOST_BYTES_PER_S = 1e3, 1e18


def as_emulated(hardware: node_pb2.Hardware) -> node_pb2.Hardware:
    """Return the hardware as a device on which every kind of operator reaches the stated speed (see `stage.Pace`)."""
    emulated = node_pb2.Hardware()
    emulated.CopyFrom(hardware)
    emulated.bytes_per_s = min(hardware.flops * _BYTES_PER_FLOP, _MOST_BYTES_PER_S)
    emulated.efficiency.clear()
    emulated.efficiency.update({info.cost: 1.0 for info in TABLE.values()})
    return emulated
