"""What users of other pipelines suffer from, each as a test of ours (the numbers are those of our list of pains)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusion.base.errors import ConfigError, NumericError, PlanError
from fusion.base.ids import Incarnation, NodeId
from fusion.graph.dag import Graph
from fusion.graph.partition import legal_cuts, partition
from fusion.plan import plan
from fusion.plan.schedule import make_schedule, most_in_flight
from fusion.plan.types import Cluster, ClusterNode, JobView, Plan
from fusion.protocol.job import LossWeightSpec, OptimizerSpec
from fusion.runtime.sampling import micro_batch_ids
from tests.support.models import tiny_gpt, tiny_resnet
from tests.support.training import Training, make_training, spread_cuts

SGD = OptimizerSpec("sgd", 0.1)


def rows(count: int, features: int = 6, classes: int = 3, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(count, features, generator=generator),
        "y": torch.randint(0, classes, (count,), generator=generator),
    }


def class_loss(outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs, batch["y"])


def mlp(seed: int = 0, width: int = 8) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3))


def curve(training: Training, cuts: Any = (), **changes: Any) -> list[float]:
    return [step.loss for step in training.run(cuts, **changes).steps]


def cluster(memories: list[int], flops: list[float] | None = None) -> Cluster:
    speeds = flops or [1e12] * len(memories)
    return Cluster(
        tuple(
            ClusterNode(NodeId(f"node{index}"), f"n{index}", f"10.0.0.{index}:7445", Incarnation(1), memory, speed)
            for index, (memory, speed) in enumerate(zip(memories, speeds, strict=True))
        )
    )


def deep_graph(layers: int, width: int = 64, seed: int = 0) -> Graph:
    torch.manual_seed(seed)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)), nn.Linear(width, 3)
    )
    data = rows(8, width)
    return make_training(model, data, class_loss, batch_size=8, micro_batches=2).captured.graph


def covered(planned: Plan, graph: Graph) -> list[int]:
    return [position for stage in planned.stages for position in range(stage.first_operator, stage.end_operator)]


class LongSkip(nn.Module):
    """The first layer's output is needed again by the last one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.a, self.b, self.last = (nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        start = torch.tanh(self.first(x))
        y = torch.tanh(self.b(torch.tanh(self.a(start))))
        result: Tensor = self.head(self.last(y) + start)
        return result


def test_p9_a_stage_is_never_planned_onto_a_node_that_cannot_hold_it() -> None:
    graph = deep_graph(12)
    job = JobView(micro_batches=8, schedule="1f1b", optimizer_bytes_per_parameter=8)
    roomy = plan(cluster([10**9] * 3), graph, job)
    small = max(stage.memory_bytes for stage in roomy.stages) // 3
    planned = plan(cluster([10**9, small, 10**9]), graph, job)
    for stage in planned.stages:
        assert stage.memory_bytes <= (small if stage.node == "node1" else 10**9)
    assert covered(planned, graph) == list(range(len(graph.operators)))


def test_p9_the_first_stage_is_charged_for_all_the_micro_batches_that_it_holds() -> None:
    graph = deep_graph(12, width=16)
    job = JobView(micro_batches=16, schedule="1f1b", optimizer_bytes_per_parameter=0)
    stages = plan(cluster([10**9] * 4), graph, job).stages
    assert [most_in_flight(item) for item in make_schedule("1f1b", 4, 16)] == [4, 3, 2, 1]
    assert stages[0].memory_bytes > stages[-1].memory_bytes
    more = plan(cluster([10**9] * 4), graph, replace(job, schedule="gpipe")).stages
    assert more[0].memory_bytes > stages[0].memory_bytes


def test_p9_a_job_that_fits_nowhere_says_how_much_is_missing() -> None:
    with pytest.raises(PlanError, match=r"\d.*(KiB|MiB|B)"):
        plan(cluster([1000, 1000]), deep_graph(4), JobView(4, "1f1b", 8))


def test_p10_a_skip_over_several_stages_trains_like_the_whole() -> None:
    training = make_training(LongSkip(), rows(16), class_loss, optimizer=SGD)
    legal = legal_cuts(training.captured.graph)
    cuts = [legal[1], legal[3], legal[5]]
    parts = partition(training.captured.graph, cuts)
    assert any(edge.target - edge.source >= 3 for edge in parts.edges)
    assert curve(training, cuts) == curve(training)


