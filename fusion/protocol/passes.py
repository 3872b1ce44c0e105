"""The two small messages that end every step: one towards the first stage, and its answer. Torch-free.

Both begin with a version, so that a worker of another release refuses them instead of misreading them. What a later
release adds to a verdict goes into its tail.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from fusion.base.errors import WireError
from fusion.base.ids import StageIndex
from fusion.compress.catalog import CodecSpec, parse_codec
from fusion.compress.linkcodecs import Link
from fusion.protocol.plan import link_codecs_from_proto, link_codecs_to_proto
from fusion.wire.v1 import plan_pb2

_VERSION = 1
_NORM = struct.Struct("<B7xqd")
_VERDICT = struct.Struct("<BBHxxxxddq")
_APPLY, _HOLD, _KEEP = 1, 2, 4

NORM_BYTES = _NORM.size  #: without the sums, 8 bytes each
MAX_VERDICT_BYTES = _VERDICT.size + 0xFFFF


@dataclass(frozen=True, slots=True)
class NormPass:
    """What a stage tells the one before it, of itself and of everything behind it."""

    sums: tuple[float, ...]  #: each gradient's sum of squares
    safe: int  #: the newest step whose state all these stages have safely; the start itself is safe
    loss: float = (
        math.nan
    )  #: of the step, once the loss stage is among them: stage 0 reports it too, should that one die

    def pack(self) -> bytes:
        """Return the message's payload."""
        return _NORM.pack(_VERSION, self.safe, self.loss) + struct.pack(f"<{len(self.sums)}d", *self.sums)

    @staticmethod
    def unpack(data: bytes) -> NormPass:
        """Return what `pack` packed; WireError if it is nothing of the kind."""
        if len(data) < _NORM.size or (len(data) - _NORM.size) % 8 or data[0] != _VERSION:
            raise WireError(f"norm: {len(data)} bytes of version {data[0] if data else '-'} are not understood")
        _, safe, loss = _NORM.unpack_from(data)
        return NormPass(struct.unpack(f"<{(len(data) - _NORM.size) // 8}d", data[_NORM.size :]), safe, loss)


@dataclass(frozen=True, slots=True)
class VerdictPass:
    """What all stages do at the end of a step, decided by stage 0."""

    apply: bool  #: False: some gradient is not finite, and nobody changes anything
    factor: float  #: that every gradient is multiplied by
    norm: float  #: the global 2-norm before that
    hold: bool = False  #: end the run after this step
    keep: bool = False  #: keep the state as it is after this step
    stable: int = 0  #: the newest step whose state all stages have safely; older ones may go
    tail: bytes = b""  #: for what is added later

    def pack(self) -> bytes:
        """Return the message's payload."""
        flags = _APPLY * self.apply | _HOLD * self.hold | _KEEP * self.keep
        return _VERDICT.pack(_VERSION, flags, len(self.tail), self.factor, self.norm, self.stable) + self.tail

    @staticmethod
    def unpack(data: bytes) -> VerdictPass:
        """Return what `pack` packed; WireError if it is nothing of the kind."""
        if len(data) < _VERDICT.size or data[0] != _VERSION:
            raise WireError(f"verdict: {len(data)} bytes of version {data[0] if data else '-'} are not understood")
        _, flags, tail_bytes, factor, norm, stable = _VERDICT.unpack_from(data)
        if len(data) != _VERDICT.size + tail_bytes:
            raise WireError(f"verdict: {len(data)} bytes instead of {_VERDICT.size + tail_bytes}")
        tail = data[_VERDICT.size :]
        return VerdictPass(bool(flags & _APPLY), factor, norm, bool(flags & _HOLD), bool(flags & _KEEP), stable, tail)


@dataclass(frozen=True, slots=True)
class CodecPass:
    """A change of codecs, in the tail of a verdict."""

    revision: int  #: counts the changes under one plan
    links: tuple[tuple[StageIndex, StageIndex, str], ...]  #: (source, target, codec)
    from_step: int = 0  #: set by stage 0

    def pack(self) -> bytes:
        """Return the verdict's tail."""
        links = link_codecs_to_proto(self.links)
        return plan_pb2.CodecChange(from_step=self.from_step, links=links, revision=self.revision).SerializeToString()

    @staticmethod
    def unpack(data: bytes, stages: int) -> CodecPass:
        """Return what `pack` packed, for a plan of so many stages; WireError if it is nothing of the kind."""
        try:
            message = plan_pb2.CodecChange.FromString(data)
        except DecodeError:
            raise WireError("verdict: its change of codecs cannot be read") from None
        return CodecPass(message.revision, link_codecs_from_proto(message.links, stages), message.from_step)

    def specs(self) -> dict[Link, CodecSpec]:
        """Return the links' codecs."""
        return {(int(source), int(target)): parse_codec(codec) for source, target, codec in self.links}
