"""A node that joins while a job runs is used once that is clearly faster, and left alone where it is not."""

from __future__ import annotations

import threading

import pytest

from tests.support.coordinator import CoordinatorProcess, FakeNode, FakeOwner

pytestmark = pytest.mark.slow

SETTINGS = {"replan_s": 0.2, "replan_hold_off_s": 0.5, "replan_ratio": 1.25}


class Training:
    """Reports of a single stage whose steps compute for long."""

    def __init__(self, node: FakeNode, compute_s: float) -> None:
        self._node, self._compute_s, self._over = node, compute_s, threading.Event()
        self._thread = threading.Thread(target=self._report, daemon=True)
        self._thread.start()

    def _report(self) -> None:
        step = 0
        while not self._over.wait(0.05):
            step += 1
            self._node.report_steps(step, step, loss=True, compute_s=self._compute_s)

    def stop(self) -> None:
        self._over.set()
        self._thread.join(10)


def start(owner, node):
    job = owner.submit(owner.job(steps=100_000, replan=True, planner="fusion"))
    node.assigned()
    node.report("starting")
    node.report("ready")
    owner.wait_for(job, "running")
    return job


def test_a_faster_node_that_joins_takes_the_job_over_at_a_steps_end(tmp_path):
    with CoordinatorProcess(tmp_path / "state", SETTINGS) as coordinator:
        owner, slow = FakeOwner(coordinator), FakeNode(coordinator, "slow", flops=1e7).join()
        job = start(owner, slow)
        training = Training(slow, compute_s=2.0)
        fast = FakeNode(coordinator, "fast", flops=1e11).join()
        hold = slow.next("hold", timeout_s=30)
        training.stop()
        assert hold.job_id == job
        reason = owner.status(job).reason
        assert reason.startswith("moves at a step's end to 1 stages on fast: ")
        state = owner.upload(b"state after step 9")
        slow.report("held", step=9, held=state)
        slow.job = ""
        taken = fast.assigned()
        assert (taken.plan.epoch, taken.resume.step, list(taken.resume.states)) == (2, 9, [state])
        for node in (slow, fast):
            node.die()
        owner.close()


def test_a_node_that_is_no_gain_leaves_a_running_job_as_it_is(tmp_path):
    with CoordinatorProcess(tmp_path / "state", SETTINGS) as coordinator:
        owner, own = FakeOwner(coordinator), FakeNode(coordinator, "own", flops=1e11).join()
        start(owner, own)
        training = Training(own, compute_s=0.05)
        idle = FakeNode(coordinator, "idle", flops=1e7).join()
        threading.Event().wait(3.0)  # several looks
        training.stop()
        assert own.commands.empty()
        assert idle.commands.empty()
        for node in (own, idle):
            node.die()
        owner.close()
