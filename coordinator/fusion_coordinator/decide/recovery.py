"""How a job goes on after something broke: whether at all, from which step, with which nodes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from fusion.base.ids import NodeId
from fusion.wire.v1 import plan_pb2
from fusion_coordinator.decide.failures import Verdict
from fusion_coordinator.keptstates import KeptState
from fusion_coordinator.state import AnyEvent
from fusion_coordinator.state.events import JobBroke, JobEnded
from fusion_coordinator.state.records import (
    JobRecord,
    JobState,
    NodeRecord,
    NodeState,
    State,
    TroubleRecord,
    WeightsRecord,
)

MEMORY_SHARE = 0.9  #: of what a node ran out of memory with: what later plans may give it
MOST_IN_A_ROW = 5  #: troubles without a step done in between, after which the job is taken to be at fault itself
AGAIN_FOR_LOSSES = 2  #: steps that are rather done again than missing from the loss curve
_AVOIDED_AFTER = {"crash": 3, "stuck": 3, "vanished": 3, "silent": 3, "device": 2}  #: in a row on one node
_OWN_FAULT = "error"


# ---- whether it goes on ----


def broke(job: JobRecord, verdict: Verdict, last_step: int, wall_s: float) -> AnyEvent:
    """Return what a verdict means: the job ends by its own fault, or it recovers.

    An error that the job's own content caused would come again on any node. So would, probably, what has come
    `MOST_IN_A_ROW` times without a step done. Lost nodes and connections are never the job's fault.
    """
    stage = job.stages[verdict.stage]
    if verdict.cause == _OWN_FAULT:
        return JobEnded(wall_s, job.job, JobState.FAILED, verdict.reason)
    if verdict.cause not in _AVOIDED_AFTER and verdict.cause != "out-of-memory":
        return JobBroke(wall_s, job.job, verdict.reason)
    trouble = TroubleRecord(stage.node, stage.node_name, verdict.cause, last_step)
    if verdict.cause == "out-of-memory":
        return JobBroke(wall_s, job.job, verdict.reason, trouble, _lower_limit(job, verdict.stage))
    if _in_a_row([*job.troubles, trouble]) >= MOST_IN_A_ROW:
        reason = f"{verdict.reason}; given up after {MOST_IN_A_ROW} failures in a row without a step done"
        return JobEnded(wall_s, job.job, JobState.FAILED, reason)
    return JobBroke(wall_s, job.job, verdict.reason, trouble)


def _in_a_row(troubles: Sequence[TroubleRecord]) -> int:
    """Return how many of the last troubles came with no step done in between."""
    count = 0
    for trouble in reversed(troubles):
        if trouble.step != troubles[-1].step or trouble.cause not in _AVOIDED_AFTER:
            break
        count += 1
    return count


def _lower_limit(job: JobRecord, stage: int) -> int:
    """Return what the node of a stage that ran out of memory may be given from now on; 0 if nothing is known."""
    planned = plan_pb2.Plan.FromString(job.plan).stages[stage]
    known = [size for size in (planned.memory_bytes, planned.memory_limit_bytes) if size]
    return int(MEMORY_SHARE * min(known)) if known else 0


# ---- with which nodes ----


def avoided(job: JobRecord) -> dict[NodeId, str]:
    """Return the nodes that this job stays away from, and why: the same went wrong there several times in a row."""
    found: dict[NodeId, str] = {}
    for node in {trouble.node for trouble in job.troubles}:
        causes = [trouble.cause for trouble in job.troubles if trouble.node == node]
        last = causes[-1]
        count = next((at for at, cause in enumerate(reversed(causes)) if cause != last), len(causes))
        if count >= _AVOIDED_AFTER.get(last, len(job.troubles) + 1):
            found[node] = f"{last} {count} times in a row"
    return found


def fit_for(job: JobRecord, nodes: Sequence[NodeRecord]) -> tuple[list[NodeRecord], list[str]]:
    """Return the nodes as plans of this job may use them, and one remark for each that it avoids."""
    bad = avoided(job)
    fit = [_limited(node, job.limits.get(node.node)) for node in nodes if node.node not in bad]
    return fit, [f"node {node.name} is avoided ({bad[node.node]})" for node in nodes if node.node in bad]


def _limited(node: NodeRecord, limit_bytes: int | None) -> NodeRecord:
    if limit_bytes is None or limit_bytes >= node.hardware.memory_bytes:
        return node
    return msgspec.structs.replace(node, hardware=msgspec.structs.replace(node.hardware, memory_bytes=limit_bytes))


# ---- from which step ----


@dataclass(frozen=True, slots=True)
class Part:
    """The state of one stage, and who keeps it."""

    state: WeightsRecord
    holders: tuple[NodeId, ...]  #: empty: the blob store has it


@dataclass(frozen=True, slots=True)
class Cut:
    """A step from which the whole job can go on."""

    step: int  #: 0: from the start
    parts: tuple[Part, ...]
    origin: str  #: "kept", "resume", "checkpoint" or "start"

    @property
    def to_upload(self) -> tuple[Part, ...]:
        """What the blob store lacks."""
        return tuple(part for part in self.parts if part.holders)


def best_cut(
    job: JobRecord, kept: Mapping[NodeId, Collection[KeptState]], stored: Collection[str], told: int | None = None
) -> Cut:
    """Return the latest step from which a broken job can go on; of equals, what needs the least to be uploaded.

    kept: what nodes that can be reached keep. stored: digests that the blob store has. States count that are of the
    epoch in force; what an earlier one led to is in `job.resume`. told: the last step of which the loss is known; a
    later one is only taken if it saves more than AGAIN_FOR_LOSSES steps, because its loss died with its nodes.
    """
    found = [*_kept_cuts(job, kept, stored), *_stored_cuts(job, stored), Cut(0, (), "start")]
    latest = max(found, key=_merit)
    if told is None or latest.step <= told:
        return latest
    known = max((cut for cut in found if cut.step <= told), key=_merit)
    return known if latest.step - known.step <= AGAIN_FOR_LOSSES else latest


def _merit(cut: Cut) -> tuple[int, int, bool]:
    return cut.step, -len(cut.to_upload), cut.origin == "resume"


def _kept_cuts(job: JobRecord, kept: Mapping[NodeId, Collection[KeptState]], stored: Collection[str]) -> list[Cut]:
    steps: dict[int, dict[int, dict[WeightsRecord, list[NodeId]]]] = {}
    for node, states in kept.items():
        for state in states:
            if state.job == job.job and state.epoch == job.epoch and state.step > 0:
                blob = WeightsRecord(state.digest, state.size_bytes)
                steps.setdefault(state.step, {}).setdefault(state.stage, {}).setdefault(blob, []).append(node)
    for index, stage in enumerate(job.stages):
        if stage.held is not None:
            steps.setdefault(stage.step, {}).setdefault(index, {}).setdefault(stage.held, [])
    wanted = set(range(len(job.stages)))
    return [
        Cut(step, tuple(_part(by_stage[index], stored) for index in sorted(wanted)), "kept")
        for step, by_stage in steps.items()
        if wanted and wanted <= by_stage.keys()
    ]


def _part(copies: Mapping[WeightsRecord, Sequence[NodeId]], stored: Collection[str]) -> Part:
    """Return one of the copies of a state: one that is stored, else the one that most nodes keep."""
    for blob in copies:
        if blob.digest in stored:
            return Part(blob, ())
    blob = max(copies, key=lambda item: (len(copies[item]), item.digest))
    return Part(blob, tuple(sorted(copies[blob])))


def _stored_cuts(job: JobRecord, stored: Collection[str]) -> list[Cut]:
    """Return the state that the epoch in force began with, and the checkpoints, as far as they are whole."""
    found = [] if job.resume is None else [("resume", job.resume.step, job.resume.states)]
    found += [("checkpoint", checkpoint.step, checkpoint.states) for checkpoint in job.checkpoints]
    return [
        Cut(step, tuple(Part(blob, ()) for blob in states), origin)
        for origin, step, states in found
        if all(blob.digest in stored for blob in states)
    ]


# ---- while its workers end ----


def absent(state: State, job: JobRecord, watching: Collection[NodeId]) -> dict[NodeId, bool]:
    """Return the nodes of a broken job that cannot be asked what they keep, and whether each one's lease still runs."""
    found = {}
    for stage in job.stages:
        node = state.nodes.get(stage.node)
        leased = node is not None and node.state is NodeState.MEMBER
        if not leased or stage.node not in watching:
            found[stage.node] = leased
    return found


def still_working(state: State, job: JobRecord, watching: Collection[NodeId]) -> list[int]:
    """Return the stages of a broken job whose workers have not ended, on nodes that can be told to end them."""
    return [
        index
        for index, stage in enumerate(job.stages)
        if not stage.state.ended
        and stage.node in watching
        and (node := state.nodes.get(stage.node)) is not None
        and (node.state, node.incarnation) == (NodeState.MEMBER, stage.incarnation)
    ]


def went_back(cut: Cut, lost: int) -> str:
    """Return the line about where a job goes on."""
    where = {
        "kept": f"the states that its nodes kept after step {cut.step}",
        "resume": f"the states after step {cut.step} that it began this epoch with",
        "checkpoint": f"the checkpoint of step {cut.step}",
        "start": "the start: nobody keeps a state of all stages",
    }[cut.origin]
    return f"goes on from {where}; {lost} step{'' if lost == 1 else 's'} to do again"
