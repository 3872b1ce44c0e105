"""A stage at work: takes instructions from its machine, runs them, and exchanges messages through an outbox."""

from __future__ import annotations

import dataclasses
import math
import queue
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from fusion.base.errors import NumericError, StoppedError
from fusion.base.ids import EdgeId, StageIndex
from fusion.graph.partition import Edge, Partition
from fusion.observe import failpoints
from fusion.observe.spans import SpanRecorder
from fusion.plan.schedule import StageSchedule
from fusion.plan.timeline import Kind
from fusion.protocol.job import JobSpec
from fusion.protocol.messages import MessageKind
from fusion.protocol.passes import CodecPass, NormPass, VerdictPass
from fusion.runtime import machine
from fusion.runtime.batches import Batches, Samples, tokens_per_sample, weighted_mean
from fusion.runtime.coding import StageCoder
from fusion.runtime.executor import ShardExecutor
from fusion.runtime.machine import Key, StageMachine, StageRole
from fusion.runtime.optimizer import OPTIMIZER_PREFIX, StageOptimizer, decide, sums_of_squares
from fusion.runtime.versions import Keeper, Versions

MOST_SKIPS = 3  #: steps in a row whose gradients are not finite end the run
_SPANS: dict[type[machine.Instruction], Kind] = {
    machine.Forward: Kind.FORWARD,
    machine.Backward: Kind.BACKWARD,
    machine.Update: Kind.UPDATE,
    machine.Evaluate: Kind.EVALUATE,
}
_LONGEST_WAIT_S = 1.0  #: between two looks at whether the stage was asked to stop


@dataclass(slots=True)
class Arrived:
    """A message's content: a tensor, or numbers, or neither for an absent gradient."""

    tensor: torch.Tensor | None = None
    requires_grad: bool = False
    numbers: bytes = b""
    release: Callable[[], None] | None = None  #: returns the sender's credit once the content is used


class Outbox(Protocol):
    """Where a stage's messages go. Neither call waits for the network."""

    def send_tensor(self, target: StageIndex, key: Key, tensor: torch.Tensor | None, *, requires_grad: bool) -> None:
        """Send a value or a gradient; None is a gradient that does not exist."""
        ...

    def send_numbers(self, target: StageIndex, key: Key, numbers: bytes) -> None:
        """Send a small control message ahead of bulk."""
        ...

    def bytes_sent(self) -> dict[StageIndex, int]:
        """Return the payload bytes sent to each stage so far."""
        ...


