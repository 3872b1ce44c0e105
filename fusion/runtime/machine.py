"""The stage as a machine without I/O: arrivals go in, the next instruction comes out.

A stage's step is one fixed list of instructions. Each names the messages that it needs; the machine releases it once
they are there, and never out of order. So a stage's additions have one order, whatever the network does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fusion.base.ids import EdgeId, StageIndex
from fusion.graph.partition import Partition
from fusion.plan.schedule import StageSchedule
from fusion.protocol.messages import MessageKind


@dataclass(frozen=True, slots=True)
class Key:
    """Names one message within an epoch."""

    kind: MessageKind
    step: int
    micro_batch: int
    edge: int


@dataclass(frozen=True, slots=True)
class Forward:
    """Run the forward of a micro-batch and send what leaves."""

    step: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Backward:
    """Run the backward of a micro-batch and send the gradients back."""

    step: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class SendTied:
    """Send the summed gradients of the local uses of shared parameters to the other holders."""

    step: int


@dataclass(frozen=True, slots=True)
class SumTied:
    """Add up the gradients of all uses of the shared parameters for which this stage answers, or of the others."""

    step: int
    answering: bool


@dataclass(frozen=True, slots=True)
class Norm:
    """Add this stage's sums of squares to those from behind and pass them on; at stage 0, give the verdict."""

    step: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """Take the verdict from the stage before and pass it on."""

    step: int


@dataclass(frozen=True, slots=True)
class Update:
    """Apply the optimizer (or skip it), and report the step."""

    step: int


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Run the evaluation's forward of a micro-batch and send what leaves."""

    step: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class EndStep:
    """Nothing of the step is left to do; report it."""

    step: int


Instruction = Forward | Backward | SendTied | SumTied | Norm | Verdict | Update | Evaluate | EndStep


@dataclass(frozen=True, slots=True)
class StageRole:
    """What a stage has to do with others, derived from the partition."""

    stage: StageIndex
    stages: int
    incoming: tuple[EdgeId, ...]
    outgoing: tuple[EdgeId, ...]
    tied_in: tuple[int, ...]  #: uses, by number, whose gradients come from other stages, of parameters it answers for
    tied_in_late: tuple[int, ...]  #: the same of parameters for which an earlier stage answers
    tied_out: tuple[tuple[int, StageIndex], ...]  #: (local use, other holder)

    @staticmethod
    def of(partition: Partition, stage: StageIndex) -> StageRole:
        """Return the role of `stage`."""
        early: list[int] = []
        late: list[int] = []
        out: list[tuple[int, StageIndex]] = []
        number = 0
        for shared in partition.shared:
            for use in shared.uses:
                if stage in shared.holders and use.stage != stage:
                    (early if shared.holders[0] == stage else late).append(number)
                if use.stage == stage:
                    out += [(number, holder) for holder in shared.holders if holder != stage]
                number += 1
        shard = partition.shards[stage]
        return StageRole(
            stage, len(partition.shards), shard.incoming, shard.outgoing, tuple(early), tuple(late), tuple(out)
        )

    def peers(self, partition: Partition) -> tuple[StageIndex, ...]:
        """Return the stages with which it exchanges messages, ascending."""
        edges = [partition.edges[edge] for edge in (*self.incoming, *self.outgoing)]
        found = {edge.source for edge in edges} | {edge.target for edge in edges}
        found |= {StageIndex(self.stage - 1), StageIndex(self.stage + 1)}
        for shared in partition.shared:
            if self.stage in shared.holders:
                found |= set(shared.holders)
        return tuple(sorted(stage for stage in found if 0 <= stage < self.stages and stage != self.stage))


