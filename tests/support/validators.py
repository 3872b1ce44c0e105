"""What must hold after every scenario, read from the histories that all processes of a cluster wrote (V1-V9).

A history is a file of JSON lines, `<process>-<pid>.jsonl` below FUSION_HISTORY, written by `fusion.observe.history`.
Every line has `event`, `at_s` (CLOCK_MONOTONIC), `process` and `pid`, and by process:

worker (with `node`, `name`, `incarnation`, `job`, `epoch`, `stage` in every line)
    started     stages, resume_step (0: from the job's weights)
    message     kind, step, micro_batch, edge, source, message_epoch, message_job: one that was taken in whole
    step        step, applied, micro_batches (whose gradients were added up), loss (of the loss stage), digests (by name
                of parameter, buffer and optimizer or codec state: as it is after the step)
daemon (with `node`, `name`)
    registered  incarnation, self_fence_s
    answered    incarnation, sent_ago_s: a heartbeat was answered that left so long ago
    worker_started  job, epoch, stage, incarnation;  worker_exited  cause, detail
    said        level, text: of the agent's own log
coordinator
    committed   kind (JobPlanned, NodeGone, ...) and the event's short fields
all
    failpoint   point, action, and the place's values: just before it acts

V1 a step counts each micro-batch exactly once; V2 epochs never go back on a node; V3 no message of an older epoch is
taken; V4 the steps of the final lineage are without gap or repeat; V5 the loss of every step is that of the undisturbed
run; V6 never two workers for one stage, and none works after its lease; V7 parameters and optimizer state after every
step are those of the undisturbed run. V8 (nothing is left over) and V9 (each failure has one line that names cause and
node) look at the cluster itself, see faultcluster.py.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Line = dict[str, Any]
Digests = Mapping[str, str]

FENCE_SLACK_S = 3.0  #: between the end of a lease and the end of its worker: a tick, and the grace to die in


@dataclass(frozen=True)
class Reference:
    """The undisturbed run: each step's loss, and the digests of all that training changes, from step 1 on."""

    losses: Sequence[float]
    digests: Sequence[Digests]


def read(directory: Path) -> list[Line]:
    """Return all lines of all processes in the order of their times, without the torn last line of a killed one."""
    lines = []
    for path in directory.glob("*.jsonl"):
        for text in path.read_text("utf-8").splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:
                continue
    return sorted(lines, key=lambda line: line["at_s"])


