"""What a codec costs in loss: a GPT and a ResNet trained through the real pipeline, with it and without.

    python -m benchmarks.convergence --json --codec int8/int4 --seeds 3 --cache runs.jsonl

Four stages in this process hand each other their tensors through the codecs that workers use, byte by byte; the same
seeds give the same initial weights, data and order with every codec. Gaps are in percent of the loss without a codec:
of the training loss (mean of the last tenth of the steps), of the held-out loss with the codec at work, and of the
held-out loss as users will serve the weights: in one piece, without it. The control, fp16 both ways, shows how much
two runs differ for no reason. Ratio is the bytes of all tensors that training sends without a codec over those with
it. CODEC is what a job's `compression` may be, also in phases: "mask:1/8 int8/int4@50% int8@90%".
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.convergence_tasks import Task, even_cuts, tasks
from fusion.base.errors import StateError
from fusion.compress.catalog import parse_pair
from fusion.compress.linkcodecs import CodecSchedule, LinkCodecs
from fusion.graph.partition import partition
from fusion.job.weights import merged
from fusion.plan.codecs import AUTO_PAIRS, Compression, pair_ratio, parse_compression
from fusion.protocol.metrics import StepMetrics
from fusion.runtime.local import compute_settings, make_coders, make_runners

DENSE, CONTROL = "none", "fp16"
RATE_BYTES_PER_S = 20e6 / 8  #: of the links that "+auto" zstd reckons with: 20 Mbit/s
CURVE_POINTS = 10
_CURVE_SHARE = 5  #: one in so many held-out samples
_BATCH = 64
GAPS = ("train_gap_pct", "val_on_gap_pct", "val_served_gap_pct")


@dataclass(frozen=True)
class Outcome:
    """What one run came to."""

    train: float  #: mean loss of the last tenth of the steps
    val_on: float  #: held-out loss through the codec of the last step
    val_served: float  #: held-out loss without codec
    wire_bytes: int  #: of tensors in training, as sent; evaluations are left out
    raw_bytes: int  #: the same as they were
    seconds: float
    losses: list[float]  #: of each step
    curve: list[tuple[int, float]]  #: (step, held-out loss without codec), on a part of the held-out samples


def schedule_of(codec: str, steps: int) -> CodecSchedule:
    """Read what a job's `compression` may be; "auto" uses the strongest codecs that it may, and a link is like another.

    ConfigError says what is wrong.
    """
    phases = parse_compression(codec, "codec")
    later = ((phase.begins(steps), _codecs(phase.compression)) for phase in phases[1:])
    return CodecSchedule(_codecs(phases[0].compression), tuple(later))


def _codecs(wanted: Compression) -> LinkCodecs:
    if wanted.kind == "auto":
        return LinkCodecs([pair for pair in AUTO_PAIRS if pair_ratio(pair) <= wanted.ratio][-1], wanted.links)
    pair = parse_pair(f"adatopk:{wanted.ratio}") if wanted.kind == "adatopk" else wanted.pair
    return LinkCodecs(pair, wanted.links)


def train(task: Task, seed: int, steps: int, codec: str) -> Outcome:
    """Train once through the pipeline."""
    with tempfile.TemporaryDirectory(prefix="fusion-convergence-") as directory:
        job = task.job(seed, steps)
        made = job.prepare(Path(directory))
        parts = partition(made.graph, even_cuts(made.graph))
        coders = make_coders(made.spec, parts, schedule_of(codec, steps), code_evaluation=True)
        for coder in coders.values():
            for peer in coders:
                coder.set_rate(peer, RATE_BYTES_PER_S)
        held_out = task.held_out()
        done: list[StepMetrics] = []
        curve = []

        def state() -> dict[str, Tensor]:
            tensors = {name: tensor for runner in runners for name, tensor in runner.state().items()}
            return merged(made.graph, made.tensors, tensors)

        begin_s = time.perf_counter()
        with compute_settings(made.spec):
            data, evaluation = (
                made.data.open("data"),
                None if made.eval_data is None else made.eval_data.open("eval_data"),
            )
            runners = make_runners(made.spec, parts, made.tensors, data, evaluation, done.append, coders=coders)
            seen = 0
            while not all(runner.finished for runner in runners):
                if not any(runner.advance() for runner in runners):
                    raise StateError("the stages wait for each other")
                if len(done) > seen:
                    seen = len(done)
                    if seen % max(1, steps // CURVE_POINTS) == 0:
                        curve.append((seen, served_loss(task, state(), _thinned(held_out))))
            served = served_loss(task, state(), held_out)
        losses = [step.loss for step in done]
        counters = [found for coder in coders.values() for found in coder.counters().values()]
        eval_loss = done[-1].eval_loss
        assert eval_loss is not None
        return Outcome(
            train=statistics.fmean(losses[-max(1, steps // 10) :]),
            val_on=eval_loss,
            val_served=served,
            wire_bytes=sum(found.coded_bytes for found in counters),
            raw_bytes=sum(found.raw_bytes for found in counters),
            seconds=time.perf_counter() - begin_s,
            losses=losses,
            curve=curve,
        )


def served_loss(task: Task, state: Mapping[str, Tensor], held_out: Mapping[str, Tensor]) -> float:
    """Return the mean held-out loss of trained weights as a user would serve them."""
    model = task.model()
    model.load_state_dict(state)
    model.eval()
    rows = len(next(iter(held_out.values())))
    total = 0.0
    with torch.no_grad():
        for first in range(0, rows, _BATCH):
            batch = {name: tensor[first : first + _BATCH] for name, tensor in held_out.items()}
            total += float(task.loss(model(batch[task.inputs]), batch)) * min(_BATCH, rows - first)
    return total / rows


def _thinned(samples: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor[::_CURVE_SHARE] for name, tensor in samples.items()}


class Runs:
    """Runs that are done once each, kept in a file of one JSON object a line if there is one."""

    def __init__(self, cache: Path | None, *, quick: bool = False) -> None:
        self._cache, self._quick = cache, quick
        self._tasks = tasks(quick=quick)
        self._done: dict[str, Outcome] = {}
        if cache is not None and cache.exists():
            for line in cache.read_text().splitlines():
                entry = json.loads(line)
                self._done[entry["key"]] = Outcome(**entry["outcome"])

    def outcome(self, model: str, seed: int, steps: int, codec: str) -> Outcome:
        """Return a run's outcome; `steps` 0: as many as the task has."""
        task = self._tasks[model]
        steps = steps or task.settings.steps
        key = f"{task.settings} seed={seed} steps={steps} {codec}"
        if key not in self._done:
            self._done[key] = train(task, seed, steps, codec)
            if self._cache is not None:
                with self._cache.open("a") as file:
                    file.write(json.dumps({"key": key, "outcome": asdict(self._done[key])}) + "\n")
        return self._done[key]


