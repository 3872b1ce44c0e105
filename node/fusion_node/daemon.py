"""The node's daemon: it does what the agent decides. One event loop, no torch, never waits for the worker."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import uuid
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, assert_never

from google.protobuf.message import DecodeError

from fusion.base.clock import Clock, process_clock
from fusion.base.errors import AuthError, ConfigError, FusionError, NotFoundError, StateError, UnreachableError
from fusion.base.ids import is_id
from fusion.base.units import format_bytes, format_flops
from fusion.observe import history
from fusion.observe.doctor import CLOCK_WARN_S, diagnose_server
from fusion.observe.logs import fields
from fusion.security.credentials import Credentials
from fusion.security.enrolment import renew_expired
from fusion.security.tls import coordinator_server_name
from fusion.transport.channels import backoff_s
from fusion.wire.v1 import job_pb2, node_pb2, plan_pb2
from fusion_node import events
from fusion_node.agent import Agent
from fusion_node.control import Control, may_pass
from fusion_node.emulation import as_emulated
from fusion_node.events import Action, Assignment, Event, StageRef
from fusion_node.hardware import Hardware, Limits, look
from fusion_node.ipc import Hold, Lease, Recode, WorkerConfig
from fusion_node.localport import EmulateSpeed, listening
from fusion_node.outbox import Outbox
from fusion_node.probes import ProbePort, measure
from fusion_node.reachability import DEFAULT_LISTEN, NotReachableError, Reachability, find_out
from fusion_node.relaying import Relays
from fusion_node.renewal import keep_renewed
from fusion_node.spares import Spares
from fusion_node.stateclerk import StateClerk
from fusion_node.statefiles import StateFiles, state_directories
from fusion_node.supervisor import Supervisor
from fusion_node.workerprocess import WORKER_COMMAND

log = logging.getLogger("fusion.node")

PROTOCOL = 1
TICK_S = 0.5
REGISTER_AGAIN_S = 45.0  #: so long may an earlier registration of ours still be in the way
DRAIN_LOOK_S = 0.5  #: between two questions whether the node may go
LAST_REPORTS_S = 2.0  #: for what is still to be told when the daemon ends


@dataclass(frozen=True, slots=True)
class Settings:
    """How the daemon is started."""

    home: Path  #: credentials, logs, cache
    listen: str = DEFAULT_LISTEN
    advertise: str = ""
    name: str = ""  #: instead of the one it joined with
    limits: Limits = field(default_factory=Limits)
    allow_data: tuple[Path, ...] = ()
    routes: dict[str, str] = field(default_factory=dict)
    require_reachable: bool = False
    drain_timeout_s: float = 120.0  #: how long to wait, when asked to end, for jobs to go on without this node
    spare_worker: bool = False  #: keep a worker process ready beside the one that works
    emulate_flops: float = 0.0  #: lab: the speed to stand for; 0: its own

    @property
    def cache_dir(self) -> Path:
        """Where the worker keeps what it can fetch again."""
        return self.home / "cache"


@contextmanager
def only_daemon(home: Path) -> Iterator[None]:
    """Hold the lock of `home`: two daemons with one identity would fence each other for ever."""
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(home / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot write {home}: {error.strerror}; use --home or FUSION_HOME") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise StateError(f"another fusion-node (pid {holder}) runs with {home}; end it, or use --home") from None
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


async def run(
    settings: Settings,
    credentials: Credentials,
    *,
    worker_command: Sequence[str] = WORKER_COMMAND,
    clock: Clock | None = None,
) -> int:
    """Run until a signal or a final refusal; return the exit code. Raises our errors for what is wrong at the start."""
    clock = clock or process_clock()
    if credentials.expired_but_renewable(clock.wall_s()):
        credentials = await _renewed_at_start(credentials, settings.home)
    else:
        credentials.check(clock.wall_s())
    settings.limits.check()
    with only_daemon(settings.home):
        history.begin("daemon", node=credentials.identity, name=settings.name or credentials.name)
        daemon = Daemon(settings, credentials, worker_command, clock)
        return await daemon.run()


async def _renewed_at_start(credentials: Credentials, home: Path) -> Credentials:
    """Return credentials that are good again; the same, to be renewed later, while the coordinator is away."""
    try:
        renewed = await asyncio.to_thread(renew_expired, credentials)
    except UnreachableError as error:
        log.warning("the certificate expired while this node was off; no new one yet", extra=fields(reason=error))
        return credentials
    renewed.save(home)
    log.info("the certificate expired while this node was off; it has a new one")
    return renewed


class Daemon:
    """Connects the agent to the coordinator, the worker, the clock and the signals."""

    def __init__(
        self, settings: Settings, credentials: Credentials, worker_command: Sequence[str], clock: Clock
    ) -> None:
        self._settings, self._credentials, self._clock = settings, credentials, clock
        self._name = settings.name or credentials.name
        self._agent = Agent(credentials.cluster, credentials.identity)
        self._events: asyncio.Queue[Event | BaseException] = asyncio.Queue()
        self._emulate_flops = settings.emulate_flops
        self._spares = Spares(worker_command) if settings.spare_worker else None
        self._supervisor = Supervisor(settings.home / "logs", self._events.put_nowait, worker_command, self._spares)
        self._outbox = Outbox(self._name, clock)
        self._control = Control(credentials)
        self._state_dirs = state_directories(settings.cache_dir, credentials.identity)
        self._states = StateFiles(self._state_dirs)
        self._clerk = StateClerk(self._states, self._control, lambda: self._agent.incarnation)
        self._probes = ProbePort(credentials.cluster, lambda: self._credentials)
        self._relays = Relays(lambda: self._credentials)
        self._relayed: set[str] = set()  #: nodes that the last measurement reached only through the coordinator
        self._hardware: Hardware | None = None
        self._reachability: Reachability | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None
        self._refused_since_s: float | None = None
        self._clock_warned = False
        self._exit: events.Exit | None = None

    async def run(self) -> int:
        """Return the exit code, with nothing left running."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        try:
            self._spawn(self._tick(), "tick")
            self._spawn(self._outbox.run(self._control), "outbox")
            self._spawn(self._clerk.run(), "states")
            self._spawn(
                keep_renewed(self._credentials, self._settings.home, self._control, self._clock, self._renewed),
                "renewal",
            )
            self._do(self._agent.start())
            if not self._settings.emulate_flops:
                return await self._obey()
            async with listening(self._settings.home, self._local_request):
                return await self._obey()
        finally:
            await self._close()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def _obey(self) -> int:
        while self._exit is None:
            event = await self._events.get()
            if isinstance(event, BaseException):
                raise event
            if isinstance(event, events.WorkerExited):
                history.note("worker_exited", cause=event.cause, detail=event.detail)
                self._relays.call({}, "")
            self._do(self._agent.handle(event, self._clock.monotonic_s()))
            self._mind_port()
        level = logging.ERROR if self._exit.code else logging.INFO
        log.log(level, self._exit.message, extra=fields(exit_code=self._exit.code))
        return self._exit.code

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._supervisor.close()
        await self._probes.release()
        await self._relays.close()
        await self._control.close()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run `work` beside; an error that it does not expect ends the daemon."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._events.put_nowait(error)

    def _signalled(self, number: signal.Signals) -> None:
        self._events.put_nowait(events.Signalled(int(number), number.name))

    def _renewed(self, credentials: Credentials) -> None:
        """The command stream moves to the new channel before the old one is closed under it."""
        self._credentials = credentials
        if self._agent.incarnation:
            self._watch_anew(self._agent.incarnation)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._events.put_nowait(events.Tick())

    def _local_request(self, request: EmulateSpeed) -> str:
        """Change the emulated speed at once. The coordinator is not told: it finds out, as with a real device."""
        before, self._emulate_flops = self._emulate_flops, request.flops
        self._supervisor.emulate(request.flops)
        log.warning("emulates another speed", extra=fields(before=before, now=request.flops))
        return f"{self._name} emulates {format_flops(request.flops)}, before {format_flops(before)}"

    # ---- what the agent wants ----

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            self._act(action)

    def _act(self, action: Action) -> None:
        match action:
            case events.Register():
                self._spawn(self._register(action.delay_s), "register")
            case events.Watch():
                self._watch_anew(action.incarnation)
            case events.Heartbeat():
                self._spawn(self._heartbeat(action), "heartbeat")
            case events.StartWorker():
                self._start_worker(action.assignment)
                self._supervisor.lease(action.lease)
            case events.StopWorker():
                log.info("stopping the worker", extra=fields(reason=action.reason, grace_s=action.grace_s))
                self._supervisor.stop(action.reason, action.grace_s, action.ask)
            case events.HoldWorker():
                self._supervisor.tell(Hold())
            case events.RecodeWorker():
                self._supervisor.tell(action.change)
            case events.LeaseWorker():
                self._note_extension(action.lease)
                self._supervisor.lease(action.lease)
            case events.ReportStates():
                self._clerk.report(action.uploaded)
            case events.ReportStage():
                log.info(f"{action.ref} is {action.report.state}", extra=fields(detail=action.report.detail))
                self._outbox.put_stage(action)
            case events.ReportMetrics():
                self._outbox.put_metrics(action)
            case events.Drain():
                self._spawn(self._drain(action), "drain")
            case events.Leave():
                self._spawn(self._leave(action), "leave")
            case events.Exit():
                self._exit = self._exit or action
            case events.Note():
                history.note("said", level=action.level, text=action.text)
                log.log(logging.getLevelName(action.level.upper()), action.text)
            case _:
                assert_never(action)

    def _note_extension(self, lease: Lease) -> None:
        if lease.until_s > lease.contact_s + lease.fence_s:
            history.note("extended", incarnation=self._agent.incarnation, until_s=lease.until_s)

    def _start_worker(self, assignment: Assignment) -> None:
        assert self._hardware is not None  # nothing is assigned before
        assert self._reachability is not None
        ref, settings = assignment.ref, self._settings
        routes, answering = self._ways(assignment.payload)
        config = WorkerConfig(
            assignment=assignment.payload,
            listen=self._reachability.listen,
            credentials_dir=str(settings.home),
            coordinator=self._credentials.coordinator,
            cache_dir=str(settings.cache_dir),
            incarnation=assignment.incarnation,
            device=self._hardware.device,
            threads=_job_threads(assignment.payload) or self._hardware.threads,
            memory_limit_bytes=self._hardware.memory_bytes,
            allow_data=tuple(str(path) for path in settings.allow_data),
            state_dirs=tuple(str(path) for path in self._state_dirs),
            emulate_flops=self._emulate_flops,
            routes=settings.routes | routes,
            answering=answering,
        )
        name = f"worker-{ref.job}-e{ref.epoch}-s{ref.stage}"
        history.note(
            "worker_started", job=ref.job, epoch=ref.epoch, stage=ref.stage, incarnation=assignment.incarnation
        )
        log.info(f"starting a worker for {ref}", extra=fields(log=settings.home / "logs" / f"{name}.log"))
        self._probes.want("")
        self._supervisor.start(config, name, self._make_room)

    def _ways(self, payload: bytes) -> tuple[dict[str, str], tuple[str, ...]]:
        """Return where the worker dials the stages that only the relay reaches, and the nodes that call it instead.

        From now on those are called that cannot dial this node and wait for that.
        """
        try:
            message = plan_pb2.Assignment.FromString(payload)
        except DecodeError:
            return {}, ()  # the worker will say what is wrong with it
        assert self._reachability is not None  # nothing is assigned before
        address = {stage.node_id: stage.address for stage in message.plan.stages}
        answering = tuple(node for node in message.answering if node in address)
        relayed = (self._relayed | set(message.relayed)) - set(answering)
        called = {node: address[node] for node in message.called if node in address}
        routes = self._settings.routes
        self._relays.call({node: routes.get(at, at) for node, at in called.items()}, self._reachability.listen)
        return {at: self._relays.route(node) for node, at in address.items() if node in relayed}, answering

    async def _make_room(self) -> None:
        """Before a worker starts: the port is free, and nobody writes the states that were never finished."""
        await self._probes.release()
        await asyncio.to_thread(self._states.clear_unfinished)

    def _mind_port(self) -> None:
        """Hold the data plane's port while no worker needs it, so that the links to this node can be measured."""
        found = self._reachability
        self._probes.want(found.listen if found is not None and self._agent.can_be_probed else "")
        if not self._probes.settled:
            self._spawn(self._probes.settle(), "probe-port")

    # ---- registration ----

    async def _register(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        try:
            hardware, reachability = await self._prepare()
            request = node_pb2.RegisterRequest(
                request_id=str(uuid.uuid4()),
                name=self._name,
                address=reachability.address,
                hardware=as_emulated(hardware.to_proto()) if self._settings.emulate_flops else hardware.to_proto(),
                protocol=PROTOCOL,
            )
            sent_s = self._clock.monotonic_s()
            answer = await self._control.register(request)
        except FusionError as error:
            self._events.put_nowait(await self._register_failure(error))
            return
        self._refused_since_s = None
        if self._spares is not None and self._supervisor.pid is None:
            self._spares.want(hardware.threads, now=True)
        history.note("registered", incarnation=answer.incarnation, self_fence_s=answer.self_fence_s)
        registered = events.Registered(
            answer.incarnation, sent_s, answer.heartbeat_s, answer.self_fence_s, answer.coordinator_grace_s
        )
        self._events.put_nowait(registered)

    async def _prepare(self) -> tuple[Hardware, Reachability]:
        """Find out once what to register with. UnreachableError while the coordinator is away."""
        if self._hardware is None:
            self._hardware = hardware = await look(self._settings.limits, self._settings.home / "speed.json")
            speed = f"{hardware.flops / 1e9:.1f} GFLOP/s"
            log.info(
                f"device {hardware.device} ({hardware.device_name})",
                extra=fields(memory=format_bytes(hardware.memory_bytes), threads=hardware.threads, speed=speed),
            )
        if self._reachability is None:
            settings = self._settings
            found = await find_out(
                settings.listen, settings.advertise, self._credentials.coordinator, self._control.probe
            )
            if not found.reachable and settings.require_reachable:
                raise NotReachableError(found.detail)
            if not found.reachable:
                log.warning(found.detail)
            log.info(f"workers will listen on {found.listen}", extra=fields(advertised=found.address))
            self._reachability = found
        return self._hardware, self._reachability

    async def _register_failure(self, error: FusionError) -> events.RegisterFailed:
        final = isinstance(error, NotReachableError)
        if isinstance(error, UnreachableError) and not final:
            error = await self._real_cause(error)
        if not final and (may_pass(error) or (isinstance(error, StateError) and self._may_be_our_own())):
            return events.RegisterFailed(str(error))
        return events.RegisterFailed(str(error), error.exit_code)

    async def _real_cause(self, error: FusionError) -> FusionError:
        """gRPC says the same of every connection that does not come about; the credentials and TLS itself say more."""
        try:
            self._credentials.check(self._clock.wall_s())
        except AuthError as problem:
            renewable = self._credentials.expired_but_renewable(self._clock.wall_s())
            return UnreachableError(f"{problem}, unless it is renewed soon") if renewable else problem
        address, name = self._control.address, coordinator_server_name(self._credentials.cluster)
        return await asyncio.to_thread(diagnose_server, address, name, self._settings.home) or error

    def _may_be_our_own(self) -> bool:
        """After a crash or a lost connection the coordinator may hold our earlier registration for alive."""
        now_s = self._clock.monotonic_s()
        self._refused_since_s = now_s if self._refused_since_s is None else self._refused_since_s
        return now_s - self._refused_since_s < REGISTER_AGAIN_S

    async def _heartbeat(self, action: events.Heartbeat) -> None:
        sent_s, sent_wall_s = self._clock.monotonic_s(), self._clock.wall_s()
        request = node_pb2.HeartbeatRequest(
            incarnation=action.incarnation,
            sequence=action.sequence,
            job_id=action.job,
            epoch=action.epoch,
            step=action.step,
            wall_clock_s=sent_wall_s,
        )
        try:
            answer = await self._control.heartbeat(request)
        except FusionError as error:
            self._refused(action.incarnation, error)
            return
        history.note("answered", incarnation=action.incarnation, sent_ago_s=self._clock.monotonic_s() - sent_s)
        self._compare_clocks((sent_wall_s + self._clock.wall_s()) / 2 - answer.wall_clock_s)
        self._events.put_nowait(events.HeartbeatAnswered(action.incarnation, sent_s, frozenset(answer.revoked)))

    def _refused(self, incarnation: int, error: FusionError) -> None:
        """A call under a registration failed: does the registration still stand?"""
        if isinstance(error, AuthError) and self._credentials.expired_but_renewable(self._clock.wall_s()):
            log.warning("the certificate has expired; it is being renewed", extra=fields(reason=error))
        elif isinstance(error, AuthError):
            self._events.put_nowait(events.AccessRefused(str(error)))
        elif isinstance(error, StateError | NotFoundError):
            self._events.put_nowait(events.RegistrationLost(incarnation, str(error)))
        else:
            log.warning("no contact with the coordinator", extra=fields(reason=error))

    def _compare_clocks(self, difference_s: float) -> None:
        if abs(difference_s) <= CLOCK_WARN_S:
            self._clock_warned = False
        elif not self._clock_warned:
            self._clock_warned = True
            log.warning(f"clock differs from the coordinator's by {difference_s:+.0f} s; switch on NTP")

    # ---- commands ----

    def _watch_anew(self, incarnation: int) -> None:
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        if incarnation:
            self._outbox.open.set()
            self._watching = self._spawn(self._watch(incarnation), "watch")
        else:
            self._outbox.open.clear()

    async def _watch(self, incarnation: int) -> None:
        attempt = 0
        while True:
            try:
                async for command in self._control.watch(incarnation):
                    attempt = 0
                    self._command(incarnation, command)
            except FusionError as error:
                self._refused(incarnation, error)
                if not may_pass(error):
                    return
            await asyncio.sleep(backoff_s(attempt))
            attempt += 1

    def _command(self, incarnation: int, command: node_pb2.Command) -> None:
        match command.WhichOneof("body"):
            case "assign":
                assignment = read_assignment(command.assign)
                if assignment is None:
                    log.error("assignment ignored: malformed job id", extra=fields(job=command.assign.job_id[:80]))
                    return
                self._events.put_nowait(events.Assigned(incarnation, assignment))
            case "stop":
                stop = command.stop
                self._events.put_nowait(events.StopOrdered(incarnation, stop.job_id, stop.epoch, stop.reason))
            case "hold":
                self._events.put_nowait(events.HoldOrdered(incarnation, command.hold.job_id, command.hold.epoch))
            case "upload":
                upload = command.upload
                self._spawn(self._clerk.upload(self._credentials, upload.job_id, set(upload.digests)), "upload")
            case "report_states":
                self._clerk.report()
            case "codecs":
                order = command.codecs
                change = Recode(order.revision, tuple((one.source, one.target, one.codec) for one in order.links))
                self._events.put_nowait(events.CodecsOrdered(incarnation, order.job_id, order.epoch, change))
            case "probe":
                self._probes.service.let_in(command.probe.callers)
                if command.probe.targets:
                    self._spawn(self._probe(incarnation, command.probe), "probe")
            case "relay":
                if self._reachability is not None:
                    self._relays.accept(command.relay.connection, self._reachability.listen)
            case _:
                return  # a ping, or what a newer coordinator knows

    async def _probe(self, incarnation: int, order: node_pb2.ProbeOrder) -> None:
        """Measure the links that the coordinator asks for, and tell it. It asks again for what it does not hear of."""
        report = node_pb2.LinksReport(incarnation=incarnation)
        for target in order.targets:
            found = await measure(target, self._credentials, self._settings.routes, self._relays)
            (self._relayed.add if found.relayed else self._relayed.discard)(target.node_id)
            report.links.append(found)
        try:
            await self._control.report_links(report)
        except FusionError as error:
            log.info("measurements of links not told", extra=fields(reason=error))

    async def _drain(self, action: events.Drain) -> None:
        """Ask until nothing needs this node any more, for as long as its owner lets it wait."""
        end_s = self._clock.monotonic_s() + self._settings.drain_timeout_s
        waits_for, problem = "", ""
        while self._clock.monotonic_s() < end_s:
            try:
                waits_for = await self._control.drain(action.incarnation, action.reason)
            except UnreachableError as error:
                waits_for = str(error)
            except FusionError as error:
                problem = str(error)
                break
            if not waits_for:
                break
            await asyncio.sleep(DRAIN_LOOK_S)
        else:
            problem = f"not within {self._settings.drain_timeout_s:.0f} s: {waits_for}"
        self._events.put_nowait(events.Drained(problem))

    async def _leave(self, action: events.Leave) -> None:
        await self._outbox.flush(LAST_REPORTS_S)
        try:
            await self._control.leave(action.incarnation, action.reason)
            await asyncio.to_thread(self._states.clear)  # nobody will ask this node for them
        except FusionError as error:
            log.warning("left without the coordinator's answer", extra=fields(reason=error))
        self._events.put_nowait(events.Left())


def read_assignment(message: plan_pb2.Assignment) -> Assignment | None:
    """Return what the agent needs of a command; None if its job id could not be part of a file name."""
    if not is_id(message.job_id):
        return None
    stages = message.plan.stages
    mine = stages[message.stage] if message.stage < len(stages) else plan_pb2.Stage()
    return Assignment(
        ref=StageRef(message.job_id, message.plan.epoch, message.stage),
        cluster=message.cluster_id,
        node=mine.node_id,
        incarnation=mine.incarnation,
        payload=message.SerializeToString(),
    )


def _job_threads(payload: bytes) -> int:
    """Return how many threads the job wants in every worker; 0 if it leaves that to the node."""
    try:
        return job_pb2.JobSpec.FromString(plan_pb2.Assignment.FromString(payload).job_spec).threads
    except DecodeError:
        return 0  # the worker will say what is wrong with it
