"""A link falls to a tenth and a node slows to a third in the middle of a run: one move, and the same losses."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusion
from fusion.cli.linkview import links_as_json
from fusion.cli.planview import plan_as_json
from fusion.cli.wan import Machine, WanLink, WanRelay
from fusion.compress.catalog import parse_codec
from fusion.job.client import live_cluster
from fusion.job.run import Run
from fusion.plan.codecs import plan_codec
from fusion_node import daemon
from fusion_node.hardware import Limits
from fusion_node.localport import EmulateSpeed, ask
from tests.support.coordinator import CoordinatorProcess
from tests.support.node import free_port, until

pytestmark = pytest.mark.slow

NAMES = ("a", "b", "c")
MBIT = 125_000.0
RATE, DELAY_S = 100 * MBIT, 0.005
SLOW_RATE = 10 * MBIT
FLOPS, SLOW_FLOPS = 2e9, 2e9 / 3  #: emulated
STEPS = 1000  #: so many that a move is worth its cost on the slowest machine; the test ends the run before
FALLS_AFTER, STEPS_AFTER_MOVE = 6, 9
#: A coordinator on the busy machine of the tests: quick to look for better plans, patient with heartbeats.
SETTINGS = {
    "probes": True,
    "probe_s": 0.1,
    "heartbeat_s": 1.0,
    "self_fence_s": 20.0,
    "lease_s": 25.0,
    "sweep_s": 0.2,
    "replan_s": 0.5,  # a look every second step is what counts
    "replan_hold_off_s": 2.0,
    "replan_ratio": 1.4,
}


def make_job(steps: int = STEPS) -> fusion.Job:
    """Three nodes are clearly faster than two: every layer takes as long as its values take to travel."""
    torch.manual_seed(0)
    layers = [layer for _ in range(9) for layer in (nn.Linear(256, 256), nn.ReLU())]
    x = torch.randn(2048, 256)
    return fusion.Job(
        nn.Sequential(*layers),
        {"input": x, "target": x},
        fusion.AdamW(1e-3),
        loss=_square_loss,
        steps=steps,
        batch_size=512,
        micro_batches=4,
        determinism="strict",
        threads=1,
    )


def _square_loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return (outputs - batch["target"]).square().mean()


class Scene:
    """Three daemons in this process behind a relay whose links a test can change; their workers are processes."""

    def __init__(self, coordinator: CoordinatorProcess, directory: Path, flops: float = FLOPS) -> None:
        self.coordinator, self.directory, self.flops = coordinator, directory, flops
        self.at = {name: f"127.0.0.1:{free_port()}" for name in NAMES}
        links = [WanLink(one, other, RATE, DELAY_S) for one in NAMES for other in NAMES]
        self.relay = WanRelay(links, [Machine(name, name, self.at[name]) for name in NAMES])
        self.tasks: list[asyncio.Task[int]] = []

    async def start(self, stack: AsyncExitStack) -> None:
        routes = await self.relay.start()
        stack.push_async_callback(self.relay.close)
        stack.push_async_callback(self._stop)
        for name in NAMES:
            home = self.directory / name
            credentials = self.coordinator.credentials("node", name)
            credentials.save(home)
            settings = daemon.Settings(
                home=home,
                listen=self.at[name],
                limits=Limits("cpu", 2**30, 1, self.flops),
                routes=routes[name],
                emulate_flops=self.flops,
            )
            self.tasks.append(asyncio.create_task(daemon.run(settings, credentials)))

        def measured() -> bool:
            return len(live_cluster(self.coordinator.address, self.coordinator.admin()).links.pairs) == 6

        await until(measured, self.tasks[0], 60, 0.2)

    async def _stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def narrow(self, one: str, other: str) -> None:
        """Let the link between two nodes fall to a tenth."""
        for pair in ((one, other), (other, one)):
            self.relay._shapers[pair].rate = SLOW_RATE

    async def slow_down(self, one: str, other: str) -> None:
        """The link between two nodes, and the first of them."""
        self.narrow(one, other)
        await asyncio.to_thread(ask, self.directory / one, EmulateSpeed(SLOW_FLOPS))


def epoch_of(run: Run) -> int:
    plan = run.status().plan
    return 0 if plan is None else plan.epoch


async def train(scene: Scene, job: fusion.Job) -> tuple[list[fusion.StepMetrics], Run, list[str]]:
    """Run the job, let its first link and node slow down, and end it some time after it has moved.

    Return its steps, and these two nodes.
    """
    async with AsyncExitStack() as stack:
        await scene.start(stack)
        run = await asyncio.to_thread(job.submit, scene.coordinator.address, scene.coordinator.admin())
        await until(lambda: run.status().step >= FALLS_AFTER, scene.tasks[0], 180, 0.1)
        first = [stage.node_name for stage in run.status().stages[:2]]
        await scene.slow_down(*first)
        await until(lambda: epoch_of(run) > 1, scene.tasks[0], 120, 0.2)
        done = run.status().step + STEPS_AFTER_MOVE
        await until(lambda: run.status().step >= done, scene.tasks[0], 120, 0.2)
        steps = await asyncio.to_thread(lambda: list(run.metrics(follow=False)))
        await asyncio.to_thread(run.cancel)
        await until(lambda: run.status().state.ended, scene.tasks[0], 60, 0.2)
        return steps, run, first


@pytest.mark.faults
def test_f13_a_job_moves_once_off_a_link_that_fell_and_a_node_that_slowed_and_its_losses_are_those_of_one_process(
    tmp_path: Path,
) -> None:
    with CoordinatorProcess(tmp_path / "coordinator", SETTINGS) as coordinator:
        steps, run, fallen = asyncio.run(train(Scene(coordinator, tmp_path), make_job()))
        status = run.status()
        plan = plan_as_json(status)
        lines = [line.text for line in run.logs()]
    assert [step.step for step in steps] == list(range(1, len(steps) + 1))
    reference = make_job(len(steps)).run_local().metrics
    assert [step.loss for step in steps] == [step.loss for step in reference]

    assert plan is not None
    assert plan["epoch"] == 2  # one move, and no more
    (moved,) = [line for line in lines if line.startswith("moves at a step's end")]
    assert "per step by what was measured, another plan" in moved
    nodes = [stage["node"] for stage in plan["stages"]]
    assert tuple(fallen) not in pairwise(nodes)
    assert tuple(fallen[::-1]) not in pairwise(nodes)
    share = {stage["node"]: stage["end_operator"] - stage["first_operator"] for stage in plan["stages"]}
    assert share.get(fallen[0], 0) < min(count for node, count in share.items() if node != fallen[0])


async def some_steps(scene: Scene, run: Run, count: int) -> None:
    done = run.status().step + count
    await until(lambda: run.status().step >= done, scene.tasks[0], 120, 0.2)


async def train_past_a_straggler(scene: Scene, job: fusion.Job) -> tuple[list[fusion.StepMetrics], Run, str, list[int]]:
    """Run the job, let its second node be three times slower until the job has moved and then as before; then end it.

    Return its steps, the node, and the epochs at the end of its slowness and of the run.
    """
    async with AsyncExitStack() as stack:
        await scene.start(stack)
        run = await asyncio.to_thread(job.submit, scene.coordinator.address, scene.coordinator.admin())
        await until(lambda: run.status().step >= FALLS_AFTER, scene.tasks[0], 180, 0.1)
        name = run.status().stages[1].node_name
        epochs = []
        await asyncio.to_thread(ask, scene.directory / name, EmulateSpeed(SLOW_FLOPS))
        await until(lambda: epoch_of(run) > 1, scene.tasks[0], 120, 0.2)
        for flops in (SLOW_FLOPS, FLOPS):
            await asyncio.to_thread(ask, scene.directory / name, EmulateSpeed(flops))
            await some_steps(scene, run, 2 * STEPS_AFTER_MOVE)
            epochs.append(epoch_of(run))
        steps = await asyncio.to_thread(lambda: list(run.metrics(follow=False)))
        await asyncio.to_thread(run.cancel)
        await until(lambda: run.status().state.ended, scene.tasks[0], 60, 0.2)
        return steps, run, name, epochs


@pytest.mark.faults
def test_f40_a_job_moves_once_away_from_a_node_that_is_slow_for_a_while_and_back_at_most_once(tmp_path: Path) -> None:
    with CoordinatorProcess(tmp_path / "coordinator", SETTINGS) as coordinator:
        steps, run, slow, epochs = asyncio.run(train_past_a_straggler(Scene(coordinator, tmp_path), make_job()))
        moves = [line.text for line in run.logs() if line.text.startswith("moves at a step's end")]
        plan = plan_as_json(run.status())
    assert [step.step for step in steps] == list(range(1, len(steps) + 1))
    reference = make_job(len(steps)).run_local().metrics
    assert [step.loss for step in steps] == [step.loss for step in reference]  # none was done in vain, or twice
    while_slow, at_last = epochs
    assert while_slow == 2
    assert at_last in (2, 3)
    assert len(moves) == at_last - 1
    if at_last == 2:
        assert plan is not None
        share = {stage["node"]: stage["end_operator"] - stage["first_operator"] for stage in plan["stages"]}
        assert share.get(slow, 0) < min(count for node, count in share.items() if node != slow)


RECODING = SETTINGS | {"recode_wins": 1, "recode_hold_off_s": 0.5}
FAST = 8e9  #: emulated: at RATE links need no codec, at a tenth of it they hold the step up


def coded_job(**settings: Any) -> fusion.Job:
    torch.manual_seed(0)
    layers = [layer for _ in range(9) for layer in (nn.Linear(256, 256), nn.ReLU())]
    x = torch.randn(1024, 256)
    values = {"steps": STEPS, "batch_size": 1024, "micro_batches": 2, "determinism": "strict", "threads": 1}
    values |= {"stages": 3, "replan": False, "compression": "auto:7.5"}
    model, optimizer = nn.Sequential(*layers), fusion.AdamW(1e-3)
    return fusion.Job(model, {"input": x, "target": x}, optimizer, loss=_square_loss, **(values | settings))


def codecs_of(run: Run) -> dict[str, str]:
    found = links_as_json(run.status())
    return {f"{link['source']}>{link['target']}": link["codec"] for link in found["links"]} if found else {}


def changed_at(run: Run) -> int:
    """Return the first step with other codecs; phases of "auto" itself begin in the second half of the run."""
    plan = run.status().plan
    return min((change.from_step for change in plan.codec_changes), default=STEPS) if plan is not None else STEPS


async def train_coded(scene: Scene) -> tuple[list[fusion.StepMetrics], Run, dict[str, str]]:
    """Run the job until its first link has fallen and some steps were done with other codecs; return the first ones."""
    async with AsyncExitStack() as stack:
        await scene.start(stack)
        job = coded_job(planner="equal-compute")
        run = await asyncio.to_thread(job.submit, scene.coordinator.address, scene.coordinator.admin())
        await until(lambda: run.status().step >= FALLS_AFTER, scene.tasks[0], 90, 0.1)
        before = codecs_of(run)
        scene.narrow(*(stage.node_name for stage in run.status().stages[:2]))
        await until(lambda: changed_at(run) <= STEPS // 2, scene.tasks[0], 120, 0.2)
        done = run.status().step + STEPS_AFTER_MOVE
        await until(lambda: run.status().step >= done, scene.tasks[0], 120, 0.2)
        steps = await asyncio.to_thread(lambda: list(run.metrics(follow=False)))
        await asyncio.to_thread(run.cancel)
        await until(lambda: run.status().state.ended, scene.tasks[0], 60, 0.2)
        return steps, run, before


@pytest.mark.faults
def test_links_take_stronger_codecs_when_one_falls_and_the_record_of_it_gives_the_same_losses(tmp_path: Path) -> None:
    with CoordinatorProcess(tmp_path / "coordinator", RECODING) as coordinator:
        steps, run, before = asyncio.run(train_coded(Scene(coordinator, tmp_path, FAST)))
        status = run.status()
        links = links_as_json(status)
        lines = [line.text for line in run.logs()]
    assert links is not None
    assert status.plan is not None
    assert status.plan.epoch == 1
    after = {f"{link['source']}>{link['target']}": link["codec"] for link in links["links"]}
    assert plan_codec(parse_codec(after["0>1"])).ratio > plan_codec(parse_codec(before["0>1"])).ratio
    assert any("codecs from step" in line and "the links hold the step up" in line for line in lines)
    cuts = [stage.first_operator for stage in status.plan.stages[1:]]
    phases = [word for word in links["compression"].split() if int([*word.split("@"), "1"][1]) <= len(steps)]
    again = coded_job(steps=len(steps), compression=" ".join(phases))
    assert [step.loss for step in steps] == [step.loss for step in again.run_local(cuts=cuts).metrics][: len(steps)]
