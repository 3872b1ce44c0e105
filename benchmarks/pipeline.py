"""Step time of a pipeline over slow, long links: ours, perfect overlap, and torch.distributed.pipelining over gloo.

    python -m benchmarks.pipeline --lab PATH/wanlab.py --json

Every case is one emulated network on this machine. On it train, one after the other, our cluster (coordinator, node
daemons and workers as real processes, TCP and TLS between the hosts) and the baseline, with the same number of stages
and micro-batches and the same tensors between stages. On both sides a stage's compute is a wait: 40 ms forward, 80 ms
backward for a micro-batch, as devices of their own would take.

"ideal" is perfect overlap (see benchmarks/perfect_overlap.py) of the best of three schedules: GPipe, plain 1F1B, and
the one that our planner chose and ours ran. Step times are medians, the first steps left out.

On the slowest network ours runs again with compression "auto" and "auto:12" (`auto_s`, `auto12_s` and their gain over
the better torch schedule, which sends fp32).

`--peers DIR` has torch_pipelining.py (default: ../peers beside the lab's directory); without it the baseline is null.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.lab import Lab, Topology, congestion_control, hosts_of, lab_up, line, link_between
from benchmarks.lab_training import Settings
from benchmarks.perfect_overlap import Boundary, step_s
from fusion.base.errors import ConfigError, JobError
from fusion.plan.schedule import StageSchedule, make_schedule, parse_schedule

FORWARD_S, BACKWARD_S = 0.040, 0.080
SAMPLES, LENGTH, WIDTH = 2, 128, 384  #: of a micro-batch
TENSOR_BYTES = SAMPLES * LENGTH * WIDTH * 4
WARM_UP = 2
COMPRESSED_STEPS = 12  #: counted ones; short ones
TESTBED = "topologies/paper-testbed.json"


@dataclass(frozen=True, slots=True)
class Case:
    """One network, and how many micro-batches pass through it in a step."""

    name: str
    micro_batches: int
    rate_mbps: float | None  #: None: the six-host testbed's own
    steps: int  #: counted ones
    compressions: tuple[str, ...] = ()  #: with which ours runs again


CASES = (
    Case("line4_8", 8, 8, 4, ("auto", "auto:12")),
    Case("line4_100", 8, 100, 12),
    Case("line4_1000", 8, 1000, 12),
    Case("paper_testbed", 12, None, 6),
)


def topology_of(case: Case, script: Path) -> Topology:
    """Return the case's network."""
    if case.rate_mbps is not None:
        return line(4, case.rate_mbps, 20)
    file = script.parent / TESTBED
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {error}") from None
    return found


def boundaries_of(topology: Topology, order: Sequence[str]) -> list[Boundary]:
    """Return the links between each two neighbours in `order`, by the topology's file; later entries win."""

    def link(a: str, b: str) -> Boundary:
        found = link_between(topology, a, b)
        return Boundary(found["rate_mbps"], found["delay_ms"] / 1e3)

    return [link(a, b) for a, b in pairwise(order)]


def ideal_s(schedules: Sequence[StageSchedule], boundaries: Sequence[Boundary]) -> float:
    """Return the step time of perfect overlap."""
    return step_s(schedules, FORWARD_S, BACKWARD_S, TENSOR_BYTES, boundaries)


def ours(lab: Lab, case: Case, steps: int, compression: str = "none") -> dict[str, Any]:
    """Train on the lab with our cluster; return what `benchmarks.lab_training` found."""
    settings = Settings(
        str(lab.script.resolve()),
        lab.name,
        dict(lab.topology),
        WARM_UP + steps,
        case.micro_batches,
        SAMPLES,
        LENGTH,
        WIDTH,
        FORWARD_S,
        compression,
    )
    command = [sys.executable, "-m", "benchmarks.lab_training"]
    output = lab.run(lab.hosts[0], command, 600, msgspec.json.encode(settings).decode())
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def torch_s(lab: Lab, case: Case, steps: int, peers: Path, schedule: str) -> float | None:
    """Return the median step of the baseline; None if it is not there."""
    script = peers / "torch_pipelining.py"
    if not script.is_file():
        return None
    command = [sys.executable, str(script.resolve()), "--mode", "sleep", "--schedule", schedule]
    command += ["--micro", str(case.micro_batches), "--steps", str(steps), "--ms", f"{1e3 * FORWARD_S:.0f}"]
    output = lab.each(command, 900)
    result = next((text for text in output.splitlines() if text.startswith("RESULT ")), None)
    if result is None:
        raise JobError("the baseline printed no result")
    return float(json.loads(result.removeprefix("RESULT "))["median"])


