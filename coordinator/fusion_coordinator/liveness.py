"""What is known only as long as the process lives: who was heard when, and how far stages are from going wrong.

Pure like the state: every function returns something new. `now_s` is always monotonic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fusion.base.ids import JobId, NodeId


@dataclass(frozen=True, slots=True)
class Presence:
    """What a node's heartbeats and its Watch stream tell."""

    incarnation: int
    heard_s: float  #: when the last heartbeat was received; a registration counts as one
    heard_wall_s: float
    watching: bool = False  #: whether its Watch stream stands
    sequence: int = 0
    job: str = ""  #: that its worker runs, by its own word
    epoch: int = 0
    step: int = 0
    idle_since_s: float | None = None  #: since when it has said that it runs nothing


@dataclass(frozen=True, slots=True)
class JobWatch:
    """How long the parts of an active job have been silent or in doubt."""

    planned_s: float
    reported_s: Mapping[int, float] = field(default_factory=dict)  #: by stage: its last report
    failed_since_s: float | None = None  #: when the first stage reported a failure
    moving_s: float | None = None  #: when the job was told to hold, or a stage stopped for it last

    def last_sign_s(self, stage: int) -> float:
        """When `stage` last reported, or was given out."""
        return self.reported_s.get(stage, self.planned_s)


Presences = Mapping[NodeId, Presence]
JobWatches = Mapping[JobId, JobWatch]


def heard(
    presence: Presence, sequence: int, job: str, epoch: int, step: int, now_s: float, now_wall_s: float
) -> Presence:
    """Return the presence after a heartbeat. One that was overtaken renews the lease, and nothing else."""
    renewed = replace(presence, heard_s=now_s, heard_wall_s=now_wall_s)
    if sequence <= presence.sequence:
        return renewed
    idle_since_s = None if job else (presence.idle_since_s if presence.idle_since_s is not None else now_s)
    return replace(renewed, sequence=sequence, job=job, epoch=epoch, step=step, idle_since_s=idle_since_s)


def forgive(presence: Presence, gap_s: float) -> Presence:
    """Return the presence as if the last `gap_s` seconds, in which nobody could be heard, had not been."""
    idle_since_s = None if presence.idle_since_s is None else presence.idle_since_s + gap_s
    return replace(presence, heard_s=presence.heard_s + gap_s, idle_since_s=idle_since_s)


def forgive_job(watch: JobWatch, gap_s: float) -> JobWatch:
    """The same for a job's parts."""
    return JobWatch(
        watch.planned_s + gap_s,
        {stage: at_s + gap_s for stage, at_s in watch.reported_s.items()},
        None if watch.failed_since_s is None else watch.failed_since_s + gap_s,
        None if watch.moving_s is None else watch.moving_s + gap_s,
    )


def reported(watch: JobWatch, stage: int, failed: bool, now_s: float) -> JobWatch:
    """Return the watch after a report of `stage`."""
    since_s = watch.failed_since_s
    if failed and since_s is None:
        since_s = now_s
    return replace(watch, reported_s={**watch.reported_s, stage: now_s}, failed_since_s=since_s)
