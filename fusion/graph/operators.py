"""The table of operators: the only calls that a graph may make, by exact overload name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OperatorInfo:
    """What everyone must know about an operator without asking torch."""

    name: str  #: "aten.linear.default", "fusion.dropout.default", "python.mul"
    cost: str  #: the rule in fusion.graph.costs that counts its floating-point operations
    returns: int = 1  #: tensors returned; 0: a list whose length the graph states (split, chunk, unbind)
    aliases: tuple[int, ...] = ()  #: arguments whose memory the result may share (views, and reshape-like calls)
    mutates: tuple[int, ...] = ()  #: arguments that it writes to, including batch norm's statistics
    random: bool = False  #: draws random numbers: runs under a generator seeded by (job, step, micro-batch, operator)


TABLE: dict[str, OperatorInfo] = {}
