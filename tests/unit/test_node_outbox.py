"""Reports reach the coordinator in order, once each, however often it fails."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fusion.base.clock import ManualClock
from fusion.base.errors import StateError, UnreachableError
from fusion.wire.v1 import node_pb2
from fusion_node import outbox as module
from fusion_node.events import ReportMetrics, ReportStage, StageRef
from fusion_node.ipc import LogEntry, StageStateReport, StepReport
from fusion_node.outbox import Outbox, stage_message, step_message

REF = StageRef("job-aaaaaaaaaa", 3, 2)


class Control:
    """Takes reports, or fails as its list of errors says."""

    def __init__(self, errors: list[Exception] | None = None) -> None:
        self.errors = errors or []
        self.taken: list[Any] = []

    async def report_stage(self, message: node_pb2.StageReport) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.taken.append(message)

    report_metrics = report_stage


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "backoff_s", lambda _attempt: 0.0)
    monkeypatch.setattr(module, "GATHER_S", 0.0)


def state(name: Any) -> ReportStage:
    return ReportStage(REF, 7, StageStateReport(name))


def step(number: int, ref: StageRef = REF) -> ReportMetrics:
    return ReportMetrics(ref, 7, StepReport(step=number))


def sent(control: Control, *actions: ReportStage | ReportMetrics, opened: bool = True) -> Outbox:
    async def scenario() -> Outbox:
        outbox = Outbox("tester", ManualClock())
        sender = asyncio.create_task(outbox.run(control))  # type: ignore[arg-type]
        if opened:
            outbox.open.set()
        for action in actions:
            if isinstance(action, ReportStage):
                outbox.put_stage(action)
            else:
                outbox.put_metrics(action)
        assert await outbox.flush(0.2 if not opened else 10) is opened
        sender.cancel()
        return outbox

    return asyncio.run(scenario())


def kinds(control: Control) -> list[str]:
    return [
        node_pb2.StageState.Name(item.state)[12:]
        if isinstance(item, node_pb2.StageReport)
        else ",".join(str(one.step) for one in item.steps)
        for item in control.taken
    ]


def test_figures_are_gathered_and_never_overtaken_by_the_state_that_follows_them():
    control = Control()
    sent(control, state("running"), step(1), step(2), step(3), state("finished"))
    assert kinds(control) == ["RUNNING", "1,2,3", "FINISHED"]


def test_figures_of_two_stages_travel_apart():
    control = Control()
    sent(control, step(1), step(1, StageRef("job-bbbbbbbbbb", 1, 0)), step(2))
    assert [item.job_id for item in control.taken] == [REF.job, "job-bbbbbbbbbb", REF.job]


def test_what_fails_is_repeated_unchanged_before_anything_later():
    control = Control([UnreachableError("away"), UnreachableError("away"), UnreachableError("away")])
    sent(control, state("running"), state("failed"))
    assert kinds(control) == ["RUNNING", "FAILED"]


def test_what_is_refused_is_dropped_and_the_rest_goes_on(caplog: pytest.LogCaptureFixture):
    control = Control([StateError("stale epoch 3, current 4")])
    sent(control, state("running"), state("failed"))
    assert kinds(control) == ["FAILED"]
    assert "report refused" in caplog.text


def test_nothing_is_sent_while_the_node_is_not_registered():
    control = Control()
    sent(control, state("failed"), opened=False)
    assert control.taken == []


def test_figures_are_bounded_states_are_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_WAITING", 10)
    monkeypatch.setattr(module, "BATCH", 5)
    control = Control()

    async def scenario() -> None:
        outbox = Outbox("tester", ManualClock())
        for number in range(1, 26):
            outbox.put_metrics(step(number))
            if number % 10 == 0:
                outbox.put_stage(state("running"))
        outbox.open.set()
        sender = asyncio.create_task(outbox.run(control))  # type: ignore[arg-type]
        assert await outbox.flush(10)
        sender.cancel()

    asyncio.run(scenario())
    assert kinds(control) == ["RUNNING", "16,17,18,19,20", "RUNNING", "21,22,23,24,25"]


def test_every_state_and_every_figure_reaches_its_field():
    report = StageStateReport("failed", "lost stage 1\x00", "peer-lost", peer_stage=1)
    message = stage_message(REF, 7, report)
    assert (message.job_id, message.epoch, message.stage, message.incarnation) == ("job-aaaaaaaaaa", 3, 2, 7)
    assert (message.state, message.cause, message.peer_stage) == (node_pb2.STAGE_STATE_FAILED, "peer-lost", 1)
    assert message.request_id != stage_message(REF, 7, report).request_id
    assert not message.HasField("weights")
    finished = stage_message(REF, 7, StageStateReport("finished", weights_digest="ab", weights_size_bytes=9))
    assert (finished.weights.digest, finished.weights.size_bytes) == ("ab", 9)
    assert not message.HasField("held")
    held = stage_message(REF, 7, StageStateReport("held", step=5, held_digest="cd", held_size_bytes=8))
    assert (held.state, held.step, held.held.digest, held.held.size_bytes) == (node_pb2.STAGE_STATE_HELD, 5, "cd", 8)
    figures = step_message(2, StepReport(5, 0.5, None, 2.0, 0.1, True, 1.0, 0.6, 0.4, 8, 64, {3: 10, 1: 7}, 99))
    assert (figures.stage, figures.step, figures.loss, figures.grad_norm, figures.skipped) == (2, 5, 0.5, 2.0, True)
    assert not figures.HasField("eval_loss")
    assert (figures.learning_rate, figures.step_s, figures.compute_s, figures.wait_s) == (0.1, 1.0, 0.6, 0.4)
    assert (figures.samples, figures.tokens, figures.peak_memory_bytes) == (8, 64, 99)
    assert [(link.target, link.bytes) for link in figures.sent] == [(1, 7), (3, 10)]


def test_text_that_protobuf_would_refuse_is_mended():
    control = Control()
    sent(control, ReportMetrics(REF, 7, LogEntry("info", "lone surrogate \ud800")))
    assert control.taken[0].logs[0].text == "lone surrogate ?"
