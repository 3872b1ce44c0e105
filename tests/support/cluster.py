"""A real cluster on this machine for end-to-end tests: coordinator and node daemons as processes, workers below them.

Every process of a cluster has the cluster's directory as its FUSION_HOME; that is how a test finds them all, also a
worker whose daemon is gone. A cluster that leaves a process or a listener behind fails the test that closes it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

import fusion
from fusion.cli.democluster import DemoCluster, free_ports
from fusion.cli.helpers import Helper, Helpers, last_line, run_once
from fusion.job.client import Client
from fusion.plan.types import Cluster as PlannedCluster
from fusion.wire.v1 import coordinator_pb2, coordinator_pb2_grpc
from fusion_node.workerprocess import MARK

WITHIN_S = 40.0  #: the product's promise: after a process was killed, so soon everybody knows
_GONE_S = 20.0
_HEAL_S = 60.0


class KeptHelpers(Helpers):
    """Helpers that can be asked for by name, and started again with the same command line."""

    def __init__(self, logs: Path) -> None:
        super().__init__(logs)
        self.named: dict[str, Helper] = {}
        self.environments: dict[str, Mapping[str, str]] = {}

    def start(self, name, module, arguments, environment, *, prefix=()) -> Helper:
        self.named[name] = super().start(name, module, arguments, environment, prefix=prefix)
        self.environments[name] = environment
        return self.named[name]

    def again(self, name: str) -> Helper:
        """Start a helper that has ended anew, just as it was started."""
        old = self.named[name]
        assert old.process.poll() is not None, f"{name} still runs"
        command = old.process.args
        assert isinstance(command, list)
        module = command.index("fusion.cli.child") + 1
        new = self.start(name, command[module], command[module + 1 :], self.environments[name])
        place = self._running.index(old)  # the coordinator stays the first, which ends last
        self._running.remove(new)
        self._running[place] = new
        if old.process.stdin is not None:
            old.process.stdin.close()
        return new


class HidingHelpers(KeptHelpers):
    """Helpers of which some nodes state an address at which nothing listens, as if a router let nobody through."""

    def __init__(self, logs: Path, hidden: Collection[str]) -> None:
        super().__init__(logs)
        self._hidden = hidden

    def start(self, name, module, arguments, environment, *, prefix=()) -> Helper:
        arguments = list(arguments)
        if name in self._hidden:
            arguments[arguments.index("--advertise") + 1] = f"127.0.0.1:{free_ports(1)[0]}"
        return super().start(name, module, arguments, environment, prefix=prefix)


class Cluster:
    """A coordinator and nodes `node-0`.. of equal stated speed, one thread each; use it in a `with` block.

    `hidden`: these cannot be dialled where they say that they are. `relays`: the coordinator joins who cannot connect.
    """

    def __init__(self, directory: Path, nodes: int = 4, *, hidden: Collection[str] = (), relays: bool = False) -> None:
        self.directory = directory
        self.helpers = HidingHelpers(directory / "logs", hidden)
        self._demo = DemoCluster(self.helpers, directory, nodes, relays=relays)
        self._before = set(psutil.Process().children(recursive=True))

    def __enter__(self) -> Cluster:
        try:
            self._demo.start_coordinator()
            self._demo.start_nodes({})
            self._demo.wait_for_nodes()
        except BaseException:
            self.helpers.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.helpers.stop()
        self._check_nothing_is_left()

    def _check_nothing_is_left(self) -> None:
        """A process that is left would also hold its listeners."""
        try:
            eventually(lambda: not self._left(), "every process of the cluster is gone", _GONE_S)
        except AssertionError:
            left = {process: command_line(process) for process in self._left()}
            for process in left:
                process.kill()
            raise AssertionError(f"processes outlived their cluster: {list(left.values())}") from None

    def _left(self) -> set[psutil.Process]:
        return {*self.processes(), *(set(psutil.Process().children(recursive=True)) - self._before)}

    # ---- where and who ----

    @property
    def address(self) -> str:
        """host:port of the coordinator's mutual-TLS port."""
        return self._demo.address

    @property
    def credentials(self) -> Path:
        """The owner's."""
        return self._demo.credentials

    @property
    def environment(self) -> dict[str, str]:
        """What commands of this cluster's owner and operator run with."""
        return self._demo.environment

    @property
    def nodes(self) -> dict[str, str]:
        """Address of each node's data plane, by name."""
        return self._demo.nodes

    def log(self, name: str) -> str:
        """Return everything that the coordinator or a node has written."""
        return self.helpers.named[name].log.read_text("utf-8", "replace")

    def process(self, name: str) -> psutil.Process:
        """Return the process of "coordinator" or of a node's daemon."""
        return psutil.Process(self.helpers.named[name].process.pid)

    def processes(self) -> list[psutil.Process]:
        """Return every live process of this cluster, whoever its parent is by now."""
        return processes_of(self.directory)

    def worker_processes(self) -> list[psutil.Process]:
        """Return every live worker, also one whose daemon is gone."""
        return [process for process in self.processes() if is_worker(process)]

    def workers(self) -> dict[str, psutil.Process]:
        """Return the live workers, by the name of the node that started them."""
        daemons = {helper.process.pid: name for name, helper in self.helpers.named.items()}
        found = {}
        for process in self.worker_processes():
            try:
                if process.ppid() in daemons:
                    found[daemons[process.ppid()]] = process
            except psutil.Error:
                continue
        return found

    def listeners(self) -> dict[str, set[int]]:
        """Return the ports that each process listens on, by "coordinator", "node-0", "node-0's worker"."""
        found = {name: ports_of(self.process(name)) for name in self.helpers.named}
        return found | {f"{name}'s worker": ports_of(worker) for name, worker in self.workers().items()}

    def wait_for_links(self) -> PlannedCluster:
        """Return the cluster as planners see it once all its links are measured."""
        return self._demo.wait_for_links()

    # ---- jobs ----

    def submit(self, job: fusion.Job) -> fusion.Run:
        """Submit a job as this cluster's owner."""
        return job.submit(self.address, self.credentials)

    def attach(self, job_id: str) -> fusion.Run:
        """Look at a job as this cluster's owner."""
        return fusion.attach(job_id, self.address, self.credentials)

    @contextmanager
    def running(self, job: fusion.Job, step: int = 2) -> Iterator[fusion.Run]:
        """Submit a job and yield its run once `step` is done, surely in the middle of it."""
        with self.submit(job) as run:
            for metrics in run.metrics():
                if metrics.step >= step:
                    break
            yield run

    # ---- harm and repair ----

    def kill(self, name: str) -> None:
        """SIGKILL the coordinator or a node's daemon, and nothing else."""
        helper = self.helpers.named[name]
        helper.process.kill()
        helper.process.wait(10)

    def terminate(self, name: str) -> int:
        """SIGTERM the coordinator or a daemon; return its exit code."""
        process = self.helpers.named[name].process
        process.send_signal(signal.SIGTERM)
        return process.wait(30)

    def heal(self) -> None:
        """Cancel what is active, start again whatever does not run, and return when all nodes are idle."""
        for name, helper in list(self.helpers.named.items()):
            if helper.process.poll() is not None:
                self.helpers.again(name)
        if not self._idle():
            with self.client() as client:
                for job in client.list():
                    if not job.state.ended:
                        client.cancel(job.job_id, "the next test")
            eventually(self._idle, f"all nodes are idle again ({self._last_words()})", _HEAL_S)

    def _idle(self) -> bool:
        return set(self.node_states().values()) == {"idle"} and not self.worker_processes()

    def node_states(self) -> dict[str, str]:
        """Return each node's state as the coordinator sees it."""
        with Client(self.address, self.directory / "coordinator" / "admin") as client:
            stub: Any = coordinator_pb2_grpc.AdminStub(client.channel)  # type: ignore[no-untyped-call]
            answer = stub.ListNodes(coordinator_pb2.ListNodesRequest(), timeout=30.0, wait_for_ready=True)
            return {node.name: node.state for node in answer.nodes}

    def client(self) -> Client:
        """A connection of this cluster's owner; the caller closes it."""
        return Client(self.address, self.credentials)

    def _last_words(self) -> str:
        return "; ".join(f"{name}: {last_line(helper.log)}" for name, helper in self.helpers.named.items())

    def command(self, module: str, *arguments: str) -> str:
        """Run `python -m module` as this cluster's operator and owner to its end, and return its stdout."""
        return run_once(module, module, arguments, self.environment)


