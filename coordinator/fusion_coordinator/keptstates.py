"""Which states of stages the nodes keep, by their own word. Not durable: they say it again when asked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fusion.base.errors import WireError
from fusion.base.ids import JobId, NodeId
from fusion.wire.v1 import node_pb2
from fusion_coordinator.blobs import check_digest

MAX_STATES = 10_000  #: in one report


@dataclass(frozen=True, slots=True)
class KeptState:
    """The state of one stage after one step."""

    job: JobId
    epoch: int
    stage: int
    step: int  #: the last one done
    digest: str
    size_bytes: int
    uploaded: bool = False  #: by the node's word, the blob store has it


@dataclass(frozen=True, slots=True)
class NodeStates:
    """What one registration of a node keeps."""

    incarnation: int
    heard_s: float  #: monotonic
    states: tuple[KeptState, ...]


def read_states(report: node_pb2.StatesReport) -> tuple[KeptState, ...]:
    """Return what a node reports; WireError for what no state can be."""
    if len(report.states) > MAX_STATES:
        raise WireError(f"a report names at most {MAX_STATES} states, got {len(report.states)}")
    return tuple(
        KeptState(
            JobId(state.job_id),
            state.epoch,
            state.stage,
            state.step,
            check_digest(state.state.digest),
            state.state.size_bytes,
            state.uploaded,
        )
        for state in report.states
    )


class KeptBook:
    """The last report of every node."""

    def __init__(self) -> None:
        self._nodes: dict[NodeId, NodeStates] = {}

    def reported(self, node: NodeId, incarnation: int, states: Iterable[KeptState], now_s: float) -> None:
        """Take a report; it replaces the one before."""
        self._nodes[node] = NodeStates(incarnation, now_s, tuple(states))

    def gone(self, node: NodeId) -> None:
        """Forget a node: what it keeps cannot be had any more."""
        self._nodes.pop(node, None)

    def heard_s(self, node: NodeId, incarnation: int) -> float:
        """Return when that registration reported last; minus infinity if never."""
        found = self._nodes.get(node)
        return found.heard_s if found is not None and found.incarnation == incarnation else float("-inf")

    def of(self, job: JobId) -> dict[NodeId, tuple[KeptState, ...]]:
        """Return a job's states by the node that keeps them."""
        found = {node: tuple(state for state in kept.states if state.job == job) for node, kept in self._nodes.items()}
        return {node: states for node, states in found.items() if states}
