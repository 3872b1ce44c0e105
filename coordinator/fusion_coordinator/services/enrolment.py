"""The enrolment port: the only one that answers callers without a certificate. Small, slow for whoever insists."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from typing import Any

import grpc

from fusion.base.errors import AuthError, UnreachableError
from fusion.base.ids import check_name
from fusion.observe.logs import fields
from fusion.protocol.status import RefusalError
from fusion.security.ca import CertificateAuthority, read_csr
from fusion.security.credentials import Role, identity_of
from fusion.security.tls import caller_of_certificate
from fusion.wire.v1 import enrolment_pb2, enrolment_pb2_grpc
from fusion_coordinator.controller import Controller
from fusion_coordinator.decide import enrolment
from fusion_coordinator.services.guard import host_of

log = logging.getLogger("fusion.coordinator.enrolment")
DEADLINE_S = 10.0
MAX_MESSAGE_BYTES = 16 * 1024
_HOSTS_REMEMBERED = 10_000


class RateLimit:
    """A bucket per host: `burst` calls at once, then `per_s`. Forgets the hosts that have not called for longest."""

    def __init__(self, per_s: float, burst: int) -> None:
        self._per_s, self._burst = per_s, burst
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, host: str, now_s: float) -> bool:
        """Whether `host` may call now."""
        left, since_s = self._buckets.pop(host, (float(self._burst), now_s))
        left = min(self._burst, left + (now_s - since_s) * self._per_s)
        allowed = left >= 1
        self._buckets[host] = (left - 1 if allowed else left, now_s)
        if len(self._buckets) > _HOSTS_REMEMBERED:
            self._buckets.popitem(last=False)
        return allowed


class EnrolmentService(enrolment_pb2_grpc.EnrolmentServicer):
    """Gives certificates for tokens."""

    def __init__(self, controller: Controller, ca: CertificateAuthority) -> None:
        self._controller, self._ca = controller, ca
        settings = controller.settings
        self._limit = RateLimit(settings.enrolments_per_s, settings.enrolment_burst)

    async def Enrol(self, request: enrolment_pb2.EnrolRequest, context: Any) -> enrolment_pb2.EnrolResponse:  # noqa: N802
        """Use a token: AuthError if it cannot be used; the same key may ask again."""
        host = self._let_in(context)
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await self._enrol(request, host)
        except TimeoutError:
            raise UnreachableError("the coordinator is too busy; try again in a few seconds") from None

    def _let_in(self, context: Any) -> str:
        """Return the caller's host; a host that calls too often is refused."""
        host = host_of(context)
        if not self._limit.take(host, self._controller.clock.monotonic_s()):
            error = UnreachableError(f"too many enrolments from {host}; try again in a few seconds")
            raise RefusalError(grpc.StatusCode.RESOURCE_EXHAUSTED, error)
        return host

    async def RenewExpired(  # noqa: N802
        self, request: enrolment_pb2.RenewExpiredRequest, context: Any
    ) -> enrolment_pb2.RenewExpiredResponse:
        """Give a node that was off a new certificate for the same key; AuthError if it was off for too long."""
        host, key = self._let_in(context), read_csr(request.csr_der)
        if not self._ca.has_issued(request.certificate_pem):
            raise AuthError("certificate_pem is not of this cluster; join it")
        named, wall_s = caller_of_certificate(request.certificate_pem), self._controller.clock.wall_s()
        if named.identity != identity_of(key):
            raise AuthError("csr_der is for another key; a certificate is renewed with the key that it has")
        enrolment.renewable(self._controller.state, named.identity, named.role, named.valid_until_s, wall_s)
        log.info("renewed an expired certificate", extra=fields(identity=named.identity, host=host))
        return enrolment_pb2.RenewExpiredResponse(certificate_pem=self._ca.issue(key, Role.NODE, wall_s))

    async def _enrol(self, request: enrolment_pb2.EnrolRequest, host: str) -> enrolment_pb2.EnrolResponse:
        name = check_name("name", request.name)
        key = read_csr(request.csr_der)
        identity, wall_s = identity_of(key), self._controller.clock.wall_s()
        role = await self._controller.change(
            lambda state: enrolment.enrol(state, request.token_id, request.secret, identity, name, wall_s)
        )
        log.info("enrolled", extra=fields(identity=identity, role=role, name=name, host=host))
        return enrolment_pb2.EnrolResponse(
            cluster_id=self._ca.cluster,
            identity=identity,
            role=role,
            certificate_pem=self._ca.issue(key, role, wall_s),
            ca_pem=self._ca.pem,
        )
