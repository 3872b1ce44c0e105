"""Drives the pure core: takes requests and time, commits the events that follow, and tells the nodes.

Everything that changes the state goes through one lock: decide, commit to disk, apply, act. Whoever asked is answered
after the commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import msgspec
from google.protobuf.message import Message

from fusion.base.clock import Clock
from fusion.base.errors import ConfigError, FusionError, PlanError, StateError, UnreachableError
from fusion.base.ids import ClusterId, JobId, NodeId
from fusion.observe import failpoints, history
from fusion.observe.logs import fields
from fusion.plan.types import Plan
from fusion.protocol.job import JobSpec, job_from_proto
from fusion.protocol.plan import plan_to_proto
from fusion.wire.v1 import job_pb2, node_pb2, plan_pb2
from fusion_coordinator.blobs import BlobFiles
from fusion_coordinator.checkpoints import Checkpoints
from fusion_coordinator.decide import failures, moves, nodes, pausing, recovery, scheduling
from fusion_coordinator.keptstates import KeptBook, KeptState
from fusion_coordinator.linkwatch import LinkWatch, in_contact
from fusion_coordinator.liveness import JobWatch, Presence, forgive, forgive_job, reported
from fusion_coordinator.planning import Planner
from fusion_coordinator.progress import JobProgress, ProgressBook, Signal
from fusion_coordinator.recoder import as_before
from fusion_coordinator.recoveries import Recoveries
from fusion_coordinator.relay import RelayHub
from fusion_coordinator.replanner import Replanner
from fusion_coordinator.session import Session
from fusion_coordinator.settings import Settings
from fusion_coordinator.state import AnyEvent, State, apply_all
from fusion_coordinator.state.events import (
    CheckpointDropped,
    JobBroke,
    JobEnded,
    JobHolds,
    JobMoves,
    JobPaused,
    JobPlanned,
    JobRecoded,
    JobRestored,
    JobResumed,
    JobStays,
    JobSubmitted,
    JobWaits,
    NodeDrains,
    NodeGone,
    NodeRegistered,
    Revoked,
    StageMoved,
)
from fusion_coordinator.state.records import JobRecord, JobState, NodeState, RecoveryRecord, StageRecord, StageState
from fusion_coordinator.store.base import Answer, Request
from fusion_coordinator.store.thread import StoreThread
from fusion_coordinator.timelines import Timelines

log = logging.getLogger("fusion.coordinator.controller")
M = TypeVar("M", bound=Message)
R = TypeVar("R")
_COMPACT_EVERY = 500  #: events
_RETRY_S = 2.0
_OWN_PAUSE_S = 1.0  #: a sweep that comes so much too late means that this process itself stood still


class Controller:
    """The coordinator's one driver. Use it in the event loop that `start` ran in."""

    def __init__(
        self,
        cluster: ClusterId,
        store: StoreThread,
        files: BlobFiles,
        settings: Settings,
        clock: Clock,
        checkpoints: Path,
    ) -> None:
        """`checkpoints`: the directory that holds them."""
        self.cluster, self.store, self.files, self.settings, self.clock = cluster, store, files, settings, clock
        self.state = State()
        self.presences: dict[NodeId, Presence] = {}
        self.progress = ProgressBook(store, settings.flush_s, settings.log_lines_per_job)
        self._watches: dict[JobId, JobWatch] = {}
        self._sessions: dict[NodeId, Session] = {}
        self.links = LinkWatch()
        self.relay = RelayHub(settings.relay_bytes_per_s, clock, self._may_be_joined, self._call_to_relay)
        self.timelines = Timelines()
        self.kept = KeptBook()
        self._planner = Planner(files)
        self.replanner = Replanner(self, self._planner)
        self.recoveries = Recoveries(self)
        self.checkpoints = Checkpoints(self, checkpoints)
        self._lock = asyncio.Lock()
        self._jobs_changed = Signal()
        self._schedule_wanted = asyncio.Event()
        self._broken_wants = asyncio.Event()  #: a job that broke wants a plan, which does not wait for others
        self._node_came_s = -1e9  #: when a node last became free
        self._tasks: list[asyncio.Task[None]] = []
        self.stopping = asyncio.Event()  #: set when streams shall end
        self._since_compaction = 0
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # ---- life ----

    async def start(self) -> None:
        """Load the state; every known node gets a fresh lease, every active job a fresh deadline."""
        self.state = await self.store.run(self.store.store.load)
        now_s, wall_s = self.clock.monotonic_s(), self.clock.wall_s()
        for node in self.state.nodes.values():
            if node.state is NodeState.MEMBER:
                self.presences[node.node] = Presence(node.incarnation, now_s, wall_s)
        for job in self.state.jobs.values():
            if job.state.active:
                failed = any(stage.state is StageState.FAILED for stage in job.stages)
                self._watches[job.job] = JobWatch(
                    now_s,
                    failed_since_s=now_s if failed else None,
                    moving_s=None if job.next is None else now_s,
                )
        if any(not job.state.ended for job in self.state.jobs.values()):
            self._planner.warm()
        await self._compact()
        await asyncio.to_thread(self.checkpoints.tidy)
        works = (
            self._sweep,
            self._schedule,
            self.progress.write,
            self._measure_links,
            self.replanner.watch,
            self.recoveries.watch,
        )
        for work in works:
            task = asyncio.get_running_loop().create_task(self._for_ever(work), name=work.__name__)
            task.add_done_callback(self._task_ended)
            self._tasks.append(task)
        self._schedule_wanted.set()

    async def _for_ever(self, work: Callable[[], Awaitable[None]]) -> None:
        """Repeat `work`; while the disk is full it is tried again."""
        while True:
            try:
                await work()
            except UnreachableError as error:
                log.error(str(error))  # it is our own line, no stack is wanted
                await asyncio.sleep(_RETRY_S)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """Only a bug ends one of them; the process must not go on half alive."""
        if not task.cancelled() and task.exception() is not None and not self.failed.done():
            self.failed.set_exception(task.exception() or RuntimeError("ended"))

    def end_streams(self) -> None:
        """Let every stream end, because the process does."""
        self.stopping.set()
        for session in self._sessions.values():
            session.end(UnreachableError("the coordinator is stopping"))

    async def stop(self) -> None:
        """End all tasks and write what waits. Nodes and jobs go on as they are."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.recoveries.close()
        await self.checkpoints.close()
        await self._planner.close()
        async with self._lock:
            await self.progress.flush()
            await self._compact()

    async def _compact(self) -> None:
        self._since_compaction = 0
        await self.store.run(self.store.store.compact, self.state, self.clock.wall_s())

    # ---- changes ----

    async def change(self, decide: Callable[[State], tuple[Sequence[AnyEvent], R]]) -> R:
        """Decide on the present state, commit the events, apply them, act on them; return the decision's result."""
        async with self._lock:
            events, result = decide(self.state)
            await self._commit(events, None)
            return result

    async def once(self, request: Request, kind: type[M], decide: Callable[[State], tuple[Sequence[AnyEvent], M]]) -> M:
        """As `change`, for a request that may come again: it has its effect once, and the same answer every time."""
        _check_request_id(request.request_id)
        async with self._lock:
            earlier = await self.store.run(self.store.store.answer, request, self.clock.wall_s())
            if earlier is not None:
                return kind.FromString(earlier)
            events, message = decide(self.state)
            expires_wall_s = self.clock.wall_s() + self.settings.answers_kept_s
            await self._commit(events, Answer(request, message.SerializeToString(), expires_wall_s))
            return message

    async def answered(self, request: Request, kind: type[M]) -> M | None:
        """Return the answer that the request had earlier, if it had one."""
        _check_request_id(request.request_id)
        earlier = await self.store.run(self.store.store.answer, request, self.clock.wall_s())
        return None if earlier is None else kind.FromString(earlier)

    async def _commit(self, events: Sequence[AnyEvent], answer: Answer | None) -> None:
        state = apply_all(events, self.state)  # an impossible event is found before it is written
        if events or answer is not None:
            names = [type(event).__name__ for event in events] or [answer.request.method if answer is not None else ""]
            _fail_at("store.before_commit", names)
            await self.store.run(self.store.store.commit, events, answer)
            _fail_at("store.after_commit", names)
            _note_events(events)
        before, self.state = self.state, state
        for event in events:
            await self._act(event, before)
        self._since_compaction += len(events)
        if self._since_compaction >= _COMPACT_EVERY:
            await self._compact()

    # ---- consequences of events ----

    async def _act(self, event: AnyEvent, before: State) -> None:
        match event:
            case NodeRegistered():
                log.info("node registered", extra=fields(node=event.name, address=event.address, host=event.seen_host))
                self._end_session(event.node, StateError("the node registered anew"))
                self.links.moved(event.node, event.address)
                now_s = self.clock.monotonic_s()
                self.presences[event.node] = Presence(event.incarnation, now_s, self.clock.wall_s())
            case NodeGone():
                level = logging.INFO if event.state is NodeState.LEFT else logging.WARNING
                log.log(level, f"node {event.state}", extra=fields(node=event.node, reason=event.reason))
                self._end_session(event.node, StateError(f"the node is {event.state}: {event.reason}; register again"))
                self.presences.pop(event.node, None)
                self.kept.gone(event.node)
                self._schedule_wanted.set()
            case NodeDrains():
                name = self.state.nodes[event.node].name
                log.info("node wants to leave", extra=fields(node=name, reason=event.reason))
            case Revoked():
                self._end_session(NodeId(event.identity), StateError("the node's certificate was revoked"))
            case JobSubmitted():
                self._planner.warm()
                await self.note(event.job, "info", f"submitted: {event.steps} steps")
                self._schedule_wanted.set()
            case JobWaits():
                await self.note(event.job, "info", f"waits: {event.reason}")
            case JobPlanned():
                await self._begin_epoch(self.state.jobs[event.job])
            case StageMoved():
                await self._stage_moved(event, before.jobs[event.job])
            case JobMoves() | JobHolds():
                await self._job_holds(event)
            case JobStays():
                self._watches[event.job] = replace(self._watches[event.job], moving_s=None)
                await self.note(event.job, "warning", f"stays as it is: {event.reason}")
                self._schedule_wanted.set()
            case JobRecoded():
                await self.note(event.job, "info", event.reason)
            case JobBroke():
                await self.note(event.job, "error", f"recovers: {event.reason}")
            case JobRestored():
                self._watches.pop(event.job, None)
                await self.progress.reopen(event.job)
                await self._drop_outdated(before.jobs[event.job])
                self._wants_plan_now()
            case JobPaused():
                await self.note(event.job, "warning", f"pauses: {event.reason}")
            case CheckpointDropped():
                await self._drop_outdated(before.jobs[event.job])
            case JobResumed():
                await self.progress.reopen(event.job)
                await self.note(event.job, "info", f"goes on after step {event.step}, as its owner asked")
                await self._drop_outdated(before.jobs[event.job])
                self._schedule_wanted.set()
            case JobEnded():
                if event.state is JobState.FAILED:
                    await self.note(event.job, "error", f"failed: {event.reason}")
                else:
                    await self.note(event.job, "warning", event.reason)
                await self._job_over(before.jobs[event.job], event.reason)
        self._jobs_changed.give()

    async def _begin_epoch(self, job: JobRecord) -> None:
        """A plan is in force: tell the nodes."""
        self._watches[job.job] = JobWatch(self.clock.monotonic_s())
        names = ", ".join(stage.node_name for stage in job.stages)
        after = "" if job.resume is None else f", going on after step {job.resume.step}"
        await self.note(job.job, "info", f"epoch {job.epoch}: {len(job.stages)} stages on {names}{after}")
        for index, stage in enumerate(job.stages):
            self.tell(stage, node_pb2.Command(assign=self._assignment(job, index)))

    async def _job_holds(self, event: JobMoves | JobHolds) -> None:
        job = self.state.jobs[event.job]
        self._watches[event.job] = replace(self._watches[event.job], moving_s=self.clock.monotonic_s())
        await self.note(event.job, "info", event.reason)
        if job.next is not None and not job.holds:
            self.tell(job.stages[0], _hold(job))

    async def _stage_moved(self, event: StageMoved, before: JobRecord) -> None:
        job = self.state.jobs[event.job]
        stage = before.stages[event.stage]
        text = f"stage {event.stage} on {stage.node_name} is {event.state.name.lower()}"
        level = "warning" if event.state is StageState.FAILED else "info"  # the one error is what follows from it
        await self.note(event.job, level, text + (f": {event.detail}" if event.detail else ""))
        presence = self.presences.get(stage.node)
        if event.state.ended and presence is not None:
            self.presences[stage.node] = replace(presence, job="")
        if event.step and job.job in self._watches:
            self._watches[job.job] = replace(self._watches[job.job], moving_s=self.clock.monotonic_s())
        if job.epoch != event.epoch or not job.stages:
            await self._moved(job, before)
        elif job.state is JobState.SUCCEEDED:
            await self.note(event.job, "info", "succeeded")
            await self._job_over(before, "the job succeeded")
        elif event.state.ended:
            self._schedule_wanted.set()
        elif job.state is JobState.RUNNING and before.recovery is not None:
            await self._recovered(job, before.recovery)

    async def _recovered(self, job: JobRecord, was: RecoveryRecord) -> None:
        """Tell in one line what had happened, and what it cost."""
        took_s = max(0.0, self.clock.wall_s() - was.since_wall_s)
        steps = f"{was.lost} step{'' if was.lost == 1 else 's'} done again"
        line = f"recovered within {took_s:.1f} s, went on after step {was.step}, {steps}: {was.reason}"
        await self.note(job.job, "warning", line)

    async def _moved(self, job: JobRecord, before: JobRecord) -> None:
        """All stages hold, and the next plan is in force, or the job pauses."""
        await self._drop_outdated(before)
        if job.stages:
            await self._begin_epoch(job)
        else:
            self._watches.pop(job.job, None)
            await self.note(job.job, "info", f"holds after step {job.resume.step if job.resume is not None else 0}")
            self._wants_plan_now()
        staying = {stage.node for stage in job.stages}
        for stage in before.stages:
            if stage.node not in staying:
                self.send_stop(stage, before, "the job goes on without this node")
        self._schedule_wanted.set()

    async def _job_over(self, before: JobRecord, reason: str) -> None:
        """A job has ended: those of its workers that may be left end too."""
        job = self.state.jobs[before.job]
        self._watches.pop(job.job, None)
        self.progress.job_over(job.job)
        for stage in job.stages:
            if not stage.state.ended or stage.state is StageState.HELD:
                self.send_stop(stage, job, reason)
        # Asked what they keep, nodes are answered that this is needed no more.
        for node in {*self.kept.of(job.job), *(stage.node for stage in job.stages)}:
            self.push(node, node_pb2.Command(report_states=node_pb2.ReportStatesOrder()))
        await self._drop_outdated(before)
        self._schedule_wanted.set()

    async def _drop_outdated(self, before: JobRecord) -> None:
        """Delete the blobs of states that a job, once it was as `before`, may have needed, and does not any more."""
        states = moves.outdated(before, self.state.jobs[before.job])
        if states:
            digests = await asyncio.to_thread(moves.droppable, self.state, states)
            await self.store.run(self.store.store.drop_blobs, digests)
            await asyncio.to_thread(self.files.remove, digests)

    async def collect_garbage(self) -> int:
        """Delete blobs that have been there for long and that nothing refers to; return how many."""
        old = await self.store.run(self.store.store.blobs, self.clock.wall_s() - self.settings.blobs_kept_s)
        async with self._lock:  # nothing begins to refer to one meanwhile
            digests = await asyncio.to_thread(moves.droppable, self.state, old)
            await self.store.run(self.store.store.drop_blobs, digests)
            await asyncio.to_thread(self.files.remove, digests)
        return len(digests)

    def send_stop(self, stage: StageRecord, job: JobRecord, reason: str) -> None:
        """Tell a stage's node to end its worker."""
        stop = node_pb2.StopWorker(job_id=job.job, epoch=job.epoch, reason=reason)
        self.tell(stage, node_pb2.Command(stop=stop))

    def push(self, node: NodeId, command: node_pb2.Command) -> None:
        """Send a command to a node, if it takes any now."""
        session = self._sessions.get(node)
        if session is not None:
            session.push(command)

    def _may_be_joined(self, source: NodeId, target: NodeId) -> bool:
        """Only nodes of one job, and those of which one measures the link to the other."""
        if {source, target} & self.state.revoked:
            return False
        if self.links.measures(source, target):
            return True
        return any(
            {source, target} <= {stage.node for stage in job.stages}
            for job in self.state.jobs.values()
            if not job.state.ended
        )

    def _call_to_relay(self, node: NodeId, connection: str) -> None:
        self.push(node, node_pb2.Command(relay=node_pb2.RelayOrder(connection=connection)))

    def watching(self) -> set[NodeId]:
        """Return the nodes that take commands now."""
        return set(self._sessions)

    async def stored(self, digests: Collection[str]) -> set[str]:
        """Return those of the digests that the blob store has."""
        store = self.store.store
        return await self.store.run(lambda: {digest for digest in digests if store.blob(digest) is not None})

    def tell(self, stage: StageRecord, command: node_pb2.Command) -> None:
        """Send a command to a stage's node, if that listens under the registration that the stage was given to."""
        session = self._sessions.get(stage.node)
        if session is not None and session.incarnation == stage.incarnation:
            session.push(command)

    def _assignment(self, job: JobRecord, stage: int) -> plan_pb2.Assignment:
        message = plan_pb2.Assignment(
            job_id=job.job,
            cluster_id=self.cluster,
            stage=stage,
            job_spec=job.spec,
            plan=plan_pb2.Plan.FromString(job.plan),
        )
        mine, book = job.stages[stage].node, self.links.book
        for node in {one.node for one in job.stages} - {mine}:
            if book.called(mine, node):
                message.answering.append(node)
            elif book.record(mine, node).relayed:
                message.relayed.append(node)
            if book.called(node, mine):
                message.called.append(node)
        if job.resume is not None:
            message.resume.step = job.resume.step
            for blob in job.resume.states:
                message.resume.states.add(digest=blob.digest, size_bytes=blob.size_bytes)
        return message

    def planned_s(self, job: JobId) -> float | None:
        """Return when a job's plan was put in force, on the monotonic clock."""
        watch = self._watches.get(job)
        return None if watch is None else watch.planned_s

    async def job_progress(self, job: JobRecord) -> JobProgress:
        """Return a job's steps and lines."""
        return await self.progress.of(job.job, len(job.stages), moves.past_counts(job.past))

    async def note(self, job: JobId, level: str, text: str) -> None:
        """Write a line into a job's log."""
        log.log(logging.getLevelName(level.upper()), text, extra=fields(job=job))
        progress = await self.job_progress(self.state.jobs[job])
        self.progress.note(progress, self.clock.wall_s(), level, text)

    def jobs_changed(self) -> asyncio.Event:
        """Return an event that is set when any job changes its state."""
        return self._jobs_changed.take()

    # ---- nodes ----

    def open_session(self, node: NodeId, incarnation: int) -> Session:
        """Begin a Watch stream; an earlier one of the node ends. What was never delivered is sent now."""
        nodes.current(self.state, node, incarnation)
        self._end_session(node, StateError("a newer Watch stream of this node took over"))
        session = Session(node, incarnation)
        self._sessions[node] = session
        self.presences[node] = replace(self.presences[node], watching=True)
        for job in self.state.jobs.values():
            for stage in job.stages if job.collects else ():
                if (stage.node, stage.incarnation) == (node, incarnation) and not stage.state.ended:
                    self.send_stop(stage, job, f"recovery: {job.reason}")
        # What it said before this process began is forgotten, and it may not have heard that a job has ended.
        session.push(node_pb2.Command(report_states=node_pb2.ReportStatesOrder()))
        for job, index, stage in nodes.stages_on(self.state, node, incarnation):
            if stage.state is StageState.ASSIGNED:
                session.push(node_pb2.Command(assign=self._assignment(job, index)))
            elif index == 0 and job.next is not None and not stage.holds:
                session.push(_hold(job))
        self._node_is_free()
        return session

    def close_session(self, session: Session) -> None:
        """The stream is over, whoever ended it."""
        if self._sessions.get(session.node) is not session:
            return
        del self._sessions[session.node]
        presence = self.presences.get(session.node)
        if presence is not None and presence.incarnation == session.incarnation:
            self.presences[session.node] = replace(presence, watching=False)

    def _end_session(self, node: NodeId, error: FusionError) -> None:
        session = self._sessions.get(node)
        if session is not None:
            session.end(error)
            self.close_session(session)

    def heartbeat(self, node: NodeId, presence: Presence) -> None:
        """Keep what a heartbeat told. A worker that nobody needs any more is stopped, in case it was not told."""
        was_busy = bool(self.presences[node].job)
        self.presences[node] = presence
        job = self.state.jobs.get(JobId(presence.job)) if presence.job else None
        needed = job is not None and (job.state.active or job.collects) and job.epoch == presence.epoch
        if presence.job and not needed:
            stop = node_pb2.StopWorker(job_id=presence.job, epoch=presence.epoch, reason="the job ended or moved on")
            self.push(node, node_pb2.Command(stop=stop))
        if was_busy and not presence.job:
            self._node_is_free()

    def _node_is_free(self) -> None:
        self._node_came_s = self.clock.monotonic_s()
        self._schedule_wanted.set()

    def states_reported(self, node: NodeId, incarnation: int, states: Iterable[KeptState]) -> None:
        """Take which states a node keeps; with what it has uploaded, a checkpoint may be complete."""
        self.kept.reported(node, incarnation, states, self.clock.monotonic_s())
        self.checkpoints.look()

    def stage_reported(self, job: JobId, stage: int, failed: bool) -> None:
        """Note that a stage gave a sign of life."""
        if job in self._watches:
            self._watches[job] = reported(self._watches[job], stage, failed, self.clock.monotonic_s())

    # ---- time ----

    async def _sweep(self) -> None:
        before_s = self.clock.monotonic_s()
        await asyncio.sleep(self.settings.sweep_s)
        gap_s = self.clock.monotonic_s() - before_s
        if gap_s > self.settings.sweep_s + _OWN_PAUSE_S:
            self._forgive_own_pause(gap_s)
        await self.sweep()

    def _forgive_own_pause(self, gap_s: float) -> None:
        """This process did not run, so it heard nobody. Nodes fence themselves by their own clocks."""
        log.warning(f"this process stood still for {gap_s:.1f} s; leases are extended by as much")
        self.presences = {node: forgive(presence, gap_s) for node, presence in self.presences.items()}
        self._watches = {job: forgive_job(watch, gap_s) for job, watch in self._watches.items()}

    async def sweep(self) -> None:
        """End leases that are over, let jobs recover that broke, and hold those whose nodes want to leave."""
        if self._leases() or self._verdicts(self.state) or pausing.drains(self.state, 0.0):
            await self.change(lambda state: (self._leases(), None))
            await self.change(lambda state: (self._verdicts(state), None))
            await self.change(lambda state: (pausing.drains(state, self.clock.wall_s()), None))

    def _leases(self) -> list[AnyEvent]:
        now_s, wall_s = self.clock.monotonic_s(), self.clock.wall_s()
        return nodes.leases_over(self.state, self.presences, now_s, wall_s, self.settings)

    def _verdicts(self, state: State) -> list[AnyEvent]:
        now_s, wall_s = self.clock.monotonic_s(), self.clock.wall_s()
        events: list[AnyEvent] = []
        for job_id, watch in self._watches.items():
            job = state.jobs[job_id]
            if not job.state.active:
                continue
            step_s = self._step_s(job_id)
            verdict = failures.verdict(job, watch, self.presences, now_s, self.settings, step_s)
            if verdict is not None:
                progress = self.progress.known(job_id)
                events.append(recovery.broke(job, verdict, 0 if progress is None else progress.last_step, wall_s))
                self._note_broken_link(job, verdict)
            else:
                events += moves.overdue(job, watch, now_s, wall_s, moves.patience_s(self.settings, step_s))
        return events

    def _note_broken_link(self, job: JobRecord, verdict: failures.Verdict) -> None:
        """Two nodes that are well but cannot reach each other are no neighbours in the next plan."""
        if verdict.cause == "peer-lost" and verdict.peer >= 0:
            ends = job.stages[verdict.stage].node, job.stages[verdict.peer].node
            self.links.book.failed(*ends, self.clock.monotonic_s(), verdict.reason)

    def _step_s(self, job: JobId) -> float:
        """Return how long a job's last step took; 0 before there is one."""
        progress = self.progress.known(job)
        return progress.last.step_s if progress is not None and progress.last is not None else 0.0

    # ---- moving ----

    async def move_job(self, job: JobId, plan: Plan, reason: str = "") -> None:
        """Let a running job go on by `plan`, from the end of one of its next steps on. Returns once that is decided.

        StateError says why it cannot move now. If the job does not come to hold, or loses a node that it was to move
        to, it stays as it is.
        """
        await self.change(lambda state: (self._move(state, job, plan, reason), None))

    def _move(self, state: State, job: JobId, plan: Plan, reason: str) -> list[JobMoves]:
        record = state.jobs[job]
        plan = as_before(record, plan, strict=job_of(record).determinism == "strict")
        return moves.move(state, self.presences, job, plan, self.clock.wall_s(), reason)

    async def move_once(self, request: Request, job: JobId, cuts: Sequence[int], names: Sequence[str]) -> None:
        """Let a running job go on by these cuts on these nodes, as somebody asked for; asked again, that is all."""
        if await self.answered(request, node_pb2.Ping) is not None:
            return
        record = self.state.jobs[job]
        moves.check_runs(record)
        chosen = moves.named_nodes(self.state, self.presences, record, names)
        links = self.links.view(in_contact(self.state, self.presences))
        plan = await self._planner.divide(scheduling.cluster_of(chosen, links), job_of(record), cuts)
        await self.once(request, node_pb2.Ping, lambda state: (self._move(state, job, plan, ""), node_pb2.Ping()))

    # ---- scheduling ----

    async def _schedule(self) -> None:
        """Try to start what waits, once the nodes have settled; what broke is not kept waiting by that."""
        await self._schedule_wanted.wait()
        self._schedule_wanted.clear()
        early_s = 1.0
        while early_s > 0:
            self._broken_wants.clear()
            jobs = scheduling.waiting(self.state)
            early_s = self._settles_in_s() if jobs else 0.0
            try:
                for job in jobs:
                    if early_s <= 0 or job.state is JobState.RECOVERING:
                        await self._try_to_start(job)
            except UnreachableError:
                self._schedule_wanted.set()
                raise
            if early_s > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._broken_wants.wait(), early_s)

    def _wants_plan_now(self) -> None:
        self._schedule_wanted.set()
        self._broken_wants.set()

    def _settles_in_s(self) -> float:
        now_s = self.clock.monotonic_s()
        early_s = self._node_came_s + self.settings.settle_s - now_s
        if scheduling.leaving(self.state, self.presences, self.clock.wall_s() - self.settings.release_wait_s):
            early_s = max(early_s, self.settings.sweep_s)
        if early_s > 0 or not self.settings.probes or now_s - self._node_came_s > self.settings.measure_wait_s:
            return early_s
        measuring = self.links.measuring(self.state, self.presences, self._idle(), now_s)
        return self.settings.probe_s if measuring else 0.0

    def _idle(self) -> set[NodeId]:
        return {node.node for node in scheduling.idle(self.state, self.presences)}

    # ---- links ----

    async def _measure_links(self) -> None:
        """Let nodes measure what is worth it, once in a while."""
        await asyncio.sleep(self.settings.probe_s)
        if not self.settings.probes:
            return
        orders = self.links.next_orders(self.state, self.presences, self._idle(), self.clock.monotonic_s())
        for node, command in orders:
            self.push(node, command)

    def links_reported(self, node: NodeId, links: Iterable[node_pb2.LinkReport]) -> None:
        """Take what a node has measured."""
        self.links.reported(node, links, self._idle(), self.clock.monotonic_s())

    async def _try_to_start(self, job: JobRecord) -> None:
        spec = job_from_proto(job_pb2.JobSpec.FromString(job.spec))
        nodes_here = scheduling.ready_for(self.state, self.presences, job)
        free, remarks = scheduling.split_by_torch(nodes_here, spec.torch_version)
        free, avoided = recovery.fit_for(job, free)
        remarks += avoided
        if not free:
            await self._wait(job, scheduling.waits_for_nodes(self.state, remarks))
            return
        try:
            links = self.links.view(in_contact(self.state, self.presences))
            plan = await self._planner.plan(scheduling.cluster_of(free, links), spec)
            plan = as_before(job, plan, strict=spec.determinism == "strict")
        except PlanError as error:
            await self._wait(job, "; ".join([str(error), *remarks]))
            return
        except FusionError as error:
            reason = f"no plan is possible: {error}"
            await self.change(lambda state: (_if_waiting(state, job, self._ended(job, reason)), None))
            return
        except Exception as error:  # a fault in the planner must not end the coordinator
            log.exception("planner failed", extra=fields(job=job.job))
            reason = f"no plan: internal error {type(error).__name__}; see the coordinator's log"
            await self.change(lambda state: (_if_waiting(state, job, self._ended(job, reason)), None))
            return
        await self.change(lambda state: (self._start_job(state, job, plan), None))

    def _ended(self, job: JobRecord, reason: str) -> JobEnded:
        return JobEnded(self.clock.wall_s(), job.job, JobState.FAILED, reason)

    async def _wait(self, job: JobRecord, reason: str) -> None:
        """No plan is possible now: a job that never ran waits in the queue, another one pauses."""

        def decide(state: State) -> tuple[list[AnyEvent], None]:
            now, wall_s = state.jobs[job.job], self.clock.wall_s()
            if now.state is JobState.QUEUED:
                event: AnyEvent = JobWaits(wall_s, job.job, reason)
            else:
                event = JobPaused(wall_s, job.job, reason)
            said = now.reason == reason and now.state is not JobState.RECOVERING
            return ([] if said else _if_waiting(state, job, event)), None

        await self.change(decide)

    def _start_job(self, state: State, job: JobRecord, plan: Plan) -> list[AnyEvent]:
        """Put a plan in force if the nodes that it was made for are still free; else it is made again."""
        free = {(node.node, node.incarnation) for node in scheduling.ready_for(state, self.presences, job)}
        if any((stage.node, stage.incarnation) not in free for stage in plan.stages):
            self._schedule_wanted.set()
            return []
        plan = replace(plan, epoch=scheduling.next_epoch(job))
        stages = tuple(StageRecord(stage.node, stage.node_name, stage.incarnation) for stage in plan.stages)
        body = plan_to_proto(plan).SerializeToString(deterministic=True)
        event = JobPlanned(self.clock.wall_s(), job.job, plan.epoch, body, stages)
        return _if_waiting(state, job, event)


