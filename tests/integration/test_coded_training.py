"""Codecs on the links of a pipeline: what is exact stays exact, what is lost is lost alike in every process."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fusion.base.ids import StageIndex
from fusion.compress.catalog import parse_pair
from fusion.compress.linkcodecs import CodecSchedule, LinkCodecs
from fusion.graph.partition import partition
from fusion.protocol.passes import CodecPass
from fusion.runtime.local import LocalResult, compute_settings, make_coders, make_runners
from tests.integration.test_exact_training import gpt_training, resnet_training, same
from tests.support.training import Training, spread_cuts


@pytest.fixture(scope="module")
def gpt() -> Training:
    return gpt_training()


@pytest.fixture(scope="module")
def whole(gpt: Training) -> LocalResult:
    return gpt.run()


def always(text: str) -> CodecSchedule:
    return CodecSchedule.always(parse_pair(text))


def losses(run: LocalResult) -> list[float]:
    return [step.loss for step in run.steps]


@pytest.mark.parametrize("text", ["none", "none+zstd"])
def test_codecs_that_lose_nothing_change_nothing(gpt: Training, whole: LocalResult, text: str) -> None:
    assert same(whole, gpt.run(spread_cuts(gpt, 3), codecs=always(text)))


@pytest.mark.parametrize(
    "text",
    [
        "bf16",
        "fp16",
        "fp8",
        "int8",
        "int4",
        "int2",
        "hadamard4",
        "int8/int4+ef",
        "topk:8/topk:8+ef",
        "adatopk:8",
        "mask:1/4",
        "mask:1/4/none",
        "lowrank:4/lowrank:4+ef",
    ],
)
def test_every_codec_trains_a_cut_model_and_trains_it_again_alike(gpt: Training, whole: LocalResult, text: str) -> None:
    cuts = spread_cuts(gpt, 3)
    run = gpt.run(cuts, codecs=always(text))
    assert same(run, gpt.run(cuts, codecs=always(text)))
    assert losses(run) != losses(whole)
    assert all(map(math.isfinite, losses(run)))
    assert sum(step.bytes for step in run.steps) < sum(step.bytes for step in gpt.run(cuts).steps)


def test_the_bytes_of_a_step_are_those_of_the_frames() -> None:
    resnet = resnet_training()
    cuts = spread_cuts(resnet, 2)
    plain, half = (
        resnet.run(cuts, steps=1, eval_every_steps=0, codecs=always(text)).steps[0].bytes for text in ("none", "bf16")
    )
    edges = partition(resnet.captured.graph, cuts).edges
    raw = [resnet.captured.graph.values[edge.value].bytes for edge in edges]
    assert plain - half == 2 * 4 * sum(size // 2 - 56 for size in raw)  # both ways, 4 micro-batches, 56 a frame


def test_evaluations_send_their_values_as_they_are_unless_asked_to_code_them(gpt: Training) -> None:
    cuts = spread_cuts(gpt, 2)
    frozen = replace(gpt, spec=replace(gpt.spec, optimizer=replace(gpt.spec.optimizer, learning_rate=0.0)))
    plain, coded = (frozen.run(cuts, codecs=always(text)).steps[1].eval_loss for text in ("none", "int4"))
    assert plain == coded
    assert frozen.run(cuts, codecs=always("int4"), code_evaluation=True).steps[1].eval_loss != plain


def test_the_codecs_of_a_schedule_begin_with_their_step(gpt: Training) -> None:
    cuts = spread_cuts(gpt, 2)
    changing = always("none").changed(3, {(0, 1): parse_pair("int4").forward})
    run, plain = (gpt.run(cuts, codecs=codecs) for codecs in (changing, always("none")))
    assert losses(run)[:2] == losses(plain)[:2]
    assert losses(run)[2] != losses(plain)[2]
    one_way = CodecSchedule.always(LinkCodecs(links={(1, 0): parse_pair("int4").forward}))
    assert losses(gpt.run(cuts, codecs=one_way))[0] == losses(plain)[0]  # gradients come after the first loss


@pytest.mark.parametrize("text", ["int8/topk:16+ef", "lowrank:4/lowrank:8+ef", "int4", "mask:1/4"])
def test_a_run_that_goes_on_from_its_state_equals_the_undisturbed_run(gpt: Training, text: str) -> None:
    cuts, codecs = spread_cuts(gpt, 3), always(text)
    undisturbed = gpt.run(cuts, codecs=codecs, steps=6)
    parts = partition(gpt.captured.graph, cuts)
    spec = replace(gpt.spec, steps=6)
    done: list[float] = []
    with compute_settings(spec):
        coders = make_coders(spec, parts, codecs)
        runners = make_runners(
            spec,
            parts,
            gpt.captured.tensors,
            gpt.data,
            gpt.eval_data,
            lambda step: done.append(step.loss),
            coders=coders,
        )
        runners[0].hold()
        while not all(runner.finished for runner in runners):
            assert any(runner.advance() for runner in runners)
    state = {name: tensor.detach().clone() for runner in runners for name, tensor in runner.state().items()}
    assert (
        sum(len(runner.state()) for runner in runners)
        == len(state) + sum(len(shared.holders) - 1 for shared in parts.shared) * 4
    )  # a parameter and its three optimizer tensors
    moved = replace(gpt, captured=replace(gpt.captured, tensors=gpt.captured.tensors | state))
    after = moved.run(cuts, codecs=codecs, steps=6, first_step=len(done) + 1)
    assert done + losses(after) == losses(undisturbed)
    assert all(torch.equal(after.tensors[name], undisturbed.tensors[name]) for name in undisturbed.tensors)
    assert after.tensors.keys() == undisturbed.tensors.keys()


def test_codecs_asked_for_while_it_runs_change_on_all_stages_with_the_same_step(gpt: Training) -> None:
    """As if they had been planned: both ends of every link, from the second step after the asking on."""
    cuts, spec = spread_cuts(gpt, 3), replace(gpt.spec, steps=6)
    parts = partition(gpt.captured.graph, cuts)
    asked = CodecPass(1, ((StageIndex(0), StageIndex(1), "int4"), (StageIndex(2), StageIndex(1), "topk:8+ef")))
    done: list[float] = []
    with compute_settings(spec):
        coders = make_coders(spec, parts, always("bf16"))
        take = [gpt.captured.tensors, gpt.data, gpt.eval_data, lambda step: done.append(step.loss)]
        runners = make_runners(spec, parts, *take, coders=coders)
        while not all(runner.finished for runner in runners):
            if len(done) == 1:
                runners[0].recode(asked)
            assert any(runner.advance() for runner in runners)
    begin = next(step for step in range(1, 7) if coders[StageIndex(0)].revision(step) == 1)
    assert 3 <= begin <= 5
    assert {coder.revision(6) for coder in coders.values()} == {1}
    planned = always("bf16").changed(begin, asked.specs())
    assert done == losses(gpt.run(cuts, codecs=planned, steps=6))
    assert done != losses(gpt.run(cuts, codecs=always("bf16"), steps=6))
