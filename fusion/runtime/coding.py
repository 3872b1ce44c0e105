"""A stage's codecs at work: its tensors to payloads and back, by the codec that each link has at each step.

Values and gradients go through their link's codec; gradients of shared parameters always go as they are, and so do
the values of evaluations, unless they are asked to be as in training.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from fusion.base.errors import WireError
from fusion.base.ids import EdgeId, StageIndex, ValueId
from fusion.base.layout import TensorLayout
from fusion.compress import raw
from fusion.compress.catalog import NONE, CodecSpec, Kind, TensorRole
from fusion.compress.codec import Codec
from fusion.compress.frame import Buffer, Frame
from fusion.compress.linkcodecs import CodecSchedule, Link
from fusion.compress.noise import Turn
from fusion.compress.state import EdgeState
from fusion.graph.dag import TensorSpec
from fusion.graph.partition import Edge, Partition
from fusion.protocol.messages import MessageKind
from fusion.runtime.machine import Key

STATE_PREFIX = "$codec."  #: of residuals and bases in a stage's state
PLAIN, FRAME = "none", "frame"  #: what a message's header says of its payload

_ROLES = {
    MessageKind.ACTIVATION: TensorRole.ACTIVATION,
    MessageKind.EVAL: TensorRole.ACTIVATION,
    MessageKind.GRADIENT: TensorRole.GRADIENT,
}


@dataclass(frozen=True, slots=True)
class Encoded:
    """A tensor on its way."""

    layout: TensorLayout
    payload: Buffer
    codec: str  #: PLAIN or FRAME


@dataclass(slots=True)
class CodingCounters:
    """What coding on one directed link has done so far; values and gradients only."""

    raw_bytes: int = 0
    coded_bytes: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True)
class _End:
    """This stage's end of one edge."""

    edge: Edge
    number: int  #: of the edge, alike under every cut: of its value, and of its target among the value's targets
    spec: TensorSpec  #: at the nominal micro-batch size
    state: EdgeState = field(default_factory=EdgeState)

    @property
    def name(self) -> str:
        value, target = self.number % 2**32, self.number // 2**32
        return f"{STATE_PREFIX}{value}.{target}."