def _fail_at(name: str, events: Sequence[str]) -> None:
    """For tests: places around the commit of each kind of event."""
    for event in events:
        failpoints.reach(name, kind=event)


def _note_events(events: Sequence[AnyEvent]) -> None:
    """Note what was committed, without the long fields (plans, specifications)."""
    if history.active():
        for event in events:
            values = msgspec.to_builtins(event)
            short = {key: value for key, value in values.items() if not isinstance(value, str) or len(value) < 300}
            history.note("committed", **(short | {"kind": type(event).__name__}))


def _hold(job: JobRecord) -> node_pb2.Command:
    return node_pb2.Command(hold=node_pb2.HoldStage(job_id=job.job, epoch=job.epoch))


def job_of(record: JobRecord) -> JobSpec:
    """Return what the owner asked for."""
    return job_from_proto(job_pb2.JobSpec.FromString(record.spec))


def _if_waiting(state: State, job: JobRecord, event: AnyEvent) -> list[AnyEvent]:
    now = state.jobs[job.job]
    return [event] if now.wants_plan and (now.epoch, now.resume) == (job.epoch, job.resume) else []


def _check_request_id(request_id: str) -> None:
    if not 8 <= len(request_id) <= 64 or not request_id.isprintable():
        raise ConfigError("request_id must be 8..64 printable characters, fresh for every request")
