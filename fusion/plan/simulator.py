"""A discrete-event simulation of a pipeline: stages, links, credit and schedules, as the runtime works through them.

Every stage takes the instructions that `fusion.runtime.machine` lists, strictly in order; each waits for its messages.
What a task makes is handed to the links the moment it is done.
"""

from __future__ import annotations

from itertools import accumulate

from fusion.base.errors import ConfigError
from fusion.plan.schedule import StageSchedule, most_in_flight
from fusion.plan.simulation import (
    EdgeLoad,
    Pipeline,
    Simulation,
    StageLoad,
    StageUse,
    StepTime,
    check_pipeline,
    seconds_each,
)
from fusion.plan.simulator_wires import Events, Line, Message, Sharing
from fusion.plan.timeline import Kind, Span

CONTROL_BYTES = 128  #: a norm or a verdict with its frame, beside the numbers of the norm
_NORM_BYTES_PER_TENSOR = 8

# the instructions of a step; the order of the numbers has no meaning
_FORWARD, _BACKWARD, _SEND_TIED, _SUM, _NORM, _VERDICT, _SUM_LATE, _UPDATE = range(8)
_WORDS = {
    _FORWARD: "forward",
    _BACKWARD: "backward",
    _SEND_TIED: "sending shared gradients",
    _SUM: "summing shared gradients",
    _NORM: "the norm",
    _VERDICT: "the verdict",
    _SUM_LATE: "summing shared gradients",
    _UPDATE: "the update",
}
_KINDS = {_FORWARD: Kind.FORWARD, _BACKWARD: Kind.BACKWARD, _UPDATE: Kind.UPDATE}


def simulate(pipeline: Pipeline, *, steps: int = 1, record: bool = True) -> Simulation:
    """Run `steps` training steps and return when everything happened; spans only if `record`.

    Raises ConfigError for a pipeline that makes no sense, and for one that stands still before its end: it names the
    stages with what they wait for, and the links without credit.
    """
    if steps < 1:
        raise ConfigError(f"steps must be at least 1, got {steps}")
    micro_batches = check_pipeline(pipeline)
    return _Run(pipeline, micro_batches, steps, record).run()


class _Stage:
    """A stage at work: the instructions of a step, and how many messages each still waits for."""

    def __init__(self, index: int, load: StageLoad, micro_batches: int) -> None:
        self.index, self.name = index, load.name
        self.seconds = {
            _FORWARD: seconds_each(load.forward_s, micro_batches),
            _BACKWARD: seconds_each(load.backward_s, micro_batches),
            _UPDATE: [load.update_s],
        }
        self.program: list[tuple[int, int]] = []  #: (instruction, micro-batch) of one step
        self.place: dict[tuple[int, int], int] = {}  #: its inverse
        self.needs: list[int] = []  #: messages, by place in the program
        self.missing: list[int] = []  #: the same over all steps, less what has arrived
        self.next = 0  #: the instruction that is next or at work, counted over all steps
        self.working = False
        self.idle_since_s = self.busy_s = 0.0
        self.began_s = 0.0  #: the task at work
        #: by instruction: what leaves when it is done, and the lines whose messages it uses, with their bytes
        self.makes: dict[int, list[_Output]] = {_FORWARD: [], _BACKWARD: [], _SEND_TIED: []}
        self.uses: dict[int, list[tuple[Line, int]]] = {_FORWARD: [], _BACKWARD: [], _SUM: [], _SUM_LATE: []}
        self.run: _Run

    def compile(self, schedule: StageSchedule, last: bool) -> None:
        """Lay out the program of a step."""
        self.program = [(_FORWARD if task.kind == "F" else _BACKWARD, task.micro_batch) for task in schedule]
        end = [_SEND_TIED] if self.makes[_SEND_TIED] else []
        end += [_SUM, _NORM] + ([_VERDICT] if self.index else []) + [_SUM_LATE, _UPDATE]
        self.program += [(instruction, 0) for instruction in end]
        self.place = {item: place for place, item in enumerate(self.program)}
        self.needs = [len(self.uses.get(instruction, ())) for instruction, _ in self.program]
        for place, (instruction, _) in enumerate(self.program):
            # a backward needs its own forward; the norm comes from behind, the verdict from before
            self.needs[place] += instruction in (_BACKWARD, _VERDICT) or (instruction == _NORM and not last)

    def arrived(self, now_s: float, position: int) -> None:
        """Note a message; go on if it was the last one that the next instruction waited for."""
        self.missing[position] -= 1
        if position == self.next and not self.working and not self.missing[position]:
            self.run.advance(now_s, self)


