"""Puts the coordinator together and runs it: lock, store, controller, and the two ports."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from fusion.base.address import join_address, split_address
from fusion.base.clock import Clock, process_clock
from fusion.base.errors import ConfigError, FusionError
from fusion.observe import history
from fusion.observe.logs import fields
from fusion.security.roles import Access, AioAuthorizer
from fusion.security.tls import server_credentials
from fusion.transport.channels import SERVER_OPTIONS
from fusion.wire.v1 import coordinator_pb2_grpc, enrolment_pb2_grpc, node_pb2_grpc, relay_pb2_grpc
from fusion_coordinator import backup
from fusion_coordinator.blobs import BlobFiles
from fusion_coordinator.controller import Controller
from fusion_coordinator.lock import WAIT_S, StateLock
from fusion_coordinator.services.admin import AdminService
from fusion_coordinator.services.blobs import BlobsService
from fusion_coordinator.services.control import NodeControlService
from fusion_coordinator.services.enrolment import MAX_MESSAGE_BYTES, EnrolmentService
from fusion_coordinator.services.guard import ErrorInterceptor
from fusion_coordinator.services.jobs import JobsService
from fusion_coordinator.services.relay import RelayService
from fusion_coordinator.settings import Settings, process_settings
from fusion_coordinator.statedir import Config, OwnCertificate, Running, StateDir
from fusion_coordinator.store.sqlite import SqliteStore
from fusion_coordinator.store.thread import StoreThread

log = logging.getLogger("fusion.coordinator")

MAX_CALLS, MAX_ENROLMENTS = 8192, 64  #: at a time
STOP_GRACE_S = 2.0
_RENEW_LOOK_S = 3600.0


@dataclass(frozen=True, slots=True)
class Listen:
    """Where to listen: host:port of the mutual-TLS port, and of the enrolment port (empty: one port further)."""

    address: str
    enrol_address: str = ""

    def resolved(self) -> tuple[str, str]:
        """Return both addresses; ConfigError for what is none."""
        host, port = split_address("--listen", self.address)
        if self.enrol_address:
            split_address("--enrol-listen", self.enrol_address)
            return self.address, self.enrol_address
        if port == 65535:
            raise ConfigError("--listen: the enrolment port would be 65536; state --enrol-listen")
        return self.address, join_address(host, port + 1 if port else 0)


async def serve(
    directory: Path,
    listen: Listen,
    *,
    settings: Settings | None = None,
    clock: Clock | None = None,
    started: Callable[[Running], None],
    stop: asyncio.Event,
    lock_wait_s: float = WAIT_S,
) -> None:
    """Run until `stop` is set; `started` is called once it listens. Our errors say what is wrong at the start."""
    state = StateDir(directory)
    config = state.config()
    history.begin("coordinator")
    address, enrol_address = listen.resolved()
    lock = StateLock(directory, lock_wait_s)
    try:
        coordinator = Coordinator(state, config, settings or process_settings(), clock or process_clock())
        await coordinator.run(address, enrol_address, started, stop)
    finally:
        lock.release()


class Coordinator:
    """One running coordinator."""

    def __init__(self, state: StateDir, config: Config, settings: Settings, clock: Clock) -> None:
        self._state, self._config, self._settings, self._clock = state, config, settings, clock
        self._ca = state.ca(config)
        hosts = [split_address("advertise", address)[0] for address in config.advertise]
        self._certificate = OwnCertificate(state, self._ca, hosts, clock)
        self._store = StoreThread()
        self._closers: list[Callable[[], None]] = []
        self._address = self._enrol_address = ""

    async def run(
        self, address: str, enrol_address: str, started: Callable[[Running], None], stop: asyncio.Event
    ) -> None:
        """Start everything, wait for `stop` or for a fault, end everything in the opposite order."""
        controller = None
        try:
            await self._store.open(lambda: SqliteStore(self._state.database))
            files = BlobFiles(self._state.blobs, self._settings.disk_reserve_bytes)
            files.drop_stale()
            controller = Controller(
                self._config.cluster, self._store, files, self._settings, self._clock, self._state.checkpoints
            )
            await controller.start()
            main = self._main_server(controller)
            enrol = self._enrolment_server(controller)
            self._address = _bind(main, "--listen", address, self._certificate, client_certificate=True)
            self._enrol_address = _bind(
                enrol, "--enrol-listen", enrol_address, self._certificate, client_certificate=False
            )
            await main.start()
            await enrol.start()
            try:
                await self._running(started, stop, controller)
            finally:
                controller.end_streams()
                await asyncio.gather(main.stop(STOP_GRACE_S), enrol.stop(STOP_GRACE_S))
        finally:
            for close in self._closers:
                close()
            if controller is not None:
                await controller.stop()
            await self._store.close()

    async def _running(self, started: Callable[[Running], None], stop: asyncio.Event, controller: Controller) -> None:
        import os

        running = Running(os.getpid(), self._address, self._enrol_address)
        self._state.write_running(running)
        log.info("listening", extra=fields(address=self._address, enrolment=self._enrol_address))
        started(running)
        renewal = asyncio.get_running_loop().create_task(self._keep_renewed())
        upkeep = asyncio.get_running_loop().create_task(self._keep_up(controller))
        stopping = asyncio.ensure_future(stop.wait())
        either: list[asyncio.Future[Any]] = [stopping, controller.failed]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if controller.failed.done():
                controller.failed.result()
            log.info("stopping")
        finally:
            for task in (renewal, upkeep, stopping):
                task.cancel()
            await asyncio.gather(renewal, upkeep, stopping, return_exceptions=True)

    async def _keep_renewed(self) -> None:
        while True:
            await asyncio.sleep(_RENEW_LOOK_S)
            with contextlib.suppress(OSError):  # a full disk: the certificate lives on for weeks, the next look is soon
                if self._certificate.renew_if_due():
                    log.info("own certificate renewed")

    async def _keep_up(self, controller: Controller) -> None:
        """Every hour: a copy of the database, and blobs that nobody needs are deleted."""
        while True:
            await asyncio.sleep(self._settings.upkeep_s)
            try:
                await asyncio.to_thread(backup.hourly, self._state, self._clock.wall_s())
                dropped = await controller.collect_garbage()
                log.info("hourly upkeep is done", extra=fields(blobs_dropped=dropped))
            except (FusionError, OSError) as error:  # a full disk: the next time is in an hour
                log.error(f"hourly upkeep failed: {error}")

    def _main_server(self, controller: Controller) -> grpc.aio.Server:
        access = Access(self._config.cluster, revoked=lambda: controller.state.revoked, clock=self._clock)
        server = grpc.aio.server(
            interceptors=[AioAuthorizer(access), ErrorInterceptor()],
            options=list(SERVER_OPTIONS),
            maximum_concurrent_rpcs=MAX_CALLS,
        )
        jobs, blobs = JobsService(controller), BlobsService(controller)
        self._closers += [jobs.close, blobs.close]
        admin = AdminService(controller, self._ca, self._where)
        _register(node_pb2_grpc.add_NodeControlServicer_to_server, NodeControlService(controller, self._ca), server)
        _register(coordinator_pb2_grpc.add_JobsServicer_to_server, jobs, server)
        _register(coordinator_pb2_grpc.add_BlobsServicer_to_server, blobs, server)
        _register(coordinator_pb2_grpc.add_AdminServicer_to_server, admin, server)
        _register(relay_pb2_grpc.add_RelayServicer_to_server, RelayService(controller.relay), server)
        return server

    def _enrolment_server(self, controller: Controller) -> grpc.aio.Server:
        options = dict(SERVER_OPTIONS) | {
            "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
            "grpc.max_send_message_length": MAX_MESSAGE_BYTES,
            "grpc.max_concurrent_streams": 4,
            "grpc.max_connection_age_ms": 30_000,
            "grpc.max_connection_age_grace_ms": 10_000,
            "grpc.max_connection_idle_ms": 10_000,
        }
        server = grpc.aio.server(
            interceptors=[ErrorInterceptor()], options=list(options.items()), maximum_concurrent_rpcs=MAX_ENROLMENTS
        )
        _register(enrolment_pb2_grpc.add_EnrolmentServicer_to_server, EnrolmentService(controller, self._ca), server)
        return server

    def _where(self) -> tuple[Sequence[str], int]:
        """The addresses for join strings: those that the operator stated, else where the port listens."""
        _, enrol_port = split_address("enrolment", self._enrol_address)
        if self._config.advertise:
            return self._config.advertise, enrol_port
        host, port = split_address("listen", self._address)
        return [join_address(item, port) for item in _reachable_hosts(host)], enrol_port


def _reachable_hosts(host: str) -> list[str]:
    """The hosts by which others may reach a port on `host`; of a wildcard, this machine's addresses."""
    if host not in ("0.0.0.0", "::"):  # noqa: S104  # it is compared, not bound
        return [host]
    import ipaddress
    import socket

    import psutil

    kinds = (socket.AF_INET,) if host == "0.0.0.0" else (socket.AF_INET, socket.AF_INET6)  # noqa: S104
    found = [
        address.address.partition("%")[0]
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family in kinds
    ]
    usable = [item for item in found if not _local(ipaddress.ip_address(item))]
    return usable or ["127.0.0.1"]


def _local(address: Any) -> bool:
    return bool(address.is_loopback or address.is_link_local)


def _register(add: Any, servicer: object, server: grpc.aio.Server) -> None:
    add(servicer, server)


def _bind(
    server: grpc.aio.Server, what: str, address: str, certificate: OwnCertificate, *, client_certificate: bool
) -> str:
    """Listen on `address`; return it with the port that was given, which may have been chosen by the system."""
    host, port = split_address(what, address)
    credentials = server_credentials(lambda: certificate.credentials, client_certificate=client_certificate)
    try:
        bound = server.add_secure_port(address, credentials)
    except RuntimeError:
        bound = 0
    if not bound:
        raise ConfigError(
            f"{what}: cannot listen on {address}; the port is taken, or {host} is not an address of this machine"
        )
    return join_address(host, bound if port == 0 else port)
