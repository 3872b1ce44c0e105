"""A node's part in a move: its worker holds, the next epoch's starts, and what is kept on the disk goes in time."""

from __future__ import annotations

import random

import pytest

from fusion_node import events as a
from fusion_node.agent import Agent
from fusion_node.events import Assignment, StageRef
from fusion_node.ipc import StageStateReport

NODE, CLUSTER, JOB = "node-under-test", "cluster-one", "job-aaaaaaaaaa"
HELD = StageStateReport("held", step=5, held_digest="ab" * 32, held_size_bytes=9)


def assigned(epoch: int, job: str = JOB) -> a.Assigned:
    return a.Assigned(7, Assignment(StageRef(job, epoch, 0), CLUSTER, NODE, 7, b"work"))


@pytest.fixture
def agent() -> Agent:
    """One whose worker runs epoch 1."""
    made = Agent(CLUSTER, NODE, random.Random(1))
    made.start()
    made.handle(a.Registered(7, 100.0, heartbeat_s=5.0, self_fence_s=25.0), 100.0)
    made.handle(assigned(1), 100.0)
    made.handle(a.WorkerReported(StageStateReport("running")), 100.0)
    return made


def kinds(actions: list[a.Action]) -> list[type]:
    return [type(action) for action in actions]


def test_the_worker_of_the_named_epoch_is_asked_to_hold_and_no_other(agent: Agent):
    assert agent.handle(a.HoldOrdered(7, JOB, 1), 101.0) == [a.HoldWorker()]
    for event in (a.HoldOrdered(7, JOB, 2), a.HoldOrdered(7, "job-bbbbbbbbbb", 1), a.HoldOrdered(6, JOB, 1)):
        assert agent.handle(event, 101.0) == []
    agent.handle(a.WorkerReported(HELD), 102.0)
    assert agent.handle(a.HoldOrdered(7, JOB, 1), 103.0) == []


def test_the_next_epoch_starts_when_the_worker_that_holds_has_ended(agent: Agent):
    told = agent.handle(a.WorkerReported(HELD), 102.0)
    assert [action.report for action in told if isinstance(action, a.ReportStage)] == [HELD]
    waiting = agent.handle(assigned(2), 103.0)
    assert a.StartWorker not in kinds(waiting)
    assert a.ReportStage not in kinds(waiting)
    started = agent.handle(a.WorkerExited("", ""), 104.0)
    assert [action.assignment.ref.epoch for action in started if isinstance(action, a.StartWorker)] == [2]
    assert a.ReportStage not in kinds(started)


def test_the_next_epoch_starts_at_once_when_the_worker_that_held_is_gone(agent: Agent):
    agent.handle(a.WorkerReported(HELD), 102.0)
    assert a.ReportStage not in kinds(agent.handle(a.WorkerExited("", ""), 103.0))
    assert kinds(agent.handle(assigned(2), 104.0)) == [a.StartWorker]
