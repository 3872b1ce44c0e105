"""`python -m benchmarks.convergence`: small models really train through the pipeline, with and without codecs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import convergence
from benchmarks.convergence import Runs, gap_pct, measure, schedule_of
from fusion.base.errors import ConfigError


@pytest.mark.slow
def test_both_models_train_with_a_codec_and_their_gaps_stand_beside_a_control_near_zero(tmp_path: Path) -> None:
    runs = Runs(tmp_path / "runs.jsonl", quick=True)
    result = measure(runs, ["gpt", "resnet"], "int2", seeds=1, steps=0)
    assert result["models"].keys() == {"gpt", "resnet"}
    assert 0 < result["control_gap_pct"] < 0.5
    assert 10 < result["ratio"] < 15  # 32 bits against 2.25 and headers of small tensors
    for name in ("train_gap_pct", "val_on_gap_pct", "val_served_gap_pct"):
        assert result[name] == max(model[name] for model in result["models"].values())
        assert abs(result[name]) > result["control_gap_pct"]


def test_finished_runs_are_taken_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "runs.jsonl"
    first = Runs(cache, quick=True).outcome("gpt", 1, 3, "int8")
    monkeypatch.setattr(convergence, "train", lambda *_: pytest.fail("trained again"))
    assert Runs(cache, quick=True).outcome("gpt", 1, 3, "int8").losses == first.losses
    assert len(first.losses) == 3


def test_a_run_has_the_codecs_of_a_jobs_compression_phase_by_phase() -> None:
    schedule = schedule_of("mask:1/8 int8/int4@50% int8@90%", 20)
    names = [schedule.at(step).pair.name for step in (1, 10, 11, 18, 19, 20)]
    assert names == ["mask:1/8/int4", "mask:1/8/int4", "int8/int4", "int8/int4", "int8", "int8"]


def test_auto_stands_for_the_strongest_codecs_that_it_may_use() -> None:
    assert [schedule_of("auto", 20).at(step).pair.name for step in (14, 15)] == ["mask:3/8/int4", "int6/int3+dither"]
    assert schedule_of("auto:4", 20).at(1).pair.name == "int8"
    assert schedule_of("auto:1", 20).at(1).pair.name == "none"
    assert schedule_of("adatopk:100", 20).at(1).pair.name == "adatopk:100"


@pytest.mark.parametrize("codec", ["int8@50% int4", "int8 int9@50%"])
def test_a_compression_that_cannot_be_is_refused(codec: str) -> None:
    with pytest.raises(ConfigError):
        schedule_of(codec, 20)


def test_a_gap_is_relative_to_the_uncompressed_loss() -> None:
    assert gap_pct(2.02, 2.0) == pytest.approx(1.0)
