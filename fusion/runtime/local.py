"""The whole job in this process: the reference that every distributed run must equal, whole or in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from fusion.base.errors import StateError
from fusion.base.ids import StageIndex
from fusion.graph.dag import Graph
from fusion.graph.partition import Partition, partition
from fusion.plan.schedule import check_schedule, make_schedule
from fusion.protocol.job import JobSpec
from fusion.protocol.metrics import StageMetrics, StepMetrics
from fusion.runtime.batches import Samples
from fusion.runtime.executor import ShardExecutor
from fusion.runtime.machine import Key
from fusion.runtime.optimizer import OPTIMIZER_PREFIX
from fusion.runtime.stage import Arrived, StageRecord, StageRunner

Carry = Callable[[torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class LocalResult:
    """What a run in one process leaves: each step's metrics, and parameters, buffers and optimizer state by name."""

    steps: list[StepMetrics] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


class _DirectOutbox:
    """Hands messages straight to the other runners of the same process."""

    def __init__(self, runners: dict[StageIndex, StageRunner], carry: Carry | None) -> None:
        self._runners = runners
        self._carry = carry
        self._bytes: dict[StageIndex, int] = {}

    def send_tensor(self, target: StageIndex, key: Key, tensor: torch.Tensor | None, *, requires_grad: bool) -> None:
        if tensor is not None:
            self._count(target, tensor.numel() * tensor.element_size())
            tensor = tensor if self._carry is None else self._carry(tensor)
        self._runners[target].deliver(key, Arrived(tensor, requires_grad))

    def send_numbers(self, target: StageIndex, key: Key, numbers: bytes) -> None:
        self._count(target, len(numbers))
        self._runners[target].deliver(key, Arrived(numbers=numbers))

    def bytes_sent(self) -> dict[StageIndex, int]:
        return dict(self._bytes)

    def _count(self, target: StageIndex, count: int) -> None:
        self._bytes[target] = self._bytes.get(target, 0) + count


def run_local(
    spec: JobSpec,
    graph: Graph,
    tensors: Mapping[str, torch.Tensor],
    data: Samples,
    eval_data: Samples | None = None,
    *,
    on_step: Callable[[StepMetrics], None] | None = None,
    stages: Sequence[int] = (),
    device: str = "cpu",
    carry: Carry | None = None,
    first_step: int = 1,
) -> LocalResult:
    """Run a job in this process and thread, in one piece or cut at the operator positions `stages`.

    `carry` is applied to every tensor between pieces. `tensors` are copied, not changed; to go on at `first_step` they
    hold what a run that did the steps before it left. The process's random numbers and torch settings are put back
    afterwards.
    """
    result = LocalResult()
    parts = partition(graph, stages)

    def finished_step(metrics: StepMetrics) -> None:
        result.steps.append(metrics)
        if on_step is not None:
            on_step(metrics)

    with compute_settings(spec, device):
        runners = make_runners(spec, parts, tensors, data, eval_data, finished_step, device, carry, first_step)
        while not all(runner.finished for runner in runners):
            if not any(runner.advance() for runner in runners):
                waiting = {int(runner.stage): runner.waits_for() for runner in runners if not runner.finished}
                raise StateError(f"stages wait for each other: {waiting}")
    for runner in runners:
        result.tensors |= runner.state()
    result.tensors = {name: tensor.detach() for name, tensor in result.tensors.items()}
    return result


def make_runners(
    spec: JobSpec,
    parts: Partition,
    tensors: Mapping[str, torch.Tensor],
    data: Samples,
    eval_data: Samples | None,
    on_step: Callable[[StepMetrics], None],
    device: str = "cpu",
    carry: Carry | None = None,
    first_step: int = 1,
) -> list[StageRunner]:
    """Return a runner for every shard, connected without a network; `carry` stands for a tensor's way over one."""
    count = len(parts.shards)
    schedules = make_schedule(spec.schedule, count, spec.micro_batches)
    check_schedule(schedules, spec.micro_batches)
    runners: dict[StageIndex, StageRunner] = {}
    gather = StepGatherer(count, on_step)
    for shard in parts.shards:
        stage = shard.index
        executor = ShardExecutor(
            parts,
            stage,
            tensors,
            device=device,
            seed=spec.seed,
            precision=spec.precision,
            draw_on_cpu=spec.determinism == "strict",
        )
        runners[stage] = StageRunner(
            spec,
            parts,
            schedules[stage],
            executor,
            data,
            eval_data,
            _DirectOutbox(runners, carry),
            gather.taker(stage),
            first_step,
        )
        runners[stage].load_state({name: value for name, value in tensors.items() if name.startswith(OPTIMIZER_PREFIX)})
    return list(runners.values())


class StepGatherer:
    """Puts the records of all stages of a step together."""

    def __init__(self, stages: int, on_step: Callable[[StepMetrics], None]) -> None:
        self._stages = stages
        self._on_step = on_step
        self._records: dict[int, dict[StageIndex, StageRecord]] = {}

    def taker(self, stage: StageIndex) -> Callable[[StageRecord], None]:
        """Return the function that takes the records of `stage`."""

        def take(record: StageRecord) -> None:
            records = self._records.setdefault(record.step, {})
            records[stage] = record
            if len(records) == self._stages:
                self._on_step(combine(self._records.pop(record.step)))

        return take


def combine(records: Mapping[StageIndex, StageRecord]) -> StepMetrics:
    """Return a step's metrics from the records of all its stages."""
    first = records[StageIndex(0)]
    losses = [record.loss for record in records.values() if record.loss is not None]
    eval_losses = [record.eval_loss for record in records.values() if record.eval_loss is not None]
    return StepMetrics(
        step=first.step,
        loss=losses[0],
        eval_loss=eval_losses[0] if eval_losses else None,
        grad_norm=first.grad_norm or 0.0,
        learning_rate=first.learning_rate,
        skipped=first.skipped,
        step_s=max(record.step_s for record in records.values()),
        samples=first.samples,
        tokens=first.tokens,
        bytes=sum(sum(record.sent_bytes.values()) for record in records.values()),
        stages=tuple(
            StageMetrics(stage, record.step_s, record.compute_s, record.wait_s, record.sent_bytes)
            for stage, record in sorted(records.items())
        ),
    )


@contextmanager
def compute_settings(spec: JobSpec, device: str = "cpu") -> Iterator[None]:
    """Set torch's threads and determinism as the job asks, and put everything back as it was."""
    threads = torch.get_num_threads()
    deterministic = torch.get_deterministic_debug_mode()
    devices = [torch.device(device)] if device.startswith("cuda") else []
    try:
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            apply_settings(spec)
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode(deterministic)


def apply_settings(spec: JobSpec) -> None:
    """Set torch's threads and determinism for this process.

    Strict: deterministic kernels, no TF32, no autotuning, and one thread unless the job names a number, because sums
    over threads depend on how many there are.
    """
    strict = spec.determinism == "strict"
    if spec.threads or strict:
        torch.set_num_threads(spec.threads or 1)
    # "error" is use_deterministic_algorithms(True); as a mode it can be put back as it was.
    torch.set_deterministic_debug_mode("error" if strict else "default")
    if strict:
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.benchmark = False
