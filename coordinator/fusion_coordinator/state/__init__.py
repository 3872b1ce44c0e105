"""The coordinator's memory as a pure function: `apply(event, state) -> state`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fusion_coordinator.state import events, jobs, members, recovery
from fusion_coordinator.state.events import AnyEvent
from fusion_coordinator.state.records import State

__all__ = ["AnyEvent", "State", "apply", "apply_all"]

_APPLY: dict[type, Callable[[Any, State], State]] = {
    events.TokenCreated: members.token_created,
    events.Enrolled: members.enrolled,
    events.Revoked: members.revoked,
    events.NodeRegistered: members.node_registered,
    events.NodeGone: members.node_gone,
    events.JobSubmitted: jobs.job_submitted,
    events.JobWaits: jobs.job_waits,
    events.JobPlanned: jobs.job_planned,
    events.StageMoved: jobs.stage_moved,
    events.JobMoves: jobs.job_moves,
    events.JobStays: jobs.job_stays,
    events.JobRecoded: jobs.job_recoded,
    events.NodeDrains: members.node_drains,
    events.JobHolds: recovery.job_holds,
    events.JobBroke: recovery.job_broke,
    events.JobRestored: recovery.job_restored,
    events.JobPaused: recovery.job_paused,
    events.JobResumed: recovery.job_resumed,
    events.CheckpointCommitted: recovery.checkpoint_committed,
    events.CheckpointDropped: recovery.checkpoint_dropped,
    events.JobEnded: jobs.job_ended,
}


def apply(event: AnyEvent, state: State) -> State:
    """Return the state after `event`; `state` itself stays as it is."""
    return _APPLY[type(event)](event, state)


def apply_all(happened: Iterable[AnyEvent], state: State) -> State:
    """Return the state after several events in order."""
    for event in happened:
        state = apply(event, state)
    return state