def measure(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one case."""
    topology = topology_of(case, options.lab)
    steps, stages = options.steps or case.steps, len(hosts_of(topology))
    with lab_up(options.lab, topology) as lab:
        run = ours(lab, case, steps)
        coded = {name: ours(lab, case, COMPRESSED_STEPS, name) for name in case.compressions}
        baseline = {
            name: torch_s(lab, case, min(steps, options.torch_steps), options.peers, name) if options.torch else None
            for name in ("gpipe", "1f1b")
        }
    boundaries = boundaries_of(topology, run["order"])
    ideals = {name: ideal_s(make_schedule(name, stages, case.micro_batches), boundaries) for name in ("gpipe", "1f1b")}
    ideals["own"] = ideal_s([parse_schedule(text) for text in run["schedules"]], boundaries)
    ours_s, best_ideal_s = statistics.median(run["step_s"][WARM_UP:]), min(ideals.values())
    known = [seconds for seconds in baseline.values() if seconds is not None]
    best_torch_s = min(known) if known else None
    return {
        "ours_s": ours_s,
        "ideal_s": best_ideal_s,
        "torch_gpipe_s": baseline["gpipe"],
        "torch_1f1b_s": baseline["1f1b"],
        "ours_vs_ideal": ours_s / best_ideal_s,
        "ours_vs_torch_best": best_torch_s / ours_s if best_torch_s else None,
        "ours_wall_s": (run["seen_s"][-1] - run["seen_s"][WARM_UP - 1]) / steps,
        "ours_step_s": run["step_s"],
        "ideal_by_schedule_s": ideals,
        "planned_s": run["planned_s"],
        "order": run["order"],
        "in_flight": run["in_flight"],
        "sent_bytes_per_step": run["sent_bytes"],
        "between_steps_s": run["between_steps_s"],
        **{key: value for name, found in coded.items() for key, value in compressed(name, found, best_torch_s).items()},
    }


def compressed(name: str, run: Mapping[str, Any], torch_s: float | None) -> dict[str, Any]:
    """Return the figures of a run with a compression; the keys begin with its name, without the colon."""
    key, step_s = name.replace(":", ""), statistics.median(run["step_s"][WARM_UP:])
    return {
        f"{key}_s": step_s,
        f"{key}_vs_torch_best": torch_s / step_s if torch_s else None,
        f"{key}_step_s": run["step_s"],
        f"{key}_codecs": {f"{source}>{target}": codec for source, target, codec in run["codecs"]},
        f"{key}_sent_bytes_per_step": run["sent_bytes"],
    }


def print_table(result: Mapping[str, Any]) -> None:
    """Print a line per case."""
    print(f"{'case':14} {'ours':>7} {'ideal':>7} {'gpipe':>7} {'1f1b':>7} {'vs ideal':>9} {'vs torch':>9}")
    for name, case in result["cases"].items():
        torch = [f"{case[key]:7.2f}" if case[key] else f"{'-':>7}" for key in ("torch_gpipe_s", "torch_1f1b_s")]
        gain = f"{case['ours_vs_torch_best']:8.2f}x" if case["ours_vs_torch_best"] else f"{'-':>9}"
        print(
            f"{name:14} {case['ours_s']:7.2f} {case['ideal_s']:7.2f} {' '.join(torch)} "
            f"{case['ours_vs_ideal']:9.3f} {gain}"
        )
        for key in [key for key in case if key.endswith("_vs_torch_best") and key != "ours_vs_torch_best"]:
            coded = key.removesuffix("_vs_torch_best")
            gain = f"{case[key]:8.2f}x" if case[key] else f"{'-':>9}"
            print(f"{name + ' ' + coded:14} {case[coded + '_s']:7.2f} {'':33} {gain}")
    print(f"seconds per step; 'vs torch' is over the better schedule; TCP: {result['congestion_control']}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lab", type=Path, required=True, metavar="PATH/wanlab.py")
    parser.add_argument("--peers", type=Path, help="directory with torch_pipelining.py")
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES], help="only this one")
    parser.add_argument("--steps", type=int, default=0, help="counted steps of ours; default: by case, 4 to 12")
    parser.add_argument("--torch-steps", type=int, default=3, help="counted steps of the baseline")
    parser.add_argument("--no-torch", dest="torch", action="store_false", help="leave the baseline out")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.peers = options.peers or options.lab.resolve().parent.parent / "peers"
    cases = {}
    for case in CASES:
        if not options.case or case.name in options.case:
            cases[case.name] = measure(case, options)
            print(f"{case.name} done", file=sys.stderr)
    if options.json:
        print(json.dumps(cases | {"congestion_control": congestion_control()}))
    else:
        print_table({"cases": cases, "congestion_control": congestion_control()})


if __name__ == "__main__":
    main()