class _Output:
    """A message that a task makes: how it travels, and which instruction of the taker needs it."""

    __slots__ = ("bytes", "codec_s", "instruction", "kind", "line", "taker")

    def __init__(
        self, line: Line, kind: Kind, count: int, codec_s: tuple[float, float], taker: _Stage, instruction: int
    ) -> None:
        self.line, self.kind, self.bytes = line, kind, count
        self.codec_s = codec_s  #: to encode and to decode it
        self.taker, self.instruction = taker, instruction


class _Run:
    """One simulation."""

    def __init__(self, pipeline: Pipeline, micro_batches: int, steps: int, record: bool) -> None:
        self._pipeline, self._steps = pipeline, steps
        self._events = Events()
        self._spans: list[Span] | None = [] if record else None
        self._lines = self._make_lines()
        self._stages = [_Stage(index, load, micro_batches) for index, load in enumerate(pipeline.stages)]
        tensors = list(accumulate(load.tensors for load in reversed(pipeline.stages)))[::-1]
        self._norm_bytes = [CONTROL_BYTES + _NORM_BYTES_PER_TENSOR * count for count in tensors]
        self._started_s = [0.0] * steps
        self._backward_end_s = [0.0] * steps
        self._end_s = [0.0] * steps
        self._connect()

    def run(self) -> Simulation:
        """Let it run to its end."""
        for stage in self._stages:
            self.advance(0.0, stage)
        self._events.run()
        self._check_finished()
        total_s = self._end_s[-1]
        spans = sorted(self._spans or (), key=lambda span: span.start_s)
        times = zip(self._started_s, self._backward_end_s, self._end_s, strict=True)
        stages = zip(self._stages, self._pipeline.schedules, strict=True)
        return Simulation(
            steps=tuple(StepTime(*item) for item in times),
            stages=tuple(
                StageUse(stage.name, stage.busy_s, stage.busy_s / total_s if total_s else 0.0, most_in_flight(schedule))
                for stage, schedule in stages
            ),
            wires=tuple(line.use(total_s) for line in self._lines.values()),
            spans=tuple(spans),
            names=tuple(stage.name for stage in self._stages),
        )

    def advance(self, now_s: float, stage: _Stage) -> None:
        """Take instructions until one lasts, or waits for a message."""
        program, length, missing = stage.program, len(stage.program), stage.missing
        while stage.next < len(missing) and not missing[stage.next]:
            step, place = divmod(stage.next, length)
            instruction, micro_batch = program[place]
            for line, count in stage.uses.get(instruction, ()):
                line.consume(now_s, count)
            if instruction in _KINDS:
                self._begin(now_s, stage, instruction, step, micro_batch)
                return
            stage.next += 1
            if instruction == _SEND_TIED:
                self._send(now_s, stage, instruction, step, 0)
            elif instruction == _NORM:
                self._pass_norm(now_s, stage, step)
            elif instruction == _VERDICT:
                self._pass_verdict(now_s, stage, step)

    def _begin(self, now_s: float, stage: _Stage, instruction: int, step: int, micro_batch: int) -> None:
        if self._spans is not None and now_s > stage.idle_since_s:
            self._spans.append(Span(stage.index, -1, Kind.WAIT, step + 1, micro_batch, stage.idle_since_s, now_s))
        if stage.next % len(stage.program) == 0 and stage.index == 0:
            self._started_s[step] = now_s
        stage.working = True
        stage.began_s = now_s
        self._events.at(now_s + stage.seconds[instruction][micro_batch], self._done, stage)

    def _done(self, now_s: float, stage: _Stage) -> None:
        """A task is through: send what it made, and go on."""
        step, place = divmod(stage.next, len(stage.program))
        instruction, micro_batch = stage.program[place]
        stage.busy_s += now_s - stage.began_s
        if self._spans is not None and now_s > stage.began_s:
            numbered = -1 if instruction == _UPDATE else micro_batch
            self._spans.append(Span(stage.index, -1, _KINDS[instruction], step + 1, numbered, stage.began_s, now_s))
        stage.working = False
        stage.idle_since_s = now_s
        stage.next += 1
        if instruction == _UPDATE:
            self._end_s[step] = max(self._end_s[step], now_s)
        else:
            if instruction == _BACKWARD:
                self._backward_end_s[step] = max(self._backward_end_s[step], now_s)
            else:
                stage.missing[step * len(stage.program) + stage.place[_BACKWARD, micro_batch]] -= 1
            self._send(now_s, stage, instruction, step, micro_batch)
        self.advance(now_s, stage)

    def _send(self, now_s: float, stage: _Stage, instruction: int, step: int, micro_batch: int) -> None:
        for output in stage.makes[instruction]:
            taker = output.taker
            position = step * len(taker.program) + taker.place[output.instruction, micro_batch]
            number = -1 if instruction == _SEND_TIED else micro_batch
            message = Message(output.bytes, taker, position, output.kind, step + 1, number, *output.codec_s)
            output.line.send(now_s, message)

    def _pass_norm(self, now_s: float, stage: _Stage, step: int) -> None:
        if stage.index:
            self._control(now_s, stage, step, -1, Kind.NORM, self._norm_bytes[stage.index])
        else:
            self._pass_verdict(now_s, stage, step)

    def _pass_verdict(self, now_s: float, stage: _Stage, step: int) -> None:
        if stage.index + 1 < len(self._stages):
            self._control(now_s, stage, step, 1, Kind.VERDICT, CONTROL_BYTES)

    def _control(self, now_s: float, stage: _Stage, step: int, direction: int, kind: Kind, count: int) -> None:
        taker = self._stages[stage.index + direction]
        place = taker.place[_NORM if kind is Kind.NORM else _VERDICT, 0]
        message = Message(count, taker, step * len(taker.program) + place, kind, step + 1, -1)
        self._lines[stage.index, taker.index].send_control(now_s, message)

    def _make_lines(self) -> dict[tuple[int, int], Line]:
        wires = {(wire.source, wire.target): wire for wire in self._pipeline.wires}
        sharing = Sharing(self._pipeline.pipe_rates_bytes_per_s)
        lines = {}
        for (source, target), wire in wires.items():
            back_delay_s = wires.get((target, source), wire).delay_s
            lines[source, target] = line = Line(wire, back_delay_s, self._events, self._spans)
            if wire.pipes:
                line.join(sharing)
        return lines

    def _connect(self) -> None:
        """Tell every stage what it makes and uses, and lay out the programs."""
        for edge in self._pipeline.edges:
            forward_s, backward_s = _codec_s(edge)
            self._output(edge.source, edge.target, _FORWARD, _FORWARD, Kind.ACTIVATION, edge.forward_bytes, forward_s)
            if edge.backward_bytes is not None:
                count = edge.backward_bytes
                self._output(edge.target, edge.source, _BACKWARD, _BACKWARD, Kind.GRADIENT, count, backward_s)
        for shared in self._pipeline.shared:
            for source in shared.uses:
                for target in shared.holders:
                    if source != target:
                        takes = _SUM if target == shared.holders[0] else _SUM_LATE
                        self._output(source, target, _SEND_TIED, takes, Kind.TIED, shared.bytes, (0.0, 0.0))
        for stage, schedule in zip(self._stages, self._pipeline.schedules, strict=True):
            stage.run = self
            stage.compile(schedule, last=stage.index == len(self._stages) - 1)
            stage.missing = stage.needs * self._steps

    def _output(
        self, source: int, target: int, made_by: int, used_by: int, kind: Kind, count: int, codec_s: tuple[float, float]
    ) -> None:
        line, taker = self._lines[source, target], self._stages[target]
        self._stages[source].makes[made_by].append(_Output(line, kind, count, codec_s, taker, used_by))
        taker.uses[used_by].append((line, count))

    def _check_finished(self) -> None:
        stuck = [stage for stage in self._stages if stage.next < len(stage.missing)]
        if not stuck:
            return
        words = []
        for stage in stuck[:3]:
            step, place = divmod(stage.next, len(stage.program))
            instruction, micro_batch = stage.program[place]
            number = f" {micro_batch}" if instruction in (_FORWARD, _BACKWARD) else ""
            words.append(f"stage {stage.index} waits for ever before {_WORDS[instruction]}{number} of step {step + 1}")
        if len(stuck) > len(words):
            words.append(f"{len(stuck) - len(words)} more stages wait")
        blocked = [reason for line in self._lines.values() if (reason := line.blocked())]
        raise ConfigError("the pipeline stands still: " + "; ".join(words + blocked[:3]))


def _codec_s(edge: EdgeLoad) -> tuple[tuple[float, float], tuple[float, float]]:
    forward_s = edge.forward_encode_s, edge.forward_decode_s
    return forward_s, (edge.backward_encode_s, edge.backward_decode_s)
