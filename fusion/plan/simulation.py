"""What the simulator takes and returns: a pipeline with its seconds and bytes, and what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite

from fusion.base.errors import ConfigError
from fusion.plan.schedule import StageSchedule, Task
from fusion.plan.timeline import Row, Span

Seconds = float | Sequence[float]  #: for every micro-batch alike, or one for each


@dataclass(frozen=True, slots=True)
class StageLoad:
    """What a stage computes."""

    name: str  #: of its node
    forward_s: Seconds
    backward_s: Seconds
    update_s: float = 0.0  #: the optimizer
    tensors: int = 0  #: parameters for whose norm it answers; each adds 8 bytes to the norm message


@dataclass(frozen=True, slots=True)
class EdgeLoad:
    """A value that goes from a stage to a later one for every micro-batch, and the gradient that comes back."""

    source: int
    target: int
    forward_bytes: int  #: on the wire, after the codec
    backward_bytes: int | None  #: None: no gradient is wanted
    forward_encode_s: float = 0.0
    forward_decode_s: float = 0.0
    backward_encode_s: float = 0.0
    backward_decode_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SharedLoad:
    """A parameter that several stages hold: each use's gradient goes to all other holders once a step."""

    uses: tuple[int, ...]  #: the stage of every use
    holders: tuple[int, ...]  #: ascending; the first answers for the norm
    bytes: int


@dataclass(frozen=True, slots=True)
class Wire:
    """The way from one stage's node to another's. Bytes leave one message at a time, and arrive `delay_s` later."""

    source: int
    target: int
    rate_bytes_per_s: float = inf  #: goodput
    delay_s: float = 0.0  #: propagation, one way
    window_bytes: float = inf  #: credit: bytes that may be under way or waiting at the target, unused
    pipes: tuple[int, ...] = ()  #: indices of the shared pipes that it goes through


@dataclass(frozen=True, slots=True)
class Pipeline:
    """All that decides how long a step takes."""

    stages: Sequence[StageLoad]
    edges: Sequence[EdgeLoad]
    wires: Sequence[Wire]
    schedules: Sequence[StageSchedule]
    shared: Sequence[SharedLoad] = ()
    pipe_rates_bytes_per_s: Sequence[float] = ()  #: shared by all wires that name the pipe, such as a site's uplink


@dataclass(frozen=True, slots=True)
class StepTime:
    """When a step was where, in seconds since the first stage began the first step."""

    start_s: float  #: the first stage began its first forward
    backward_end_s: float  #: the last backward of any stage was done
    end_s: float  #: the last stage had updated


@dataclass(frozen=True, slots=True)
class StageUse:
    """What a stage did with its time over all steps."""

    name: str
    busy_s: float
    share: float  #: of the whole time
    most_in_flight: int  #: micro-batches whose activations it held at once


@dataclass(frozen=True, slots=True)
class WireUse:
    """What a link carried over all steps."""

    source: int
    target: int
    bytes: int
    busy_s: float
    share: float  #: of the whole time
    blocked_s: float  #: a message waited for credit while nothing was being sent
    queued_peak_bytes: int  #: handed over and not sent yet
    buffered_peak_bytes: int  #: arrived and not used yet


@dataclass(frozen=True, slots=True)
class Simulation:
    """What became of a pipeline."""

    steps: tuple[StepTime, ...]
    stages: tuple[StageUse, ...]
    wires: tuple[WireUse, ...]
    spans: tuple[Span, ...]  #: ordered by start; empty unless asked for
    names: tuple[str, ...]  #: of the nodes, by stage

    @property
    def total_s(self) -> float:
        """From the first forward to the last update."""
        return self.steps[-1].end_s

    @property
    def step_s(self) -> float:
        """The time from one step to the next once they follow each other; of a single step its whole time."""
        if len(self.steps) == 1:
            return self.steps[0].end_s
        return (self.steps[-1].end_s - self.steps[0].end_s) / (len(self.steps) - 1)

    @property
    def bottleneck(self) -> Row:
        """The stage (target -1) or link that was busy longest; the first of equals, stages before links."""
        stages = [(use.busy_s, (index, -1)) for index, use in enumerate(self.stages)]
        wires = [(use.busy_s, (use.source, use.target)) for use in self.wires]
        return max(stages + wires, key=lambda item: round(item[0], 9))[1]  # equal but for rounding


