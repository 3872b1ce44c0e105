"""The daemon against a scripted coordinator over real mutual TLS, with real worker processes (without torch)."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import psutil
import pytest

from fusion.base.errors import AuthError, StateError, UnreachableError
from fusion.protocol.job import BlobRef
from fusion.security.credentials import Credentials, Role, load_key
from fusion.wire.v1 import node_pb2
from fusion_node import daemon
from fusion_node.statefiles import Kept, StateFiles, state_directories
from fusion_node.stopping import stop
from tests.support.node import FAST, JOB, ScriptedCoordinator, free_port, running, serve, until, worker_command


@pytest.fixture(autouse=True)
def _tick_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "TICK_S", 0.05)


@pytest.fixture
def coordinator() -> ScriptedCoordinator:
    return ScriptedCoordinator()


@pytest.fixture
def address(coordinator: ScriptedCoordinator) -> Iterator[str]:
    with serve(coordinator) as at:
        yield at


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "a node's home ü"


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def test_registers_what_it_has_and_where_it_is_reached(coordinator: ScriptedCoordinator, address: str, home: Path):
    async def scenario() -> None:
        node = coordinator.make_node(home, address)
        async with running(home, node) as task:
            await until(lambda: len(coordinator.heartbeats) >= 3, task)

    asyncio.run(scenario())
    request = coordinator.registered[0]
    assert request.name == "tester"
    assert (request.hardware.memory_bytes, request.hardware.flops, request.hardware.threads) == (2**30, 1e9, 1)
    assert request.hardware.torch_version
    assert request.address == coordinator.probes[-1]
    assert [beat.sequence for beat in coordinator.heartbeats[:3]] == [1, 2, 3]


def test_runs_a_stage_and_tells_its_states_figures_and_logs(coordinator: ScriptedCoordinator, address: str, home: Path):
    async def scenario() -> None:
        node = coordinator.make_node(home, address)
        async with running(home, node, "finish") as task:
            await until(lambda: bool(coordinator.heartbeats), task)
            coordinator.assign(epoch=4, threads=3)
            await until(lambda: "finished" in coordinator.states(), task)
            await until(lambda: not children(), task)

    asyncio.run(scenario())
    assert coordinator.states() == ["running", "finished"]
    assert coordinator.stages[0].detail == f"{JOB} threads=3 omp=3"
    last = coordinator.stages[-1]
    assert (last.job_id, last.epoch, last.incarnation, last.weights.digest) == (JOB, 4, 1, "ab" * 32)
    steps = [step for report in coordinator.metrics for step in report.steps]
    assert [(step.step, step.loss) for step in steps] == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert [(step.sent[0].target, step.sent[0].bytes) for step in steps] == [(1, 100), (1, 200), (1, 300)]
    assert [line.text for report in coordinator.metrics for line in report.logs] == ["all done"]
    (log,) = (home / "logs").glob("*.log")
    assert "a stray line on stdout" in log.read_text()


@pytest.mark.parametrize(
    ("behaviour", "cause", "words"),
    [
        ("crash", "crash", ["killed by signal 9 (out of memory?)", "last words of the worker"]),
        ("segv", "crash", ["killed by signal 11 (SIGSEGV)"]),
        ("raise", "out-of-memory", ["exit code 1", "MemoryError: cannot hold 3 GiB"]),
        ("import-error", "crash", ["exit code 1", "ImportError: no module named torch"]),
    ],
)
def test_a_dead_worker_is_reported_with_its_cause_and_the_heartbeat_goes_on(
    coordinator: ScriptedCoordinator, address: str, home: Path, behaviour: str, cause: str, words: list[str]
):
    async def scenario() -> None:
        node = coordinator.make_node(home, address)
        async with running(home, node, behaviour) as task:
            await until(lambda: bool(coordinator.heartbeats), task)
            coordinator.assign()
            await until(lambda: "failed" in coordinator.states(), task)
            before = len(coordinator.heartbeats)
            await until(lambda: len(coordinator.heartbeats) >= before + 3, task)

    asyncio.run(scenario())
    last = coordinator.stages[-1]
    assert last.cause == cause
    for word in words:
        assert word in last.detail
    assert "\n" not in last.detail


def test_a_frozen_worker_does_not_stop_the_heartbeat_and_can_be_stopped(
    coordinator: ScriptedCoordinator, address: str, home: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("fusion_node.agent.STOP_GRACE_S", 0.5)

    async def scenario() -> None:
        node = coordinator.make_node(home, address)
        async with running(home, node, "frozen") as task:
            await until(lambda: bool(coordinator.heartbeats), task)
            coordinator.assign()
            await until(lambda: "running" in coordinator.states(), task)
            before = len(coordinator.heartbeats)
            await until(lambda: len(coordinator.heartbeats) >= before + 5, task)
            assert coordinator.heartbeats[-1].job_id == JOB
            coordinator.stop()
            await until(lambda: coordinator.states()[-1] == "stopped", task)
            assert children() == []

    asyncio.run(scenario())


def test_a_worker_that_ignores_stop_and_sigterm_is_killed(
    coordinator: ScriptedCoordinator, address: str, home: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("fusion_node.agent.STOP_GRACE_S", 0.5)

    async def scenario() -> None:
        node = coordinator.make_node(home, address)
        async with running(home, node, "deaf") as task:
            await until(lambda: bool(coordinator.heartbeats), task)
            coordinator.assign()
            await until(lambda: "running" in coordinator.states(), task)
            coordinator.stop(reason="cancelled by its owner")
            await until(lambda: coordinator.states()[-1] == "stopped", task)

    asyncio.run(scenario())
    assert coordinator.stages[-1].detail == "cancelled by its owner"


def test_a_worker_that_floods_its_log_is_kept_within_bounds(
    coordinator: ScriptedCoordinator, address: str, home: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("fusion_node.supervisor.BoundedLog.__init__.__defaults__", (2**20,))

    async def scenario() -> None:
        node = coordinator.make_node(home, address)
        async with running(home, node, "noise") as task:
            await until(lambda: bool(coordinator.heartbeats), task)
            coordinator.assign()
            await until(lambda: "finished" in coordinator.states(), task)
            await until(lambda: not children(), task)

    asyncio.run(scenario())
    sizes = [path.stat().st_size for path in (home / "logs").iterdir()]
    assert len(sizes) == 2
    assert max(sizes) <= 2**20


def test_a_worker_that_breaks_the_protocol_is_heard_where_it_keeps_it(
    coordinator: ScriptedCoordinator, address: str, home: Path
):
    async def scenario() -> None:
        node = coordinator.make_node(home, address)
        async with running(home, node, "garbage") as task:
            await until(lambda: bool(coordinator.heartbeats), task)
            coordinator.assign()
            await until(lambda: "finished" in coordinator.states(), task)

    asyncio.run(scenario())
    warnings = [line for report in coordinator.metrics for line in report.logs if line.level == "warning"]
    assert "not a report" in warnings[0].text
    assert "missing required field `state`" in warnings[-1].text


def test_a_newer_epoch_replaces_the_worker_and_a_stale_one_is_refused(
    coordinator: ScriptedCoordinator, address: str, home: Path
):
    async def scenario() -> None:
        node = coordinator.make_node(home, address)
        async with running(home, node, "run") as task:
            await until(lambda: bool(coordinator.heartbeats), task)
            coordinator.assign(epoch=2)
            await until(lambda: coordinator.states() == ["running"], task)
            coordinator.assign(epoch=3)
            await until(lambda: coordinator.states() == ["running", "stopped", "running"], task)
            coordinator.assign(epoch=1)
            await until(lambda: len(coordinator.stages) == 4, task)
            assert len(children()) == 1

    asyncio.run(scenario())
    assert [(item.epoch, item.detail) for item in coordinator.stages[1::2]] == [
        (2, "replaced by epoch 3"),
        (1, "stale epoch 1, current 3"),
    ]


@pytest.mark.slow
def test_f11_a_node_that_hears_nothing_fences_itself_and_comes_back(
    coordinator: ScriptedCoordinator, address: str, home: Path
):
    coordinator.self_fence_s = 1.5

    async def scenario() -> None:
        node = coordinator.make_node(home, address)
        async with running(home, node, "run") as task:
            await until(lambda: bool(coordinator.heartbeats), task)
            coordinator.assign()
            await until(lambda: "running" in coordinator.states(), task)
            coordinator.silent.set()
            await until(lambda: not children(), task)  # the worker is gone before contact returns
            coordinator.silent.clear()
            await until(lambda: len(coordinator.registered) == 2, task)
            await until(lambda: "failed" in coordinator.states(), task)

    asyncio.run(scenario())
    last = coordinator.stages[-1]
    assert (last.cause, last.incarnation) == ("lease", 1)
    assert coordinator.incarnation == 2


def test_a_node_whose_registration_is_unknown_registers_again(
    coordinator: ScriptedCoordinator, address: str, home: Path
):
    async def scenario() -> None:
        node = coordinator.make_node(home, address)
        async with running(home, node) as task:
            await until(lambda: bool(coordinator.heartbeats), task)
            coordinator.refuse_heartbeat = (grpc.StatusCode.NOT_FOUND, "unknown node")
            await until(lambda: len(coordinator.registered) == 2, task)
            coordinator.refuse_heartbeat = None
            await until(lambda: coordinator.heartbeats[-1].incarnation == coordinator.incarnation, task)

    asyncio.run(scenario())


@pytest.mark.slow
def test_p4_f7_the_node_comes_back_after_the_coordinator_was_restarted_and_its_worker_never_stopped(
    coordinator: ScriptedCoordinator, home: Path
):
    port = free_port()

    async def scenario() -> None:
        node = coordinator.make_node(home, f"127.0.0.1:{port}")
        with serve(coordinator, port):
            context = running(home, node, "run")
            task = await context.__aenter__()
            await until(lambda: bool(coordinator.heartbeats), task)
            coordinator.assign()
            await until(lambda: "running" in coordinator.states(), task)
            pid = children()[0].pid
        await asyncio.sleep(0.7)
        before = len(coordinator.heartbeats)
        with serve(coordinator, port):
            await until(lambda: len(coordinator.heartbeats) > before, task)
            coordinator.stop(reason="still listening for commands")
            await until(lambda: coordinator.states()[-1] == "stopped", task)
            assert len(coordinator.registered) == 1
            assert pid not in [child.pid for child in children()]
            await context.__aexit__(None, None, None)

    asyncio.run(scenario())


def test_a_report_is_repeated_until_it_is_answered_with_the_same_request_id(
    coordinator: ScriptedCoordinator, address: str, home: Path
):
    coordinator.fail_reports = 2
    seen: list[str] = []
    take = coordinator.ReportStage

    def report(request: node_pb2.StageReport, context: object) -> object:
        seen.append(request.request_id)
        return take(request, context)

    coordinator.ReportStage = report  # type: ignore[method-assign]

    async def scenario() -> None:
        with serve(coordinator) as at:
            node = coordinator.make_node(home, at)
            async with running(home, node, "finish") as task:
                await until(lambda: bool(coordinator.heartbeats), task)
                coordinator.assign()
                await until(lambda: coordinator.states() == ["running", "finished"], task)

    asyncio.run(scenario())
    assert len(seen) == 4
    assert seen[0] == seen[1] == seen[2] != seen[3]


def test_f31_sigterm_stops_the_worker_takes_leave_and_exits_zero(
    coordinator: ScriptedCoordinator, address: str, home: Path
):
    async def scenario() -> int:
        node = coordinator.make_node(home, address)
        async with running(home, node, "run") as task:
            await until(lambda: bool(coordinator.heartbeats), task)
            coordinator.assign()
            await until(lambda: "running" in coordinator.states(), task)
            coordinator.drains_needed = 3
            os.kill(os.getpid(), signal.SIGTERM)
            await until(lambda: coordinator.drains == 2, task)
            assert coordinator.states() == ["running"]
            return await asyncio.wait_for(task, 10)

    assert asyncio.run(scenario()) == 0
    assert coordinator.drains == 3
    assert coordinator.states() == ["running", "stopped"]
    assert coordinator.left == ["the node was asked to end (SIGTERM)"]
    assert children() == []


def test_f31_fusion_node_stop_ends_the_daemon_in_order(coordinator: ScriptedCoordinator, address: str, home: Path):
    async def scenario() -> int:
        node = coordinator.make_node(home, address)
        async with running(home, node, "run") as task:
            await until(lambda: bool(coordinator.heartbeats), task)
            await asyncio.to_thread(stop, home, now=False, patience_s=10.0)
            return await task

    with pytest.raises(StateError, match="no fusion-node runs with"):
        stop(home, now=False, patience_s=1.0)
    assert asyncio.run(scenario()) == 0
    assert coordinator.left == ["the node was asked to end (SIGTERM)"]
    with pytest.raises(StateError, match="no fusion-node runs with"):
        stop(home, now=True, patience_s=1.0)


def test_kept_states_are_told_and_go_with_their_job(coordinator: ScriptedCoordinator, address: str, home: Path):
    async def scenario() -> None:
        node = coordinator.make_node(home, address)
        files = StateFiles(state_directories(home / "cache", node.identity))
        blob = BlobRef("ab" * 32, 5)
        for job in (JOB, "job-bbbbbbbbbb"):
            part = files.begin(job, 5)
            part.write_bytes(b"state")
            files.keep(part, Kept(job, 3, 1, 7, blob))
        coordinator.ended_jobs = ["job-bbbbbbbbbb"]
        async with running(home, node, "finish") as task:
            await until(lambda: bool(coordinator.kept), task)
            told = [(state.job_id, state.epoch, state.stage, state.step) for state in coordinator.kept[0].states]
            assert told == [(JOB, 3, 1, 7), ("job-bbbbbbbbbb", 3, 1, 7)]
            assert coordinator.kept[0].incarnation == coordinator.incarnation
            await until(lambda: len(files.all()) == 1, task)
            before = len(coordinator.kept)
            coordinator.assign()
            await until(lambda: "finished" in coordinator.states(), task)
            await until(lambda: len(coordinator.kept) > before, task)
            assert [state.job_id for state in coordinator.kept[-1].states] == [JOB]
            coordinator.ended_jobs = [JOB]
            coordinator.commands.put(node_pb2.Command(report_states=node_pb2.ReportStatesOrder()))
            await until(lambda: not files.all(), task)

    asyncio.run(scenario())


def test_f31_a_second_signal_ends_it_at_once(coordinator: ScriptedCoordinator, address: str, home: Path):
    async def scenario() -> int:
        node = coordinator.make_node(home, address)
        async with running(home, node, "deaf") as task:
            await until(lambda: bool(coordinator.heartbeats), task)
            coordinator.assign()
            await until(lambda: "running" in coordinator.states(), task)
            coordinator.drains_needed = 10**6
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.1)
            os.kill(os.getpid(), signal.SIGINT)
            return await asyncio.wait_for(task, 3)

    assert asyncio.run(scenario()) == 130
    assert children() == []


def test_the_certificate_is_renewed_at_two_thirds_of_its_life_without_losing_contact(
    coordinator: ScriptedCoordinator, address: str, home: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("fusion_node.control.OLD_CHANNEL_S", 0.1)
    now_s = time.time()
    # valid from 5 minutes ago for 7 minutes: two thirds of its life are over since half a minute
    node = coordinator.make_node(home, address, wall_s=now_s, valid_s=60.0)

    async def scenario() -> None:
        async with running(home, node) as task:
            await until(lambda: coordinator.renewed == 1, task)
            await until(lambda: (home / "certificate.pem").read_bytes() != node.certificate_pem, task)
            await asyncio.sleep(0.3)  # the old channels are closed by now
            before = len(coordinator.heartbeats)
            coordinator.assign()
            await until(lambda: "finished" in coordinator.states(), task)
            await until(lambda: len(coordinator.heartbeats) > before, task)

    asyncio.run(scenario())
    assert len(coordinator.registered) == coordinator.renewed == 1
    assert (home / "key.pem").read_bytes() == node.key_pem


def test_a_node_whose_certificate_expired_while_it_was_off_gets_a_new_one_as_soon_as_there_is_somebody_to_ask(
    coordinator: ScriptedCoordinator, address: str, home: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("fusion_node.renewal.RETRY_FIRST_S", 0.01)
    old = coordinator.make_node(home, address, wall_s=time.time() - 1000, valid_s=500.0)
    key = load_key(old.key_pem).public_key()
    new = replace(old, certificate_pem=coordinator.ca.issue(key, Role.NODE, time.time()))
    asked: list[bytes] = []

    def renewed(found: Credentials) -> Credentials:
        asked.append(found.certificate_pem)
        if len(asked) == 1:
            raise UnreachableError("nobody answers")
        return new

    monkeypatch.setattr("fusion_node.daemon.renew_expired", renewed)
    monkeypatch.setattr("fusion_node.renewal.renew_expired", renewed)

    async def scenario() -> None:
        async with running(home, old) as task:
            await until(lambda: bool(coordinator.heartbeats), task)

    asyncio.run(scenario())
    assert asked == [old.certificate_pem] * 2
    assert Credentials.load(home).certificate_pem == new.certificate_pem


def test_b33_an_expired_certificate_is_named_before_anything_is_tried(
    coordinator: ScriptedCoordinator, address: str, home: Path
):
    node = coordinator.make_node(home, address, wall_s=time.time() - 8 * 86_400, valid_s=500.0)
    with pytest.raises(AuthError, match=r"expired at .* join again"):
        asyncio.run(daemon.run(daemon.Settings(home=home, limits=FAST), node))
    assert coordinator.registered == []


def test_b33_a_coordinator_that_was_set_up_anew_is_named_as_such(
    coordinator: ScriptedCoordinator, address: str, home: Path, caplog: pytest.LogCaptureFixture
):
    node = ScriptedCoordinator().make_node(home, address)  # of a CA that this coordinator does not know

    async def scenario() -> int:
        async with running(home, node) as task:
            return await asyncio.wait_for(task, 20)

    assert asyncio.run(scenario()) == 20
    assert "is not the coordinator of this cluster" in caplog.text


@pytest.mark.slow
def test_a_coordinator_that_is_away_is_waited_for_and_said_so(
    coordinator: ScriptedCoordinator, home: Path, caplog: pytest.LogCaptureFixture
):
    port = free_port()
    node = coordinator.make_node(home, f"127.0.0.1:{port}")

    async def scenario() -> None:
        async with running(home, node) as task:
            await until(lambda: "nothing listens at" in caplog.text, task)
            with serve(coordinator, port):
                await until(lambda: bool(coordinator.heartbeats), task)
                task.cancel()

    asyncio.run(scenario())


def test_f24_a_clock_that_differs_is_reported_and_no_lease_ends(
    coordinator: ScriptedCoordinator, address: str, home: Path, caplog: pytest.LogCaptureFixture
):
    coordinator.clock_ahead_s = 3600.0

    async def scenario() -> None:
        node = coordinator.make_node(home, address)
        async with running(home, node) as task:
            await until(lambda: len(coordinator.heartbeats) >= 4, task)

    asyncio.run(scenario())
    assert caplog.text.count("clock differs from the coordinator's by -3600 s") == 1
    assert len(coordinator.registered) == 1


@pytest.mark.parametrize(
    ("code", "exit_code"), [(grpc.StatusCode.INVALID_ARGUMENT, 10), (grpc.StatusCode.UNAUTHENTICATED, 20)]
)
def test_a_final_refusal_of_the_registration_ends_the_daemon(
    coordinator: ScriptedCoordinator, address: str, home: Path, code: grpc.StatusCode, exit_code: int
):
    coordinator.refuse_register = (code, "no")

    async def scenario() -> int:
        node = coordinator.make_node(home, address)
        async with running(home, node) as task:
            return await asyncio.wait_for(task, 10)

    assert asyncio.run(scenario()) == exit_code


def test_f21_two_daemons_never_run_with_one_identity_on_one_machine(home: Path):
    refused = pytest.raises(StateError, match=f"pid {os.getpid()}")
    with daemon.only_daemon(home), refused, daemon.only_daemon(home):
        pass
    with daemon.only_daemon(home):
        pass


def test_p5_workers_start_while_grpc_is_in_full_use(coordinator: ScriptedCoordinator, address: str, home: Path):
    coordinator.heartbeat_s = 0.01

    async def scenario() -> None:
        node = coordinator.make_node(home, address)
        async with running(home, node, "finish") as task:
            await until(lambda: bool(coordinator.heartbeats), task)
            for epoch in range(1, 6):
                coordinator.assign(epoch=epoch)
                await until(lambda epoch=epoch: coordinator.states().count("finished") == epoch, task)

    asyncio.run(scenario())
    assert {item.cause for item in coordinator.stages} == {""}


def test_the_worker_command_is_the_real_worker_by_default():
    assert daemon.WORKER_COMMAND[-1] == "fusion_node.worker"
    assert worker_command("x")[-1] == "x"
