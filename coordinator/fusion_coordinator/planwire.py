"""What the coordinator and its planner process say to each other: msgpack over the child's stdin and stdout.

Each message follows its length, as 8 bytes in big-endian order. Requests are answered one by one, in their order. End
of file on the child's stdin means that the coordinator is gone: the child ends at once, also from within a plan.
"""

from __future__ import annotations

import msgspec

from fusion.base import errors
from fusion.base.errors import FusionError
from fusion.base.ids import NodeId
from fusion.plan.types import Cluster, Plan
from fusion.protocol.status import RefusalError
from fusion_coordinator.decide.recoding import Choices
from fusion_coordinator.planmaking import Alternative

LENGTH_BYTES = 8


class MakePlan(msgspec.Struct, frozen=True, tag="plan"):
    """As PlanMaker.plan."""

    cluster: Cluster
    spec: bytes  #: a serialised JobSpec


class Divide(msgspec.Struct, frozen=True, tag="divide"):
    """As PlanMaker.divide."""

    cluster: Cluster
    spec: bytes
    cuts: tuple[int, ...]


class Seen(msgspec.Struct, frozen=True, tag="seen"):
    """What PlanMaker.compare and PlanMaker.recode are told of a running job."""

    cluster: Cluster
    spec: bytes
    present: Plan
    compute_s: tuple[float, ...]
    earlier: dict[NodeId, float]
    step: int


class Compare(msgspec.Struct, frozen=True, tag="compare"):
    """As PlanMaker.compare."""

    seen: Seen


class Recode(msgspec.Struct, frozen=True, tag="recode"):
    """As PlanMaker.recode."""

    seen: Seen


class Planned(msgspec.Struct, frozen=True, tag="planned"):
    """The answer to MakePlan and Divide."""

    plan: Plan


class Compared(msgspec.Struct, frozen=True, tag="compared"):
    """The answer to Compare."""

    found: Alternative


class Recoded(msgspec.Struct, frozen=True, tag="recoded"):
    """The answer to Recode."""

    choices: Choices | None


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """One of our errors: the planner works, and says why there is no plan."""

    kind: str  #: the error's class
    text: str


class Faulty(msgspec.Struct, frozen=True, tag="faulty"):
    """An error that nobody should see: a fault in the planner."""

    kind: str
    trace: str


Asked = MakePlan | Divide | Compare | Recode
Answer = Planned | Compared | Recoded | Refused | Faulty

_ENCODER = msgspec.msgpack.Encoder()
_ASKED: msgspec.msgpack.Decoder[Asked] = msgspec.msgpack.Decoder(Asked)
_ANSWER: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def encode(message: Asked | Answer) -> bytes:
    """Return a message with its length before it."""
    body = _ENCODER.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def decode_asked(body: bytes) -> Asked:
    """Read a request."""
    return _ASKED.decode(body)


def decode_answer(body: bytes) -> Answer:
    """Read an answer."""
    return _ANSWER.decode(body)


def refused(error: FusionError) -> Refused:
    """Return the answer that carries one of our errors."""
    source = error.error if isinstance(error, RefusalError) else error
    return Refused(type(source).__name__, str(error))


def error_of(answer: Refused) -> FusionError:
    """Return the error that an answer carries."""
    kind = getattr(errors, answer.kind, FusionError)
    return kind(answer.text) if issubclass(kind, FusionError) else FusionError(answer.text)