def seconds_each(seconds: Seconds, micro_batches: int) -> list[float]:
    """Return the seconds of every micro-batch."""
    return [float(seconds)] * micro_batches if isinstance(seconds, int | float) else list(seconds)


def check_pipeline(pipeline: Pipeline) -> int:
    """Return the number of micro-batches; ConfigError for a pipeline that makes no sense."""
    if not pipeline.stages or len(pipeline.schedules) != len(pipeline.stages):
        raise ConfigError(f"{len(pipeline.stages)} stages with {len(pipeline.schedules)} schedules; needed: one each")
    micro_batches = len(pipeline.schedules[0]) // 2
    tasks = {task for index in range(micro_batches) for task in (Task("F", index), Task("B", index))}
    for index, (load, schedule) in enumerate(zip(pipeline.stages, pipeline.schedules, strict=True)):
        if len(schedule) != len(tasks) or set(schedule) != tasks:
            raise ConfigError(f"schedule of stage {index} must hold F and B of micro-batches 0 to {micro_batches - 1}")
        _check_load(f"stage {index}", load, micro_batches)
    _check_wires(pipeline)
    for edge in pipeline.edges:
        if not 0 <= edge.source < edge.target < len(pipeline.stages):
            raise ConfigError(f"edge from stage {edge.source} to {edge.target}: it must lead to a later stage")
        codec_s = (edge.forward_encode_s, edge.forward_decode_s, edge.backward_encode_s, edge.backward_decode_s)
        _check_seconds(f"codec of the edge from stage {edge.source} to {edge.target}", codec_s)
    return micro_batches


def _check_load(what: str, load: StageLoad, micro_batches: int) -> None:
    for field, seconds in (("forward_s", load.forward_s), ("backward_s", load.backward_s)):
        if not isinstance(seconds, int | float) and len(seconds) != micro_batches:
            raise ConfigError(f"{what}: {field} has {len(seconds)} values for {micro_batches} micro-batches")
        _check_seconds(f"{what}: {field}", seconds_each(seconds, micro_batches))
    _check_seconds(f"{what}: update_s", [load.update_s])


def _check_seconds(what: str, seconds: Sequence[float]) -> None:
    for value in seconds:
        if not (isfinite(value) and value >= 0):
            raise ConfigError(f"{what} must be 0 or more seconds, got {value}")


def _check_wires(pipeline: Pipeline) -> None:
    pairs: set[tuple[int, int]] = set()
    for wire in pipeline.wires:
        _check_wire(wire, pipeline.pipe_rates_bytes_per_s)
        pairs.add((wire.source, wire.target))
    if len(pairs) != len(pipeline.wires):
        raise ConfigError("two links between the same stages in the same direction")
    for source, target in _pairs_needed(pipeline):
        if (source, target) not in pairs:
            raise ConfigError(f"there is no link from stage {source} to stage {target}, which exchange messages")


def _pairs_needed(pipeline: Pipeline) -> list[tuple[int, int]]:
    """Return the pairs of stages, in both directions where both are used, that send each other messages."""
    needed: dict[tuple[int, int], None] = {}
    for stage in range(len(pipeline.stages) - 1):
        needed |= {(stage, stage + 1): None, (stage + 1, stage): None}
    for edge in pipeline.edges:
        needed[edge.source, edge.target] = None
        if edge.backward_bytes is not None:
            needed[edge.target, edge.source] = None
    for shared in pipeline.shared:
        needed |= {(source, target): None for source in shared.uses for target in shared.holders if source != target}
    return list(needed)


def _check_wire(wire: Wire, pipe_rates: Sequence[float]) -> None:
    what = f"link from stage {wire.source} to stage {wire.target}"
    if not wire.rate_bytes_per_s > 0:
        raise ConfigError(f"{what}: rate must be more than 0 bytes/s, got {wire.rate_bytes_per_s}")
    if not wire.window_bytes > 0:
        raise ConfigError(f"{what}: the credit window must be more than 0 bytes, got {wire.window_bytes}")
    _check_seconds(f"{what}: delay", [wire.delay_s])
    for pipe in wire.pipes:
        if not (0 <= pipe < len(pipe_rates) and 0 < pipe_rates[pipe] < inf):
            raise ConfigError(f"{what}: shared pipe {pipe} does not exist or has no finite rate above 0")