def gap_pct(loss: float, dense: float) -> float:
    """Return how much larger a loss is than the uncompressed run's, in percent."""
    return 100 * (loss / dense - 1)


def gaps(runs: Sequence[Outcome], dense: Sequence[Outcome]) -> dict[str, Any]:
    """Return the mean gaps over seeds, the served one of each seed, and the standard error of its mean."""
    pairs = list(zip(runs, dense, strict=True))
    found: dict[str, Any] = {
        f"{name}_gap_pct": statistics.fmean(gap_pct(getattr(run, name), getattr(base, name)) for run, base in pairs)
        for name in ("train", "val_on", "val_served")
    }
    served = [gap_pct(run.val_served, base.val_served) for run, base in pairs]
    error = statistics.stdev(served) / len(served) ** 0.5 if len(served) > 1 else None
    return found | {"val_served_gaps_pct": served, "val_served_error_pct": error}


def measure(runs: Runs, models: Sequence[str], codec: str, seeds: int, steps: int) -> dict[str, Any]:
    """Return the codec's figures on every model and the worse ones of all models."""
    result: dict[str, Any] = {}
    for model in models:
        dense, control, coded = (
            [runs.outcome(model, seed, steps, name) for seed in range(1, seeds + 1)] for name in (DENSE, CONTROL, codec)
        )
        result[model] = gaps(coded, dense) | {
            "ratio": statistics.fmean(base.wire_bytes / run.wire_bytes for run, base in zip(coded, dense, strict=True)),
            "control": gaps(control, dense),
            "dense_train": statistics.fmean(run.train for run in dense),
            "dense_val": statistics.fmean(run.val_served for run in dense),
            "seconds": statistics.fmean(run.seconds for run in coded),
        }
    worst = {name: max(result[model][name] for model in models) for name in GAPS}
    return {
        "codec": codec,
        "seeds": seeds,
        "ratio": min(result[model]["ratio"] for model in models),
        **worst,
        "control_gap_pct": max(abs(result[model]["control"][name]) for model in models for name in GAPS),
        "models": result,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codec", default="auto", help="as a job's compression")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each kind, with other weights and order of data")
    parser.add_argument("--models", default="gpt,resnet", help="comma-separated; default: both")
    parser.add_argument("--steps", type=int, default=0, help="of every run; default: the model's own")
    parser.add_argument("--cache", type=Path, help="file of finished runs, which are not repeated; made if missing")
    parser.add_argument("--quick", action="store_true", help="tiny models, a few steps: shows only that it works")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = measure(
        Runs(options.cache, quick=options.quick), options.models.split(","), options.codec, options.seeds, options.steps
    )
    if options.json:
        print(json.dumps(result))
        return
    for model, figures in result["models"].items():
        print(
            f"{model:7} dense {figures['dense_val']:.4f}  ratio {figures['ratio']:6.2f}  gaps: train "
            f"{figures['train_gap_pct']:+.2f} %, codec on {figures['val_on_gap_pct']:+.2f} %, served "
            f"{figures['val_served_gap_pct']:+.2f} %; control {figures['control']['val_served_gap_pct']:+.2f} %"
        )


if __name__ == "__main__":
    main()
