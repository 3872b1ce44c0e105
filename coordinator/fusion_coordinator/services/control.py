"""What node daemons call."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

from fusion.base.errors import AuthError, WireError
from fusion.base.ids import JobId, NodeId
from fusion.observe.logs import fields
from fusion.protocol.timeline import stage_spans_from_proto
from fusion.security.ca import CertificateAuthority, read_csr
from fusion.security.credentials import Role, identity_of
from fusion.wire.v1 import node_pb2, node_pb2_grpc, tensor_pb2
from fusion_coordinator import addresses
from fusion_coordinator.controller import Controller
from fusion_coordinator.decide import jobs, nodes
from fusion_coordinator.decide.enrolment import hash_secret
from fusion_coordinator.decide.jobs import Report
from fusion_coordinator.decide.nodes import Registration
from fusion_coordinator.keptstates import read_states
from fusion_coordinator.liveness import heard
from fusion_coordinator.services.enrolment import RateLimit
from fusion_coordinator.services.guard import host_of, who
from fusion_coordinator.state import AnyEvent, State
from fusion_coordinator.state.events import StageMoved
from fusion_coordinator.state.records import HardwareRecord, NodeState, StageState, WeightsRecord
from fusion_coordinator.store.base import Request

log = logging.getLogger("fusion.coordinator.control")
MAX_STEPS_PER_REPORT = 10_000
MAX_LINKS_PER_REPORT = 64
_REGISTER = "/fusion.wire.v1.NodeControl/Register"


class NodeControlService(node_pb2_grpc.NodeControlServicer):
    """Registration, leases, commands and reports."""

    def __init__(self, controller: Controller, ca: CertificateAuthority) -> None:
        self._controller, self._ca = controller, ca
        self._probes = RateLimit(per_s=1.0, burst=10)
        self._skewed: set[NodeId] = set()

    async def Register(self, request: node_pb2.RegisterRequest, context: Any) -> node_pb2.RegisterResponse:  # noqa: N802
        """Register the caller under a new incarnation."""
        node, host = NodeId(who(context).identity), host_of(context)
        addresses.check_stated("address", request.address, host)
        asked = Registration(node, request.name, request.address, host, _hardware(request.hardware), request.protocol)
        controller, settings = self._controller, self._controller.settings
        now_s, wall_s = controller.clock.monotonic_s(), controller.clock.wall_s()

        def decide(state: State) -> tuple[list[AnyEvent], node_pb2.RegisterResponse]:
            presence = controller.presences.get(node)
            events, incarnation = nodes.register(state, presence, asked, now_s, wall_s, settings)
            return events, node_pb2.RegisterResponse(
                incarnation=incarnation,
                lease_s=settings.lease_s,
                heartbeat_s=settings.heartbeat_s,
                self_fence_s=settings.self_fence_s,
                coordinator_grace_s=settings.coordinator_grace_s,
            )

        # The same request id with another content would be another request: the content is part of the key.
        content = hash_secret(request.address.encode() + request.hardware.SerializeToString(deterministic=True))
        key = Request(node, f"{_REGISTER}#{content.hex()[:16]}", request.request_id)
        return await controller.once(key, node_pb2.RegisterResponse, decide)

    async def Heartbeat(self, request: node_pb2.HeartbeatRequest, context: Any) -> node_pb2.HeartbeatResponse:  # noqa: N802
        """Renew the caller's lease."""
        node, controller = NodeId(who(context).identity), self._controller
        nodes.current(controller.state, node, request.incarnation)
        now_s, wall_s = controller.clock.monotonic_s(), controller.clock.wall_s()
        presence = heard(
            controller.presences[node], request.sequence, request.job_id, request.epoch, request.step, now_s, wall_s
        )
        controller.heartbeat(node, presence)
        self._compare_clocks(node, request.wall_clock_s - wall_s)
        return node_pb2.HeartbeatResponse(wall_clock_s=wall_s, revoked=sorted(controller.state.revoked))

    def _compare_clocks(self, node: NodeId, difference_s: float) -> None:
        """Nothing is decided by it, but certificates will be (F24)."""
        if abs(difference_s) <= self._controller.settings.skew_warning_s:
            self._skewed.discard(node)
        elif node not in self._skewed:
            self._skewed.add(node)
            name = self._controller.state.nodes[node].name
            log.warning(f"clock of node {name} differs by {difference_s:+.0f} s", extra=fields(node=node))

    async def Watch(self, request: node_pb2.WatchRequest, context: Any) -> AsyncIterator[node_pb2.Command]:  # noqa: N802
        """Push commands until the registration ends."""
        controller = self._controller
        session = controller.open_session(NodeId(who(context).identity), request.incarnation)
        try:
            yield node_pb2.Command(ping=node_pb2.Ping())
            while True:
                command = await session.next(controller.settings.ping_s)
                yield command if command is not None else node_pb2.Command(ping=node_pb2.Ping())
        finally:
            controller.close_session(session)

    async def ReportStage(self, request: node_pb2.StageReport, context: Any) -> node_pb2.StageReportResponse:  # noqa: N802
        """Take a stage's state. Repeating it changes nothing."""
        controller, wall_s = self._controller, self._controller.clock.wall_s()
        weights = await self._uploaded(request.weights) if request.HasField("weights") else None
        held = await self._uploaded(request.held) if request.HasField("held") else None
        report = Report(
            NodeId(who(context).identity),
            request.incarnation,
            request.job_id,
            request.epoch,
            request.stage,
            request.state,
            request.detail,
            request.cause,
            request.peer_stage,
            weights,
            request.step,
            held,
        )
        events = await controller.change(lambda state: (found := jobs.stage_report(state, report, wall_s), found))
        failed = any(isinstance(event, StageMoved) and event.state is StageState.FAILED for event in events)
        job = controller.state.jobs[JobId(request.job_id)]
        controller.stage_reported(job.job, request.stage, failed)
        if failed:
            await controller.sweep()
        return node_pb2.StageReportResponse()

    async def _uploaded(self, ref: tensor_pb2.BlobRef) -> WeightsRecord:
        store = self._controller.store
        blob = await store.run(store.store.blob, ref.digest)
        if blob is None or blob.size_bytes != ref.size_bytes:
            raise WireError(f"weights {ref.digest[:64]} are not in the store; upload them before reporting")
        return WeightsRecord(ref.digest, ref.size_bytes)

    async def ReportMetrics(self, request: node_pb2.MetricsReport, context: Any) -> node_pb2.MetricsReportResponse:  # noqa: N802
        """Take steps and log lines; answered once they are on disk."""
        controller, node = self._controller, NodeId(who(context).identity)
        if (
            max(len(request.steps), len(request.spans)) > MAX_STEPS_PER_REPORT
            or len(request.logs) > MAX_STEPS_PER_REPORT
        ):
            raise WireError(f"a report holds at most {MAX_STEPS_PER_REPORT} steps and lines")
        job = controller.state.jobs.get(JobId(request.job_id))
        mine = [index for index, stage in enumerate(job.stages) if stage.node == node] if job is not None else []
        stages = {part.stage for part in request.steps} or set(mine) or {0}
        for stage in stages:
            job = jobs.owned_stage(controller.state, node, request.incarnation, request.job_id, request.epoch, stage)
        assert job is not None  # found for at least one stage
        if any(not 1 <= part.step <= job.steps for part in request.steps):
            raise WireError(f"step must be 1..{job.steps}, the job has no others")
        controller.replanner.steps(job, request.steps, controller.links)
        await controller.replanner.recoder.steps(job, request.steps)
        for spans in request.spans:
            jobs.owned_stage(controller.state, node, request.incarnation, request.job_id, request.epoch, spans.stage)
            stage_spans_from_proto(spans)  # refuses what is none
            controller.timelines.add(job.job, request.epoch, spans)
        progress = await controller.job_progress(job)
        await controller.progress.add(progress, request.steps, request.logs)
        controller.checkpoints.figures_came(job.job)
        return node_pb2.MetricsReportResponse()

    async def ReportLinks(self, request: node_pb2.LinksReport, context: Any) -> node_pb2.LinksReportResponse:  # noqa: N802
        """Take what probes of the caller have found."""
        node = NodeId(who(context).identity)
        nodes.current(self._controller.state, node, request.incarnation)
        self._controller.links_reported(node, request.links[:MAX_LINKS_PER_REPORT])
        return node_pb2.LinksReportResponse()

    async def ReportStates(self, request: node_pb2.StatesReport, context: Any) -> node_pb2.StatesReportResponse:  # noqa: N802
        """Take which states the caller keeps; it replaces what it said before."""
        node = NodeId(who(context).identity)
        nodes.current(self._controller.state, node, request.incarnation)
        states, jobs_known = read_states(request), self._controller.state.jobs
        self._controller.states_reported(node, request.incarnation, states)
        named = {state.job for state in states}
        ended = sorted(job for job in named if job not in jobs_known or jobs_known[job].state.ended)
        return node_pb2.StatesReportResponse(ended_jobs=ended)

    async def ProbeReachability(self, request: node_pb2.ProbeRequest, context: Any) -> node_pb2.ProbeResponse:  # noqa: N802
        """Say where the call comes from and, if an address is stated, whether the caller is reached there."""
        host = host_of(context)
        answer = node_pb2.ProbeResponse(seen_host=host, relay_bytes_per_s=self._controller.relay.bytes_per_s)
        if not request.address:
            return answer
        if not self._probes.take(who(context).identity, self._controller.clock.monotonic_s()):
            answer.detail = "too many probes; try again in a few seconds"
            return answer
        found = await addresses.probe(request.address, request.nonce, host)
        answer.reachable, answer.detail = found.reachable, found.detail
        return answer

    async def Renew(self, request: node_pb2.RenewRequest, context: Any) -> node_pb2.RenewResponse:  # noqa: N802
        """Return a new certificate for the caller's own key."""
        key = read_csr(request.csr_der)
        if identity_of(key) != who(context).identity:
            raise AuthError("csr_der is for another key; a certificate is renewed with the key that it has")
        wall_s = self._controller.clock.wall_s()
        return node_pb2.RenewResponse(certificate_pem=self._ca.issue(key, Role.NODE, wall_s))

    async def Leave(self, request: node_pb2.LeaveRequest, context: Any) -> node_pb2.LeaveResponse:  # noqa: N802
        """End the caller's registration. Doing so twice changes nothing."""
        node, wall_s = NodeId(who(context).identity), self._controller.clock.wall_s()
        reason = " ".join(request.reason.split())[:200] or "it was told to"

        def decide(state: State) -> tuple[list[AnyEvent], None]:
            record = state.nodes.get(node)
            if record is None or record.incarnation != request.incarnation or record.state is not NodeState.MEMBER:
                return [], None
            return nodes.gone(state, node, request.incarnation, NodeState.LEFT, reason, wall_s), None

        await self._controller.change(decide)
        return node_pb2.LeaveResponse()

    async def Drain(self, request: node_pb2.DrainRequest, context: Any) -> node_pb2.DrainResponse:  # noqa: N802
        """Say whether the caller may leave now, or what for it has to wait. Asking again changes nothing."""
        node, controller = NodeId(who(context).identity), self._controller
        reason, wall_s = " ".join(request.reason.split())[:200], controller.clock.wall_s()
        waits_for = await controller.change(lambda state: nodes.drain(state, node, request.incarnation, reason, wall_s))
        return node_pb2.DrainResponse(done=not waits_for, waits_for=waits_for)


def _hardware(message: node_pb2.Hardware) -> HardwareRecord:
    return HardwareRecord(
        message.device,
        message.device_name,
        message.memory_bytes,
        message.flops,
        message.threads,
        message.platform,
        message.python_version,
        message.torch_version,
        message.package_version,
        message.bytes_per_s,
        dict(message.efficiency),
    )
