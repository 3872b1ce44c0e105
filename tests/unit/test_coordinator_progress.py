"""Steps are put together from stages, once, in order, whoever reports first; lines are numbered and harmless."""

from __future__ import annotations

import asyncio
import math

from fusion.base.ids import JobId
from fusion.wire.v1 import node_pb2
from fusion_coordinator.progress import RING, JobProgress, ProgressBook, combine
from fusion_coordinator.store.memory import MemoryStore
from fusion_coordinator.store.thread import StoreThread

JOB = JobId("job-aaaaaaaaaa")


def part(stage, step, **fields):
    return node_pb2.StageStep(stage=stage, step=step, **fields)


def test_a_step_takes_each_figure_from_the_stage_that_knows_it():
    first = part(0, 7, grad_norm=2.5, step_s=1.0, learning_rate=0.1, samples=8, tokens=64)
    first.sent.add(target=1, bytes=100)
    middle = part(1, 7, step_s=1.5, learning_rate=0.1, skipped=True)
    middle.sent.add(target=0, bytes=10)
    middle.sent.add(target=2, bytes=20)
    last = part(2, 7, loss=0.25, eval_loss=0.5, step_s=1.25, learning_rate=0.1, samples=8, tokens=64)
    metrics = combine([last, first, middle])
    assert (metrics.step, metrics.loss, metrics.eval_loss, metrics.grad_norm) == (7, 0.25, 0.5, 2.5)
    assert (metrics.step_s, metrics.bytes, metrics.samples, metrics.tokens) == (1.5, 130, 8, 64)
    assert metrics.skipped
    assert [stage.stage for stage in metrics.stages] == [0, 1, 2]


def test_what_no_stage_reported_is_not_a_number_rather_than_zero():
    metrics = combine([part(0, 1)])
    assert math.isnan(metrics.loss)
    assert math.isnan(metrics.grad_norm)
    assert not metrics.HasField("eval_loss")


def test_steps_finish_in_order_and_a_lost_report_holds_nothing_up():
    progress = JobProgress(JOB, 2, None, 0)
    for stage, step in ((0, 1), (0, 2), (1, 1), (0, 3), (1, 3), (1, 2)):
        progress.add_step(part(stage, step))
    assert [metrics.step for metrics in progress.steps_in_memory(0)] == [1, 3]
    progress.add_step(part(1, 3))
    assert progress.last_step == 3
    assert progress.steps_in_memory(3) == []


def run(test):
    async def main():
        thread, store = StoreThread(), MemoryStore()
        await thread.open(lambda: store)
        book = ProgressBook(thread, 0.0, 2000)

        async def for_ever():
            while True:
                await book.write()

        writer = asyncio.create_task(for_ever())
        try:
            await test(book, store)
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
            await thread.close()

    asyncio.run(main())


def test_a_report_is_answered_only_when_it_is_kept():
    async def test(book, store):
        progress = await book.of(JOB, 2)
        await book.add(progress, [part(0, 1), part(1, 1)], [node_pb2.LogLine(text="hi")])
        assert [row.stage for row in store.steps(JOB, 0, 10)] == [0, 1]
        assert len(store.logs(JOB, 0, 10)) == 1

    run(test)


def test_readers_far_behind_read_from_the_store_and_miss_nothing():
    async def test(book, store):
        progress = await book.of(JOB, 1)
        total = RING + 300
        for first in range(1, total, 100):
            steps = [part(0, step, loss=float(step)) for step in range(first, min(first + 100, total + 1))]
            await book.add(progress, steps, [node_pb2.LogLine(text=f"line {step.step}") for step in steps])
        seen, position = [], 0
        while found := await book.steps(progress, position):
            seen += [metrics.step for metrics in found]
            position = seen[-1]
        assert seen == list(range(1, total + 1))
        lines, position = [], 0
        while rows := await book.lines(progress, position):
            lines += [node_pb2.LogLine.FromString(row.body).text for row in rows]
            position = rows[-1].number
        assert lines == [f"line {step}" for step in range(1, total + 1)]

    run(test)


def test_after_a_restart_it_knows_the_last_step_and_the_halves_of_later_ones():
    async def test(book, store):
        progress = await book.of(JOB, 2)
        await book.add(progress, [part(0, 1), part(1, 1, loss=0.5), part(0, 2)], [node_pb2.LogLine(text="x")])
        fresh = ProgressBook(book._store, 0.0, 2000)
        again = await fresh.of(JOB, 2)
        assert (again.last_step, again.last.loss, again.last_log) == (1, 0.5, 1)
        again.add_step(part(1, 2, loss=0.25))
        assert (again.last_step, again.last.loss) == (2, 0.25)

    run(test)


def test_t17_lines_cannot_steer_a_terminal_or_grow_without_end():
    progress = JobProgress(JOB, 1, None, 0)
    row = progress.add_line(node_pb2.LogLine(text="a\x1b[2J\nb" + "x" * 9000, origin="n\x07", level="info"))
    line = node_pb2.LogLine.FromString(row.body)
    assert line.text.startswith("a\\x1b[2J\\nbx")
    assert len(line.text) < 2100
    assert line.origin == "n\\x07"


def test_only_so_many_lines_of_a_job_are_kept():
    async def test(book, store):
        progress = await book.of(JOB, 1)
        for first in range(0, 5000, 500):
            await book.add(progress, [], [node_pb2.LogLine(text=str(first + index)) for index in range(500)])
        kept = store.logs(JOB, 0, 10_000)
        assert kept[-1].number == 5000
        assert 2000 <= len(kept) <= 3000

    run(test)


def test_ended_jobs_do_not_stay_in_memory_for_ever():
    async def test(book, store):
        for index in range(200):
            job = JobId(f"job-{index:010}")
            progress = await book.of(job, 1)
            await book.add(progress, [part(0, 1, loss=1.0)], [])
            book.job_over(job)
        assert sum(book.known(JobId(f"job-{index:010}")) is not None for index in range(200)) <= 66
        assert (await book.of(JobId("job-0000000000"), 1)).last.loss == 1.0

    run(test)
