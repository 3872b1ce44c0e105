"""What planners take and return."""

from __future__ import annotations

from dataclasses import dataclass

from fusion.base.ids import Epoch, Incarnation, NodeId, StageIndex


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A node as a planner sees it."""

    node: NodeId
    name: str
    address: str  #: host:port of its data plane
    incarnation: Incarnation
    memory_bytes: int  #: what its owner lets a job use
    flops: float  #: measured speed of real operators, floating-point operations per second


@dataclass(frozen=True, slots=True)
class Cluster:
    """The nodes that a plan may use, in a stable order."""

    nodes: tuple[ClusterNode, ...]


@dataclass(frozen=True, slots=True)
class JobView:
    """The settings of a job that a planner looks at."""

    micro_batches: int
    schedule: str  #: "1f1b" or "gpipe"
    optimizer_bytes_per_parameter: int  #: state beside the weight and its gradient: AdamW 8, SGD with momentum 4
    max_stages: int = 0  #: 0: no limit
    cuts: tuple[int, ...] = ()  #: operator positions asked for by the job, instead of the planner's choice


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """A contiguous part of the operators on one node."""

    node: NodeId
    node_name: str
    address: str
    incarnation: Incarnation
    first_operator: int
    end_operator: int  #: one past the last
    parameters: int  #: scalars held
    memory_bytes: int  #: estimated need
    forward_s: float  #: estimated, per micro-batch
    backward_s: float


@dataclass(frozen=True, slots=True)
class PlannedLink:
    """A directed pair of stages that exchange values, either way of the step."""

    source: StageIndex
    target: StageIndex
    codec: str
    bytes_per_step: int  #: estimated, before the codec


@dataclass(frozen=True, slots=True)
class Plan:
    """Shards to nodes, links to codecs, and the schedule. A newer epoch replaces it whole."""

    epoch: Epoch
    stages: tuple[PlannedStage, ...]
    links: tuple[PlannedLink, ...]
    schedule: str
    micro_batches: int
