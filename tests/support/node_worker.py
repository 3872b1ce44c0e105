"""A worker without torch, for tests of the daemon: speaks the real protocol and behaves as its argument says."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from fusion.wire.v1 import plan_pb2
from fusion_node.ipc import StepReport, WorkerChannel


def main() -> None:
    behaviour = sys.argv[1]
    if behaviour == "import-error":
        raise ImportError("no module named torch")
    channel = WorkerChannel.take_stdio()
    config = channel.read_config()
    stopped = threading.Event()
    reasons: list[str] = []

    def stop(reason: str) -> None:
        reasons.append(reason)
        stopped.set()

    if behaviour == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        channel.watch(lambda _reason: None)
    else:
        channel.watch(stop)
    job = plan_pb2.Assignment.FromString(config.assignment)
    channel.state("running", f"{job.job_id} threads={config.threads} omp={os.environ['OMP_NUM_THREADS']}")
    behave(behaviour, channel, stopped)
    if stopped.is_set():
        channel.state("stopped", reasons[0])
    channel.close()


def behave(behaviour: str, channel: WorkerChannel, stopped: threading.Event) -> None:
    match behaviour:
        case "finish":
            for step in range(1, 4):
                channel.report(StepReport(step=step, loss=1.0 / step, sent={1: 100 * step}))
                print("a stray line on stdout")
            channel.log("info", "all done")
            channel.state("finished", weights_digest="ab" * 32, weights_size_bytes=12)
        case "run" | "deaf":
            for step in range(1, 10_000):
                channel.report(StepReport(step=step, loss=1.0))
                if stopped.wait(0.1):
                    return
        case "crash":
            print("last words of the worker", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        case "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "raise":
            raise MemoryError("cannot hold 3 GiB")
        case "noise":
            for _ in range(3000):
                os.write(2, b"x" * 1023 + b"\n")
            channel.state("finished", weights_digest="ab" * 32, weights_size_bytes=12)
        case "frozen":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "garbage":
            os.write(channel._reports, b"not a report\n" + b"y" * 2**21 + b'\n{"type":"state"}\n')
            channel.state("finished", weights_digest="ab" * 32, weights_size_bytes=12)
        case _:
            time.sleep(60)


if __name__ == "__main__":
    main()
