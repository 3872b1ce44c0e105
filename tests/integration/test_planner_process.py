"""The planner's process: it plans as the planner does, and nothing is lost or left behind when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace

import psutil
import pytest

from fusion.base.digest import BlobHasher
from fusion.base.errors import PlanError, WireError
from fusion.base.ids import Incarnation, NodeId
from fusion.graph.dag import TensorSpec
from fusion.plan.types import Cluster, ClusterNode, Link, LinkTable
from fusion.protocol.graph import graph_to_proto
from fusion.protocol.job import BlobRef, DataField, DataFile, DataSpec, JobSpec, OptimizerSpec, RowSource
from fusion_coordinator.blobs import BlobFiles
from fusion_coordinator.planmaking import PlanMaker
from fusion_coordinator.planning import Planner, PlannerDiedError
from tests.support.coordinator import CoordinatorProcess, FakeNode, FakeOwner, begin, wait_until
from tests.support.graphs import chain
from tests.support.loops import run

A, B = (
    ClusterNode(NodeId(name * 20), name, f"10.0.0.{at}:7445", Incarnation(1), 2**30, 1e9, f"site {name}")
    for at, name in enumerate("ab")
)
#: One link is slow, one is absent, and a pair is a key: all of it must get through.
LINKS = LinkTable({(A.node, B.node): Link(1e5, 0.02), (B.node, A.node): Link(1e6, 0.02)}, {("x", "y"): None}, None)
CLUSTER = Cluster((A, B), LINKS)


@pytest.fixture
def files(tmp_path):
    return BlobFiles(tmp_path, 0)


@pytest.fixture
def spec(files):
    content = graph_to_proto(chain(6)).SerializeToString()
    hasher = BlobHasher()
    hasher.update(content)
    blob = BlobRef(hasher.hexdigest(), len(content))
    path = files.path(blob.digest)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    field = DataField("x", TensorSpec("float32", (4,)), RowSource(0, "x"))
    data = DataSpec((field,), (DataFile(blob),), samples=8)
    return JobSpec("job", blob, blob, data, OptimizerSpec("adamw", 0.1), batch_size=4, micro_batches=2, steps=10)


def planning(files: BlobFiles, scenario: Callable[[Planner], Awaitable[None]], command: tuple[str, ...] = ()) -> None:
    """Run a scenario with a planner, of which nothing may be left."""

    async def all_of_it() -> None:
        before = set(psutil.Process().children(recursive=True))
        planner = Planner(files, command) if command else Planner(files)
        try:
            await scenario(planner)
        finally:
            await planner.close()
        assert planner.pid is None
        assert set(psutil.Process().children(recursive=True)) == before

    run(all_of_it)


def test_plans_comparisons_and_choices_are_those_of_the_planner_itself(files, spec):
    maker = PlanMaker(files)
    auto = replace(spec, compression="auto")

    async def scenario(planner: Planner) -> None:
        present = maker.divide(CLUSTER, auto, [2])
        assert await planner.divide(CLUSTER, auto, [2]) == present
        assert await planner.plan(CLUSTER, spec) == maker.plan(CLUSTER, spec)
        seen = (CLUSTER, auto, present, [0.5, 0.01], {NodeId("c" * 20): 3.0}, 4)
        assert await planner.compare(*seen) == maker.compare(*seen)
        choices = await planner.recode(*seen)
        assert choices is not None
        assert choices == maker.recode(*seen)
        assert await planner.recode(CLUSTER, spec, *seen[2:]) is None

    planning(files, scenario)


def test_what_is_wrong_with_a_job_is_said_as_ever_and_the_process_goes_on(files, spec):
    tiny = Cluster((replace(A, memory_bytes=1),))

    async def scenario(planner: Planner) -> None:
        with pytest.raises(PlanError, match="memory"):
            await planner.plan(tiny, spec)
        pid = planner.pid
        with pytest.raises(WireError, match=r"is damaged on the coordinator"):
            await planner.plan(CLUSTER, replace(spec, graph=BlobRef("0" * 64, 10)))
        assert len((await planner.divide(CLUSTER, spec, [2])).stages) == 2
        assert planner.pid == pid

    planning(files, scenario)


def test_a_plan_that_was_under_way_when_the_process_was_killed_is_made_by_the_next(files, spec):
    async def scenario(planner: Planner) -> None:
        expected = await planner.plan(CLUSTER, spec)
        first = planner.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        asked = asyncio.create_task(planner.plan(CLUSTER, spec))
        await asyncio.sleep(0.05)
        os.kill(first, signal.SIGKILL)
        assert await asked == expected
        assert planner.pid not in (None, first)

    planning(files, scenario)


def test_a_question_that_nobody_waits_for_any_more_does_not_answer_the_next(files, spec):
    async def scenario(planner: Planner) -> None:
        dropped = asyncio.create_task(planner.divide(CLUSTER, spec, [2]))
        await asyncio.sleep(0.05)
        dropped.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await dropped
        assert (await planner.divide(CLUSTER, spec, [4])).stages[0].end_operator == 4

    planning(files, scenario)


def test_a_process_that_dies_every_time_is_an_error_of_one_plan_and_no_more(files, spec):
    async def scenario(planner: Planner) -> None:
        for _ in range(2):
            with pytest.raises(PlannerDiedError, match="2 times"):
                await planner.plan(CLUSTER, spec)

    planning(files, scenario, (sys.executable, "-c", "raise SystemExit(3)"))


def planner_of(coordinator: CoordinatorProcess) -> psutil.Process | None:
    """The planner's process, which is a coordinator's only child."""
    assert coordinator.process is not None
    return next(iter(psutil.Process(coordinator.process.pid).children()), None)


def test_a_coordinator_outlives_its_planner_says_so_and_takes_it_along_when_it_is_killed(tmp_path):
    with CoordinatorProcess(tmp_path / "state") as coordinator:
        node, owner = FakeNode(coordinator, "a").join(), FakeOwner(coordinator)
        try:
            job = owner.submit(owner.job())
            begin([node])
            owner.wait_for(job, "running")
            planner = planner_of(coordinator)
            assert planner is not None
            assert planner.nice() >= 10
            owner.cancel(job)
            node.job = ""  # its worker has ended

            planner.suspend()
            job = owner.submit(owner.job())

            def failed() -> bool:
                found = planner_of(coordinator)
                if found is not None:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        found.kill()
                return owner.state(job) == "failed"

            wait_until(failed, "the job fails with a planner that always dies")
            assert "no plan: internal error PlannerDiedError" in owner.status(job).reason
            assert coordinator.process is not None
            assert coordinator.process.poll() is None

            node.skip("stop")
            job = owner.submit(owner.job())
            planner = wait_until(lambda: planner_of(coordinator), "a planner for the next job")
            begin([node])
            owner.wait_for(job, "running")
            coordinator.kill()
            planner.wait(10)  # a process that is not ours: until it is gone
        finally:
            owner.close()
            node.die()
