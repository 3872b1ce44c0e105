"""Registrations, leases, and what a node's end means for the jobs that it worked on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import grpc

from fusion.base.errors import ConfigError, NotFoundError, StateError
from fusion.base.ids import NodeId, check_name
from fusion.protocol.status import RefusalError
from fusion_coordinator.decide import moves
from fusion_coordinator.liveness import Presence, Presences
from fusion_coordinator.settings import Settings
from fusion_coordinator.state import AnyEvent, State
from fusion_coordinator.state.events import JobBroke, JobStays, NodeDrains, NodeGone, NodeRegistered
from fusion_coordinator.state.records import HardwareRecord, JobRecord, NodeRecord, NodeState, StageRecord

PROTOCOL = 1
MAX_MEMORY_BYTES = 2**50
MAX_FLOPS = 1e20
MAX_BYTES_PER_S = 1e18
MAX_KINDS, MAX_KIND = 64, 40  #: of operators; characters
LEAST_SHARE, MOST_SHARE = 1e-6, 1e3
MAX_TEXT = 200


@dataclass(frozen=True, slots=True)
class Registration:
    """What a node asks to be registered as."""

    node: NodeId
    name: str
    address: str  #: checked already
    seen_host: str
    hardware: HardwareRecord
    protocol: int


def check_registration(asked: Registration) -> None:
    """Raise ConfigError for figures that no machine has."""
    check_name("name", asked.name)
    hardware = asked.hardware
    if asked.protocol != PROTOCOL:
        raise ConfigError(f"protocol: the node speaks {asked.protocol}, this coordinator {PROTOCOL}; upgrade the older")
    if not 0 < hardware.memory_bytes <= MAX_MEMORY_BYTES:
        raise ConfigError(f"hardware.memory_bytes must be 1..{MAX_MEMORY_BYTES}, got {hardware.memory_bytes}")
    if not (math.isfinite(hardware.flops) and 0 < hardware.flops <= MAX_FLOPS):
        raise ConfigError(f"hardware.flops must be above 0 and at most {MAX_FLOPS:g}, got {hardware.flops:g}")
    if not 0 <= hardware.bytes_per_s <= MAX_BYTES_PER_S:
        raise ConfigError(f"hardware.bytes_per_s must be 0..{MAX_BYTES_PER_S:g}, got {hardware.bytes_per_s:g}")
    _check_efficiency(hardware.efficiency)
    if not 0 < hardware.threads <= 4096:
        raise ConfigError(f"hardware.threads must be 1..4096, got {hardware.threads}")
    for field in ("device", "device_name", "platform", "python_version", "torch_version", "package_version"):
        text = getattr(hardware, field)
        if len(text) > MAX_TEXT or not text.isprintable():
            raise ConfigError(f"hardware.{field} must be at most {MAX_TEXT} printable characters, got {text[:40]!r}")


def _check_efficiency(shares: Mapping[str, float]) -> None:
    if len(shares) > MAX_KINDS:
        raise ConfigError(f"hardware.efficiency has {len(shares)} kinds of operator, at most {MAX_KINDS} are allowed")
    for kind, share in shares.items():
        if not (len(kind) <= MAX_KIND and kind.isidentifier() and kind.isascii()):
            raise ConfigError(f"hardware.efficiency: {kind[:40]!r} is no kind of operator, such as conv")
        if not LEAST_SHARE <= share <= MOST_SHARE:
            raise ConfigError(f"hardware.efficiency: {kind} must be {LEAST_SHARE:g}..{MOST_SHARE:g}, got {share:g}")


def register(
    state: State, presence: Presence | None, asked: Registration, now_s: float, wall_s: float, settings: Settings
) -> tuple[list[AnyEvent], int]:
    """Register a node; return its new incarnation. The old one's jobs recover.

    While an earlier registration's lease runs, only a restart on the same machine is taken: anything else would be
    two machines with one identity (RefusalError with ALREADY_EXISTS).
    """
    check_registration(asked)
    old = state.nodes.get(asked.node)
    events: list[AnyEvent] = []
    if old is not None and old.state is NodeState.MEMBER:
        if _holds(old, presence, now_s, settings) and (presence is None or _elsewhere(old, presence, asked)):
            raise RefusalError(grpc.StatusCode.ALREADY_EXISTS, StateError(_copied(old, presence, now_s, settings)))
        why = "it registered anew, after a restart or too long without contact"
        events += break_jobs_of(state, old.node, old.incarnation, why, wall_s)
    incarnation = state.incarnation + 1
    events.append(
        NodeRegistered(wall_s, asked.node, asked.name, asked.address, asked.seen_host, asked.hardware, incarnation)
    )
    return events, incarnation


def _holds(old: NodeRecord, presence: Presence | None, now_s: float, settings: Settings) -> bool:
    return (
        presence is not None and presence.incarnation == old.incarnation and now_s - presence.heard_s < settings.lease_s
    )


def _elsewhere(old: NodeRecord, presence: Presence, asked: Registration) -> bool:
    return presence.watching or old.seen_host != asked.seen_host


def _copied(old: NodeRecord, presence: Presence | None, now_s: float, settings: Settings) -> str:
    left_s = settings.lease_s - (now_s - presence.heard_s) if presence is not None else settings.lease_s
    return (
        f"node {old.name} ({old.node}) is registered from {old.seen_host} and alive; if this is another machine with "
        f"copied credentials, give it its own with 'fusion-node join'; if it is the same one, wait {left_s:.0f} s"
    )


def current(state: State, node: NodeId, incarnation: int) -> NodeRecord:
    """Return the node's registration if `incarnation` is the one in force; else it must register again."""
    record = state.nodes.get(node)
    if record is None:
        raise NotFoundError(f"node {node} is not registered; register first")
    if record.incarnation != incarnation:
        raise StateError(f"stale incarnation {incarnation}, current {record.incarnation}; register again")
    if record.state is not NodeState.MEMBER:
        raise StateError(f"incarnation {incarnation} is {record.state}: {record.reason}; register again")
    return record


