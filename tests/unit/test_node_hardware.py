"""What a node says of its machine: limits, memory, threads, and a speed that is measured once."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import psutil
import pytest
import torch

from fusion.base.errors import ConfigError
from fusion.base.ids import Incarnation, NodeId
from fusion.graph.operators import TABLE
from fusion.plan.timing import EFFICIENCY, TimeModel
from fusion.plan.types import ClusterNode
from fusion.plan.workload import OperatorLoad, Workload
from fusion_node import benchmark, calibration, hardware
from fusion_node.emulation import as_emulated
from fusion_node.hardware import Hardware, Limits, look


def looked(limits: Limits, cache: Path) -> Hardware:
    return asyncio.run(look(limits, cache))


@pytest.mark.slow
def test_the_speed_is_measured_once_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hardware, "BENCHMARK_S", 0.1)
    cache = tmp_path / "node" / "speed.json"
    first = looked(Limits(device="cpu", max_memory_bytes=2**30, threads=1), cache)
    assert 1e8 < first.flops < 1e14
    assert 1e7 < first.bytes_per_s < 1e14
    assert first.efficiency["memory"] == 1.0
    assert 0.0 < first.efficiency["conv"] < 100.0
    monkeypatch.setattr(hardware, "BENCHMARK_COMMAND", ("/nonexistent",))
    assert looked(Limits(device="cpu", max_memory_bytes=2**30, threads=1), cache) == first
    with pytest.raises(ConfigError, match=r"cannot be measured: .*nonexistent.*; state it with --speed"):
        looked(Limits(device="cpu", threads=2), cache)  # another thread count has another speed


def test_the_speed_cache_is_keyed_by_device_threads_and_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script = tmp_path / "measure.py"
    script.write_text(
        "import json, os, pathlib\n"
        f"count = pathlib.Path({str(tmp_path)!r}) / 'count'\n"
        "count.write_text(str(int(count.read_text()) + 1 if count.exists() else 1))\n"
        "print(json.dumps({'device': 'cpu', 'flops': float(count.read_text())}))\n"
    )
    monkeypatch.setattr(hardware, "BENCHMARK_COMMAND", (sys.executable, str(script)))
    cache = tmp_path / "speed.json"
    assert [looked(Limits("cpu", threads=n), cache).flops for n in (1, 1, 2, 1)] == [1.0, 1.0, 2.0, 1.0]
    monkeypatch.setattr(hardware, "package_version", lambda _package: "9.9.9")
    assert looked(Limits("cpu", threads=1), cache).flops == 3.0
    cache.write_text("damaged")
    assert looked(Limits("cpu", threads=1), cache).flops == 4.0


def test_a_stated_speed_skips_the_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hardware, "BENCHMARK_COMMAND", ("/nonexistent",))
    found = looked(Limits(device="cpu", max_memory_bytes=2**30, threads=2, flops=3e12), tmp_path / "speed.json")
    assert (found.device, found.memory_bytes, found.threads, found.flops) == ("cpu", 2**30, 2, 3e12)
    assert (found.bytes_per_s, found.efficiency) == (0.0, {})
    assert not (tmp_path / "speed.json").exists()


def test_an_emulated_device_is_its_speed_whatever_the_operator(tmp_path: Path):
    found = looked(Limits("cpu", max_memory_bytes=2**30, threads=1, flops=2e9), tmp_path / "speed.json")
    message = as_emulated(found.to_proto())
    node = ClusterNode(
        NodeId("n"),
        "n",
        "",
        Incarnation(1),
        1,
        message.flops,
        "",
        message.bytes_per_s,
        tuple(message.efficiency.items()),
    )
    kinds = ("linear", "conv", "attention", "norm")
    load = Workload([OperatorLoad(kind, 3e6, 6e6, 5e6, 9e6) for kind in kinds], [], [], [])
    forward, backward = load.work(TimeModel().pace_of(node), TimeModel())
    assert forward.tolist() == pytest.approx([3e6] * 4)
    assert backward.tolist() == pytest.approx([6e6] * 4)


def test_memory_is_80_percent_of_what_is_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hardware, "available_memory_bytes", lambda: 10_000)
    assert looked(Limits("cpu", flops=1e9), tmp_path / "s").memory_bytes == 8_000


def test_a_containers_limits_count(monkeypatch: pytest.MonkeyPatch):
    files = {"memory.max": "3000000", "memory.current": "1000000", "cpu.max": "150000 100000"}
    monkeypatch.setattr(hardware, "_cgroup_text", lambda name: files[name])
    assert hardware.available_memory_bytes() == 2_000_000
    assert hardware.usable_cores() <= 2
    files.update({"memory.max": "max", "cpu.max": "max 100000"})
    assert hardware.available_memory_bytes() > 2_000_000
    assert 1 <= hardware.usable_cores() <= (psutil.cpu_count() or 1)


@pytest.mark.parametrize(
    "limits",
    [
        Limits(device="gpu"),
        Limits(device="cuda:x"),
        Limits(device="cpu; rm"),
        Limits(max_memory_bytes=-1),
        Limits(threads=-1),
        Limits(threads=5000),
        Limits(flops=-1.0),
        Limits(flops=float("nan")),
        Limits(flops=1e30),
    ],
)
def test_limits_that_make_no_sense_are_refused_by_name(limits: Limits):
    with pytest.raises(ConfigError, match=r"^--(device|max-memory|threads|speed): "):
        limits.check()


def test_more_memory_than_there_is_cannot_be_promised(tmp_path: Path):
    with pytest.raises(ConfigError, match="--max-memory: 977 TiB is more than cpu has"):
        looked(Limits("cpu", max_memory_bytes=977 * 2**40, flops=1e9), tmp_path / "speed.json")


@pytest.mark.slow
def test_a_device_that_is_not_there_is_named(tmp_path: Path):
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.raises(ConfigError, match="sees 0 CUDA devices"):
        looked(Limits(device="cuda", flops=1e12), tmp_path / "speed.json")


def test_a_benchmark_that_dies_says_so_and_names_the_way_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    command = (sys.executable, "-c", "raise SystemExit('torch is broken')")
    monkeypatch.setattr(hardware, "BENCHMARK_COMMAND", command)
    with pytest.raises(ConfigError, match=r"torch is broken; state it with --speed"):
        looked(Limits(device="cpu"), tmp_path / "speed.json")


def test_the_blocks_operations_are_those_that_torch_counts():
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    block = benchmark.Block(batch=2, length=16, width=32, heads=4)
    parameters = benchmark._parameters(block.width, torch.device("cpu"))
    x = torch.randn(block.batch, block.length, block.width, requires_grad=True)
    # the counter knows attention on the CPU only as the matrix products that it consists of
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        benchmark._run(x, parameters, block.heads)
    assert counter.get_total_flops() == block.flops


SMALL = calibration.Sizes(batch=2, length=16, width=32, heads=4, channels=8, side=8)


def samples() -> dict[str, calibration.Sample]:
    made = [make(calibration._Maker(torch.device("cpu")), SMALL) for make in calibration._SAMPLES]
    return {sample.kind: sample for sample in made}


def test_samples_count_the_operations_that_torch_counts():
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    for kind, sample in samples().items():
        if sample.arithmetic and kind not in ("recurrent", "attention"):  # it knows nothing of fused layers
            with FlopCounterMode(display=False) as counter:
                calibration._run(sample, torch.device("cpu"))
            assert counter.get_total_flops() == sample.work, kind
    attention = samples()["attention"]
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        calibration._run(attention, torch.device("cpu"))
    # six products without a fused kernel, which makes the scores a second time in its backward
    assert counter.get_total_flops() * 7 == attention.work * 6


def test_every_kind_of_operator_that_takes_time_is_calibrated():
    found = calibration.calibrate(torch.device("cpu"), 1e9, 0.0, SMALL)
    kinds = {info.cost for info in TABLE.values()} - {"view", "convert", "cdist"}
    assert found.efficiency.keys() == kinds
    assert all(share > 0 for share in found.efficiency.values())
    assert found.efficiency["memory"] == 1.0
    assert EFFICIENCY.keys() - found.efficiency.keys() == {"cdist"}


def test_samples_take_turns_and_only_the_faster_half_of_their_runs_counts():
    now_s, order = [0.0], []

    def run(name: str, seconds: list[float]) -> None:
        order.append(name)
        now_s[0] += seconds.pop(0)

    first, second = [9.0, 1.0, 5.0, 3.0, 0.5], [9.0, 2.0, 2.0, 8.0, 8.0]
    took = calibration.rounds_s([lambda: run("a", first), lambda: run("b", second)], 25.0, lambda: now_s[0])
    assert "".join(order) == "ababababab"
    assert took == [(0.5 + 1.0) / 2, 2.0]


def test_the_benchmark_prints_one_json_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["benchmark", "--device", "cpu", "--seconds", "0"])
    benchmark.main()
    assert json.loads(capsys.readouterr().out)["device"] == "cpu"


def test_what_is_registered_carries_the_versions():
    message = Hardware("cpu", "a processor", 2**33, 1e9, 4).to_proto()
    assert (message.memory_bytes, message.threads) == (2**33, 4)
    assert message.torch_version.split("+")[0] == torch.__version__.split("+")[0]
    assert message.python_version == sys.version.split()[0]
