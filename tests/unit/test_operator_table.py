"""The table of operators against torch's own schemas, and what the table must never hold."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from fusion.base.errors import GraphError
from fusion.base.ids import ValueId
from fusion.graph.check import check_graph
from fusion.graph.costs import _RULES as COST_RULES
from fusion.graph.dag import DType, Operator, Ref
from fusion.graph.operators import (
    FILLS,
    TABLE,
    UNINITIALISED,
    OperatorInfo,
    argument_of,
    may_draw,
    shared_values,
    written_values,
)
from fusion.graph.shapes import RULES as SHAPE_RULES
from tests.support.graphs import chain
from tests.support.operators import overload

ATEN = [info for info in TABLE.values() if info.name.startswith("aten.")]

#: May return their argument or a view of it, which torch's notation does not say: the arguments concerned.
UNSTATED_ALIASES = {
    "aten._unsafe_view.default": {0},
    "aten.alpha_dropout.default": {0},
    "aten.broadcast_tensors.default": {0},
    "aten.channel_shuffle.default": {0},
    "aten.einsum.default": {1},
    "aten.feature_alpha_dropout.default": {0},
    "aten.feature_dropout.default": {0},
    "aten.meshgrid.default": {0},
    "aten.meshgrid.indexing": {0},
    "aten.pixel_shuffle.default": {0},
    "aten.pixel_unshuffle.default": {0},
    "aten.rrelu.default": {0},
    "aten.type_as.default": {0},
}
#: Write to their running statistics, which torch's notation denies.
UNSTATED_WRITES = {"aten.batch_norm.default": {3, 4}, "aten.instance_norm.default": {3, 4}}

#: Every operator that was met in sixteen captured models of common kinds.
_MET = """
__and__.Tensor abs adaptive_avg_pool2d add.Tensor add_.Tensor addmm alias arange batch_norm bernoulli_.float
bitwise_not bmm cat chunk clamp clone contiguous conv1d conv2d conv_transpose2d.input copy_ cos cross_entropy_loss
cumsum diff div.Tensor div_.Tensor einsum embedding eq.Scalar eq.Tensor exp expand fill_.Tensor flatten.using_ints
full_like gather ge.Scalar gelu gt.Scalar index.Tensor index_add layer_norm le.Tensor lift_fresh_copy linear log
lstm.input lt.Scalar masked_fill.Scalar masked_fill_.Scalar matmul max_pool2d mean.dim min.other mul.Tensor ne.Scalar
neg new_empty new_ones new_zeros ones pad permute pow.Tensor_Scalar relu relu_ repeat repeat_interleave.self_int
reshape rsqrt scaled_dot_product_attention select.int silu sin slice.Tensor softmax.int softplus split.Tensor
split_with_sizes squeeze.dim stack sub.Tensor sum.dim_IntList tanh to.device to.dtype to.dtype_layout topk
transpose.int tril unbind.int unsqueeze upsample_bilinear2d.vec view where.ScalarOther where.default where.self zeros
zeros_like
"""


def schema(info: OperatorInfo) -> Any:
    return overload(info.name)._schema


def test_the_table_has_every_operator_that_common_models_use() -> None:
    wanted = {f"aten.{name if '.' in name else name + '.default'}" for name in _MET.split()}
    assert wanted <= TABLE.keys()
    assert {"fusion.dropout.default", "python.mul"} <= TABLE.keys()
    assert len(TABLE) >= 200


def test_names_are_their_own_keys() -> None:
    assert all(name == info.name for name, info in TABLE.items())


def test_every_parameter_is_as_in_torchs_schema() -> None:
    for info in ATEN:
        ours = [(item.name, item.keyword_only, item.required) for item in info.parameters]
        theirs = [(arg.name, arg.kwarg_only, not arg.has_default_value()) for arg in schema(info).arguments]
        assert ours == theirs, info.name


def test_every_parameters_type_is_as_in_torchs_schema() -> None:
    def type_of(item: Any) -> str:
        inner = f"{item.kind}?" if item.nullable_items else item.kind
        return f"List[{inner}]" if item.is_list else inner

    simple = {"Scalar": "number", "ScalarType": "int", "Layout": "int", "MemoryFormat": "int", "Device": "Device"}
    for info in ATEN:
        for item, arg in zip(info.parameters, schema(info).arguments, strict=True):
            theirs = str(arg.type)
            nullable = theirs.startswith("Optional[")
            if nullable:
                theirs = theirs.removeprefix("Optional[").removesuffix("]")
            theirs = theirs.replace("Optional[Tensor]", "Tensor?").replace("SymInt", "int")
            ours = type_of(item)
            assert simple.get(ours, ours) == theirs, f"{info.name} {item.name}"
            assert item.nullable == nullable, f"{info.name} {item.name}"


def test_writes_are_those_of_torchs_schema_and_batch_norms_statistics() -> None:
    for info in ATEN:
        marked = {i for i, arg in enumerate(schema(info).arguments) if arg.alias_info and arg.alias_info.is_write}
        assert set(info.mutates) == marked | UNSTATED_WRITES.get(info.name, set()), info.name


def test_shared_memory_is_that_of_torchs_schema_and_of_results_that_may_be_the_argument() -> None:
    for info in ATEN:
        marked = {i for i, arg in enumerate(schema(info).arguments) if arg.alias_info}
        assert set(info.aliases) == marked | UNSTATED_ALIASES.get(info.name, set()), info.name


def test_batch_norm_does_write_what_its_schema_denies() -> None:
    mean, var = torch.zeros(3), torch.ones(3)
    overload("aten.batch_norm.default")(torch.randn(4, 3), None, None, mean, var, True, 0.1, 1e-5, False)
    assert mean.abs().sum() > 0


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("aten.type_as.default", lambda x: (x, x)),
        ("aten.reshape.default", lambda x: (x, [16])),
        ("aten.contiguous.default", lambda x: (x,)),
        ("aten.to.dtype", lambda x: (x, torch.float32)),
        ("aten.flatten.using_ints", lambda x: (x,)),
        ("aten.feature_dropout.default", lambda x: (x, 0.5, False)),
        ("aten.einsum.default", lambda x: ("ij->ji", [x])),
        ("aten.broadcast_tensors.default", lambda x: ([x],)),
        ("aten.meshgrid.indexing", lambda x: ([x[0], x[1]],)),
    ],
)
def test_results_that_torch_does_return_as_the_same_memory_are_known_to_share_it(name: str, arguments: Any) -> None:
    x = torch.randn(4, 4)
    keywords = {"indexing": "ij"} if name == "aten.meshgrid.indexing" else {}
    result = overload(name)(*arguments(x), **keywords)
    first = result[0] if isinstance(result, (list, tuple)) else result
    assert first.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert TABLE[name].aliases


def test_numbers_of_results_are_those_of_torchs_schema() -> None:
    for info in ATEN:
        returns = schema(info).returns
        is_list = len(returns) == 1 and str(returns[0].type) == "List[Tensor]"
        assert info.returns == (0 if is_list else len(returns)), info.name


def test_operators_that_torch_tags_as_seeded_are_random_and_no_others() -> None:
    untagged = {
        info.name for info in ATEN if info.random and torch.Tag.nondeterministic_seeded not in overload(info.name).tags
    }
    tagged = {
        info.name for info in ATEN if not info.random and torch.Tag.nondeterministic_seeded in overload(info.name).tags
    }
    assert (untagged, tagged) == (set(), set())
    assert TABLE["fusion.dropout.default"].random


def test_every_rule_that_the_table_names_exists_and_is_used() -> None:
    without_arithmetic = {"memory", "special", "norm", "batch_norm", "pool", "random", "view", "convert", "rows"}
    assert {info.cost for info in TABLE.values()} == without_arithmetic | COST_RULES.keys()
    assert {info.shape for info in TABLE.values()} - {""} == SHAPE_RULES.keys()


@pytest.mark.parametrize(
    "name",
    [
        "aten.from_file.default",
        "aten.set_.source_Tensor",
        "aten.resize_.default",
        "aten._print.default",
        "aten.empty.memory_format",
        "aten.empty_like.default",
        "aten.empty_strided.default",
        "aten.new_empty_strided.default",
        "aten.as_strided.default",
        "aten.item.default",
        "aten.dropout.default",
        "aten.native_dropout.default",
        "torch.ops.load_library",
        "python.eval",
        "python.pow",
    ],
)
def test_t5_what_may_harm_a_node_is_not_in_the_table(name: str) -> None:
    assert name not in TABLE


def test_t5_of_all_operators_that_torch_registers_only_those_of_the_table_pass() -> None:
    graph = chain(1)
    registered = {(item.name.replace("::", "."), item.overload_name or "default") for item in _all_schemas()}
    names = {f"{name}.{kind}" for name, kind in registered}
    assert len(names) > 3000
    assert "aten.from_file.default" in names
    for name in names - TABLE.keys():
        operators = (replace(graph.operators[0], name=name), *graph.operators[1:])
        with pytest.raises(GraphError, match="not in the table"):
            check_graph(replace(graph, operators=operators))


def _all_schemas() -> list[Any]:
    return list(torch._C._jit_get_all_schemas())


def test_t5_nothing_takes_a_path_a_storage_or_a_generator_that_must_be_given() -> None:
    kinds = {item.kind for info in TABLE.values() for item in info.parameters if item.required}
    assert kinds <= {"Tensor", "Scalar", "int", "float", "bool", "str", "ScalarType", "Device"}
    texts = {(info.name, item.name) for info in TABLE.values() for item in info.parameters if item.kind == "str"}
    assert {name for _, name in texts} <= {
        "approximate", "equation", "indexing", "mode", "padding", "reduce", "rounding_mode", "side"
    }  # fmt: skip


def test_whatever_returns_old_memory_is_listed_as_such() -> None:
    assert {name for name in TABLE if "empty" in name} == UNINITIALISED
    for name in FILLS:
        assert TABLE[name].mutates == (0,)


def test_an_argument_is_found_by_position_or_keyword() -> None:
    op = Operator("aten.softmax.int", (Ref(ValueId(3)), -1), (("dtype", DType("float32")),), outputs=(ValueId(4),))
    assert argument_of(op, "dim") == -1
    assert argument_of(op, "dtype") == DType("float32")
    assert argument_of(Operator("aten.softmax.int", (Ref(ValueId(3)), 0)), "dtype") is None


def test_shared_and_written_values_are_found_in_lists_and_keywords() -> None:
    tensors = (Ref(ValueId(1)), Ref(ValueId(2)))
    assert list(shared_values(Operator("aten.meshgrid.indexing", (tensors,), (("indexing", "ij"),)))) == [1, 2]
    assert list(shared_values(Operator("aten.view.default", (), (("self", Ref(ValueId(5))), ("size", (4,)))))) == [5]
    assert list(written_values(Operator("aten.add_.Tensor", (Ref(ValueId(7)), 1)))) == [7]
    norm = ("aten.batch_norm.default", (Ref(ValueId(0)), None, None, None, None, True, 0.1, 1e-5, True))
    assert list(written_values(Operator(*norm))) == []


@pytest.mark.parametrize(
    ("name", "arguments", "draws"),
    [
        ("fusion.dropout.default", (Ref(ValueId(0)), 0.1, True), True),
        ("fusion.dropout.default", (Ref(ValueId(0)), 0.0, True), False),
        ("fusion.dropout.default", (Ref(ValueId(0)), 0.1, False), False),
        ("aten.scaled_dot_product_attention.default", (Ref(ValueId(0)),) * 3, False),
        ("aten.scaled_dot_product_attention.default", (*(Ref(ValueId(0)),) * 3, None, 0.1), True),
        ("aten.bernoulli.p", (Ref(ValueId(0)), 0.0), True),
        ("aten.rand.default", ((2,),), True),
        ("aten.relu.default", (Ref(ValueId(0)),), False),
    ],
)
def test_a_call_draws_random_numbers_only_if_its_arguments_make_it(
    name: str, arguments: tuple[Any, ...], draws: bool
) -> None:
    assert may_draw(Operator(name, arguments)) is draws


def test_the_table_is_known_without_torch() -> None:
    code = "import sys, fusion.graph.check, fusion.graph.partition; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