def test_p11_tied_weights_on_two_stages_stay_equal_for_ever() -> None:
    tokens = torch.randint(0, 61, (16, 17), generator=torch.Generator().manual_seed(5))
    data = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    training = make_training(tiny_gpt(dropout=0.0), data, steps=6, optimizer=OptimizerSpec("adamw", 1e-2))
    cuts = spread_cuts(training, 3)
    parts = partition(training.captured.graph, cuts)
    assert [shared.holders for shared in parts.shared] == [(0, 2)]
    from fusion.runtime.local import make_runners

    runners = make_runners(training.spec, parts, training.captured.tensors, training.data, None, lambda _: None)
    while not all(runner.finished for runner in runners):
        assert any(runner.advance() for runner in runners)
    name = parts.graph.input_of[parts.shared[0].value].name
    copies = [runner.executor.parameters[name] for runner in (runners[0], runners[2])]
    assert torch.equal(*copies)
    assert not torch.equal(copies[0], training.captured.tensors[name])


def test_p12_a_smaller_last_micro_batch_trains_as_one_big_batch_does() -> None:
    training = make_training(mlp(), rows(30), class_loss, batch_size=10, micro_batches=4, optimizer=SGD)
    assert training.spec.micro_batch_sizes() == (3, 3, 3, 1)
    whole = curve(training, micro_batches=1)
    assert curve(training) == pytest.approx(whole, rel=1e-5)
    assert curve(training, spread_cuts(training, 3)) == curve(training)


def test_p12_batches_run_on_into_the_next_pass_over_the_data() -> None:
    training = make_training(mlp(), rows(10), class_loss, batch_size=8, micro_batches=2, steps=5, shuffle=True)
    ids = np.concatenate(
        [micro_batch_ids(0, 10, True, (4, 4), step=step, micro_batch=index) for step in range(1, 6) for index in (0, 1)]
    )
    assert sorted(ids.tolist()) == sorted(list(range(10)) * 4)
    assert all(map(math.isfinite, curve(training)))


def test_p13_clipping_uses_the_norm_of_all_stages() -> None:
    clip = 0.05
    training = make_training(mlp(), rows(16), class_loss, steps=1, grad_clip=clip, optimizer=SGD, micro_batches=1)
    model = mlp()
    batch = {name: tensor[:8] for name, tensor in training.data.rows.items()}
    class_loss(model(batch["x"]), batch).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
    assert norm > clip
    step = training.run(spread_cuts(training, 3)).steps[0]
    assert step.grad_norm == pytest.approx(norm.item(), rel=1e-5)
    ours = training.run(spread_cuts(training, 3)).tensors
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        expected = parameter.detach() - 0.1 * parameter.grad
        torch.testing.assert_close(ours[name], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8])
def test_p14_loss_and_gradients_do_not_depend_on_the_number_of_micro_batches(micro_batches: int) -> None:
    training = make_training(mlp(), rows(16), class_loss, batch_size=8, micro_batches=2, optimizer=SGD)
    one, other = training.run(micro_batches=1), training.run(micro_batches=micro_batches)
    assert [step.loss for step in other.steps] == pytest.approx([step.loss for step in one.steps], rel=1e-5)
    assert [step.grad_norm for step in other.steps] == pytest.approx([step.grad_norm for step in one.steps], rel=1e-4)


def test_p14_padded_tokens_weigh_nothing_however_they_are_spread_over_micro_batches() -> None:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 61, (8, 13), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[:3, 4:] = -100
    labels[5, 1:] = -100
    data = {"input_ids": tokens[:, :-1].contiguous(), "labels": labels.contiguous()}

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.head = nn.Embedding(61, 8), nn.Linear(8, 61)

        def forward(self, input_ids: Tensor) -> Tensor:
            logits: Tensor = self.head(self.embed(input_ids))
            return logits

    def loss(outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)

    rule = LossWeightSpec("labels", -100)
    training = make_training(Padded(), data, loss, batch_size=8, micro_batches=4, loss_weight=rule, optimizer=SGD)
    whole = curve(training, micro_batches=1)
    assert curve(training) == pytest.approx(whole, rel=1e-5)
    assert curve(training, loss_weight=LossWeightSpec()) != pytest.approx(whole, rel=1e-5)


def test_p15_the_order_of_the_data_does_not_depend_on_the_number_of_stages() -> None:
    training = make_training(mlp(), rows(40), class_loss, shuffle=True, steps=4, seed=9)
    assert curve(training, spread_cuts(training, 2)) == curve(training, spread_cuts(training, 4)) == curve(training)


