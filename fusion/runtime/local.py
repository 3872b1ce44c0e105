"""The whole job in this process: the reference that every distributed run must equal, whole or in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from fusion.base.errors import StateError
from fusion.base.ids import StageIndex
from fusion.compress.linkcodecs import CodecSchedule
from fusion.graph.dag import Graph
from fusion.graph.partition import Partition, partition
from fusion.plan.schedule import check_schedule, make_schedule, most_in_flight
from fusion.protocol.job import JobSpec
from fusion.protocol.metrics import StageMetrics, StepMetrics
from fusion.runtime.batches import Samples
from fusion.runtime.coding import STATE_PREFIX, StageCoder
from fusion.runtime.executor import ShardExecutor
from fusion.runtime.machine import Key
from fusion.runtime.optimizer import OPTIMIZER_PREFIX
from fusion.runtime.stage import Arrived, StageRecord, StageRunner
from fusion.runtime.versions import Keeper


@dataclass(slots=True)
class LocalResult:
    """What a run in one process leaves: each step's metrics, and parameters, buffers and optimizer state by name."""

    steps: list[StepMetrics] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


class _DirectOutbox:
    """Hands messages straight to the other runners of the same process; through their codecs, if there are any."""

    def __init__(
        self, stage: StageIndex, runners: dict[StageIndex, StageRunner], coders: Mapping[StageIndex, StageCoder]
    ) -> None:
        self._stage = stage
        self._runners = runners
        self._coders = coders
        self._bytes: dict[StageIndex, int] = {}

    def send_tensor(self, target: StageIndex, key: Key, tensor: torch.Tensor | None, *, requires_grad: bool) -> None:
        if tensor is None:
            for stage in (self._stage, target) if self._coders else ():
                self._coders[stage].absent(key)
        elif self._coders:
            sent = self._coders[self._stage].encode(key, tensor, requires_grad=requires_grad)
            self._count(target, len(sent.payload))
            tensor = self._coders[target].decode(
                key, sent.layout, sent.payload, sent.codec, requires_grad=requires_grad
            )
        else:
            self._count(target, tensor.numel() * tensor.element_size())
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
    codecs: CodecSchedule | None = None,
    code_evaluation: bool = False,
    first_step: int = 1,
    keepers: Sequence[Keeper | None] = (),
) -> LocalResult:
    """Run a job in this process and thread, in one piece or cut at the operator positions `stages`.

    With `codecs` every tensor between pieces goes through its link's codec, byte by byte as over a network; without,
    it is handed over as it is. `code_evaluation`: the values of evaluations, too, go through them. `tensors` are
    copied, not changed; to go on at `first_step` they hold what a run that did the steps before it left. `keepers`, one
    for each piece, get versions of its state. The process's random numbers and torch settings are put back afterwards.
    """
    result = LocalResult()
    parts = partition(graph, stages)

    def finished_step(metrics: StepMetrics) -> None:
        result.steps.append(metrics)
        if on_step is not None:
            on_step(metrics)

    coders = {} if codecs is None else make_coders(spec, parts, codecs, device, code_evaluation=code_evaluation)
    with compute_settings(spec, device):
        runners = make_runners(
            spec, parts, tensors, data, eval_data, finished_step, device, first_step, coders, keepers
        )
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
    first_step: int = 1,
    coders: Mapping[StageIndex, StageCoder] | None = None,
    keepers: Sequence[Keeper | None] = (),
) -> list[StageRunner]:
    """Return a runner for every shard, connected without a network; `coders` stand for a tensor's way over one."""
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
            recompute=spec.recompute == "always" and most_in_flight(schedules[stage]) > 1,
        )
        runners[stage] = StageRunner(
            spec,
            parts,
            schedules[stage],
            executor,
            data,
            eval_data,
            _DirectOutbox(stage, runners, coders or {}),
            gather.taker(stage),
            first_step,
            keeper=keepers[stage] if keepers else None,
            coder=(coders or {}).get(stage),
        )
        runners[stage].load_state(
            {name: value for name, value in tensors.items() if name.startswith((OPTIMIZER_PREFIX, STATE_PREFIX))}
        )
    return list(runners.values())


def make_coders(
    spec: JobSpec,
    parts: Partition,
    codecs: CodecSchedule,
    device: str = "cpu",
    *,
    code_evaluation: bool = False,
) -> dict[StageIndex, StageCoder]:
    """Return the codecs at work for every stage of a pipeline in this process."""
    return {
        shard.index: StageCoder(
            parts, shard.index, codecs, seed=spec.seed, device=device, code_evaluation=code_evaluation
        )
        for shard in parts.shards
    }


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
