"""The frames of a peer stream as bytes: what is sent, what is understood, and the two sides' first words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from google.protobuf.message import DecodeError

from fusion.base.errors import StateError, WireError
from fusion.base.units import KIB, MIB
from fusion.protocol.header import check_epoch
from fusion.protocol.messages import Session
from fusion.wire.v1 import peer_pb2

__all__ = [
    "CHUNK_BYTES",
    "Chunk",
    "DEFAULT_WINDOW_BYTES",
    "FREE_BYTES",
    "MAX_CHUNK_BYTES",
    "OtherRunError",
    "Standing",
    "check_hello",
    "chunk_frame",
    "chunk_of",
    "frame",
    "hello",
    "parse_frame",
    "standing_of",
]

CHUNK_BYTES = MIB - 4 * KIB  #: of payload in one frame, on fast links; slow ones get smaller chunks
MAX_CHUNK_BYTES = MIB  #: that a receiver takes
FREE_BYTES = 64 * KIB  #: payload of an urgent message up to which it needs no credit
DEFAULT_WINDOW_BYTES = 64 * MIB


class OtherRunError(StateError):
    """The other side belongs to an earlier or foreign run, whose worker may be about to make room for ours."""


class Chunk(NamedTuple):
    """A part of a message's payload."""

    message: int
    offset: int
    data: memoryview | bytes


@dataclass(frozen=True, slots=True)
class Standing:
    """How much a receiver has of what was sent before on streams that broke."""

    next_message: int = 1  #: the first one that it has heard nothing of
    partial: Mapping[int, int] = field(default_factory=dict)  #: earlier ones that are not whole: bytes that are here
    credited_bytes: int = 0  #: all credit that it has returned


_CHUNK_TAG = 0x1A  # PeerFrame.chunk and Chunk.data are both field 3, length-delimited


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def chunk_frame(message: int, offset: int, data: memoryview) -> bytes:
    """Return PeerFrame(chunk=Chunk(message, offset, data)) in protobuf's encoding.

    Written by hand because protobuf copies bulk three times on its way out; this copies it once.
    """
    inner = bytearray()
    if message:
        inner += b"\x08" + _varint(message)
    if offset:
        inner += b"\x10" + _varint(offset)
    if data:
        inner += bytes((_CHUNK_TAG,)) + _varint(len(data))
    return b"".join((bytes((_CHUNK_TAG,)), _varint(len(inner) + len(data)), inner, data))


def chunk_of(data: bytes) -> Chunk | None:
    """Return the chunk that a frame of `chunk_frame` holds, without a copy; None for any other frame.

    What is not exactly such a frame is left to `parse_frame`.
    """
    if len(data) < 2 or data[0] != _CHUNK_TAG:
        return None
    try:
        size, position = _read_varint(data, 1)
        if position + size != len(data):
            return None
        message = offset = 0
        if data[position] == 0x08:
            message, position = _read_varint(data, position + 1)
        if data[position] == 0x10:
            offset, position = _read_varint(data, position + 1)
        if data[position] != _CHUNK_TAG:
            return None
        size, position = _read_varint(data, position + 1)
    except IndexError:
        return None
    return Chunk(message, offset, memoryview(data)[position:]) if position + size == len(data) else None


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Return a number of at most 63 bits and the position behind it; IndexError if it is longer or cut off."""
    number = shift = 0
    while shift < 63:
        byte = data[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position
        shift += 7
    raise IndexError


def frame(
    *,
    hello: peer_pb2.Hello | None = None,
    header: peer_pb2.Header | None = None,
    credit: int | None = None,
    window_bytes: int = 0,
    goodbye: str | None = None,
    ack: peer_pb2.Ack | None = None,
) -> bytes:
    """Return a frame with the one body that is given; `window_bytes` goes with a credit."""
    return peer_pb2.PeerFrame(
        hello=hello,
        header=header,
        credit=None if credit is None else peer_pb2.Credit(bytes=credit, window_bytes=window_bytes),
        goodbye=None if goodbye is None else peer_pb2.Goodbye(reason=goodbye[:500]),
        ack=ack,
    ).SerializeToString()


def parse_frame(data: bytes) -> peer_pb2.PeerFrame:
    """Return the frame in `data`; WireError if it is none."""
    try:
        parsed = peer_pb2.PeerFrame.FromString(data)
    except DecodeError:
        raise WireError(f"frame of {len(data)} bytes is not a PeerFrame") from None
    if parsed.WhichOneof("body") is None:
        raise WireError("frame has no body; allowed: hello, header, chunk, credit, ack, goodbye")
    return parsed


def hello(
    session: Session, *, answer: bool, window_bytes: int = 0, stripe: int = 0, standing: Standing | None = None
) -> peer_pb2.Hello:
    """Return one side's first words: the dialling side's, which is the session's source, or the answer."""
    here = standing or Standing()
    return peer_pb2.Hello(
        job_id=session.job,
        epoch=session.epoch,
        source_stage=session.source,
        target_stage=session.target,
        incarnation=session.target_incarnation if answer else session.source_incarnation,
        window_bytes=window_bytes,
        stripe=stripe,
        next_message=0 if standing is None else here.next_message,
        partial=[peer_pb2.Partial(message=number, bytes=count) for number, count in here.partial.items()],
        credited_bytes=here.credited_bytes,
    )


def standing_of(answer: peer_pb2.Hello) -> Standing:
    """Return what an answering side says that it has."""
    partial = {item.message: item.bytes for item in answer.partial}
    return Standing(max(1, answer.next_message), partial, answer.credited_bytes)


def check_hello(message: peer_pb2.Hello, session: Session, *, answer: bool) -> None:
    """Raise StateError, with words for the other side's user, unless `message` belongs to `session`."""
    if message.job_id != session.job:
        raise OtherRunError(f"job {message.job_id[:40]!r} is not trained here; this worker trains {session.job}")
    try:
        check_epoch(message.epoch, session.epoch)
    except StateError as error:
        raise (OtherRunError(str(error)) if message.epoch > session.epoch else error) from None
    if (message.source_stage, message.target_stage) != (session.source, session.target):
        raise StateError(
            f"stream from stage {message.source_stage} to stage {message.target_stage} "
            f"came to one from {session.source} to {session.target}"
        )
    expected = session.target_incarnation if answer else session.source_incarnation
    if message.incarnation != expected:
        stage = session.target if answer else session.source
        raise StateError(f"stage {stage} has incarnation {message.incarnation}, the plan names {expected}")