class StageMachine:
    """Steps through a stage's instructions as their messages arrive."""

    def __init__(
        self,
        role: StageRole,
        schedule: StageSchedule,
        *,
        first_step: int,
        last_step: int,
        eval_every_steps: int = 0,
        eval_micro_batches: int = 0,
    ) -> None:
        self._role = role
        self._schedule = schedule
        self._eval_every_steps = eval_every_steps
        self._eval_micro_batches = eval_micro_batches
        self._last_step = last_step
        self._stop_after = last_step
        #: edges whose gradient is wanted back, by (step, micro-batch): known once the forward has run
        self._wanted: dict[tuple[int, int], tuple[EdgeId, ...]] = {}
        self._here: set[Key] = set()
        self._awaited: set[Key] | None = None  #: of the next instruction; None until somebody asks
        self._program = self._run(first_step)
        self._next: Instruction | None = next(self._program, None)

    def stop_after(self, step: int) -> None:
        """End after `step`, which is under way, as if it had been the last; what the last step adds is left out."""
        self._stop_after = step

    @property
    def finished(self) -> bool:
        """Whether the last instruction of the last step has been taken."""
        return self._next is None

    @property
    def current(self) -> Instruction | None:
        """The instruction that is next, whether or not it can run yet."""
        return self._next

    def arrived(self, key: Key) -> None:
        """Note that a message is here; a second one of the same key is an error of the transport."""
        assert key not in self._here, f"{key} arrived twice"
        self._here.add(key)
        if self._awaited is not None:
            self._awaited.discard(key)

    def sent(self, step: int, micro_batch: int, wanted: tuple[EdgeId, ...]) -> None:
        """Note which of the values that a forward sent want their gradients back."""
        self._wanted[step, micro_batch] = wanted

    def missing(self) -> set[Key]:
        """Return the messages that the next instruction still waits for."""
        if self._awaited is None:
            self._awaited = set() if self._next is None else set(self.needs(self._next)) - self._here
        return self._awaited

    def take(self) -> Instruction | None:
        """Return the next instruction if all that it needs is here, and go on to the one after it."""
        if self._next is None or self.missing():
            return None
        instruction = self._next
        self._here.difference_update(self.needs(instruction))
        if isinstance(instruction, Backward):
            self._wanted.pop((instruction.step, instruction.micro_batch))
        self._next = next(self._program, None)
        self._awaited = None
        return instruction

    def needs(self, instruction: Instruction) -> tuple[Key, ...]:
        """Return the messages that an instruction consumes."""
        role = self._role
        match instruction:
            case Forward(step, micro_batch):
                return tuple(Key(MessageKind.ACTIVATION, step, micro_batch, edge) for edge in role.incoming)
            case Evaluate(step, micro_batch):
                return tuple(Key(MessageKind.EVAL, step, micro_batch, edge) for edge in role.incoming)
            case Backward(step, micro_batch):
                wanted = self._wanted.get((step, micro_batch), ())
                return tuple(Key(MessageKind.GRADIENT, step, micro_batch, edge) for edge in wanted)
            case SumTied(step, answering):
                uses = role.tied_in if answering else role.tied_in_late
                return tuple(Key(MessageKind.TIED, step, 0, use) for use in uses)
            case Norm(step):
                return () if role.stage == role.stages - 1 else (Key(MessageKind.NORM, step, 0, 0),)
            case Verdict(step):
                return (Key(MessageKind.VERDICT, step, 0, 0),)
            case SendTied() | Update() | EndStep():
                return ()

    def _run(self, first_step: int) -> Iterator[Instruction]:
        step = first_step - 1
        while step < self._stop_after:
            step += 1
            for task in self._schedule:
                yield Forward(step, task.micro_batch) if task.kind == "F" else Backward(step, task.micro_batch)
            yield from self._end_of_step(step)

    def _end_of_step(self, step: int) -> Iterator[Instruction]:
        if self._role.tied_out:
            yield SendTied(step)
        yield SumTied(step, answering=True)
        yield Norm(step)
        if self._role.stage > 0:
            yield Verdict(step)
        if self._role.tied_in_late:
            yield SumTied(step, answering=False)
        yield Update(step)
        if self._eval_every_steps and (step % self._eval_every_steps == 0 or step == self._last_step):
            for micro_batch in range(self._eval_micro_batches):
                yield Evaluate(step, micro_batch)
        yield EndStep(step)