def leases_over(state: State, presences: Presences, now_s: float, wall_s: float, settings: Settings) -> list[AnyEvent]:
    """Return what follows from all leases that have ended by now."""
    events: list[AnyEvent] = []
    for node, record in state.nodes.items():
        presence = presences.get(node)
        if record.state is not NodeState.MEMBER or presence is None or presence.incarnation != record.incarnation:
            continue
        silent_s = now_s - presence.heard_s
        if silent_s >= settings.lease_s:
            reason = f"no heartbeat for {silent_s:.0f} s"
            events += gone(state, node, record.incarnation, NodeState.LOST, reason, wall_s)
    return _once_per_job(events)


def gone(state: State, node: NodeId, incarnation: int, how: NodeState, reason: str, wall_s: float) -> list[AnyEvent]:
    """Return the events of a node's end: it is gone, and the jobs that it worked on recover."""
    word = "was lost" if how is NodeState.LOST else "left"
    return [
        NodeGone(wall_s, node, incarnation, how, reason),
        *break_jobs_of(state, node, incarnation, f"{word}: {reason}", wall_s, verb=""),
    ]


def break_jobs_of(
    state: State, node: NodeId, incarnation: int, what: str, wall_s: float, verb: str = "was lost: "
) -> list[AnyEvent]:
    """Return what breaks: all active jobs with an unfinished stage on that incarnation of a node.

    A job that is about to move there stays as it is, if it can still.
    """
    events: list[AnyEvent] = [
        JobBroke(wall_s, job.job, f"node {stage.node_name} (stage {index}) {verb}{what}")
        for job, index, stage in stages_on(state, node, incarnation)
    ]
    for job, index, stage in moves.moving_to(state, node, incarnation):
        if job.holds:
            name = f"node {stage.node_name} (stage {index} of the plan that it moves to)"
            events.append(JobBroke(wall_s, job.job, f"{name} {verb}{what}"))
        else:
            events.append(JobStays(wall_s, job.job, f"node {stage.node_name} {verb}{what}"))
    return _once_per_job(events)


def drain(state: State, node: NodeId, incarnation: int, reason: str, wall_s: float) -> tuple[list[AnyEvent], str]:
    """Let a node come to leave; return what it has to wait for, one line, empty once it may."""
    record = current(state, node, incarnation)
    events: list[AnyEvent] = [] if record.draining else [NodeDrains(wall_s, node, incarnation, reason)]
    needed = [f"stage {index} of {job.job}" for job, index, _ in stages_on(state, node, incarnation)]
    needed += [f"the states of {job.job}" for job in state.jobs.values() if job.collects and _worked(job, node)]
    return events, ", ".join(needed)


def _worked(job: JobRecord, node: NodeId) -> bool:
    return any(stage.node == node for stage in job.stages)


def stages_on(state: State, node: NodeId, incarnation: int) -> list[tuple[JobRecord, int, StageRecord]]:
    """Return the unfinished stages of active jobs on that incarnation of a node."""
    return [
        (job, index, stage)
        for job in state.jobs.values()
        if job.state.active
        for index, stage in enumerate(job.stages)
        if stage.node == node and stage.incarnation == incarnation and not stage.state.ended
    ]


def _once_per_job(events: list[AnyEvent]) -> list[AnyEvent]:
    """A job breaks, or gives up its move, once: by the first of the nodes that went together."""
    broke: set[str] = set()
    stays: set[str] = set()
    kept: list[AnyEvent] = []
    for event in events:
        if isinstance(event, JobBroke | JobStays):
            if event.job in broke or (isinstance(event, JobStays) and event.job in stays):
                continue
            (broke if isinstance(event, JobBroke) else stays).add(event.job)
        kept.append(event)
    return kept
