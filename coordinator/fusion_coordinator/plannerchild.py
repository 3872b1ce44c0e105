"""The planner's process, which `planning.Planner` starts: python -m fusion_coordinator.plannerchild BLOBS

It runs at low priority, so that a heartbeat never waits for a plan, and ends when its coordinator does.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import traceback
from pathlib import Path
from typing import BinaryIO

from fusion.base.errors import FusionError
from fusion.protocol.job import JobSpec, job_from_proto
from fusion.wire.v1 import job_pb2
from fusion_coordinator import planwire
from fusion_coordinator.blobs import BlobFiles
from fusion_coordinator.planmaking import PlanMaker
from fusion_coordinator.planwire import Answer, Asked, Compare, Compared, Divide, Faulty, MakePlan, Planned, Recoded

NICE = 10  #: added to the coordinator's own


def main() -> None:
    """Answer requests until the coordinator is gone."""
    os.nice(NICE)
    maker = PlanMaker(BlobFiles(Path(sys.argv[1]), 0))
    answers, asked = sys.stdout.buffer, queue.SimpleQueue[bytes]()
    sys.stdout = sys.stderr  # what a library prints must not get between the answers
    threading.Thread(target=_read, args=(sys.stdin.buffer, asked), name="coordinator", daemon=True).start()
    while True:
        answers.write(planwire.encode(_answer(maker, asked.get())))
        answers.flush()


def _read(stream: BinaryIO, asked: queue.SimpleQueue[bytes]) -> None:
    while len(head := stream.read(planwire.LENGTH_BYTES)) == planwire.LENGTH_BYTES:
        asked.put(stream.read(int.from_bytes(head, "big")))
    os._exit(0)


def _answer(maker: PlanMaker, body: bytes) -> Answer:
    try:
        return _made(maker, planwire.decode_asked(body))
    except FusionError as error:
        return planwire.refused(error)
    except Exception as error:  # noqa: BLE001  # the coordinator says so, and this process goes on
        return Faulty(type(error).__name__, traceback.format_exc())


def _made(maker: PlanMaker, asked: Asked) -> Answer:
    if isinstance(asked, MakePlan):
        return Planned(maker.plan(asked.cluster, _spec(asked.spec)))
    if isinstance(asked, Divide):
        return Planned(maker.divide(asked.cluster, _spec(asked.spec), asked.cuts))
    seen = asked.seen
    about = (seen.cluster, _spec(seen.spec), seen.present, seen.compute_s, seen.earlier, seen.step)
    return Compared(maker.compare(*about)) if isinstance(asked, Compare) else Recoded(maker.recode(*about))


def _spec(body: bytes) -> JobSpec:
    return job_from_proto(job_pb2.JobSpec.FromString(body))


if __name__ == "__main__":
    main()
