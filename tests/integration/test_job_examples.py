"""Every example is a job file that trains."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from fusion.cli.jobfile import load_job

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS = {"resnet_images": "mlxtend", "hf_gpt2": "transformers", "hf_t5": "transformers"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def test_all_examples_are_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"minimal", "gpt", *NEEDS}


@pytest.mark.parametrize("name", ["gpt", *NEEDS])
def test_example_trains(name: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    job = load_job(EXAMPLES / f"{name}.py", {"steps": 2, "batch_size": 4, "micro_batches": 2})
    job.eval_every = 0
    losses = job.run_local().losses
    assert len(losses) == 2
    assert all(map(math.isfinite, losses))


def test_the_minimal_example_is_a_script_of_a_few_lines_that_learns() -> None:
    path = EXAMPLES / "minimal.py"
    code = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith('"""')]
    assert len(code) <= 20
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=True)
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(losses) == 50
    assert losses[-1] < losses[0] / 10