class Machine:
    """A machine of somebody who types commands: its FUSION_HOME, the installed programs, one service at a time."""

    def __init__(self, home: Path, **variables: str) -> None:
        self.home = home
        self.environment = own_environment(home) | variables
        self._log = home.with_suffix(".log")
        self._service: subprocess.Popen[bytes] | None = None

    def popen(self, program: str, *arguments: str) -> subprocess.Popen[str]:
        """Start a program with pipes for what it says."""
        pipe = subprocess.PIPE
        command = [str(Path(sys.executable).with_name(program)), *arguments]
        return subprocess.Popen(
            command, env=self.environment, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
        )

    def run(self, program: str, *arguments: str, code: int = 0) -> str:
        """Run a program to its end with exit code `code`; return its stdout."""
        return self._run(program, *arguments, code=code)[0]

    def fails(self, program: str, *arguments: str, code: int) -> str:
        """Run a program that fails with `code` and says so on stderr alone; return that."""
        out, err = self._run(program, *arguments, code=code)
        assert out == ""
        return err

    def _run(self, program: str, *arguments: str, code: int) -> tuple[str, str]:
        with self.popen(program, *arguments) as process:
            out, err = process.communicate(timeout=120)
        said = f"{program} {' '.join(arguments)} ended with {process.returncode}: {out}{err}"
        assert process.returncode == code, said
        assert "Traceback" not in out + err, said
        return out, err

    def start(self, program: str, *arguments: str) -> None:
        """Start the service of this machine; what it says goes to its log."""
        command = [str(Path(sys.executable).with_name(program)), *arguments]
        with self._log.open("ab") as log:
            self._service = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def stop(self) -> int:
        """End the service with SIGTERM; return its exit code."""
        if self._service is None:
            return 0
        self._service.send_signal(signal.SIGTERM)
        try:
            return self._service.wait(20)
        except subprocess.TimeoutExpired:
            self._service.kill()
            return self._service.wait(10)

    def process(self) -> psutil.Process:
        """Return the service's process."""
        assert self._service is not None
        return psutil.Process(self._service.pid)

    def log(self) -> str:
        """Return what the service has said."""
        return self._log.read_text("utf-8", "replace")


