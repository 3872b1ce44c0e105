"""Plans, assignments and errors survive the wire, and nonsense is refused there."""

from __future__ import annotations

import dataclasses

import grpc
import pytest

from fusion.base import errors
from fusion.base.errors import FusionError, StateError, UnreachableError, WireError
from fusion.base.ids import ClusterId, Epoch, Incarnation, JobId, NodeId, StageIndex
from fusion.graph.dag import TensorSpec
from fusion.plan.types import CodecChange, Plan, PlannedLink, PlannedStage
from fusion.protocol.job import BlobRef, DataField, DataFile, DataSpec, JobSpec, OptimizerSpec, RowSource
from fusion.protocol.plan import Assignment, assignment_from_proto, assignment_to_proto, plan_from_proto, plan_to_proto
from fusion.protocol.status import RefusalError, error_metadata, from_rpc_error, status_of

STAGES = (
    PlannedStage(NodeId("a" * 20), "n0", "10.0.0.1:7445", Incarnation(3), 0, 7, 1000, 2**33, 0.25, 0.5),
    PlannedStage(NodeId("b" * 20), "n1", "10.0.0.2:7445", Incarnation(9), 7, 8, 1, 2**20, 0.125, 0.0, recompute=True),
)
S0, S1 = StageIndex(0), StageIndex(1)
PLAN = Plan(
    Epoch(4),
    STAGES,
    (PlannedLink(S0, S1, "none", 12345),),
    "gpipe",
    8,
    codec_changes=(CodecChange(5, ((S0, S1, "int8"), (S1, S0, "topk:20+ef"))), CodecChange(9, ((S0, S1, "none"),))),
)
JOB = JobSpec(
    "j",
    BlobRef("0" * 64, 1),
    BlobRef("1" * 64, 2),
    DataSpec((DataField("x", TensorSpec("float32", (3,)), RowSource(0, "x")),), (DataFile(BlobRef("2" * 64, 3)),), 10),
    OptimizerSpec("sgd", 0.1),
    8,
    8,
    5,
    recompute="never",
)


def test_a_plan_comes_back_the_same():
    assert plan_from_proto(plan_to_proto(PLAN)) == PLAN


def test_an_assignment_comes_back_the_same():
    assignment = Assignment(JobId("job-abcdefghij"), ClusterId("abcdefghij"), StageIndex(1), JOB, PLAN)
    assert assignment_from_proto(assignment_to_proto(assignment)) == assignment


@pytest.mark.parametrize(
    "broken",
    [
        dataclasses.replace(PLAN, epoch=Epoch(0)),
        dataclasses.replace(PLAN, stages=()),
        dataclasses.replace(PLAN, stages=STAGES[1:]),
        dataclasses.replace(PLAN, stages=(STAGES[0], dataclasses.replace(STAGES[1], first_operator=6))),
        dataclasses.replace(PLAN, stages=(STAGES[0], dataclasses.replace(STAGES[1], end_operator=7))),
        dataclasses.replace(PLAN, links=(PlannedLink(StageIndex(0), StageIndex(2), "none", 1),)),
        dataclasses.replace(PLAN, links=(PlannedLink(StageIndex(1), StageIndex(1), "none", 1),)),
        dataclasses.replace(PLAN, links=(PlannedLink(S0, S1, "zip", 1),)),
        dataclasses.replace(PLAN, links=(PlannedLink(S0, S1, "int8+ef", 1),)),  # error feedback on activations
        dataclasses.replace(PLAN, codec_changes=PLAN.codec_changes[::-1]),
        dataclasses.replace(PLAN, codec_changes=(CodecChange(0, ()),)),
        dataclasses.replace(PLAN, codec_changes=(CodecChange(2, ((S0, StageIndex(2), "none"),)),)),
        dataclasses.replace(PLAN, codec_changes=(CodecChange(2, ((S0, S1, "int9"),)),)),
        dataclasses.replace(PLAN, schedule="zigzag"),
        dataclasses.replace(PLAN, micro_batches=0),
    ],
)
def test_b26_a_plan_that_does_not_hold_together_is_refused(broken):
    with pytest.raises(WireError, match="plan:"):
        plan_from_proto(plan_to_proto(broken))


def test_an_assignment_to_a_stage_or_job_that_cannot_be_is_refused():
    message = assignment_to_proto(
        Assignment(JobId("job-abcdefghij"), ClusterId("abcdefghij"), StageIndex(1), JOB, PLAN)
    )
    for field, value in (("stage", 2), ("job_id", "../x"), ("job_spec", b"\xff\xff")):
        bad = type(message)()
        bad.CopyFrom(message)
        setattr(bad, field, value)
        with pytest.raises(WireError, match="assignment"):
            assignment_from_proto(bad)


class Failed(grpc.RpcError):
    def __init__(self, code, details, trailing=()):
        self._code, self._details, self._trailing = code, details, trailing

    def code(self):
        return self._code

    def details(self):
        return self._details

    def trailing_metadata(self):
        return self._trailing


def test_every_error_of_the_tree_crosses_the_wire_as_itself():
    kinds = [item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, FusionError)]
    assert len(kinds) >= 13
    for kind in kinds:
        error = kind("steps must be 1..9, got 0")
        code, line = status_of(error)
        back = from_rpc_error(Failed(code, line, error_metadata(error)), "submitting")
        assert type(back) is kind
        assert str(back) == "steps must be 1..9, got 0"


def test_a_refusal_keeps_its_own_status():
    error = RefusalError(grpc.StatusCode.ALREADY_EXISTS, StateError("n0 is here already"))
    assert status_of(error) == (grpc.StatusCode.ALREADY_EXISTS, "n0 is here already")
    assert error_metadata(error) == (("fusion-error", "StateError"),)


def test_a_foreign_error_leaves_without_its_content():
    code, line = status_of(KeyError("/secret/path"))
    assert code is grpc.StatusCode.INTERNAL
    assert "secret" not in line


def test_the_wires_own_failures_say_what_was_tried():
    error = from_rpc_error(Failed(grpc.StatusCode.UNAVAILABLE, "failed to connect"), "asking 10.0.0.1:7443")
    assert type(error) is UnreachableError
    assert str(error) == "asking 10.0.0.1:7443: no answer (failed to connect)"


def test_messages_are_one_line_and_fit_into_metadata():
    _, line = status_of(StateError("a\nb" + "x" * 9000))
    assert "\n" not in line
    assert len(line) == 2000
