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


def test_each_codec_of_a_schedule_ends_at_its_share_of_the_steps() -> None:
    schedule = schedule_of("mask:1/8@0.5,int8/int4@0.9,int8", 20)
    names = [schedule.at(step).pair.name for step in (1, 10, 11, 18, 19, 20)]
    assert names == ["mask:1/8/int4", "mask:1/8/int4", "int8/int4", "int8/int4", "int8", "int8"]


@pytest.mark.parametrize("codec", ["int8@0.5", "int8,int4", "int8@0.5,int9"])
def test_a_schedule_that_cannot_be_is_refused(codec: str) -> None:
    with pytest.raises(ConfigError):
        schedule_of(codec, 20)


def test_a_gap_is_relative_to_the_uncompressed_loss() -> None:
    assert gap_pct(2.02, 2.0) == pytest.approx(1.0)
