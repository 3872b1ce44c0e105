"""`fusion plan` and `fusion simulate`: from a job file and a cluster file to a plan, with nothing running."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fusion.base.errors import FusionError
from fusion.cli.main import cli

JOB = """
import torch, fusion
torch.manual_seed(0)
layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(6)]
x = torch.randn(64, 64)
print("the job file may print what it likes")
job = fusion.Job(
    model=torch.nn.Sequential(*layers, torch.nn.Linear(64, 3)),
    data=fusion.TensorData({"x": x, "y": x[:, :3].argmax(1)}),
    loss=lambda outputs, batch: torch.nn.functional.cross_entropy(outputs, batch["y"]),
    optimizer=fusion.AdamW(1e-3), batch_size=32, micro_batches=4, steps=10, name="layers",
)
"""
CLUSTER = """
[[nodes]]
name = "near"
speed = "100M"
memory = "1GiB"
site = "here"
count = 2
[[nodes]]
name = "far"
speed = "1M"
memory = "1GiB"
[[sites]]
name = "here"
rate = "1 Gbit/s"
delay = "0.1 ms"
[default]
rate = "1 Mbit/s"
delay = "200 ms"
"""


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    return ["--job", str(tmp_path / "job.py"), "--cluster", str(tmp_path / "cluster.toml")]


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(cli, list(arguments), catch_exceptions=True)
    if isinstance(result.exception, FusionError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout) if "--json" in arguments else result.stdout


def test_plan_uses_the_nodes_that_pay_and_names_the_others_with_the_reason(files: list[str]) -> None:
    found = run("plan", *files, "--json")
    assert {stage["node"] for stage in found["stages"]} == {"near-1", "near-2"}
    assert [item["node"] for item in found["left_out"]] == ["far"]
    assert found["left_out"][0]["reason"]
    assert found["stages"][0]["first_operator"] == 0
    assert found["stages"][0]["end_operator"] == found["stages"][1]["first_operator"]
    assert all(0 < stage["memory_bytes"] <= stage["memory_limit_bytes"] for stage in found["stages"])
    assert found["step_s"] > 0
    assert found["micro_batches"] == 4


def test_baselines_are_there_and_slower_where_a_node_hurts(files: list[str]) -> None:
    ours = run("plan", *files, "--json")
    everybody = run("plan", *files, "--method", "equal-number", "--json")
    assert len(everybody["stages"]) == 3
    assert everybody["step_s"] > 5 * ours["step_s"]


def test_the_tables_for_people_name_bottleneck_stages_and_links(files: list[str]) -> None:
    text = run("plan", *files)
    assert text.startswith("layers: ")
    assert "bottleneck: " in text
    assert "left out: far: " in text
    assert "0 -> 1" in text


def test_plan_says_which_stages_run_forwards_again(files: list[str], tmp_path: Path) -> None:
    kept = run("plan", *files, "--json")["stages"]
    assert not any(stage["recompute"] for stage in kept)
    (tmp_path / "job.py").write_text(JOB.replace("steps=10", 'steps=10, recompute="always"'))
    stages = run("plan", *files, "--json")["stages"]
    assert [stage["recompute"] for stage in stages] == [stage["in_flight"] > 1 for stage in stages]
    assert f"{stages[0]['in_flight']}, recomputed" in run("plan", *files)


def test_simulate_draws_the_same_plan_and_agrees_with_it(files: list[str], tmp_path: Path) -> None:
    trace, picture = tmp_path / "t.json", tmp_path / "t.svg"
    planned = run("plan", *files, "--json")
    found = run("simulate", *files, "--trace", str(trace), "--svg", str(picture), "--json")
    assert 0.9 < found["step_s"] / planned["step_s"] < 1.5  # the estimate leaves the optimizer's update out
    assert [stage["node"] for stage in found["stages"]] == [stage["node"] for stage in planned["stages"]]
    assert json.loads(trace.read_text())["traceEvents"]
    assert picture.read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ('site = "here"\nsped = 1', "sped"),
        ('site = "here"\ncount = -1', "count"),
    ],
)
def test_a_bad_cluster_file_is_one_line_that_names_the_place(
    files: list[str], tmp_path: Path, change: str, words: str
) -> None:
    (tmp_path / "cluster.toml").write_text(CLUSTER.replace('site = "here"\ncount = 2', change))
    with pytest.raises(FusionError, match=words) as caught:
        run("plan", *files)
    assert "\n" not in str(caught.value)


def test_a_cluster_that_cannot_hold_the_model_says_how_much_is_missing(files: list[str], tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(CLUSTER.replace("1GiB", "1MiB").replace("count = 2\n", ""))
    job = tmp_path / "job.py"
    job.write_text(JOB.replace("Linear(64, 64)", "Linear(64, 512), torch.nn.Linear(512, 64)"))
    with pytest.raises(FusionError, match=r"\d.*(MiB|KiB|GiB)"):
        run("plan", *files)


def test_a_cluster_comes_from_one_place(files: list[str]) -> None:
    with pytest.raises(FusionError, match="either --cluster FILE or --live"):
        run("plan", *files, "--live")