@dataclass(frozen=True, slots=True)
class StageRecord:
    """What one stage did in one step."""

    step: int
    learning_rate: float
    skipped: bool
    step_s: float
    compute_s: float
    wait_s: float
    samples: int
    tokens: int
    sent_bytes: dict[StageIndex, int]
    loss: float | None = None  #: from the loss stage, and from stage 0
    eval_loss: float | None = None
    grad_norm: float | None = None  #: from stage 0, and from the loss stage
    waited_s: dict[StageIndex, float] = field(default_factory=dict)  #: of wait_s, by the stage that was waited for
    micro_batches: tuple[int, ...] = ()  #: whose gradients were added up, in order
    spoiled: bool = False  #: gradients were not finite here, and were on all later stages


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a full micro-batch takes on the device that this one stands for."""

    forward_s: float
    backward_s: float


@dataclass(slots=True)
class _StepState:
    """What a stage gathers during a step."""

    started_s: float
    weights: list[float]
    losses: list[torch.Tensor]
    eval_losses: list[torch.Tensor]
    tied: dict[int, torch.Tensor | None]
    backwards: list[int] = field(default_factory=list)  #: micro-batches whose gradients are in
    spoiled: bool = False  #: own gradients are not finite, and those from behind are
    loss: float | None = None  #: once it is known here
    verdict: VerdictPass | None = None
    compute_s: float = 0.0
    wait_s: float = 0.0
    waited_s: dict[StageIndex, float] = field(default_factory=dict)


class StageRunner:
    """One stage of a job. `deliver` may be called from any thread; everything else from the one that computes."""

    def __init__(
        self,
        job: JobSpec,
        partition: Partition,
        schedule: StageSchedule,
        executor: ShardExecutor,
        data: Samples | None,
        eval_data: Samples | None,
        outbox: Outbox,
        on_step: Callable[[StageRecord], None],
        first_step: int = 1,
        pace: Pace | None = None,
        keeper: Keeper | None = None,
        coder: StageCoder | None = None,
    ) -> None:
        """`coder` is that of the outbox: what it keeps between steps is the stage's state."""
        self._job = job
        self._coder = coder
        self.spans: SpanRecorder | None = None  #: notes what the stage does when, if somebody wants to know
        self.pace = pace  #: of an emulated device; may be changed while it runs, from any thread
        self._partition = partition
        self.executor = executor
        self.stage = executor.stage
        self._outbox = outbox
        self._on_step = on_step
        dynamic = partition.graph.dynamic_batch
        self._batches = Batches(job, data)
        self._evaluation = Batches(job, eval_data, evaluation=True, dynamic=dynamic)
        self._role = StageRole.of(partition, self.stage)
        self._machine = StageMachine(
            self._role,
            schedule,
            first_step=first_step,
            last_step=job.steps,
            eval_every_steps=job.eval_every_steps,
            eval_micro_batches=len(self._evaluation.sizes),
        )
        self._optimizer = StageOptimizer(job, executor.parameters)
        self._shared = [shared for shared in partition.shared if self.stage in shared.holders]
        self._names = {value: item.name for value, item in partition.graph.input_of.items()}
        self._arrivals: queue.SimpleQueue[tuple[Key, Arrived]] = queue.SimpleQueue()
        self._contents: dict[Key, Arrived] = {}
        self._tokens = tokens_per_sample(job.data)
        self._state: _StepState | None = None
        self._sent_before: dict[StageIndex, int] = {}
        self._skips = 0  #: steps in a row that were skipped, so far
        self._hold_wanted = False
        self._codecs_wanted: CodecPass | None = None
        self._versions = Versions(keeper, first_step - 1, every_steps=job.checkpoint_every_steps, last_step=job.steps)
        self.held_after: int | None = None  #: the step after which all stages hold, once that is decided

    @property
    def finished(self) -> bool:
        """Whether the last step is over, or the one after which the stage holds."""
        return self._machine.finished

    def deliver(self, key: Key, content: Arrived) -> None:
        """Hand over a message that has arrived. Thread-safe."""
        self._arrivals.put((key, content))

    def hold(self) -> None:
        """Ask for an end of the run at the next step's end, alike on all stages. Only stage 0 decides. Thread-safe."""
        self._hold_wanted = True

    def recode(self, change: CodecPass) -> None:
        """Ask for other codecs on some links, on all stages from one step on. Only stage 0 decides. Thread-safe."""
        self._codecs_wanted = change

    def state(self) -> dict[str, torch.Tensor]:
        """Return all that the stage needs to go on after the step that it has done, by names that no cut changes."""
        coding = {} if self._coder is None else self._coder.state()
        return self.executor.parameters | self.executor.buffers | self._optimizer.state() | coding

    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over the state of optimizer and codecs; parameters and buffers came with the executor."""
        self._optimizer.load_state(
            {name: value for name, value in tensors.items() if name.startswith(OPTIMIZER_PREFIX)}
        )
        if self._coder is not None:
            self._coder.load_state(tensors)

    def run(self, should_stop: Callable[[], str | None]) -> None:
        """Work until the job's last step; StoppedError with the reason once `should_stop` gives one."""
        while not self.finished:
            reason = should_stop()
            if reason is not None:
                raise StoppedError(reason)
            if not self.advance():
                self._await_arrival()

    def waits_for(self) -> set[Key]:
        """Return the messages without which the stage cannot go on now."""
        return self._machine.missing()

    def advance(self) -> bool:
        """Run the next instruction if its messages are here; return whether there was one."""
        self._collect()
        instruction = self._machine.take()
        if instruction is None:
            return False
        state = self._step_state(instruction.step)
        begin_s, start_s = time.perf_counter(), time.monotonic()
        self._execute(instruction, state)
        state.compute_s += time.perf_counter() - begin_s
        kind = _SPANS.get(type(instruction))
        if self.spans is not None and kind is not None:
            micro_batch = getattr(instruction, "micro_batch", -1)
            self.spans.work(kind, instruction.step, micro_batch, start_s, time.monotonic())
        if isinstance(instruction, machine.EndStep):
            self._report(instruction.step, state)
        return True

    def _await_arrival(self) -> None:
        begin_s, missing = time.perf_counter(), self._machine.missing()
        with suppress(queue.Empty):
            self._note(*self._arrivals.get(timeout=_LONGEST_WAIT_S))
        if self._state is not None:
            waited_s = time.perf_counter() - begin_s
            self._count_wait(self._state, missing, waited_s)
            if self.spans is not None and self._machine.current is not None:
                end_s = time.monotonic()
                self.spans.work(Kind.WAIT, self._machine.current.step, -1, end_s - waited_s, end_s)

    def _count_wait(self, state: _StepState, missing: set[Key], seconds: float) -> None:
        """Share a wait out among the stages that something was still missing from."""
        state.wait_s += seconds
        sources = {source for key in missing if (source := self._sender(key)) is not None}
        for source in sources:
            state.waited_s[source] = state.waited_s.get(source, 0.0) + seconds / len(sources)

    def _sender(self, key: Key) -> StageIndex | None:
        """Return the stage whose message a key names; None for tied gradients and control messages."""
        if key.kind in (MessageKind.ACTIVATION, MessageKind.EVAL):
            return self._edge(EdgeId(key.edge)).source
        return self._edge(EdgeId(key.edge)).target if key.kind is MessageKind.GRADIENT else None

    def _collect(self) -> None:
        while True:
            try:
                self._note(*self._arrivals.get_nowait())
            except queue.Empty:
                return

    def _note(self, key: Key, content: Arrived) -> None:
        self._machine.arrived(key)
        self._contents[key] = content

    def _take(self, key: Key) -> Arrived:
        content = self._contents.pop(key)
        if content.release is not None:
            content.release()
        return content

    def _step_state(self, step: int) -> _StepState:
        if self._state is None:
            weights = self._batches.loss_weights(step) if self.executor.makes_loss else []
            self._state = _StepState(time.perf_counter(), weights, [], [], {})
        return self._state

    def _execute(self, instruction: machine.Instruction, state: _StepState) -> None:
        match instruction:
            case machine.Forward(step, micro_batch):
                self._forward(step, micro_batch, state)
            case machine.Backward(step, micro_batch):
                self._backward(step, micro_batch, state)
            case machine.SendTied(step):
                self._send_tied(step)
            case machine.SumTied(step, answering):
                self._sum_tied(step, answering, state)
            case machine.Norm(step):
                self._norm(step, state)
            case machine.Verdict(step):
                self._pass_verdict(step, state)
            case machine.Update(step):
                assert state.verdict is not None
                failpoints.reach("stage.before_update", stage=self.stage, step=step)
                if state.verdict.apply:
                    self._optimizer.apply(step, state.verdict.factor)
                self.executor.clear_gradients()
                failpoints.reach("stage.after_update", stage=self.stage, step=step)
                if state.verdict.keep:
                    self._versions.keep(step, self.state())
            case machine.Evaluate(step, micro_batch):
                self._evaluate(step, micro_batch, state)
            case machine.EndStep(step):
                if self._coder is not None:
                    self._coder.end_step(step)

    def _forward(self, step: int, micro_batch: int, state: _StepState) -> None:
        failpoints.reach("stage.forward", stage=self.stage, step=step, micro_batch=micro_batch)
        received = {}
        for edge in self._role.incoming:
            content = self._take(Key(MessageKind.ACTIVATION, step, micro_batch, edge))
            assert content.tensor is not None
            received[edge] = (content.tensor, content.requires_grad)
        begin_s = time.perf_counter()
        fields = self._on_device(self._batches.fields(self.executor.batch_fields.keys(), step, micro_batch))
        result = self.executor.forward(step, micro_batch, fields, received, self._batches.sizes[micro_batch])
        self._stretch(begin_s, micro_batch, "forward_s")
        wanted = tuple(edge for edge, value in result.edges.items() if value.requires_grad)
        self._machine.sent(step, micro_batch, wanted)
        for edge, value in result.edges.items():
            key = Key(MessageKind.ACTIVATION, step, micro_batch, edge)
            self._outbox.send_tensor(self._edge(edge).target, key, value.detach(), requires_grad=value.requires_grad)
        if result.loss is not None:
            state.losses.append(result.loss)

    def _backward(self, step: int, micro_batch: int, state: _StepState) -> None:
        gradients: dict[EdgeId, torch.Tensor | None] = {}
        for edge in self._role.outgoing:
            key = Key(MessageKind.GRADIENT, step, micro_batch, edge)
            if key in self._contents:
                gradients[edge] = self._take(key).tensor

        begin_s = time.perf_counter()
        weight = state.weights[micro_batch] if state.weights else 0.0
        found = self.executor.backward(micro_batch, weight, gradients)
        state.backwards.append(micro_batch)
        if failpoints.reach("stage.backward", stage=self.stage, step=step, micro_batch=micro_batch) == "nan":
            self._spoil_gradient()
        self._stretch(begin_s, micro_batch, "backward_s")
        for edge, gradient in found.items():
            key = Key(MessageKind.GRADIENT, step, micro_batch, edge)
            self._outbox.send_tensor(self._edge(edge).source, key, gradient, requires_grad=False)

    def _stretch(self, begin_s: float, micro_batch: int, which: Literal["forward_s", "backward_s"]) -> None:
        """On an emulated device: wait until the pass that began at `begin_s` has taken as long as it would there."""
        pace = self.pace
        if pace is not None:
            sizes = self._batches.sizes
            left_s = begin_s + getattr(pace, which) * sizes[micro_batch] / sizes[0] - time.perf_counter()
            if left_s > 0:
                time.sleep(left_s)

    def _spoil_gradient(self) -> None:
        """For tests: let one element of one gradient be no number."""
        gradient = next(tensor.grad for tensor in self.executor.parameters.values() if tensor.grad is not None)
        gradient.view(-1)[0] = math.nan

    def _send_tied(self, step: int) -> None:
        gradients = self.executor.use_gradients()
        for use, holder in self._role.tied_out:
            key = Key(MessageKind.TIED, step, 0, use)
            self._outbox.send_tensor(holder, key, gradients[use], requires_grad=False)

    def _sum_tied(self, step: int, answering: bool, state: _StepState) -> None:
        """Set the gradient of shared parameters to the sum over their uses, in the uses' own order."""
        state.tied.update(self.executor.use_gradients())
        for use in self._role.tied_in if answering else self._role.tied_in_late:
            state.tied[use] = self._take(Key(MessageKind.TIED, step, 0, use)).tensor
        number = 0
        for shared in self._partition.shared:
            numbers = range(number, number + len(shared.uses))
            number += len(shared.uses)
            if self.stage in shared.holders and (shared.holders[0] == self.stage) == answering:
                self.executor.parameters[self._names[shared.value]].grad = _sum(state.tied.pop(use) for use in numbers)

    def _norm(self, step: int, state: _StepState) -> None:
        sums, safe = self._own_sums(), self._versions.safe
        if self.executor.makes_loss:
            state.loss = weighted_mean(_numbers(state.losses), state.weights)
        state.spoiled = not all(map(math.isfinite, sums))
        if self.stage + 1 < self._role.stages:
            behind = NormPass.unpack(self._take(Key(MessageKind.NORM, step, 0, 0)).numbers)
            state.spoiled &= all(map(math.isfinite, behind.sums))
            sums += behind.sums
            safe = min(safe, behind.safe)
            state.loss = behind.loss if state.loss is None else state.loss
        if self.stage > 0:
            packed = NormPass(tuple(sums), safe, math.nan if state.loss is None else state.loss).pack()
            self._outbox.send_numbers(StageIndex(self.stage - 1), Key(MessageKind.NORM, step, 0, 0), packed)
            return
        verdict = decide(sums, self._job.grad_clip)
        self._mind_divergence(step, verdict.apply)
        hold = self._hold_wanted and step < self._job.steps
        keep = not hold and self._versions.wanted(step, safe) and not failpoints.reach("stage.keep", step=step)
        tail = self._codec_change(step)
        self._obey(step, VerdictPass(verdict.apply, verdict.factor, verdict.norm, hold, keep, safe, tail), state)

    def _codec_change(self, step: int) -> bytes:
        """Return the wanted codecs, packed, at stage 0: for the step after the next.

        Every stage has heard of it before any message of that step exists, because the next verdict waits for all.
        """
        wanted = self._codecs_wanted
        if self._coder is None or wanted is None or wanted.revision <= self._coder.newest_revision:
            return b""
        return dataclasses.replace(wanted, from_step=step + 2).pack()

    def _mind_divergence(self, step: int, finite: bool) -> None:
        """A step may be skipped; one after the other, the model no longer learns, and never will again."""
        self._skips = 0 if finite else self._skips + 1
        if self._skips >= MOST_SKIPS:
            raise NumericError(
                f"diverged: the gradients of steps {step - MOST_SKIPS + 1} to {step} were not finite; nothing was "
                "changed since; lower the learning rate, set grad_clip, or look at the data"
            )

    def _own_sums(self) -> list[float]:
        """Return the sums of squares of the parameters for which this stage answers."""
        foreign = {self._names[shared.value] for shared in self._shared if shared.holders[0] != self.stage}
        gradients = [
            tensor.grad
            for name, tensor in self.executor.parameters.items()
            if tensor.grad is not None and name not in foreign
        ]
        return sums_of_squares(gradients)

    def _pass_verdict(self, step: int, state: _StepState) -> None:
        self._obey(step, VerdictPass.unpack(self._take(Key(MessageKind.VERDICT, step, 0, 0)).numbers), state)

    def _obey(self, step: int, verdict: VerdictPass, state: _StepState) -> None:
        """Pass the verdict on and act on it; it travels in the step, so all stages do the same in the same one."""
        state.verdict = verdict
        if verdict.hold:
            self.held_after = step
            self._machine.stop_after(step)
        if self.stage + 1 < self._role.stages:
            key = Key(MessageKind.VERDICT, step, 0, 0)
            self._outbox.send_numbers(StageIndex(self.stage + 1), key, verdict.pack())
        if verdict.tail and self._coder is not None:
            change = CodecPass.unpack(verdict.tail, self._role.stages)
            self._coder.change(change.from_step, change.specs(), change.revision)
        self._versions.stable(verdict.stable)

    def _evaluate(self, step: int, micro_batch: int, state: _StepState) -> None:
        received = {}
        for edge in self._role.incoming:
            tensor = self._take(Key(MessageKind.EVAL, step, micro_batch, edge)).tensor
            assert tensor is not None
            received[edge] = tensor
        fields = self._on_device(self._evaluation.fields(self.executor.batch_fields.keys(), step, micro_batch))
        result = self.executor.evaluate(step, micro_batch, fields, received, self._evaluation.sizes[micro_batch])
        for edge, value in result.edges.items():
            key = Key(MessageKind.EVAL, step, micro_batch, edge)
            self._outbox.send_tensor(self._edge(edge).target, key, value, requires_grad=False)
        if result.loss is not None:
            state.eval_losses.append(result.loss)

    def _report(self, step: int, state: _StepState) -> None:
        assert state.verdict is not None
        self._state = None
        eval_loss = None
        if state.eval_losses:
            eval_loss = weighted_mean(_numbers(state.eval_losses), self._evaluation.loss_weights(step))
        told_twice = self.stage == 0 or self.executor.makes_loss  # should one of them die before its report has arrived
        sent = self._outbox.bytes_sent()
        before, self._sent_before = self._sent_before, sent
        self._on_step(
            StageRecord(
                step=step,
                learning_rate=self._optimizer.learning_rate(step),
                skipped=not state.verdict.apply,
                step_s=time.perf_counter() - state.started_s,
                compute_s=state.compute_s,
                wait_s=state.wait_s,
                waited_s=state.waited_s,
                samples=self._job.batch_size,
                tokens=self._job.batch_size * self._tokens,
                sent_bytes={target: count - before.get(target, 0) for target, count in sent.items()},
                loss=state.loss if told_twice else None,
                eval_loss=eval_loss,
                grad_norm=state.verdict.norm if told_twice else None,
                micro_batches=tuple(state.backwards),
                spoiled=state.spoiled,
            )
        )

    def _edge(self, edge: EdgeId) -> Edge:
        return self._partition.edges[edge]

    def _on_device(self, fields: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        device = self.executor.device
        if device.type == "cpu":
            return fields
        return {name: tensor.to(device, non_blocking=True) for name, tensor in fields.items()}


def _sum(gradients: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
    total: torch.Tensor | None = None
    for gradient in gradients:
        if gradient is not None:
            total = gradient if total is None else total + gradient
    return total


def _numbers(losses: list[torch.Tensor]) -> list[float]:
    """Return the losses as numbers, in one transfer."""
    values = torch.stack([loss.to(torch.float64) if loss.device.type != "mps" else loss for loss in losses])
    return [float(value) if math.isfinite(value) else math.nan for value in values.tolist()]