def eventually(condition: Callable[[], object], what: str, within_s: float = WITHIN_S) -> None:
    """Return once `condition` holds; AssertionError with `what` if it does not within `within_s` seconds."""
    start_s = time.monotonic()
    while not condition():
        assert time.monotonic() - start_s < within_s, f"not within {within_s:.0f} s: {what}"
        time.sleep(0.1)


@contextmanager
def within(seconds: float, what: str) -> Iterator[None]:
    """Fail if the block takes longer. It is not interrupted: what is called in it has limits of its own."""
    start_s = time.monotonic()
    yield
    took_s = time.monotonic() - start_s
    assert took_s < seconds, f"{what} took {took_s:.1f} s, must be below {seconds:.0f} s"


def processes_of(directory: Path) -> list[psutil.Process]:
    """Return every live process whose FUSION_HOME is `directory` or lies in it."""
    found = []
    for process in psutil.process_iter():
        try:
            home = process.environ().get("FUSION_HOME")
            if home and Path(home).is_relative_to(directory) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def is_worker(process: psutil.Process) -> bool:
    """Whether a process is a node's worker; one that has just ended is none, nor is one made before it had work."""
    try:
        return "fusion_node.worker" in process.cmdline() and MARK not in process.cmdline()
    except psutil.Error:
        return False


def command_line(process: psutil.Process) -> str:
    """Return what a process was started with, as far as it can still be told."""
    try:
        return " ".join(process.cmdline())[:200]
    except psutil.Error:
        return "gone"


def ports_of(process: psutil.Process) -> set[int]:
    """Return the ports of a process's own listening sockets, TCP and UDP."""
    return {
        at.laddr.port
        for at in process.net_connections("inet")
        if at.status == psutil.CONN_LISTEN or (at.type.name == "SOCK_DGRAM" and not at.raddr)
    }


def port_of(address: str) -> int:
    """Return the port of host:port."""
    return int(address.rpartition(":")[2])


def has_loaded(process: psutil.Process, library: str) -> bool:
    """Whether a library is mapped into a process."""
    return any(library in mapping.path for mapping in process.memory_maps())


def own_environment(home: Path) -> dict[str, str]:
    """Return an environment for commands with a FUSION_HOME of their own and nothing else of ours."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FUSION_")}
    return kept | {"FUSION_HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def neighbouring_ports(count: int) -> list[int]:
    """Return `count` ports in a row that nobody uses at the moment."""
    while True:
        first = free_ports(1)[0]
        try:
            for port in range(first, first + count):
                with socket.socket() as tried:
                    tried.bind(("127.0.0.1", port))
        except (OSError, OverflowError):
            continue
        return list(range(first, first + count))
