"""The frames of a peer stream as bytes: what is sent, what is understood, and the two sides' first words."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from fusion.base.errors import StateError, WireError
from fusion.base.units import KIB, MIB
from fusion.protocol.header import check_epoch
from fusion.protocol.messages import Session
from fusion.wire.v1 import peer_pb2

__all__ = [
    "CHUNK_BYTES",
    "DEFAULT_WINDOW_BYTES",
    "FREE_BYTES",
    "MAX_CHUNK_BYTES",
    "OtherRunError",
    "check_hello",
    "chunk_frame",
    "frame",
    "hello",
    "parse_frame",
]

CHUNK_BYTES = 512 * KIB  #: of payload in one frame: large enough for speed, small enough for urgent messages to pass
MAX_CHUNK_BYTES = MIB  #: that a receiver takes
FREE_BYTES = 64 * KIB  #: payload of an urgent message up to which it needs no credit
DEFAULT_WINDOW_BYTES = 64 * MIB


class OtherRunError(StateError):
    """The other side belongs to an earlier or foreign run, whose worker may be about to make room for ours."""


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


def frame(
    *,
    hello: peer_pb2.Hello | None = None,
    header: peer_pb2.Header | None = None,
    credit: int | None = None,
    goodbye: str | None = None,
) -> bytes:
    """Return a frame with the one body that is given."""
    return peer_pb2.PeerFrame(
        hello=hello,
        header=header,
        credit=None if credit is None else peer_pb2.Credit(bytes=credit),
        goodbye=None if goodbye is None else peer_pb2.Goodbye(reason=goodbye[:500]),
    ).SerializeToString()


def parse_frame(data: bytes) -> peer_pb2.PeerFrame:
    """Return the frame in `data`; WireError if it is none."""
    try:
        parsed = peer_pb2.PeerFrame.FromString(data)
    except DecodeError:
        raise WireError(f"frame of {len(data)} bytes is not a PeerFrame") from None
    if parsed.WhichOneof("body") is None:
        raise WireError("frame has no body; allowed: hello, header, chunk, credit, goodbye")
    return parsed


def hello(session: Session, *, answer: bool, window_bytes: int = 0) -> peer_pb2.Hello:
    """Return one side's first words: the dialling side's, which is the session's source, or the answer."""
    return peer_pb2.Hello(
        job_id=session.job,
        epoch=session.epoch,
        source_stage=session.source,
        target_stage=session.target,
        incarnation=session.target_incarnation if answer else session.source_incarnation,
        window_bytes=window_bytes,
    )


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