class StageCoder:
    """Encodes what leaves a stage and decodes what comes to it.

    `encode` may run on one thread per target and `decode` on one per source, all at the same time; the rest belongs
    to the thread that computes.
    """

    def __init__(
        self,
        parts: Partition,
        stage: StageIndex,
        codecs: CodecSchedule | None = None,
        *,
        seed: int = 0,
        device: str | torch.device = "cpu",
        code_evaluation: bool = False,
    ) -> None:
        """`seed` is the job's; None as `codecs` is the codec "none" everywhere."""
        self.stage = stage
        self._codecs = codecs or CodecSchedule()
        self._seed = seed
        self._device = str(device)
        self._code_evaluation = code_evaluation
        self._ends = {end.edge.edge: end for end in _ends(parts, stage)}
        self._counters: dict[Link, CodingCounters] = {}
        self._lock = threading.Lock()  #: over the counters
        self._revisions: list[tuple[int, int]] = []  #: (first step, revision), ascending
        self._made: dict[tuple[CodecSpec, TensorRole], Codec] = {}

    # ---- tensors ----

    def encode(self, key: Key, tensor: torch.Tensor, *, requires_grad: bool) -> Encoded:
        """Return the payload of a value or gradient, on any device."""
        spec, link = self._codec(key)
        begin_s = time.perf_counter()
        if spec == NONE:
            layout, payload = raw.encode(tensor)
            encoded = Encoded(layout, payload, PLAIN)
        else:
            end, role = self._ends[EdgeId(key.edge)], _ROLES[key.kind]
            _drop_what_does_not_fit(end.state, role, spec)
            state = _apart(end.state) if key.kind is MessageKind.EVAL else end.state
            turn = self._turn(key, end, requires_grad)
            frame = self._made_codec(spec, role).encode(tensor, state, turn)
            encoded = Encoded(frame.layout, frame.payload, FRAME)
        if link is not None and key.kind is not MessageKind.EVAL:
            raw_bytes = tensor.numel() * tensor.element_size()
            self._count(link, raw_bytes, len(encoded.payload), time.perf_counter() - begin_s)
        return encoded

    def decode(
        self, key: Key, layout: TensorLayout, payload: Buffer, codec: str, *, requires_grad: bool
    ) -> torch.Tensor:
        """Return the tensor of a payload; WireError unless the link's codec of that step made it."""
        spec, link = self._codec(key)
        expected = PLAIN if spec == NONE else FRAME
        if codec != expected:
            raise WireError(f"codec {codec[:40]!r} in the header where {expected!r} ({spec.name}) is agreed")
        begin_s = time.perf_counter()
        if link is not None:
            self._check_layout(key, layout)
        if spec == NONE:
            tensor = raw.decode(layout, payload, self._device)
        else:
            end, role = self._ends[EdgeId(key.edge)], _ROLES[key.kind]
            state = EdgeState() if key.kind is MessageKind.EVAL else end.state
            wanted = TensorSpec(layout.dtype, layout.shape)
            turn = self._turn(key, end, requires_grad)
            made = self._made_codec(spec, role)
            tensor = made.decode(Frame(layout, payload), wanted, state, turn, self._device)
        if link is not None and key.kind is not MessageKind.EVAL:
            self._count(link, decode_s=time.perf_counter() - begin_s)
        return tensor

    def absent(self, key: Key) -> None:
        """Learn that a gradient will not be sent, or will not come: nothing waits for it any more."""
        if key.kind is MessageKind.GRADIENT:
            self._ends[EdgeId(key.edge)].state.drop_mask(Turn(self._seed, key.step, key.micro_batch, 0))

    # ---- steps ----

    def codec(self, source: StageIndex, target: StageIndex, step: int) -> CodecSpec:
        """Return the codec of a link at a step."""
        return self._codecs.at(step).of(source, target)

    @property
    def newest_revision(self) -> int:
        """The revision of the last change that was taken; 0 if there was none."""
        return max((revision for _, revision in self._revisions), default=0)

    def change(self, from_step: int, links: Mapping[Link, CodecSpec], revision: int) -> None:
        """Use other codecs on some links from a step on that no message has come from yet."""
        self._codecs = self._codecs.changed(from_step, links)
        self._revisions.append((from_step, revision))

    def revision(self, step: int) -> int:
        """Return the revision of the last change that was in force in a step; 0 if none was."""
        return max((revision for first, revision in self._revisions if first <= step), default=0)

    def end_step(self, step: int) -> None:
        """Forget what only a step needs that is over on this stage."""
        for end in self._ends.values():
            end.state.forget_before(step + 1)

    def set_rate(self, peer: StageIndex, rate_bytes_per_s: float) -> None:
        """State the goodput of the link to a stage; it decides whether zstd pays."""
        for end in self._ends.values():
            if peer in (end.edge.source, end.edge.target):
                end.state.rate_bytes_per_s = rate_bytes_per_s

    def counters(self) -> dict[Link, CodingCounters]:
        """Return what each directed link of this stage has coded so far."""
        with self._lock:
            return {
                link: CodingCounters(found.raw_bytes, found.coded_bytes, found.encode_s, found.decode_s)
                for link, found in self._counters.items()
            }

    # ---- state ----

    def state(self) -> dict[str, torch.Tensor]:
        """Return residuals and bases, by names that hold under every cut that has the edge."""
        return {
            end.name + name: tensor
            for end in self._ends.values()
            for name, tensor in end.state.state_dict().items()
            if name.endswith(self._encoded_role(end))
        }

    def state_names(self, names: Iterable[str]) -> set[str]:
        """Return those of some names that belong to this stage: of what it encodes. Others' are of no use here."""
        ours = {end.name: self._encoded_role(end) for end in self._ends.values()}
        return {
            name
            for name in names
            if name.startswith(STATE_PREFIX)
            and any(name.startswith(prefix) and name.endswith(role) for prefix, role in ours.items())
        }

    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over residuals and bases of the edges that this stage still has; the error feedback of others ends."""
        names = self.state_names(tensors)
        for end in self._ends.values():
            found = {name: tensors[name] for name in names if name.startswith(end.name)}
            end.state.load_state_dict(
                {name.removeprefix(end.name): tensor.to(self._device) for name, tensor in found.items()}
            )

    def _encoded_role(self, end: _End) -> TensorRole:
        return TensorRole.ACTIVATION if end.edge.source == self.stage else TensorRole.GRADIENT

    # ---- helpers ----

    def _codec(self, key: Key) -> tuple[CodecSpec, Link | None]:
        """Return the codec of a message and, of values and gradients, its link."""
        if key.kind not in _ROLES:
            return NONE, None
        if key.edge not in self._ends:
            raise WireError(f"edge {key.edge} is not of this stage")
        edge = self._ends[EdgeId(key.edge)].edge
        link = (edge.target, edge.source) if key.kind is MessageKind.GRADIENT else (edge.source, edge.target)
        if key.kind is MessageKind.EVAL and not self._code_evaluation:
            return NONE, link
        return self._codecs.at(key.step).of(*link), link

    def _made_codec(self, spec: CodecSpec, role: TensorRole) -> Codec:
        made = self._made.get((spec, role))
        if made is None:
            made = self._made[spec, role] = Codec(spec, role)
        return made

    def _turn(self, key: Key, end: _End, requires_grad: bool) -> Turn:
        expects = requires_grad and key.kind is MessageKind.ACTIVATION
        return Turn(self._seed, key.step, key.micro_batch, end.number, expects)

    def _check_layout(self, key: Key, layout: TensorLayout) -> None:
        """Refuse what the graph's value cannot be. Smaller last micro-batches and autocast's dtypes are allowed."""
        spec = self._ends[EdgeId(key.edge)].spec
        elements = TensorSpec(layout.dtype, layout.shape).elements
        if len(layout.shape) != len(spec.shape) or elements > spec.elements:
            raise WireError(f"shape {list(layout.shape)[:16]} where at most {list(spec.shape)} is expected")

    def _count(
        self, link: Link, raw_bytes: int = 0, coded_bytes: int = 0, encode_s: float = 0.0, decode_s: float = 0.0
    ) -> None:
        with self._lock:
            counters = self._counters.setdefault(link, CodingCounters())
            counters.raw_bytes += raw_bytes
            counters.coded_bytes += coded_bytes
            counters.encode_s += encode_s
            counters.decode_s += decode_s


def _ends(parts: Partition, stage: StageIndex) -> Iterable[_End]:
    """Yield the ends of a stage's edges; an edge is numbered by its value and by how many targets come before it."""
    targets: dict[ValueId, int] = {}
    for edge in parts.edges:
        rank = targets.get(edge.value, 0)
        targets[edge.value] = rank + 1
        spec = parts.graph.values[edge.value].spec
        if stage in (edge.source, edge.target) and spec is not None:
            yield _End(edge, rank * 2**32 + edge.value, spec)


def _apart(state: EdgeState) -> EdgeState:
    """Return a state for a value of an evaluation, which must leave no trace in training."""
    return EdgeState(bases=dict(state.bases), rate_bytes_per_s=state.rate_bytes_per_s)


def _drop_what_does_not_fit(state: EdgeState, role: TensorRole, spec: CodecSpec) -> None:
    """Once a link's codec has changed: drop the residual and the basis of a codec that is no longer in use."""
    if not spec.error_feedback:
        state.residuals.pop(role, None)
    if spec.kind is not Kind.LOWRANK:
        state.bases.pop(role, None)
