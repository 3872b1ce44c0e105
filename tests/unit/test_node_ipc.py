"""What daemon and worker say to each other, line by line."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading

import msgspec
import pytest

from fusion.base.errors import WireError
from fusion_node import ipc

CONFIG = ipc.WorkerConfig(
    assignment=bytes(range(256)),
    listen="0.0.0.0:7445",
    credentials_dir="/home/ü/node",
    coordinator="[::1]:7443",
    cache_dir="/cache",
    incarnation=2**40,
    allow_data=("/data", "/more data"),
    routes={"10.0.0.1:7445": "127.0.0.1:9001"},
)


def test_a_configuration_survives_its_line():
    line = ipc.encode(CONFIG)
    assert line.count(b"\n") == 1
    assert ipc.decode_config(line) == CONFIG


@pytest.mark.parametrize(
    "report",
    [
        ipc.StageStateReport("failed", "lost stage 2", "peer-lost", peer_stage=2),
        ipc.StageStateReport("finished", weights_digest="ab", weights_size_bytes=2**40),
        ipc.StepReport(step=1, loss=0.1, sent={0: 5, 3: 7}),
        ipc.StepReport(step=1, loss=None, eval_loss=math.inf, grad_norm=-math.inf),
        ipc.LogEntry("warning", "two\nlines and \x1b[2J"),
        ipc.Progress(3, 12),
    ],
)
def test_a_report_survives_its_line(report: ipc.Report):
    line = ipc.encode(report)
    assert line.count(b"\n") == 1
    assert ipc.decode_report(line) == report


def test_a_loss_that_is_not_a_number_stays_one():
    report = ipc.decode_report(ipc.encode(ipc.StepReport(step=1, loss=math.nan)))
    assert isinstance(report, ipc.StepReport)
    assert report.loss is not None
    assert math.isnan(report.loss)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        b'{"type":"config"}',
        b'{"type":"stop","reason":"x"}',
        b'{"type":"state","state":"levitating"}',
        b'{"type":"step","step":-1}',
        b'{"type":"step","step":1,"samples":9223372036854775808}',
        b'{"type":"step","step":1,"sent":{"-1":5}}',
        b'{"type":"step","step":"1"}',
        b'{"type":"state","state":"failed","peer_stage":4294967296}',
    ],
)
def test_a_line_that_is_no_report_is_refused(line: bytes):
    with pytest.raises(WireError, match="report of the worker"):
        ipc.decode_report(line)


class Pipes:
    """Both ends of the two pipes between a daemon and a worker."""

    def __init__(self) -> None:
        worker_reads, self.daemon_writes = os.pipe()
        self.daemon_reads, worker_writes = os.pipe()
        self.channel = ipc.WorkerChannel(worker_reads, worker_writes)

    def lines(self, count: int) -> list[ipc.Report]:
        with os.fdopen(self.daemon_reads, "rb", closefd=False) as file:
            return [ipc.decode_report(file.readline()) for _ in range(count)]


def test_the_worker_reads_its_configuration_then_commands_then_the_end():
    pipes = Pipes()
    os.write(pipes.daemon_writes, ipc.encode(CONFIG) + ipc.encode(ipc.Stop("cancelled"))[:5])
    assert pipes.channel.read_config() == CONFIG
    heard: list[str] = []
    stopped, orphaned = threading.Event(), threading.Event()

    def on_stop(reason: str) -> None:
        heard.append(reason)
        stopped.set()

    pipes.channel.watch(on_stop, orphaned.set)
    os.write(pipes.daemon_writes, ipc.encode(ipc.Stop("cancelled"))[5:])
    assert stopped.wait(10)
    assert heard == ["cancelled"]
    assert not orphaned.is_set()
    os.close(pipes.daemon_writes)
    assert orphaned.wait(10)


def test_a_hold_is_heard_and_stops_nothing():
    pipes = Pipes()
    held, reasons = threading.Event(), []
    pipes.channel.watch(reasons.append, lambda: None, on_hold=held.set)
    os.write(pipes.daemon_writes, ipc.encode(ipc.Hold()))
    assert held.wait(10)
    assert reasons == []
    os.close(pipes.daemon_writes)


def test_a_speed_to_emulate_is_heard_and_stops_nothing():
    pipes = Pipes()
    heard, speeds, reasons = threading.Event(), [], []

    def on_emulate(flops: float) -> None:
        speeds.append(flops)
        heard.set()

    pipes.channel.watch(reasons.append, lambda: None, on_emulate=on_emulate)
    os.write(pipes.daemon_writes, ipc.encode(ipc.Emulate(2.5e9)))
    assert heard.wait(10)
    assert (speeds, reasons) == ([2.5e9], [])
    os.close(pipes.daemon_writes)


def test_a_missing_configuration_is_an_error_of_its_own():
    pipes = Pipes()
    os.close(pipes.daemon_writes)
    with pytest.raises(WireError, match="worker configuration"):
        pipes.channel.read_config()


def test_reports_of_many_threads_do_not_mix():
    pipes = Pipes()
    threads = [
        threading.Thread(target=lambda n=n: [pipes.channel.log("info", f"{n} " * 500) for _ in range(50)])
        for n in range(4)
    ]
    collected: list[ipc.Report] = []
    reader = threading.Thread(target=lambda: collected.extend(pipes.lines(200)))
    for thread in (reader, *threads):
        thread.start()
    for thread in (*threads, reader):
        thread.join(20)
    assert len(collected) == 200
    assert {len(set(entry.text.split())) for entry in collected if isinstance(entry, ipc.LogEntry)} == {1}


def test_the_worker_says_that_it_lives(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ipc, "PROGRESS_INTERVAL_S", 0.01)
    pipes = Pipes()
    pipes.channel.progress(4, 9)
    pipes.channel.watch(lambda _reason: None, lambda: None)
    assert pipes.lines(2) == [ipc.Progress(4, 9)] * 2
    pipes.channel.close()
    os.close(pipes.daemon_writes)


def test_reporting_to_a_daemon_that_is_gone_goes_nowhere():
    pipes = Pipes()
    os.close(pipes.daemon_reads)
    pipes.channel.state("running")


def test_details_and_log_entries_are_one_line_of_bounded_length():
    pipes = Pipes()
    pipes.channel.state("failed", "first\n\tsecond " + "x" * 10_000, cause="error")
    (report,) = pipes.lines(1)
    assert isinstance(report, ipc.StageStateReport)
    assert report.detail.startswith("first second x")
    assert len(report.detail) == ipc.MAX_TEXT


PROGRAM = """
import os, sys
from fusion_node.ipc import WorkerChannel
channel = WorkerChannel.take_stdio()
print("printed by Python")
os.write(1, b"written by C code\\n")
config = channel.read_config()
assert sys.stdin.read() == ""
channel.state("ready", config.listen)
print("printed at the end")
"""


def test_stray_prints_go_to_stderr_and_the_protocol_stays_clean():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=ipc.encode(CONFIG), capture_output=True, timeout=30, check=True
    )
    assert ipc.decode_report(done.stdout) == ipc.StageStateReport("ready", "0.0.0.0:7445")
    for text in (b"printed by Python", b"written by C code", b"printed at the end"):
        assert text in done.stderr


ORPHAN = """
import time
from fusion_node.ipc import WorkerChannel
channel = WorkerChannel.take_stdio()
channel.read_config()
channel.watch(lambda reason: None)
channel.state("running")
time.sleep(60)
"""


def test_a_worker_whose_daemon_is_gone_ends_at_once():
    with subprocess.Popen([sys.executable, "-c", ORPHAN], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write(ipc.encode(CONFIG))
        worker.stdin.flush()
        worker.stdout.readline()
        worker.stdin.close()
        assert worker.wait(10) == ipc.ORPHANED_EXIT_CODE


def test_the_protocol_has_the_fields_that_the_worker_relies_on():
    names = {field.name for field in msgspec.structs.fields(ipc.WorkerConfig)}
    assert names >= {"assignment", "listen", "credentials_dir", "coordinator", "cache_dir", "device", "threads"}
    assert names >= {"memory_limit_bytes", "allow_data", "routes", "incarnation"}
