"""The shape rules against what torch really returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusion.base.ids import ValueId
from fusion.graph.dag import Operator, Ref, TensorSpec, Value
from fusion.graph.operators import TABLE
from fusion.graph.shapes import RULES, ShapeError, broadcast, expected_shape
from tests.support.operators import Call

X = torch.ones(2, 3)
IMAGE = torch.ones(2, 4, 9, 8)
IDS = torch.zeros(2, 3, dtype=torch.int64)

CALLS: list[tuple[str, Callable[[], Call]]] = [
    ("same", lambda: Call("aten.relu.default", X)),
    ("same", lambda: Call("aten.zeros_like.default", X)),
    ("same", lambda: Call("aten.masked_fill_.Scalar", X.clone(), X.bool(), 1.0)),
    ("same", lambda: Call("aten.pow.Scalar", 2.0, X)),
    ("same", lambda: Call("aten.layer_norm.default", X, [3])),
    ("broadcast", lambda: Call("aten.add.Tensor", X, torch.ones(4, 1, 3))),
    ("broadcast", lambda: Call("aten.add.Tensor", X, 2.0)),
    ("broadcast", lambda: Call("aten.where.self", X.bool(), torch.ones(()), torch.ones(4, 1, 1))),
    ("broadcast", lambda: Call("aten.masked_fill.Scalar", torch.ones(3), X.bool(), 0.0)),
    ("size", lambda: Call("aten.zeros.default", [2, 5])),
    ("size", lambda: Call("aten.new_full.default", X, [], 1.0)),
    ("size", lambda: Call("aten.randint.low", 0, 5, [4])),
    ("range", lambda: Call("aten.arange.default", 5)),
    ("range", lambda: Call("aten.arange.start", 2, 5)),
    ("range", lambda: Call("aten.arange.start_step", 0, 7, 3)),
    ("range", lambda: Call("aten.arange.start_step", 0.0, 1.0, 0.3)),
    ("range", lambda: Call("aten.arange.start_step", 7, 0, -2)),
    ("range", lambda: Call("aten.eye.default", 3)),
    ("range", lambda: Call("aten.eye.m", 3, 2)),
    ("range", lambda: Call("aten.linspace.default", 0.0, 1.0, 7)),
    ("range", lambda: Call("aten.scalar_tensor.default", 1.0)),
    ("expand", lambda: Call("aten.expand.default", torch.ones(3, 1), [4, -1, 5])),
    ("expand", lambda: Call("aten.broadcast_to.default", torch.ones(3, 1), [2, 3, 5])),
    ("repeat", lambda: Call("aten.repeat.default", X, [4, 1, 2])),
    ("repeat", lambda: Call("aten.tile.default", X, [2])),
    ("repeat_interleave", lambda: Call("aten.repeat_interleave.self_int", X, 3, -1)),
    ("repeat_interleave", lambda: Call("aten.repeat_interleave.self_int", X, 3)),
    ("pad", lambda: Call("aten.pad.default", X, [1, 2, 0, -1])),
    ("pad", lambda: Call("aten.constant_pad_nd.default", X, [0, 4])),
    ("pad", lambda: Call("aten.reflection_pad2d.default", IMAGE, [1, 2, 3, 4])),
    ("one_hot", lambda: Call("aten.one_hot.default", IDS, 7)),
    ("cat", lambda: Call("aten.cat.default", [X, torch.ones(5, 3)])),
    ("cat", lambda: Call("aten.cat.default", [X, torch.ones(0), X], -1)),
    ("stack", lambda: Call("aten.stack.default", [X, X], -1)),
    ("stack", lambda: Call("aten.stack.default", [X, X, X], 1)),
    ("embedding", lambda: Call("aten.embedding.default", torch.ones(10, 4), IDS)),
    ("linear", lambda: Call("aten.linear.default", X, torch.ones(5, 3), torch.ones(5))),
    ("linear", lambda: Call("aten.linear.default", X, torch.ones(3))),
    ("matmul", lambda: Call("aten.matmul.default", torch.ones(4, 1, 2, 3), torch.ones(5, 3, 6))),
    ("matmul", lambda: Call("aten.matmul.default", torch.ones(3), torch.ones(5, 3, 6))),
    ("matmul", lambda: Call("aten.matmul.default", torch.ones(5, 2, 3), torch.ones(3))),
    ("matmul", lambda: Call("aten.mv.default", X, torch.ones(3))),
    ("matmul", lambda: Call("aten.dot.default", torch.ones(3), torch.ones(3))),
    ("addmm", lambda: Call("aten.addmm.default", torch.ones(5), X, torch.ones(3, 5))),
    ("addmm", lambda: Call("aten.baddbmm.default", torch.ones(1), torch.ones(2, 4, 3), torch.ones(2, 3, 5))),
    ("addmm", lambda: Call("aten.addmv.default", torch.ones(2), X, torch.ones(3))),
    ("conv", lambda: Call("aten.conv2d.default", IMAGE, torch.ones(6, 4, 3, 2))),
    ("conv", lambda: Call("aten.conv2d.default", IMAGE, torch.ones(6, 2, 3, 2), None, [2, 1], [1, 2], [1, 3], 2)),
    ("conv", lambda: Call("aten.conv2d.default", IMAGE[0], torch.ones(6, 4, 3, 2), None, [2], [1])),
    ("conv", lambda: Call("aten.conv1d.padding", torch.ones(2, 4, 9), torch.ones(6, 4, 4), None, [1], "same")),
    ("conv", lambda: Call("aten.conv3d.padding", torch.ones(2, 4, 5, 6, 7), torch.ones(6, 4, 3, 2, 2), None, [2])),
    ("output_size", lambda: Call("aten.adaptive_avg_pool2d.default", IMAGE, [3, 2])),
    ("output_size", lambda: Call("aten.adaptive_avg_pool2d.default", IMAGE[0], [3, 2])),
    ("output_size", lambda: Call("aten.upsample_nearest2d.vec", IMAGE, None, [1.5, 2.6])),
    ("output_size", lambda: Call("aten.upsample_bilinear2d.vec", IMAGE, [20, 21], False, None)),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "call"), CALLS)
def test_a_rule_says_the_shape_that_torch_returns(rule: str, call: Callable[[], Call]) -> None:
    made = call()
    assert TABLE[made.operator.name].shape == rule
    assert expected_shape(made.operator, made.values) == tuple(made.results[0].shape)


def test_every_rule_is_compared_with_torch() -> None:
    assert {rule for rule, _ in CALLS} | {"elements"} == RULES.keys()


def test_views_are_compared_by_their_number_of_elements() -> None:
    made = Call("aten.view.default", X, [6])
    assert expected_shape(made.operator, made.values) is None
    wrong = [made.values[0], Value(TensorSpec("float32", (7,)))]
    with pytest.raises(ShapeError, match="6 elements"):
        expected_shape(made.operator, wrong)


def values(*shapes: tuple[int, ...]) -> list[Value]:
    return [Value(TensorSpec("float32", shape)) for shape in shapes]


REFS = [Ref(ValueId(index)) for index in range(4)]


@pytest.mark.parametrize(
    ("name", "arguments", "shapes"),
    [
        ("aten.add.Tensor", REFS[:2], [(2, 3), (4,)]),
        ("aten.linear.default", REFS[:2], [(2, 3), (5, 4)]),
        ("aten.linear.default", REFS[:2], [(), (5, 4)]),
        ("aten.matmul.default", REFS[:2], [(2, 3), (2, 3)]),
        ("aten.matmul.default", REFS[:2], [(), (3,)]),
        ("aten.cat.default", [tuple(REFS[:2])], [(2, 3), (2, 4)]),
        ("aten.cat.default", [tuple(REFS[:2]), 7], [(2, 3), (2, 3)]),
        ("aten.stack.default", [tuple(REFS[:2])], [(2, 3), (2, 4)]),
        ("aten.expand.default", [REFS[0], (4, 5)], [(2, 3), ()]),
        ("aten.expand.default", [REFS[0], (3,)], [(2, 3), ()]),
        ("aten.conv2d.default", REFS[:2], [(2, 3, 8, 8), (4, 5, 3, 3)]),
        ("aten.conv2d.default", [*REFS[:2], None, (0, 1)], [(2, 3, 8, 8), (4, 3, 3, 3)]),
        ("aten.pad.default", [REFS[0], (1,)], [(2, 3), ()]),
        ("aten.one_hot.default", REFS[:1], [(2, 3), ()]),
        ("aten.upsample_nearest2d.vec", [REFS[0], None, (float("inf"), 1.0)], [(1, 2, 3, 3), ()]),
        ("aten.arange.start_step", [0, 5, 0], [(), ()]),
        ("aten.arange.default", [-3], [(), ()]),
        ("aten.arange.default", [float("inf")], [(), ()]),
    ],
)
def test_arguments_that_do_not_fit_together_are_told(
    name: str, arguments: list[Any], shapes: list[tuple[int, ...]]
) -> None:
    with pytest.raises(ShapeError):
        expected_shape(Operator(name, tuple(arguments), outputs=(ValueId(2),)), values(*shapes, (2, 3)))


def test_sizes_may_be_integers_of_the_graph() -> None:
    op = Operator("aten.zeros.default", ((REFS[0], 3),), outputs=(ValueId(1),))
    assert expected_shape(op, [Value(None, nominal=8), *values((8, 3))]) == (8, 3)


def test_broadcasting_follows_torch() -> None:
    for shapes in ([(2, 1), (3,)], [(1,), (2, 0)], [(), (4, 1, 2)], [(5, 1, 2), (3, 1), (2,)]):
        assert broadcast(shapes) == tuple(torch.broadcast_shapes(*shapes))
