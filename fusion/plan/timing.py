"""How long an operator takes on a node: arithmetic by kind, or memory traffic, whichever takes longer.

The unit of work is the floating-point operation at the node's stated speed: seconds = work / flops. Nodes that differ
only in speed share one account of the work; `Pace` is what tells accounts apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, log

from fusion.plan.types import ClusterNode

#: Bytes that a node moves per floating-point operation that it computes, where its memory was not measured: the same
#: balance as `fusion.plan.need.WORK_PER_BYTE`, and about that of both CPUs and GPUs.
BYTES_PER_FLOP = 0.125

#: Share of a node's measured speed, that of large matrix products, which other kinds reach before calibration.
EFFICIENCY: Mapping[str, float] = {
    "linear": 1.0,
    "matmul": 0.9,
    "addmm": 1.0,
    "einsum": 0.9,
    "tensordot": 0.9,
    "bilinear": 0.8,
    "cdist": 0.5,
    "conv": 0.8,
    "conv_transpose": 0.7,
    "attention": 0.7,
    "recurrent": 0.5,
    "cell": 0.5,
}
#: The backward of an operator reads and writes about twice what its forward does.
BACKWARD_MOVES = 2.0
_STEP = 1.05  #: balances nearer than this are taken as one, so that a thousand nodes share a few accounts


@dataclass(frozen=True, slots=True)
class Pace:
    """What decides the work of an operator beside the node's speed."""

    bytes_per_flop: float
    efficiency: tuple[tuple[str, float], ...] = ()  #: in place of the model's own, by kind


@dataclass(frozen=True, slots=True)
class TimeModel:
    """The efficiencies that hold where a node's own calibration says nothing."""

    efficiency: Mapping[str, float] = field(default_factory=lambda: EFFICIENCY)
    bytes_per_flop: float = BYTES_PER_FLOP

    def pace_of(self, node: ClusterNode) -> Pace:
        """Return the account of work that holds on `node`."""
        if node.bytes_per_s <= 0:
            return Pace(self.bytes_per_flop, node.efficiency)
        return Pace(_rounded(node.bytes_per_s / node.flops), node.efficiency)

    def efficiency_of(self, pace: Pace, kind: str) -> float:
        """Return the share of the speed that operators of a kind reach."""
        for name, share in pace.efficiency:
            if name == kind:
                return share
        return self.efficiency.get(kind, 1.0)


def _rounded(ratio: float) -> float:
    """Return the nearest power of `_STEP`; infinite memory speed stays so."""
    return ratio if ratio in (0.0, inf) else _STEP ** round(log(ratio, _STEP))
