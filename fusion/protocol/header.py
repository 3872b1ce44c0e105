"""A message's header and a tensor's layout <-> protobuf, with every bound checked before anyone allocates by them."""

from __future__ import annotations

import re

from fusion.base.errors import StateError, WireError
from fusion.base.ids import EdgeId
from fusion.base.layout import MAX_RANK, TensorLayout
from fusion.graph.dag import DTYPE_BYTES
from fusion.protocol.messages import MessageHeader, MessageKind, Session
from fusion.wire.v1 import peer_pb2

__all__ = [
    "check_epoch",
    "describe",
    "elements",
    "header_from_proto",
    "header_to_proto",
    "layout_from_proto",
    "layout_to_proto",
    "span_bytes",
]

MAX_STEP = 10**9
MAX_INDEX = 2**31  #: of a micro-batch or an edge
MAX_DIM = 2**48  #: of one dimension or stride
MAX_ELEMENTS = 2**50  #: of a tensor, where empty dimensions count as 1
ALIGNMENT_BYTES = 64
_KINDS = frozenset(int(kind) for kind in MessageKind)
_CODEC = re.compile(r"[a-z0-9][a-z0-9._-]{0,31}")


def describe(kind: int, step: int, micro_batch: int, edge: int) -> str:
    """Return how messages about a message call it: "activation edge 3 step 7 micro-batch 2"."""
    name = MessageKind(kind).name.lower() if kind in _KINDS else f"kind {kind}"
    return f"{name} edge {edge} step {step} micro-batch {micro_batch}"


def elements(layout: TensorLayout) -> int:
    """Return the number of elements of a tensor."""
    count = 1
    for size in layout.shape:
        count *= size
    return count


def span_bytes(layout: TensorLayout) -> int:
    """Return the bytes from a tensor's first element to its last, both included: what its storage must hold."""
    if 0 in layout.shape:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(layout.shape, layout.strides, strict=True))
    return (last + 1) * DTYPE_BYTES[layout.dtype]


def layout_to_proto(layout: TensorLayout) -> peer_pb2.Layout:
    """Return `layout` as protobuf."""
    return peer_pb2.Layout(
        dtype=layout.dtype,
        shape=layout.shape,
        strides=layout.strides,
        alignment_offset=layout.alignment_offset,
    )


def layout_from_proto(message: peer_pb2.Layout) -> TensorLayout:
    """Return the layout that `message` states; WireError where it could not be one of a real tensor."""
    if message.dtype not in DTYPE_BYTES:
        raise WireError(f"layout.dtype: {message.dtype[:40]!r} is not one of {', '.join(DTYPE_BYTES)}")
    rank = len(message.shape)
    if rank > MAX_RANK or len(message.strides) != rank:
        raise WireError(
            f"layout: {rank} dimensions with {len(message.strides)} strides; allowed: 0 to {MAX_RANK}, one stride each"
        )
    for field, numbers in (("shape", message.shape), ("strides", message.strides)):
        if any(not 0 <= number <= MAX_DIM for number in numbers):
            raise WireError(f"layout.{field}: {list(numbers)} has an entry outside 0..{MAX_DIM}")
    count = 1
    for size in message.shape:
        count *= max(size, 1)
    if count > MAX_ELEMENTS:
        raise WireError(f"layout.shape: {list(message.shape)} has more than {MAX_ELEMENTS} elements")
    if message.alignment_offset * DTYPE_BYTES[message.dtype] >= ALIGNMENT_BYTES:
        raise WireError(
            f"layout.alignment_offset: {message.alignment_offset} elements of {message.dtype} "
            f"are not less than {ALIGNMENT_BYTES} bytes"
        )
    return TensorLayout(message.dtype, tuple(message.shape), tuple(message.strides), message.alignment_offset)


def header_to_proto(
    session: Session,
    header: MessageHeader,
    *,
    message: int,
    sequence: int,
    payload_bytes: int,
    urgent: bool,
    background: bool = False,
    checksum: int | None = None,
    path_bytes: int = 0,
) -> peer_pb2.Header:
    """Return `header` as protobuf, with the identity of the session and the numbers of this sending."""
    return peer_pb2.Header(
        message=message,
        kind=peer_pb2.MessageKind.ValueType(header.kind),
        job_id=session.job,
        epoch=session.epoch,
        incarnation=session.source_incarnation,
        step=header.step,
        micro_batch=header.micro_batch,
        edge=header.edge,
        sequence=sequence,
        payload_bytes=payload_bytes,
        absent=header.absent,
        requires_grad=header.requires_grad,
        codec=header.codec,
        layout=None if header.layout is None else layout_to_proto(header.layout),
        urgent=urgent,
        background=background,
        checksum=checksum,
        path_bytes=path_bytes,
    )


def check_epoch(theirs: int, current: int) -> None:
    """Raise StateError unless `theirs` is the plan epoch in force here."""
    if theirs < current:
        raise StateError(f"stale epoch {theirs}, current {current}")
    if theirs > current:
        raise StateError(f"epoch {theirs} is newer than {current}, which is in force here")


def header_from_proto(message: peer_pb2.Header, session: Session) -> MessageHeader:
    """Return the header that `message` states.

    StateError when it belongs to another epoch, WireError when it belongs to another job or incarnation or when
    anything in it is out of bounds; the text names edge, step and micro-batch.
    """
    about = describe(message.kind, message.step, message.micro_batch, message.edge)
    if message.job_id != session.job:
        raise WireError(f"{about}: belongs to job {message.job_id[:40]!r}, this stream to {session.job}")
    try:
        check_epoch(message.epoch, session.epoch)
    except StateError as error:
        raise StateError(f"{about}: {error}") from None
    if message.incarnation != session.source_incarnation:
        raise WireError(f"{about}: incarnation {message.incarnation}, this stream's is {session.source_incarnation}")
    try:
        return _checked(message)
    except WireError as error:
        raise WireError(f"{about}: {error}") from None


def _checked(message: peer_pb2.Header) -> MessageHeader:
    if message.kind not in _KINDS:
        raise WireError(f"kind: {message.kind} is none of 1..{max(MessageKind)}")
    if message.step > MAX_STEP:
        raise WireError(f"step: {message.step} is above {MAX_STEP}")
    if message.micro_batch >= MAX_INDEX or message.edge >= MAX_INDEX:
        raise WireError(f"micro_batch and edge must be below {MAX_INDEX}")
    if not _CODEC.fullmatch(message.codec):
        raise WireError(f"codec: {message.codec[:40]!r} is not a codec's name")
    if message.absent and message.payload_bytes:
        raise WireError(f"payload_bytes: {message.payload_bytes} of a value that is absent")
    return MessageHeader(
        kind=MessageKind(message.kind),
        step=message.step,
        micro_batch=message.micro_batch,
        edge=EdgeId(message.edge),
        layout=layout_from_proto(message.layout) if message.HasField("layout") else None,
        absent=message.absent,
        requires_grad=message.requires_grad,
        codec=message.codec,
    )
