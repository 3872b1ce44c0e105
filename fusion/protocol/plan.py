"""Plans and assignments, to and from protobuf. What comes in is checked before anybody acts on it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from google.protobuf.message import DecodeError

from fusion.base.errors import ConfigError, WireError
from fusion.base.ids import ClusterId, Epoch, Incarnation, JobId, NodeId, StageIndex, is_id
from fusion.compress.catalog import parse_codec
from fusion.plan.types import CodecChange, Plan, PlannedLink, PlannedStage
from fusion.protocol.job import BlobRef, JobSpec, blob_from_proto, job_from_proto, job_to_proto
from fusion.wire.v1 import job_pb2, plan_pb2

MAX_STAGES = 10_000


@dataclass(frozen=True, slots=True)
class Resume:
    """Where a job goes on that was held under another plan."""

    step: int  #: the last one done
    states: tuple[BlobRef, ...]  #: together all that training has changed, by name


@dataclass(frozen=True, slots=True)
class Assignment:
    """What one worker is started with."""

    job: JobId
    cluster: ClusterId
    stage: StageIndex
    spec: JobSpec
    plan: Plan
    resume: Resume | None = None  #: None: from the first step


def plan_to_proto(plan: Plan) -> plan_pb2.Plan:
    """Return the message for a plan."""
    message = plan_pb2.Plan(
        epoch=plan.epoch, schedule=plan.schedule, micro_batches=plan.micro_batches, step_s=plan.step_s
    )
    for stage in plan.stages:
        message.stages.add(
            node_id=stage.node,
            node_name=stage.node_name,
            address=stage.address,
            first_operator=stage.first_operator,
            end_operator=stage.end_operator,
            parameters=stage.parameters,
            memory_bytes=stage.memory_bytes,
            forward_s=stage.forward_s,
            backward_s=stage.backward_s,
            incarnation=stage.incarnation,
            memory_limit_bytes=stage.memory_limit_bytes,
            in_flight=stage.in_flight,
            replica_stage=0 if stage.replica_stage is None else stage.replica_stage + 1,
            recompute=stage.recompute,
        )
    for link in plan.links:
        message.links.add(
            source=link.source,
            target=link.target,
            codec=link.codec,
            bytes_per_step=link.bytes_per_step,
            ratio=link.ratio,
            seconds=link.seconds,
        )
    for change in plan.codec_changes:
        message.codec_changes.add(from_step=change.from_step, links=link_codecs_to_proto(change.links))
    return message


def link_codecs_to_proto(links: Iterable[tuple[StageIndex, StageIndex, str]]) -> list[plan_pb2.LinkCodec]:
    """Return the messages for the codecs of some links."""
    return [plan_pb2.LinkCodec(source=source, target=target, codec=codec) for source, target, codec in links]


def link_codecs_from_proto(
    links: Iterable[plan_pb2.LinkCodec], stages: int
) -> tuple[tuple[StageIndex, StageIndex, str], ...]:
    """Return the codecs of some links of a plan with so many stages; WireError names one that cannot be."""
    found = []
    for item in links:
        _check_link(item.source, item.target, item.codec, stages)
        found.append((StageIndex(item.source), StageIndex(item.target), item.codec))
    return tuple(found)


def plan_from_proto(message: plan_pb2.Plan) -> Plan:
    """Return the plan of a message; WireError if its stages leave a gap, or a link joins stages that do not exist."""
    stages = tuple(
        PlannedStage(
            NodeId(item.node_id),
            item.node_name,
            item.address,
            Incarnation(item.incarnation),
            item.first_operator,
            item.end_operator,
            item.parameters,
            item.memory_bytes,
            item.forward_s,
            item.backward_s,
            item.memory_limit_bytes,
            item.in_flight,
            StageIndex(item.replica_stage - 1) if item.replica_stage else None,
            item.recompute,
        )
        for item in message.stages
    )
    links = tuple(
        PlannedLink(
            StageIndex(item.source),
            StageIndex(item.target),
            item.codec,
            item.bytes_per_step,
            item.ratio or 1.0,
            item.seconds,
        )
        for item in message.links
    )
    changes = tuple(
        CodecChange(change.from_step, link_codecs_from_proto(change.links, len(stages)))
        for change in message.codec_changes
    )
    plan = Plan(Epoch(message.epoch), stages, links, message.schedule, message.micro_batches, message.step_s, changes)
    _check_plan(plan)
    return plan


def _check_plan(plan: Plan) -> None:
    if plan.epoch < 1:
        raise WireError("plan: its epoch is missing")
    if plan.schedule not in ("1f1b", "gpipe"):
        raise WireError(f"plan: schedule {plan.schedule[:40]!r} is unknown")
    if not 1 <= plan.micro_batches <= 4096:
        raise WireError(f"plan: micro_batches={plan.micro_batches} must be 1..4096")
    if not 1 <= len(plan.stages) <= MAX_STAGES:
        raise WireError(f"plan: it has {len(plan.stages)} stages; allowed are 1..{MAX_STAGES}")
    expected = 0
    for index, stage in enumerate(plan.stages):
        if stage.first_operator != expected or stage.end_operator <= stage.first_operator:
            raise WireError(
                f"plan: stage {index} runs operators {stage.first_operator}..{stage.end_operator}, "
                f"it must begin at {expected} and hold at least one"
            )
        expected = stage.end_operator
    for link in plan.links:
        _check_link(link.source, link.target, link.codec, len(plan.stages))
    steps = [change.from_step for change in plan.codec_changes]
    if any(later <= earlier for earlier, later in pairwise([0, *steps])):
        raise WireError(f"plan: codec changes from the steps {steps[:16]}; they must ascend from 1")


def _check_link(source: int, target: int, codec: str, stages: int) -> None:
    if source == target or not (source < stages and target < stages):
        raise WireError(f"plan: link {source}->{target} does not join two of its {stages} stages")
    try:
        spec = parse_codec(codec)
    except ConfigError as error:
        raise WireError(f"plan: link {source}->{target}: {error}") from None
    if spec.error_feedback and source < target:
        raise WireError(f"plan: link {source}->{target}: {spec.name!r} has error feedback on activations")


def assignment_to_proto(assignment: Assignment) -> plan_pb2.Assignment:
    """Return the message for an assignment."""
    message = plan_pb2.Assignment(
        job_id=assignment.job,
        cluster_id=assignment.cluster,
        stage=assignment.stage,
        job_spec=job_to_proto(assignment.spec).SerializeToString(deterministic=True),
        plan=plan_to_proto(assignment.plan),
    )
    if assignment.resume is not None:
        message.resume.step = assignment.resume.step
        for state in assignment.resume.states:
            message.resume.states.add(digest=state.digest, size_bytes=state.size_bytes)
    return message


def resume_from_proto(message: plan_pb2.Assignment) -> Resume | None:
    """Return where an assignment goes on; None if it begins with the first step. WireError if it cannot."""
    if not message.HasField("resume"):
        return None
    if not 1 <= message.resume.step < 2**63 or not 1 <= len(message.resume.states) <= MAX_STAGES:
        raise WireError(f"assignment: it cannot go on after step {message.resume.step} from no state at all")
    return Resume(message.resume.step, tuple(blob_from_proto(state) for state in message.resume.states))


def assignment_from_proto(message: plan_pb2.Assignment) -> Assignment:
    """Return the assignment of a message; WireError or ConfigError names what is wrong with it."""
    if not is_id(message.job_id) or not is_id(message.cluster_id):
        raise WireError(f"assignment: {message.job_id[:40]!r} in {message.cluster_id[:40]!r} is not a job of a cluster")
    plan = plan_from_proto(message.plan)
    if message.stage >= len(plan.stages):
        raise WireError(f"assignment: stage {message.stage} of a plan with {len(plan.stages)} stages")
    try:
        spec = job_from_proto(job_pb2.JobSpec.FromString(message.job_spec))
    except DecodeError:
        raise WireError("assignment: its job cannot be read") from None
    return Assignment(
        JobId(message.job_id),
        ClusterId(message.cluster_id),
        StageIndex(message.stage),
        spec,
        plan,
        resume_from_proto(message),
    )