@pytest.mark.parametrize("layers", [3, 5, 7, 11])
@pytest.mark.parametrize("nodes", [2, 3, 4, 5])
def test_p16_odd_numbers_of_layers_leave_no_operator_out_and_no_stage_empty(layers: int, nodes: int) -> None:
    graph = deep_graph(layers)
    planned = plan(cluster([10**9] * nodes, [1e12, 3e12, 0.5e12, 2e12, 1e12][:nodes]), graph, JobView(4, "1f1b", 8))
    assert covered(planned, graph) == list(range(len(graph.operators)))
    assert all(stage.end_operator > stage.first_operator for stage in planned.stages)
    assert len({stage.node for stage in planned.stages}) == len(planned.stages) == nodes


def test_p17_values_without_gradient_cross_between_stages() -> None:
    class Masked(nn.Module):
        """A frozen part, an integer and a bool value cross the cut beside one that has a gradient."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.frozen, self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
            for parameter in self.frozen.parameters():
                parameter.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            fixed = torch.sin(self.frozen(x))
            best = self.first(x).topk(3).indices
            keep = fixed > 0
            hidden = torch.tanh(self.first(x))
            chosen = hidden.gather(1, best).sum(1, keepdim=True)
            scores: Tensor = self.last(torch.where(keep, hidden, fixed)) + chosen
            return scores

    training = make_training(Masked(), rows(16), class_loss)
    whole = training.run()
    dtypes, without_gradient = set(), 0
    for cut in legal_cuts(training.captured.graph):
        for edge in partition(training.captured.graph, [cut]).edges:
            value = training.captured.graph.values[edge.value]
            assert value.spec is not None
            dtypes.add(value.spec.dtype)
            without_gradient += not value.requires_grad
        cut_run = training.run([cut])
        assert [step.loss for step in cut_run.steps] == pytest.approx([step.loss for step in whole.steps], abs=1e-6)
    assert {"bool", "int64", "float32"} <= dtypes
    assert without_gradient
    assert torch.equal(whole.tensors["frozen.weight"], training.captured.tensors["frozen.weight"])


def test_p18_batch_norm_sees_each_micro_batch_and_its_statistics_move_in_their_order() -> None:
    generator = torch.Generator().manual_seed(6)
    data = {
        "image": torch.randn(8, 3, 8, 8, generator=generator),
        "label": torch.randint(0, 5, (8,), generator=generator),
    }

    def loss(outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
        return F.cross_entropy(outputs, batch["label"])

    training = make_training(tiny_resnet(), data, loss, steps=1, batch_size=8, micro_batches=4)
    ours = training.run(spread_cuts(training, 3)).tensors
    model = tiny_resnet().train()
    for start in range(0, 8, 2):
        model(data["image"][start : start + 2])
    statistics = {name: tensor for name, tensor in model.named_buffers() if "running" in name or "num_batches" in name}
    assert statistics
    for name, tensor in statistics.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-6, atol=1e-7)


def test_p19_one_stage_with_a_gradient_that_is_not_finite_makes_all_stages_skip() -> None:
    data = rows(24)
    data["x"][9, 0] = (
        math.inf
    )  # in the second step: tanh saturates behind it, so only the first layer's gradient is NaN
    training = make_training(mlp(), data, class_loss, optimizer=SGD, steps=3)
    result = training.run(spread_cuts(training, 3))
    assert [step.skipped for step in result.steps] == [False, True, False]
    assert math.isfinite(result.steps[1].loss)
    assert all(tensor.isfinite().all() for tensor in result.tensors.values())


def test_f19_three_steps_in_a_row_that_are_not_finite_end_the_run_and_name_it() -> None:
    data = rows(48)
    data["x"][8:, 0] = math.inf  # from the second step on
    training = make_training(mlp(), data, class_loss, optimizer=SGD, steps=6)
    with pytest.raises(NumericError, match="diverged: the gradients of steps 2 to 4 were not finite"):
        training.run(spread_cuts(training, 3))


def test_a_schedule_table_drives_the_learning_rate() -> None:
    from fusion.protocol.job import LrScheduleSpec

    training = make_training(mlp(), rows(16), class_loss, lr_schedule=LrScheduleSpec("table", factors=(1.0, 0.5, 0.0)))
    result = training.run(spread_cuts(training, 2))
    assert [step.learning_rate for step in result.steps] == [0.01, 0.005, 0.0]


def test_micro_batches_of_which_more_than_the_last_are_smaller_are_refused() -> None:
    from fusion.protocol.job import check_settings

    training = make_training(mlp(), rows(16), class_loss)
    with pytest.raises(ConfigError, match="micro_batches=5 works"):
        check_settings(replace(training.spec, batch_size=10, micro_batches=7))
