"""What the operator of the cluster calls."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

from fusion.base.ids import NodeId, random_id
from fusion.protocol.cluster import cluster_to_proto
from fusion.security.ca import CertificateAuthority
from fusion.security.credentials import Role
from fusion.security.enrolment import SECRET_BYTES, make_join_string
from fusion.wire.v1 import coordinator_pb2, coordinator_pb2_grpc, node_pb2
from fusion_coordinator.controller import Controller
from fusion_coordinator.decide import enrolment, nodes, scheduling
from fusion_coordinator.decide.nodes import PROTOCOL
from fusion_coordinator.linkwatch import in_contact
from fusion_coordinator.services.guard import who
from fusion_coordinator.state import AnyEvent, State
from fusion_coordinator.state.records import NodeRecord, NodeState
from fusion_coordinator.store.base import Request

_CREATE_TOKEN = "/fusion.wire.v1.Admin/CreateToken"  # noqa: S105
_REVOKE = "/fusion.wire.v1.Admin/Revoke"


class AdminService(coordinator_pb2_grpc.AdminServicer):
    """Tokens, nodes, revocation."""

    def __init__(
        self, controller: Controller, ca: CertificateAuthority, where: Callable[[], tuple[Sequence[str], int]]
    ) -> None:
        """`where` returns the addresses of the mutual-TLS port and the number of the enrolment port."""
        self._controller, self._ca, self._where = controller, ca, where

    async def CreateToken(  # noqa: N802
        self, request: coordinator_pb2.CreateTokenRequest, context: Any
    ) -> coordinator_pb2.CreateTokenResponse:
        """Make a join string that one machine can use once."""
        wall_s, secret, token_id = self._controller.clock.wall_s(), secrets.token_bytes(SECRET_BYTES), random_id("tok-")

        def decide(_state: State) -> tuple[Sequence[AnyEvent], coordinator_pb2.CreateTokenResponse]:
            event = enrolment.create_token(request.role, request.valid_s, token_id, secret, wall_s)
            addresses, enrol_port = self._where()
            text = make_join_string(
                cluster=self._ca.cluster,
                role=event.role,
                addresses=addresses,
                enrol_port=enrol_port,
                token_id=token_id,
                secret=secret,
                expires_wall_s=event.expires_wall_s,
                ca_der=self._ca.der,
            )
            return [event], coordinator_pb2.CreateTokenResponse(join_string=text, expires_wall_s=event.expires_wall_s)

        key = Request(who(context).identity, _CREATE_TOKEN, request.request_id)
        return await self._controller.once(key, coordinator_pb2.CreateTokenResponse, decide)

    async def ListNodes(  # noqa: N802
        self,
        request: coordinator_pb2.ListNodesRequest,
        context: Any,
    ) -> coordinator_pb2.ListNodesResponse:
        """Return all nodes that ever registered, by name."""
        state, presences = self._controller.state, self._controller.presences
        found = sorted(state.nodes.values(), key=lambda node: (node.name, node.node))
        free = {node.node for node in scheduling.idle(state, presences)}
        return coordinator_pb2.ListNodesResponse(nodes=[self._node(node, node.node in free) for node in found])

    async def Cluster(  # noqa: N802
        self, request: coordinator_pb2.ClusterRequest, context: Any
    ) -> coordinator_pb2.ClusterResponse:
        """Return the nodes in contact and the links between them, as the planner sees them."""
        state, presences = self._controller.state, self._controller.presences
        here = in_contact(state, presences)
        found = sorted((state.nodes[node] for node in here), key=lambda node: (node.name, node.node))
        cluster = scheduling.cluster_of(found, self._controller.links.view(here))
        return cluster_to_proto(cluster, {node.node for node in scheduling.idle(state, presences)})

    def _node(self, node: NodeRecord, free: bool) -> coordinator_pb2.NodeStatus:
        state, presence = self._controller.state, self._controller.presences.get(node.node)
        job = next(
            (job.job for job in state.jobs.values() if node.node in scheduling.needed_by(job)),
            presence.job if presence is not None else "",
        )
        hardware = node.hardware
        return coordinator_pb2.NodeStatus(
            node_id=node.node,
            name=node.name,
            state=_word(node, bool(job), free),
            address=node.address,
            hardware=node_pb2.Hardware(
                device=hardware.device,
                device_name=hardware.device_name,
                memory_bytes=hardware.memory_bytes,
                flops=hardware.flops,
                threads=hardware.threads,
                platform=hardware.platform,
                python_version=hardware.python_version,
                torch_version=hardware.torch_version,
                package_version=hardware.package_version,
                bytes_per_s=hardware.bytes_per_s,
                efficiency=hardware.efficiency,
            ),
            job_id=job,
            last_heartbeat_wall_s=presence.heard_wall_s if presence is not None else node.since_wall_s,
            incarnation=node.incarnation,
        )

    async def Revoke(self, request: coordinator_pb2.RevokeRequest, context: Any) -> coordinator_pb2.RevokeResponse:  # noqa: N802
        """Withdraw an identity at once: its calls are refused, and what it worked on fails."""
        wall_s = self._controller.clock.wall_s()

        def decide(state: State) -> tuple[Sequence[AnyEvent], coordinator_pb2.RevokeResponse]:
            events = enrolment.revoke(state, request.identity, wall_s)
            record = state.nodes.get(NodeId(request.identity))
            if events and record is not None and record.state is NodeState.MEMBER:
                events += nodes.gone(
                    state, record.node, record.incarnation, NodeState.LEFT, "its certificate was revoked", wall_s
                )
            return events, coordinator_pb2.RevokeResponse()

        key = Request(who(context).identity, f"{_REVOKE}#{request.identity[:40]}", request.request_id)
        return await self._controller.once(key, coordinator_pb2.RevokeResponse, decide)

    async def Info(self, request: coordinator_pb2.InfoRequest, context: Any) -> coordinator_pb2.InfoResponse:  # noqa: N802
        """Say who answers, and as whom the caller is known."""
        from fusion import __version__

        caller = who(context)
        return coordinator_pb2.InfoResponse(
            cluster_id=self._ca.cluster,
            package_version=__version__,
            protocol=PROTOCOL,
            wall_clock_s=self._controller.clock.wall_s(),
            caller_identity=caller.identity,
            caller_role=str(Role(caller.role)),
        )


def _word(node: NodeRecord, busy: bool, free: bool) -> str:
    if node.state is not NodeState.MEMBER:
        return str(node.state)
    if busy:
        return "busy"
    return "idle" if free else "away"
