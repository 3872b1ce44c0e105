"""The validators of fault scenarios find what they are for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.validators import History, Reference

JOB = "job-aaaaaaaaaa"
REFERENCE = Reference([3.0, 2.0, 1.0], [{"w": f"w{step}", "v": f"v{step}"} for step in (1, 2, 3)])
Line = dict[str, Any]


def worker(event: str, at_s: float, epoch: int, stage: int, **values: Any) -> Line:
    common = {"process": "worker", "pid": 10 * epoch + stage, "node": f"id-{stage}", "name": f"node-{stage}"}
    return (
        common | {"event": event, "at_s": at_s, "job": JOB, "epoch": epoch, "stage": stage, "incarnation": 1} | values
    )


def step(at_s: float, epoch: int, stage: int, number: int) -> Line:
    name = "wv"[stage]
    loss = None if stage == 0 else REFERENCE.losses[number - 1]
    digests = {name: f"{name}{number}"}
    return worker(
        "step", at_s, epoch, stage, step=number, applied=True, micro_batches=[1, 0], loss=loss, digests=digests
    )


def recovered_run() -> list[Line]:
    """Two stages; the first epoch ends after stage 0 has done step 2, the second goes on after step 1."""
    daemons = [
        {"process": "daemon", "pid": stage, "node": f"id-{stage}", "name": f"node-{stage}", "at_s": 0.0}
        | {"event": "registered", "incarnation": 1, "self_fence_s": 25.0}
        for stage in (0, 1)
    ]
    return [
        *daemons,
        *(worker("started", 1.0, 1, stage, stages=2, resume_step=0) for stage in (0, 1)),
        worker("message", 1.5, 1, 1, kind="ACTIVATION", step=1, micro_batch=0, edge=0, source=0, message_epoch=1)
        | {"message_job": JOB},
        step(2.0, 1, 0, 1), step(2.1, 1, 1, 1), step(3.0, 1, 0, 2),
        {"process": "coordinator", "event": "committed", "kind": "JobBroke", "at_s": 4.0, "job": JOB}
        | {"reason": "node node-1 (stage 1) crashed"},
        *(worker("started", 5.0, 2, stage, stages=2, resume_step=1) for stage in (0, 1)),
        step(6.0, 2, 0, 2), step(6.1, 2, 1, 2), step(7.0, 2, 0, 3), step(7.1, 2, 1, 3),
    ]  # fmt: skip


def check(lines: list[Line]) -> History:
    history = History(sorted(lines, key=lambda line: line["at_s"]), JOB)
    history.check(REFERENCE, 2, 3)
    return history


def test_a_run_that_recovered_exactly_passes_and_its_figures_are_right() -> None:
    history = check(recovered_run())
    assert history.epochs() == {1: 0, 2: 1}
    assert history.lost_steps() == 0  # step 2 was not done by all stages before
    assert history.v9_failures("node-1") == ["node node-1 (stage 1) crashed"]
    assert len(history.final()) == 6


def of(lines: list[Line], epoch: int, stage: int, number: int) -> Line:
    found = (line for line in lines if line["event"] == "step" and line["epoch"] == epoch)
    return next(line for line in found if (line["stage"], line["step"]) == (stage, number))


def counts_twice(lines: list[Line]) -> None:
    of(lines, 2, 0, 2)["micro_batches"] = [0, 1, 1]


def counts_a_part(lines: list[Line]) -> None:
    of(lines, 2, 0, 2)["micro_batches"] = [0]


def goes_back(lines: list[Line]) -> None:
    for at_s, epoch in ((0.9, 2), (4.9, 1)):
        lines.append(worker("worker_started", at_s, epoch, 0) | {"process": "daemon"})


def takes_an_older_message(lines: list[Line]) -> None:
    message = next(line for line in lines if line["event"] == "message")
    lines.append(copy.deepcopy(message) | {"at_s": 6.05, "epoch": 2, "pid": 21})


def takes_a_message_twice(lines: list[Line]) -> None:
    message = next(line for line in lines if line["event"] == "message")
    lines.append(copy.deepcopy(message))


def leaves_a_gap(lines: list[Line]) -> None:
    lines.remove(of(lines, 2, 1, 3))


def has_another_loss(lines: list[Line]) -> None:
    of(lines, 2, 1, 2)["loss"] = 2.0000001


def works_beside_a_newer_epoch(lines: list[Line]) -> None:
    of(lines, 1, 0, 2)["at_s"] = 6.5


def works_after_its_lease(lines: list[Line]) -> None:
    for line in lines:
        if line["at_s"] >= 7.0:
            line["at_s"] += 30.0


def has_another_state(lines: list[Line]) -> None:
    of(lines, 2, 0, 3)["digests"] = {"w": "other"}


def lacks_a_state(lines: list[Line]) -> None:
    of(lines, 2, 0, 3)["digests"] = {}


@pytest.mark.parametrize(
    ("spoil", "validator"),
    [
        (counts_twice, "V1"),
        (counts_a_part, "V1"),
        (goes_back, "V2"),
        (takes_an_older_message, "V3"),
        (takes_a_message_twice, "V3"),
        (leaves_a_gap, "V4"),
        (has_another_loss, "V5"),
        (works_beside_a_newer_epoch, "V6"),
        (works_after_its_lease, "V6"),
        (has_another_state, "V7"),
        (lacks_a_state, "V7"),
    ],
)
def test_what_must_not_be_is_found(spoil: Callable[[list[Line]], None], validator: str) -> None:
    lines = recovered_run()
    spoil(lines)
    with pytest.raises(AssertionError, match=validator):
        check(lines)


def test_a_failure_that_is_noted_twice_or_without_its_node_is_found() -> None:
    lines = recovered_run()
    broke = next(line for line in lines if line.get("kind") == "JobBroke")
    with pytest.raises(AssertionError, match="V9"):
        History([*lines, dict(broke)], JOB).v9_failures("node-1")
    with pytest.raises(AssertionError, match="V9"):
        History(lines, JOB).v9_failures("node-0")
