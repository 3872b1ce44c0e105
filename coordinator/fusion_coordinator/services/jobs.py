"""What owners of jobs call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

from fusion.base.errors import ConfigError, UnreachableError
from fusion.base.ids import JobId, NodeId, random_id
from fusion.protocol.job import JobSpec, job_from_proto
from fusion.security.tls import Caller
from fusion.wire.v1 import coordinator_pb2, coordinator_pb2_grpc, job_pb2, node_pb2, plan_pb2, tensor_pb2
from fusion_coordinator import admission
from fusion_coordinator.controller import Controller
from fusion_coordinator.decide import jobs, pausing
from fusion_coordinator.progress import JobProgress
from fusion_coordinator.relay import Traffic
from fusion_coordinator.services.guard import who
from fusion_coordinator.state import AnyEvent, State
from fusion_coordinator.state.records import JobRecord
from fusion_coordinator.store.base import Request

_SUBMIT = "/fusion.wire.v1.Jobs/Submit"
_CANCEL = "/fusion.wire.v1.Jobs/Cancel"
_MOVE = "/fusion.wire.v1.Jobs/Move"
_PAUSE = "/fusion.wire.v1.Jobs/Pause"
_RESUME = "/fusion.wire.v1.Jobs/Resume"
MAX_STAGES_NAMED = 10_000


class JobsService(coordinator_pb2_grpc.JobsServicer):
    """Submitting, looking, following, moving and cancelling."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._checkers = ThreadPoolExecutor(2, thread_name_prefix="admission")
        self._submitting: dict[Request, asyncio.Task[coordinator_pb2.SubmitResponse]] = {}

    async def Submit(self, request: coordinator_pb2.SubmitRequest, context: Any) -> coordinator_pb2.SubmitResponse:  # noqa: N802
        """Check a job against everything it names, and queue it.

        The checks may take longer than a caller waits; asked again, it gets the answer of the checks under way.
        """
        caller = who(context)
        key = Request(caller.identity, _SUBMIT, request.request_id)
        earlier = await self._controller.answered(key, coordinator_pb2.SubmitResponse)
        if earlier is not None:
            return earlier
        task = self._submitting.get(key)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._submit(request, caller, key))
            self._submitting[key] = task
            task.add_done_callback(lambda _: self._submitting.pop(key, None))
            task.add_done_callback(lambda done: None if done.cancelled() else done.exception())  # who asked may be gone
        return await asyncio.shield(task)

    async def _submit(
        self, request: coordinator_pb2.SubmitRequest, caller: Caller, key: Request
    ) -> coordinator_pb2.SubmitResponse:
        spec = job_from_proto(request.spec)
        await self._check(spec)
        controller, job = self._controller, JobId(random_id("job-"))
        body, wall_s = request.spec.SerializeToString(deterministic=True), controller.clock.wall_s()

        def decide(state: State) -> tuple[Sequence[AnyEvent], coordinator_pb2.SubmitResponse]:
            events = jobs.submit(state, caller.identity, job, spec.name, body, spec.steps, wall_s, controller.settings)
            return events, coordinator_pb2.SubmitResponse(job_id=job)

        return await controller.once(key, coordinator_pb2.SubmitResponse, decide)

    async def _check(self, spec: JobSpec) -> None:
        store, needed = self._controller.store, admission.blobs_of(spec)
        sizes: dict[str, int | None] = {}
        for blob in needed.values():
            record = await store.run(store.store.blob, blob.digest)
            sizes[blob.digest] = None if record is None else record.size_bytes
        admission.check_complete(needed, sizes)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._checkers, admission.check_job, spec, self._controller.files)

    async def Get(self, request: coordinator_pb2.GetJobRequest, context: Any) -> coordinator_pb2.JobStatus:  # noqa: N802
        """Return a job's status."""
        return await self._status(self._visible(request.job_id, who(context)))

    async def Timeline(  # noqa: N802
        self, request: coordinator_pb2.TimelineRequest, context: Any
    ) -> coordinator_pb2.TimelineResponse:
        """Return the measured spans of a job's last few steps."""
        job = self._visible(request.job_id, who(context))
        return coordinator_pb2.TimelineResponse(stages=self._controller.timelines.of(job.job))

    async def List(self, request: coordinator_pb2.ListJobsRequest, context: Any) -> coordinator_pb2.ListJobsResponse:  # noqa: N802
        """Return the caller's jobs, the newest first; an admin's are all."""
        caller = who(context)
        found = [
            job
            for job in self._controller.state.jobs.values()
            if caller.role == "admin" or job.owner == caller.identity
        ]
        found.sort(key=lambda job: job.submitted_wall_s, reverse=True)
        return coordinator_pb2.ListJobsResponse(jobs=[await self._status(job) for job in found])

    async def Cancel(self, request: coordinator_pb2.CancelRequest, context: Any) -> coordinator_pb2.JobStatus:  # noqa: N802
        """Cancel a job; StateError if it has ended."""
        caller, controller = who(context), self._controller
        wall_s = controller.clock.wall_s()

        def decide(state: State) -> tuple[Sequence[AnyEvent], coordinator_pb2.GetJobRequest]:
            job = jobs.visible(state, request.job_id, caller.identity, caller.role)
            name = "an admin" if caller.identity != job.owner else "its owner"
            events = jobs.cancel(job, name, request.reason, wall_s)
            return events, coordinator_pb2.GetJobRequest(job_id=job.job)

        key = Request(caller.identity, f"{_CANCEL}#{request.job_id[:40]}", request.request_id)
        answer = await controller.once(key, coordinator_pb2.GetJobRequest, decide)
        return await self._status(self._visible(answer.job_id, caller))

    async def Move(self, request: coordinator_pb2.MoveRequest, context: Any) -> coordinator_pb2.JobStatus:  # noqa: N802
        """Let a running job go on under other cuts on other nodes; StateError says why it cannot now."""
        caller = who(context)
        job = self._visible(request.job_id, caller)
        _check_division(request)
        key = Request(caller.identity, f"{_MOVE}#{job.job}", request.request_id)
        await self._controller.move_once(key, job.job, request.cuts, request.nodes)
        return await self._status(self._visible(request.job_id, caller))

    async def Pause(self, request: coordinator_pb2.PauseRequest, context: Any) -> coordinator_pb2.JobStatus:  # noqa: N802
        """Let a job stop at a step's end; it keeps its state, and its nodes are free."""
        caller, controller = who(context), self._controller
        self._visible(request.job_id, caller)
        wall_s = controller.clock.wall_s()

        def decide(state: State) -> tuple[Sequence[AnyEvent], node_pb2.Ping]:
            job = jobs.visible(state, request.job_id, caller.identity, caller.role)
            name = "an admin" if caller.identity != job.owner else "its owner"
            return pausing.pause(job, name, wall_s), node_pb2.Ping()

        await controller.once(Request(caller.identity, _PAUSE, request.request_id), node_pb2.Ping, decide)
        return await self._status(self._visible(request.job_id, caller))

    async def Resume(self, request: coordinator_pb2.ResumeRequest, context: Any) -> coordinator_pb2.JobStatus:  # noqa: N802
        """Let a job go on that pauses, or has failed or was cancelled."""
        caller, controller = who(context), self._controller
        wall_s = controller.clock.wall_s()
        from_step = request.from_step if request.HasField("from_step") else None
        job = self._visible(request.job_id, caller)
        if from_step is not None:
            await controller.checkpoints.check(job.job, from_step)
        elif job.state.ended:
            await controller.checkpoints.newest(job.job)

        def decide(state: State) -> tuple[Sequence[AnyEvent], node_pb2.Ping]:
            job = jobs.visible(state, request.job_id, caller.identity, caller.role)
            event = pausing.resume(job, from_step, wall_s)
            controller.progress.close_after(job.job, event.step)
            return [event], node_pb2.Ping()

        await controller.once(Request(caller.identity, _RESUME, request.request_id), node_pb2.Ping, decide)
        return await self._status(self._visible(request.job_id, caller))

    async def ListCheckpoints(  # noqa: N802
        self, request: coordinator_pb2.ListCheckpointsRequest, context: Any
    ) -> coordinator_pb2.ListCheckpointsResponse:
        """Return a job's committed checkpoints."""
        job, controller = self._visible(request.job_id, who(context)), self._controller
        answer = coordinator_pb2.ListCheckpointsResponse()
        for checkpoint in job.checkpoints:
            answer.checkpoints.add(
                step=checkpoint.step,
                epoch=checkpoint.epoch,
                committed_wall_s=checkpoint.committed_wall_s,
                states=[tensor_pb2.BlobRef(digest=s.digest, size_bytes=s.size_bytes) for s in checkpoint.states],
                manifest=await controller.checkpoints.manifest(job.job, checkpoint.step),
            )
        return answer

    async def Follow(  # noqa: N802
        self, request: coordinator_pb2.FollowRequest, context: Any
    ) -> AsyncIterator[coordinator_pb2.JobEvent]:
        """Send what has happened since the caller's position, and with `wait` what happens until the job has ended."""
        caller, controller = who(context), self._controller
        step, line, sent = request.after_step, request.after_log, None
        while True:
            states = controller.jobs_changed()
            job = self._visible(request.job_id, caller)
            progress = await controller.job_progress(job)
            news = progress.changed.take()
            if (job.state, job.reason) != sent and not job.state.ended:
                sent = (job.state, job.reason)
                yield coordinator_pb2.JobEvent(status=await self._status(job))
            quiet = True
            for metrics in await controller.progress.steps(progress, step):
                yield coordinator_pb2.JobEvent(metrics=metrics)
                step, quiet = metrics.step, False
            for row in await controller.progress.lines(progress, line):
                yield coordinator_pb2.JobEvent(log=node_pb2.LogLine.FromString(row.body))
                line, quiet = row.number, False
            if not quiet:
                continue
            if job.state.ended or not request.wait:
                yield coordinator_pb2.JobEvent(status=await self._status(job))
                return
            await _first_of(states, news, controller.stopping)
            if controller.stopping.is_set():
                raise UnreachableError("the coordinator is stopping")

    def _visible(self, job_id: str, caller: Caller) -> JobRecord:
        return jobs.visible(self._controller.state, job_id, caller.identity, caller.role)

    async def _status(self, job: JobRecord) -> coordinator_pb2.JobStatus:
        message = status_message(job, await self._controller.job_progress(job))
        if not job.state.ended:
            message.relayed.extend(_relayed(job, self._controller.relay.standing()))
        return message

    def close(self) -> None:
        """Let no further check begin."""
        for task in self._submitting.values():
            task.cancel()
        self._checkers.shutdown(wait=False, cancel_futures=True)


