"""Why a job broke. The first report is often only a consequence, so the root cause gets a moment to arrive."""

from __future__ import annotations

from dataclasses import dataclass

from fusion_coordinator.decide import moves
from fusion_coordinator.liveness import JobWatch, Presence, Presences
from fusion_coordinator.settings import Settings
from fusion_coordinator.state.records import JobRecord, JobState, StageRecord, StageState

_RANK = {
    "out-of-memory": 0,
    "error": 1,
    "device": 2,
    "crash": 3,
    "stuck": 4,
    "lease": 5,
}  #: whose word counts more, of several
_WORDS = {
    "out-of-memory": "ran out of memory",
    "error": "failed",
    "device": "lost its device",
    "crash": "crashed",
    "stuck": "made no progress",
    "lease": "ended its work, because it had no answer from the coordinator",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What broke an active job."""

    reason: str  #: one line
    cause: str  #: a stage's cause, or "stopped", "node-lost", "silent" or "vanished"
    stage: int  #: where it broke
    peer: int = -1  #: of "peer-lost": the stage that it lost


def verdict(
    job: JobRecord, watch: JobWatch, presences: Presences, now_s: float, settings: Settings, step_s: float = 0.0
) -> Verdict | None:
    """Return what breaks an active job, or None while there is nothing, or not yet.

    `step_s`: how long the job's last step took.
    """
    return (
        _root_cause(job)
        or _peer_lost(job, watch, presences, now_s, settings)
        or _never_ready(job, watch, now_s, settings)
        or _vanished(job, watch, presences, now_s, settings)
        or _never_held(job, watch, now_s, moves.patience_s(settings, step_s))
    )


def _never_held(job: JobRecord, watch: JobWatch, now_s: float, limit_s: float) -> Verdict | None:
    found = moves.never_held(job, watch, now_s, limit_s)
    return None if found is None else Verdict(found[1], "silent", found[0])


def _name(index: int, stage: StageRecord) -> str:
    return f"node {stage.node_name} (stage {index})"


def _after(text: str) -> str:
    return f": {text}" if text else ""


def _root_cause(job: JobRecord) -> Verdict | None:
    """A failure that is nobody else's consequence."""
    found = [
        (_RANK.get(stage.cause, 9), index, stage)
        for index, stage in enumerate(job.stages)
        if stage.state is StageState.FAILED and stage.cause != "peer-lost"
    ]
    if found:
        _, index, stage = min(found, key=lambda item: item[:2])
        reason = f"{_name(index, stage)} {_WORDS.get(stage.cause, 'failed')}{_after(stage.detail)}"
        return Verdict(reason, stage.cause, index)
    for index, stage in enumerate(job.stages):
        if stage.state is StageState.STOPPED:
            return Verdict(f"{_name(index, stage)} stopped its worker{_after(stage.detail)}", "stopped", index)
    return None


def _peer_lost(
    job: JobRecord, watch: JobWatch, presences: Presences, now_s: float, settings: Settings
) -> Verdict | None:
    """Some stages lost another. If that one's node has lost the coordinator too, it is gone; else wait for a cause."""
    reports = [
        (index, stage)
        for index, stage in enumerate(job.stages)
        if stage.state is StageState.FAILED and stage.cause == "peer-lost"
    ]
    for index, stage in reports:
        if 0 <= stage.peer_stage < len(job.stages):
            peer = job.stages[stage.peer_stage]
            if not peer.state.ended and not _connected(peer, presences.get(peer.node)):
                reason = (
                    f"{_name(stage.peer_stage, peer)} was lost: its connections to the coordinator and to "
                    f"{_name(index, stage)} broke"
                )
                return Verdict(reason, "node-lost", stage.peer_stage)
    if not reports or watch.failed_since_s is None or now_s - watch.failed_since_s < settings.blame_wait_s:
        return None
    index, stage = reports[0]
    if not 0 <= stage.peer_stage < len(job.stages):
        return Verdict(f"{_name(index, stage)} lost its connection to a peer{_after(stage.detail)}", "peer-lost", index)
    peer_name = _name(stage.peer_stage, job.stages[stage.peer_stage])
    reason = f"{_name(index, stage)} lost its connection to {peer_name}{_after(stage.detail)}"
    return Verdict(reason, "peer-lost", index, stage.peer_stage)


def _connected(stage: StageRecord, presence: Presence | None) -> bool:
    return presence is not None and presence.incarnation == stage.incarnation and presence.watching


def _never_ready(job: JobRecord, watch: JobWatch, now_s: float, settings: Settings) -> Verdict | None:
    """A stage that starts may take long, as long as it says so now and then."""
    if job.state is not JobState.STARTING:
        return None
    for index, stage in enumerate(job.stages):
        silent_s = now_s - watch.last_sign_s(index)
        if not stage.state.ready and silent_s >= settings.start_timeout_s:
            last = f"its last report is {stage.state.name.lower()}{_after(stage.detail)}"
            reason = f"{_name(index, stage)} did not start: nothing heard of it for {silent_s:.0f} s, {last}"
            return Verdict(reason, "silent", index)
    return None


def _vanished(
    job: JobRecord, watch: JobWatch, presences: Presences, now_s: float, settings: Settings
) -> Verdict | None:
    """A node that is well but runs nothing, though it reported a worker: whatever it had to say was lost with it."""
    for index, stage in enumerate(job.stages):
        presence = presences.get(stage.node)
        if stage.state.ended or stage.state is StageState.ASSIGNED or presence is None:
            continue
        if presence.incarnation != stage.incarnation or presence.idle_since_s is None:
            continue
        if now_s - max(presence.idle_since_s, watch.last_sign_s(index)) >= settings.vanished_s:
            return Verdict(f"{_name(index, stage)} no longer runs its worker, and did not say why", "vanished", index)
    return None