class History:
    """The lines of one cluster, and what must hold of them for one job."""

    def __init__(self, lines: Sequence[Line], job: str) -> None:
        self.lines, self.job = lines, job
        self.steps = [line for line in self.of("worker", "step") if line["job"] == job]
        self.plans = [line for line in self.of("coordinator", "committed") if line.get("job") == job]

    @classmethod
    def load(cls, directory: Path, job: str) -> History:
        """Read the histories in `directory`."""
        return cls(read(directory), job)

    def of(self, process: str, event: str) -> list[Line]:
        """Return one kind of line."""
        return [line for line in self.lines if line["process"] == process and line["event"] == event]

    def epochs(self) -> dict[int, int]:
        """Return by epoch the step that it went on after (0: from the beginning), for those that did a step."""
        started = [line for line in self.of("worker", "started") if line["job"] == self.job]
        worked = {line["epoch"] for line in self.steps}
        return {line["epoch"]: line["resume_step"] for line in started if line["epoch"] in worked}

    def final(self) -> list[Line]:
        """Return the steps of the final lineage: what a later epoch did again is not in it."""
        cut: dict[int, int] = {}  # by epoch: the last step that counts
        last = 2**62
        for epoch, resumed in sorted(self.epochs().items(), reverse=True):
            cut[epoch] = last
            last = min(last, resumed)
        return [line for line in self.steps if line["step"] <= cut[line["epoch"]]]

    # ---- the validators ----

    def check(self, reference: Reference | None, micro_batches: int, last_step: int | None = None) -> None:
        """Run all of them; `last_step`: of a job that has ended. Without a reference V5 and V7 are left out."""
        self.v1_each_micro_batch_counts_once(micro_batches)
        self.v2_epochs_never_go_back()
        self.v3_no_message_of_an_older_epoch()
        self.v4_no_gap_and_no_repeat(last_step)
        self.v6_one_holder_at_a_time()
        if reference is not None:
            self.v5_losses(reference)
            self.v7_states(reference)

    def v1_each_micro_batch_counts_once(self, micro_batches: int) -> None:
        for line in self.steps:
            counted = sorted(line["micro_batches"])
            assert counted in ([], list(range(micro_batches))), f"V1 {_at(line)} counted micro-batches {counted}"
            # a stage that has nothing to train has no backward at all; no stage counts a part of them
        for at, lines in _by(self.steps, "epoch", "stage", "step").items():
            assert len(lines) == 1, f"V1 epoch, stage, step {at} was done {len(lines)} times"

    def v2_epochs_never_go_back(self) -> None:
        newest: dict[tuple[str, str], int] = {}
        for line in self.lines:
            if line["event"] == "worker_started":
                key = line["node"], line["job"]
                assert line["epoch"] > newest.get(key, 0), f"V2 {line['name']} started epoch {line['epoch']} again"
                newest[key] = line["epoch"]
        last = 0
        for line in self.plans:
            if "epoch" in line and line["kind"] in ("JobPlanned", "JobRecovered"):
                assert line["epoch"] > last, f"V2 the coordinator committed epoch {line['epoch']} after {last}"
                last = line["epoch"]

    def v3_no_message_of_an_older_epoch(self) -> None:
        seen: set[tuple[Any, ...]] = set()
        for line in self.of("worker", "message"):
            assert (line["message_job"], line["message_epoch"]) == (line["job"], line["epoch"]), f"V3 {line}"
            names = ("job", "epoch", "stage", "source", "kind", "step", "micro_batch", "edge")
            key = tuple(line[name] for name in names)
            if line["kind"].startswith(("REPLICA", "CONTACT")):  # a copy that was damaged, and a doubt, are told again
                continue
            assert key not in seen, f"V3 taken twice: {key}"
            seen.add(key)

    def v4_no_gap_and_no_repeat(self, last_step: int | None) -> None:
        stages = {line["epoch"]: line["stages"] for line in self.of("worker", "started") if line["job"] == self.job}
        done = _by(self.final(), "step")
        whole = [step for (step,), lines in done.items() if len(lines) == stages[lines[0]["epoch"]]]
        last = max(whole, default=0) if last_step is None else last_step
        for step in range(1, last + 1):
            lines = done.get((step,), [])
            epochs = {line["epoch"] for line in lines}
            at = sorted((line["epoch"], line["stage"]) for line in lines)
            assert len(epochs) == 1, f"V4 step {step} of the final lineage was done by epoch and stage {at}"
            assert [stage for _, stage in at] == list(range(stages[min(epochs)])), f"V4 step {step}: {at}"

    def v5_losses(self, reference: Reference) -> None:
        for line in self.steps:  # of every lineage: what was done in vain was right too
            if line["loss"] is not None:
                expected = reference.losses[line["step"] - 1]
                assert line["loss"] == expected, f"V5 {_at(line)}: loss {line['loss']!r}, undisturbed {expected!r}"

    def v7_states(self, reference: Reference) -> None:
        for line in self.steps:
            expected = reference.digests[line["step"] - 1]
            wrong = [name for name, digest in line["digests"].items() if expected.get(name) != digest]
            assert not wrong, f"V7 {_at(line)}: {wrong} differ from the undisturbed run"
        for (step,), lines in _by(self.final(), "step").items():
            held = {name for line in lines for name in line["digests"]}
            complete = _all_stages(lines, self.lines)
            missing = set(reference.digests[step - 1]) - held if complete else set()
            assert not missing, f"V7 step {step}: no stage has {sorted(missing)}"

    def v6_one_holder_at_a_time(self) -> None:
        """Once an epoch does steps, no older one does; a stage of an epoch is one node's; all work under a lease."""
        newest = 0
        for line in self.steps:
            assert line["epoch"] >= newest, f"V6 {_at(line)} after epoch {newest} had begun to work"
            newest = line["epoch"]
        for at, lines in _by(self.steps, "epoch", "stage").items():
            nodes = {line["node"] for line in lines}
            assert len(nodes) == 1, f"V6 epoch, stage {at} was worked on by {nodes}"
        for line in self.steps:
            end_s = self._lease_end_s(line)
            assert line["at_s"] <= end_s + FENCE_SLACK_S, (
                f"V6 {_at(line)}: {line['at_s'] - end_s:.1f} s after its lease"
            )

    def _lease_end_s(self, step: Line) -> float:
        """Return when the lease ended under which a step was done: as far as it had been renewed by then, and after."""
        fence_s, from_s, extended_s = 0.0, 0.0, 0.0
        for line in self.lines:
            if line["process"] == "daemon" and line["node"] == step["node"]:
                if line["event"] == "registered" and line["incarnation"] == step["incarnation"]:
                    fence_s, from_s = line["self_fence_s"], max(from_s, line["at_s"])
                elif (
                    line["event"] == "answered"
                    and line["incarnation"] == step["incarnation"]
                    and line["at_s"] <= step["at_s"]
                ):
                    from_s = max(from_s, line["at_s"] - line["sent_ago_s"])
                elif line["event"] == "extended" and line["incarnation"] == step["incarnation"]:
                    extended_s = max(extended_s, line["until_s"] if line["at_s"] <= step["at_s"] else 0.0)
        return max(from_s + fence_s, extended_s)

    def v9_failures(self, *names: str) -> list[str]:
        """Check that the coordinator took note of one failure for each of these nodes, in order; return the reasons."""
        reasons = [line["reason"] for line in self.plans if line["kind"] == "JobBroke"]
        assert len(reasons) == len(names), f"V9 failures noted: {reasons}"
        for name, reason in zip(names, reasons, strict=True):
            assert f"node {name} " in reason, f"V9 {reason!r} does not name {name}"
            assert "\n" not in reason
        return reasons

    # ---- figures ----

    def nodes_gone(self) -> list[str]:
        """Return the nodes that were given up since the job was submitted."""
        begun_s = self.plans[0]["at_s"]
        gone = [line for line in self.of("coordinator", "committed") if line["kind"] == "NodeGone"]
        return [line["node"] for line in gone if line["at_s"] >= begun_s]

    def failpoint_s(self) -> float:
        """Return when the first failpoint of the job fired that is not a pause."""
        own = (line for line in self.lines if line.get("job", self.job) == self.job)
        fired = (line for line in own if line["event"] == "failpoint" and line["action"] != "sleep")
        return float(next(line["at_s"] for line in fired))

    def first_step_after_s(self, at_s: float, epoch: int) -> float | None:
        """Return when the loss stage first finished a step of an epoch later than `epoch`, after `at_s`."""
        found = (line["at_s"] for line in self.steps if line["epoch"] > epoch and line["at_s"] > at_s)
        return next(found, None)

    def lost_steps(self) -> int:
        """Return how many steps that all stages had finished were done again."""
        stages = {line["epoch"]: line["stages"] for line in self.of("worker", "started") if line["job"] == self.job}
        whole: dict[int, int] = defaultdict(int)  # by epoch: the last step that all its stages finished
        for (epoch, step), lines in _by(self.steps, "epoch", "step").items():
            if len(lines) == stages[epoch]:
                whole[epoch] = max(whole[epoch], step)
        order = sorted(self.epochs().items())
        lost, reached = 0, 0
        for epoch, resumed in order:
            lost += max(0, reached - resumed)
            reached = max(whole[epoch], resumed)
        return lost


def _by(lines: Iterable[Line], *names: str) -> dict[tuple[Any, ...], list[Line]]:
    found: dict[tuple[Any, ...], list[Line]] = defaultdict(list)
    for line in lines:
        found[tuple(line[name] for name in names)].append(line)
    return found


def _at(line: Line) -> str:
    return f"epoch {line['epoch']} stage {line['stage']} ({line['name']}) step {line['step']}"


def _all_stages(lines: Sequence[Line], everything: Sequence[Line]) -> bool:
    epoch = lines[0]["epoch"]
    counts = (
        line["stages"]
        for line in everything
        if line["event"] == "started" and line["epoch"] == epoch and line["job"] == lines[0]["job"]
    )
    return len({line["stage"] for line in lines}) == next(counts, -1)
