"""What held stages hand on is all that stages under any other cut need, once, and nothing that never changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fusion.base.errors import DataError
from fusion.base.ids import StageIndex
from fusion.graph.dag import InputKind
from fusion.graph.partition import Partition, partition
from fusion.runtime.local import compute_settings, make_runners
from fusion.runtime.stage import StageRunner
from fusion.runtime.tensorfile import save_tensors
from fusion_node.stagestate import HELD_PREFIX, HandedOn, initial_names, load_stage
from fusion_node.statefiles import FileSource
from tests.support.models import tiny_gpt
from tests.support.training import Training, make_training, spread_cuts


@pytest.fixture(scope="module")
def training() -> Training:
    """Tied embeddings in the first and the last stage; the positions are frozen."""
    tokens = torch.randint(0, 61, (8, 17), generator=torch.Generator().manual_seed(5))
    rows = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    model = tiny_gpt()
    model.position.weight.requires_grad_(False)
    made = make_training(model, rows)
    return replace(made, spec=replace(made.spec, steps=2))


def trained(training: Training, parts: Partition) -> list[StageRunner]:
    with compute_settings(training.spec):
        runners = make_runners(
            training.spec, parts, training.captured.tensors, training.data, None, lambda _metrics: None
        )
        while not all(runner.finished for runner in runners):
            assert any(runner.advance() for runner in runners)
    return runners


def test_each_tensor_is_handed_on_once_and_goes_where_it_is_needed(training: Training, tmp_path: Path):
    graph = training.captured.graph
    old = partition(graph, spread_cuts(training, 3))
    assert old.shared, "the tied embedding is shared"
    runners = trained(training, old)
    states = [HandedOn(runner.executor, old, f"job.e1.s{runner.stage}")(2, runner.state()) for runner in runners]
    names = [name for state in states for name in state if not name.startswith(HELD_PREFIX)]
    assert len(names) == len(set(names))
    everything = {name: tensor for runner in runners for name, tensor in runner.state().items()}
    assert everything.keys() - set(names) == {"position.weight"}
    assert [int(state[f"{HELD_PREFIX}job.e1.s{stage}"]) for stage, state in enumerate(states)] == [2, 2, 2]

    weights = tmp_path / "weights"
    save_tensors(weights, training.captured.tensors)
    files = [tmp_path / f"state{stage}" for stage in range(3)]
    for path, state in zip(files, states, strict=True):
        save_tensors(path, state)
    new = partition(graph, spread_cuts(training, 2, 0.2))
    for shard in new.shards:
        found = load_stage(new, shard.index, FileSource(weights), [FileSource(path) for path in files])
        kinds = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT)
        inputs = {graph.input_of[value].name for value in shard.inputs if graph.input_of[value].kind in kinds}
        assert found.inputs.keys() == inputs
        expected = training.captured.tensors | everything
        assert all(torch.equal(found.inputs[name], expected[name]) for name in inputs)
        optimizer = {
            f"$optimizer.{key}.{name}" for name in inputs for key in ("step", "exp_avg", "exp_avg_sq")
        } & everything.keys()
        assert found.optimizer.keys() == optimizer
        assert all(torch.equal(found.optimizer[name], everything[name]) for name in optimizer)


def test_a_first_start_takes_everything_from_the_weights(training: Training, tmp_path: Path):
    parts = partition(training.captured.graph, spread_cuts(training, 2))
    save_tensors(tmp_path / "weights", training.captured.tensors)
    for shard in parts.shards:
        found = load_stage(parts, shard.index, FileSource(tmp_path / "weights"), [])
        assert set(found.inputs) == set(initial_names(parts, shard.index, resumed=False))
        assert found.optimizer == {}
        assert all(torch.equal(tensor, training.captured.tensors[name]) for name, tensor in found.inputs.items())


def test_a_tensor_that_no_state_has_is_named_and_never_taken_as_it_was_at_first(training: Training, tmp_path: Path):
    parts = partition(training.captured.graph, [])
    save_tensors(tmp_path / "weights", training.captured.tensors)
    state = {name: tensor for name, tensor in training.captured.tensors.items() if name != "norm.weight"}
    save_tensors(tmp_path / "state", state)
    with pytest.raises(DataError, match=r"'norm\.weight' is in none of the 1 states"):
        load_stage(parts, StageIndex(0), FileSource(tmp_path / "weights"), [FileSource(tmp_path / "state")])