def _relayed(
    job: JobRecord, standing: Mapping[tuple[NodeId, NodeId], Traffic]
) -> Iterator[coordinator_pb2.RelayedLink]:
    """Yield the links of a job that go through the relay now."""
    stages = {stage.node: number for number, stage in enumerate(job.stages)}
    for (source, target), traffic in standing.items():
        if source in stages and target in stages:
            yield coordinator_pb2.RelayedLink(
                source=stages[source], target=stages[target], by="coordinator", bytes=traffic.bytes
            )


def _check_division(request: coordinator_pb2.MoveRequest) -> None:
    nodes, cuts = len(request.nodes), len(request.cuts)
    if not 1 <= nodes <= MAX_STAGES_NAMED:
        raise ConfigError(f"nodes: {nodes} are named, allowed are 1..{MAX_STAGES_NAMED}")
    if cuts and nodes != cuts + 1:
        raise ConfigError(
            f"nodes: {cuts} cuts make {cuts + 1} stages, {nodes} nodes are named; name one for each stage"
        )
    if any(second <= first for first, second in pairwise(request.cuts)):
        raise ConfigError(f"cuts must ascend, got {', '.join(map(str, request.cuts[:20]))}")


async def _first_of(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def status_message(job: JobRecord, progress: JobProgress) -> coordinator_pb2.JobStatus:
    """Return a job as its owner sees it."""
    spec = job_pb2.JobSpec.FromString(job.spec)
    message = coordinator_pb2.JobStatus(
        job_id=job.job,
        name=job.name,
        state=coordinator_pb2.JobState.ValueType(job.state),
        reason=job.reason,
        step=progress.last_step,
        steps=job.steps,
        submitted_wall_s=job.submitted_wall_s,
        finished_wall_s=job.finished_wall_s,
        owner=job.owner,
        graph=spec.graph,
        weights=spec.weights,
    )
    if job.plan:
        message.plan.CopyFrom(plan_pb2.Plan.FromString(job.plan))
    if progress.last is not None:
        message.last.CopyFrom(progress.last)
    if job.state.name == "SUCCEEDED":
        message.stage_weights.extend(
            tensor_pb2.BlobRef(digest=stage.weights.digest, size_bytes=stage.weights.size_bytes)
            for stage in job.stages
            if stage.weights is not None
        )
    return message
