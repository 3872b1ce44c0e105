"""The demo's report and its models."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from click.testing import CliRunner

from fusion.base.errors import ConfigError, FusionError
from fusion.base.ids import NodeId, StageIndex
from fusion.cli import models
from fusion.cli.demoprediction import Prediction
from fusion.cli.demoreport import Display, Outcome, describe
from fusion.cli.demowan import DemoWan
from fusion.cli.main import cli
from fusion.cli.wan import WanConfig
from fusion.plan.cluster_file import parse_cluster
from fusion.plan.planner import plan_workload
from fusion.plan.types import Link, LinkTable
from fusion.protocol.jobstatus import StageStatus
from fusion.protocol.metrics import LinkMetrics, StageMetrics, StepMetrics, metrics_from_proto, metrics_to_proto
from tests.support.planner import SGD, chain_load, cluster, node


def _step(number: int, loss: float, step_s: float = 1.0, tokens: int = 100) -> StepMetrics:
    zero, one = StageIndex(0), StageIndex(1)
    stages = (
        StageMetrics(zero, step_s, 0.5, 0.1, {one: 10 * number}),
        StageMetrics(one, step_s, 0.5, 0.1, {zero: 3, one: 0}),
    )
    return StepMetrics(
        number, loss, step_s=step_s, samples=8, tokens=tokens, bytes=10 * number + 3, grad_norm=0.5, stages=stages
    )


def _outcome(tokens: int = 100) -> Outcome:
    metrics = [_step(1, 5.0, 9.0, tokens), _step(2, 4.0, 1.0, tokens), _step(3, 3.0, 3.0, tokens)]
    reference = [_step(1, 5.0), _step(2, 4.25), _step(3, 3.0)]
    stages = [StageStatus(NodeId("a"), "node-0", 0, 7, 1000), StageStatus(NodeId("b"), "node-1", 7, 12, 234)]
    return Outcome("gpt", metrics, reference, stages, {("node-0", "node-1"): "20 ms, 50 Mbit/s"}, 12.5)


def test_the_json_report_has_the_figures() -> None:
    report = json.loads(json.dumps(_outcome().as_json()))
    assert report["steps"] == 3
    assert (report["first_loss"], report["last_loss"]) == (5.0, 3.0)
    assert report["reference_max_abs_diff"] == 0.25
    assert report["tokens_per_s"] == 50.0  # 200 tokens in 4 s: the first step, which warms up, is left out
    assert report["bytes_per_step"] == 23.0
    assert report["stages"] == [
        {"node": "node-0", "operators": 7, "parameters": 1000},
        {"node": "node-1", "operators": 5, "parameters": 234},
    ]
    assert report["links"][0] == {"from": "node-0", "to": "node-1", "bytes": 60, "shaped": "20 ms, 50 Mbit/s"}
    assert report["links"][1] == {"from": "node-1", "to": "node-0", "bytes": 9, "shaped": None}


def test_the_table_has_the_same_figures() -> None:
    text = "\n".join(_outcome().lines())
    for figure in ("5.000000", "3.000000", "0.25", "50 tokens/s", "1,000 parameters", "60 B  20 ms", "12.5 s in all"):
        assert figure in text
    assert "samples/s" in "\n".join(_outcome(tokens=0).lines())


def test_one_step_is_enough_for_a_report() -> None:
    one = Outcome("gpt", [_step(1, 5.0, 2.0)], [_step(1, 5.0)], [], {}, 1.0)
    assert one.tokens_per_s == 50.0


def test_progress_without_a_terminal_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    with Display(10) as display:
        for number in range(1, 11):
            display.step("4 nodes", _step(number, 1.0))
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 6
    assert describe(_step(2, 1.0), 10) == "step 2/10  loss 1.0000  100 tokens/s  23 B/step"


def test_metrics_survive_the_wire() -> None:
    for metrics in (_step(3, 1.5), StepMetrics(1, math.inf, eval_loss=2.0, skipped=True, learning_rate=1e-3)):
        assert metrics_from_proto(metrics_to_proto(metrics)) == metrics


def test_the_gpt_has_about_three_million_parameters_with_tied_embeddings_and_dropout() -> None:
    job = models.gpt_job(steps=2)
    count = sum(parameter.numel() for parameter in job.model.parameters())
    assert 2_500_000 < count < 3_500_000
    assert job.model.head.weight is job.model.tokens.weight
    assert any(isinstance(module, torch.nn.Dropout) and module.p == 0.1 for module in job.model.modules())
    assert job.micro_batches == 8
    assert job.data.samples > 10_000
    again = models.gpt_job(steps=2)
    assert torch.equal(again.model.head.weight, job.model.head.weight)
    assert (again.data.tokens == job.data.tokens).all()


def test_the_resnet_trains_on_real_images_with_batch_norm() -> None:
    pytest.importorskip("sklearn")
    job = models.resnet_job(steps=2)
    assert any(isinstance(module, torch.nn.BatchNorm2d) for module in job.model.modules())
    first = job.data.first(64)
    assert first["image"].shape == (64, 1, 8, 8)
    assert first["image"].max() <= 1.0
    assert len(set(first["label"].tolist())) == 10


def test_without_the_images_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"pip install 'fusionllm\[demo\]'"):
        models.digit_images()


# ---- a cluster file brought to life ----

FILE = """
[[nodes]]
name = "a"
speed = "1G"
memory = "1GiB"
site = "east"
count = 2
[[nodes]]
name = "b"
speed = "1G"
memory = "1GiB"
[[nodes]]
name = "c"
speed = "1G"
memory = "1GiB"
[[sites]]
name = "east"
rate = "100 Mbit/s"
delay = "1 ms"
uplink = "16 Mbit/s"
downlink = "24 Mbit/s"
[[links]]
between = ["east", "b"]
rate = "80 Mbit/s"
rate_back = "8 Mbit/s"
delay = "30 ms"
"""


def test_the_relay_gets_the_links_and_uplinks_of_the_file(tmp_path: Path) -> None:
    addresses = {name: f"127.0.0.1:{port}" for port, name in enumerate(("a-1", "a-2", "b", "c"), start=7001)}
    wan = DemoWan.of_cluster(addresses, parse_cluster(FILE), tmp_path)
    config = msgspec.json.decode(msgspec.json.encode(wan.config), type=WanConfig)
    links = {(link.source, link.target): link for link in config.links}
    assert {(machine.name, machine.address) for machine in config.machines} == set(addresses.items())
    assert config.pipes == {"east out": 2e6, "east in": 3e6}
    inside, out, into = links["a-1", "a-2"], links["a-2", "b"], links["b", "a-2"]
    assert (inside.rate_bytes_per_s, inside.delay_s, inside.pipes) == (12.5e6, 0.001, ())
    assert (out.rate_bytes_per_s, out.delay_s, out.pipes) == (2e6, 0.03, ("east out",))  # no faster than the uplink
    assert (into.rate_bytes_per_s, into.delay_s, into.pipes) == (1e6, 0.03, ("east in",))
    assert {pair for pair, link in links.items() if not link.connects} == {
        pair
        for pair in links
        if "c" in pair  # nothing names a link of c
    }
    assert wan.links["a-1", "c"] == "no link"
    assert wan.links["b", "a-1"] == "8 Mbit/s, 60 ms round trip"
    assert wan.summary == "4 nodes at 3 sites, 3 links between them, 3 pairs cannot connect"


def test_the_example_cluster_is_a_dozen_nodes_that_a_laptop_can_stand_for() -> None:
    file = Path(__file__).parents[2] / "examples" / "cluster.toml"
    made = parse_cluster(file.read_text(), "cluster.toml")
    assert len(made.nodes) == 12
    assert sum(node.flops for node in made.nodes) < 10e9


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        (FILE.replace("speed", "sped"), (), "unknown key 'sped'"),
        (FILE.replace("count = 2", "count = 20"), (), "22 nodes; at most 16"),
        (FILE, ("--nodes", "3"), "leave --nodes and --wan out"),
        (FILE, ("--no-wan",), "leave --nodes and --wan out"),
        (None, ("--planner", "op-fence"), "--planner goes with --cluster"),
        ("", (), "names no node"),
    ],
)
def test_a_cluster_that_cannot_be_emulated_is_one_line(
    text: str | None, options: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(text or "")
    arguments = ["demo", *(() if text is None else ("--cluster", str(file))), *options]
    failed = CliRunner().invoke(cli, arguments).exception
    assert isinstance(failed, FusionError)
    assert words in str(failed)
    assert "\n" not in str(failed)
    missing = CliRunner().invoke(cli, ["demo", "--cluster", str(tmp_path / "none.toml")]).exception
    assert "none.toml cannot be read" in str(missing)


def _prediction() -> Prediction:
    """Two stages of 4 units of work each, at 1 unit a second forward and 2 backward, 5 micro-batches."""
    machines = cluster([node("a"), node("b"), node("slow", 1e6)], LinkTable(default=Link(1e6, 0.01)))
    plan = plan_workload(machines, chain_load(8, value_bytes=100_000), SGD).plan
    assert [stage.node_name for stage in plan.stages] in (["a", "b"], ["b", "a"])
    zero, one = StageIndex(0), StageIndex(1)

    def step(number: int, step_s: float) -> StepMetrics:
        there = StageMetrics(zero, step_s, 60.0, 0.1, {one: 500_000}, received={one: LinkMetrics(500_000, 1.0)})
        return StepMetrics(number, 1.0, step_s=step_s, stages=(there, StageMetrics(one, step_s, 75.0, 0.1, {})))

    plan = replace(plan, step_s=72.0)
    return Prediction(plan, machines, [step(1, 500.0), step(2, 80.0), step(3, 79.0), step(4, 90.0)], 76.0)


def test_a_prediction_is_compared_with_the_median_step_after_the_first() -> None:
    made = _prediction()
    found = json.loads(json.dumps(made.as_json()))
    assert (found["measured_s"], found["predicted_s"], found["simulated_s"]) == (80.0, 72.0, 76.0)
    assert found["error"] == pytest.approx(0.1)
    assert found["simulated_error"] == pytest.approx(0.05)
    assert found["left_out"] == ["slow"]
    assert [stage["predicted_s"] for stage in found["stages"]] == pytest.approx([60.0, 60.0])
    assert [stage["computed_s"] for stage in found["stages"]] == [60.0, 75.0]
    back = next(link for link in found["links"] if link["source"] == 1)
    assert back["predicted_s"] == pytest.approx(0.5)  # 5 times 100 kB at 1 MB/s
    assert (back["busy_s"], back["goodput_bytes_per_s"]) == (1.0, 500_000)
    forth = next(link for link in found["links"] if link["source"] == 0)
    assert (forth["busy_s"], forth["goodput_bytes_per_s"]) == (None, None)  # its receiver has told nothing
    text = "\n".join(made.lines())
    for words in ("median of 3", "10.0% off", "left out by the plan: slow", "+25%", "too slow or too busy"):
        assert words in text
