"""Makes plans in a process of its own, at low priority, so that no heartbeat waits for one.

A thread would not do: the planner holds the interpreter for long stretches. The process is started when the first job
is there, stays, and is started again when it dies. It holds nothing but copies of graphs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Mapping, Sequence

import fusion
import fusion_coordinator
from fusion.base.children import child_environment
from fusion.base.errors import UnreachableError
from fusion.base.ids import NodeId
from fusion.observe.logs import fields
from fusion.plan.types import Cluster, Plan
from fusion.protocol.job import JobSpec, job_to_proto
from fusion_coordinator import planwire
from fusion_coordinator.blobs import BlobFiles
from fusion_coordinator.decide.recoding import Choices
from fusion_coordinator.planmaking import Alternative
from fusion_coordinator.planwire import (
    Answer,
    Asked,
    Compare,
    Compared,
    Divide,
    Faulty,
    MakePlan,
    Planned,
    Recode,
    Recoded,
    Refused,
    Seen,
)

log = logging.getLogger("fusion.coordinator.planning")

COMMAND = (sys.executable, "-P", "-m", "fusion_coordinator.plannerchild")
ANSWER_LIMIT_S = 600.0  #: a planner that takes longer hangs; the longest plans take some 10 s
TRIES = 2
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


class PlannerDiedError(Exception):
    """The planner's process ended, or hung, over the same request every time."""


class PlannerFaultError(Exception):
    """The planner met an error that it should not; the message is its trace."""


class Planner:
    """PlanMaker's methods, which run in another process, one at a time.

    Beside PlanMaker's errors they raise PlannerDiedError and PlannerFaultError.
    """

    def __init__(self, files: BlobFiles, command: Sequence[str] = COMMAND) -> None:
        self._command = (*command, str(files.directory))
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self._warming: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The process id, while there is a process."""
        return None if self._process is None else self._process.pid

    def warm(self) -> None:
        """Have the process started: there will be something to plan."""
        if self._process is None and self._warming is None:
            self._warming = asyncio.get_running_loop().create_task(self._warm(), name="planner starts")

    async def plan(self, cluster: Cluster, spec: JobSpec) -> Plan:
        """Return a plan with epoch 1; PlanError if none fits, ConfigError if none ever could."""
        return _plan_in(await self._ask(MakePlan(cluster, _body(spec))))

    async def divide(self, cluster: Cluster, spec: JobSpec, cuts: Sequence[int]) -> Plan:
        """Return a plan on these nodes in their order, cut at `cuts`, or evenly if there are none."""
        return _plan_in(await self._ask(Divide(cluster, _body(spec), tuple(cuts))))

    async def compare(
        self,
        cluster: Cluster,
        spec: JobSpec,
        present: Plan,
        compute_s: Sequence[float],
        earlier: Mapping[NodeId, float],
        step: int = 0,
    ) -> Alternative:
        """Return the best plan now that a job was seen to run; arguments as PlanMaker.compare."""
        seen = Seen(cluster, _body(spec), present, tuple(compute_s), dict(earlier), step)
        answer = await self._ask(Compare(seen))
        assert isinstance(answer, Compared)
        return answer.found

    async def recode(
        self,
        cluster: Cluster,
        spec: JobSpec,
        present: Plan,
        compute_s: Sequence[float],
        earlier: Mapping[NodeId, float],
        step: int,
    ) -> Choices | None:
        """Return which codecs the links of a running job should have after `step`; arguments as PlanMaker.recode."""
        seen = Seen(cluster, _body(spec), present, tuple(compute_s), dict(earlier), step)
        answer = await self._ask(Recode(seen))
        assert isinstance(answer, Recoded)
        return answer.choices

    async def close(self) -> None:
        """End the process, whatever it does, and wait until nothing of it is left."""
        self._closed = True
        if self._warming is not None:
            self._warming.cancel()
            await asyncio.gather(self._warming, return_exceptions=True)
        await self._end()

    # ---- the process ----

    async def _ask(self, asked: Asked) -> Answer:
        """Return the answer; a process that dies over it is replaced once."""
        body = planwire.encode(asked)
        async with self._lock:
            for _ in range(TRIES):
                try:
                    answer = await asyncio.wait_for(self._exchange(body), ANSWER_LIMIT_S)
                    break
                except (OSError, EOFError, TimeoutError) as error:
                    status = await self._end()
                    log.error("planner's process failed", extra=fields(exit_status=status, error=repr(error)))
                except asyncio.CancelledError:
                    await self._end()  # the next one must not get this one's answer
                    raise
            else:
                raise PlannerDiedError(f"the planner's process failed {TRIES} times over one plan")
        if isinstance(answer, Refused):
            raise planwire.error_of(answer)
        if isinstance(answer, Faulty):
            raise PlannerFaultError(answer.trace)
        return answer

    async def _exchange(self, body: bytes) -> Answer:
        process = await self._running()
        assert process.stdin is not None  # asked for in `_running`
        assert process.stdout is not None
        process.stdin.write(body)
        await process.stdin.drain()
        size = int.from_bytes(await process.stdout.readexactly(planwire.LENGTH_BYTES), "big")
        return planwire.decode_answer(await process.stdout.readexactly(size))

    async def _running(self) -> asyncio.subprocess.Process:
        if self._closed:
            raise UnreachableError("the coordinator is stopping")
        if self._process is not None and self._process.returncode is not None:
            await self._end()
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=child_environment((fusion, fusion_coordinator)) | _ONE_THREAD,
                start_new_session=True,  # Ctrl-C in the coordinator's terminal is for the coordinator alone
            )
        return self._process

    async def _warm(self) -> None:
        try:
            async with self._lock:
                with contextlib.suppress(OSError):  # said when a plan is wanted
                    await self._running()
        finally:
            self._warming = None

    async def _end(self) -> int | None:
        """Kill the process; return its exit status."""
        process, self._process = self._process, None
        if process is None:
            return None
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        status = await process.wait()
        process._transport.close()  # type: ignore[attr-defined]  # asyncio's own way leaves it to the collector
        return status


def _body(spec: JobSpec) -> bytes:
    return job_to_proto(spec).SerializeToString()


def _plan_in(answer: Answer) -> Plan:
    assert isinstance(answer, Planned)
    return answer.plan
