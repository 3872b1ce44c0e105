"""What workers say to each other: one dataclass for every message of a step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from fusion.base.ids import EdgeId, Epoch, Incarnation, JobId, StageIndex
from fusion.base.layout import TensorLayout


class MessageKind(IntEnum):
    """Same numbers as on the wire."""

    ACTIVATION = 1  #: a value, from its producer to a consumer
    GRADIENT = 2  #: the gradient of such a value, on the way back
    TIED = 3  #: the summed gradient of one use of a shared parameter
    NORM = 4  #: per-parameter sums of squares, towards the first stage
    VERDICT = 5  #: apply or skip, and the clipping factor, towards the last stage
    EVAL = 6  #: a value of an evaluation's forward
    REPLICA = 7  #: a part of a stage's kept state, to the stage that holds a copy of it
    REPLICA_ACK = 8  #: that stage's answer: the copy is written and its digest is right
    CONTACT = 9  #: which stages are without contact with the coordinator, and since when


@dataclass(frozen=True, slots=True)
class Session:
    """Who two workers are to each other; checked at the start of a stream and on every header."""

    job: JobId
    epoch: Epoch
    source: StageIndex
    target: StageIndex
    source_incarnation: Incarnation
    target_incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class MessageHeader:
    """Everything about a message but its payload. Unique by (kind, step, micro_batch, edge) within a session."""

    kind: MessageKind
    step: int  #: from 1
    micro_batch: int  #: from 0; of EVAL counted over the whole evaluation; 0 where it has no meaning
    edge: EdgeId  #: of TIED the index of the use; 0 where it has no meaning
    layout: TensorLayout | None = None  #: None when the payload is no tensor, or absent
    absent: bool = False  #: a gradient that does not exist: zero, with no payload
    requires_grad: bool = False  #: an activation whose gradient is expected back
    codec: str = "none"
