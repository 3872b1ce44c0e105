"""What planners take and return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
    site: str = ""  #: nodes of one site share its uplink; empty: the node is a site of its own
    bytes_per_s: float = 0.0  #: measured memory traffic of operators that only move bytes; 0: in proportion to `flops`
    #: share of `flops` that an operator kind (`OperatorInfo.cost`) reaches here, where calibration has found it
    efficiency: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Link:
    """A directed path between two nodes."""

    rate_bytes_per_s: float  #: goodput
    delay_s: float = 0.0  #: propagation, one way


@dataclass(frozen=True, slots=True)
class Uplink:
    """What all nodes of a site share towards other sites."""

    out_bytes_per_s: float
    in_bytes_per_s: float


#: What is assumed of nodes between which nothing was measured.
UNMEASURED_LINK = Link(125_000_000.0, 0.001)


@dataclass(frozen=True, slots=True)
class LinkTable:
    """All links of a cluster in little space: the entry for a pair of nodes goes before the one for their sites.

    None as an entry, or as the default, is an absent link: these nodes cannot connect.
    """

    pairs: Mapping[tuple[NodeId, NodeId], Link | None] = field(default_factory=dict)  #: (source, target)
    sites: Mapping[tuple[str, str], Link | None] = field(default_factory=dict)  #: (of the source, of the target)
    default: Link | None = UNMEASURED_LINK
    uplinks: Mapping[str, Uplink] = field(default_factory=dict)  #: by site

    def between(self, source: ClusterNode, target: ClusterNode) -> Link | None:
        """Return the link from one node to another, as fast as it is with nobody else on a shared uplink."""
        found = self.pairs.get((source.node, target.node), self._by_site(source, target))
        if found is None or not self.uplinks or site_of(source) == site_of(target):
            return found
        rate = found.rate_bytes_per_s
        if (leaving := self.uplinks.get(site_of(source))) is not None:
            rate = min(rate, leaving.out_bytes_per_s)
        if (entering := self.uplinks.get(site_of(target))) is not None:
            rate = min(rate, entering.in_bytes_per_s)
        return Link(rate, found.delay_s)

    def scaled(self, rate: float, delay: float = 1.0) -> LinkTable:
        """Return the links, shared uplinks too, with every rate and every delay multiplied by these factors."""

        def link(one: Link | None) -> Link | None:
            return None if one is None else Link(one.rate_bytes_per_s * rate, one.delay_s * delay)

        return LinkTable(
            {pair: link(one) for pair, one in self.pairs.items()},
            {pair: link(one) for pair, one in self.sites.items()},
            link(self.default),
            {site: Uplink(one.out_bytes_per_s * rate, one.in_bytes_per_s * rate) for site, one in self.uplinks.items()},
        )

    def _by_site(self, source: ClusterNode, target: ClusterNode) -> Link | None:
        return self.sites.get((site_of(source), site_of(target)), self.default)


def site_of(node: ClusterNode) -> str:
    """Return the node's site; a node without one is a site of its own, named like the node."""
    return node.site or node.name


@dataclass(frozen=True, slots=True)
class Cluster:
    """The nodes that a plan may use, in a stable order, and the links between them."""

    nodes: tuple[ClusterNode, ...]
    links: LinkTable = field(default_factory=LinkTable)


@dataclass(frozen=True, slots=True)
class JobView:
    """The settings of a job that a planner looks at."""

    micro_batches: int
    schedule: str  #: "1f1b" or "gpipe"
    optimizer_bytes_per_parameter: int  #: state beside the weight and its gradient: AdamW 8, SGD with momentum 4
    max_stages: int = 0  #: 0: no limit
    cuts: tuple[int, ...] = ()  #: operator positions asked for by the job, instead of the planner's choice
    compression: str = "none"  #: as `codecs.parse_compression` reads it
    steps: int = 0  #: of the whole run; 0: unknown, and only the first phase of `compression` is planned
    first_step: int = 1  #: that the plan is for
    recompute: str = "auto"  #: "auto": where memory would otherwise cost more time; "never" or "always"


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
    memory_limit_bytes: int = 0  #: what its node lets the job use; 0: not stated
    in_flight: int = 0  #: micro-batches that it holds at once; 0: as the schedule's name says
    replica_stage: StageIndex | None = None  #: whose worker keeps a copy of this stage's state; None: nobody does
    recompute: bool = False  #: it keeps only what came in, and runs each forward again; `backward_s` has that time


@dataclass(frozen=True, slots=True)
class PlannedLink:
    """A directed pair of stages that exchange values, either way of the step."""

    source: StageIndex
    target: StageIndex
    codec: str
    bytes_per_step: int  #: estimated, before the codec
    ratio: float = 1.0  #: of the codec: bytes before over bytes on the wire
    seconds: float = 0.0  #: estimated, per micro-batch: transfer, delay, encoding and decoding; 0: not estimated


@dataclass(frozen=True, slots=True)
class CodecChange:
    """From the beginning of a step on, these links use these codecs; the others keep theirs."""

    from_step: int
    links: tuple[tuple[StageIndex, StageIndex, str], ...]  #: (source, target, codec)


@dataclass(frozen=True, slots=True)
class Plan:
    """Shards to nodes, links to codecs, and the schedule. A newer epoch replaces it whole."""

    epoch: Epoch
    stages: tuple[PlannedStage, ...]
    links: tuple[PlannedLink, ...]
    schedule: str
    micro_batches: int
    step_s: float = 0.0  #: estimated; 0: not estimated
    codec_changes: tuple[CodecChange, ...] = ()  #: ascending; before the first the links' own codecs hold
