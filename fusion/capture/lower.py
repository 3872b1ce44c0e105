"""From torch.export's graph to operators of the table."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.export.graph_signature import InputKind as ExportKind

from fusion.base.errors import CaptureError
from fusion.base.ids import ValueId
from fusion.capture.arguments import constant
from fusion.capture.drafts import Draft, DraftGraph, DraftInput
from fusion.capture.entry import MODEL
from fusion.capture.export import Exported
from fusion.capture.places import Place, place_of_node
from fusion.capture.sizes import ARITHMETIC, Sizes, UnsupportedSizeError
from fusion.capture.weights import Weights
from fusion.graph.dag import DTYPE_BYTES, Argument, InputKind, Operator, Ref
from fusion.graph.operators import TABLE

BATCH_SIZE_NAME = "$batch_size"
CONSTANT_PREFIX = "$constant."

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
#: Checks that torch.export adds; what they check holds by construction or is checked by the operators themselves.
_CHECKS = ("aten._assert_", "aten.sym_constrain_range", "aten._functional_assert", "aten._functional_sym_constrain")
_DROPOUTS = {
    f"aten.{name}{suffix}.default": "fusion.dropout.default" if name == "dropout" else f"aten.{name}.default"
    for name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
    for suffix in ("", "_")
}
_DROPOUT_CALLS = {
    "fusion.dropout.default": torch.ops.aten.dropout.default,
    "aten.alpha_dropout.default": torch.ops.aten.alpha_dropout.default,
    "aten.feature_dropout.default": torch.ops.aten.feature_dropout.default,
    "aten.feature_alpha_dropout.default": torch.ops.aten.feature_alpha_dropout.default,
}


class NeedsFixedBatchError(Exception):
    """The model computes something from the batch size that the OP-DAG holds only if that size is fixed."""


@dataclass(frozen=True, slots=True)
class _Region:
    """What surrounds an operator in the model."""

    no_grad: bool = False
    autocast_dtype: str = ""


def lower(exported: Exported, weights: Weights, fields: tuple[str, ...]) -> DraftGraph:
    """Return the operators of an exported model. Raise CaptureError, naming the model's line, for what has no place."""
    return _Lowering(exported, weights, fields).run()


class _Lowering:
    def __init__(self, exported: Exported, weights: Weights, fields: tuple[str, ...]) -> None:
        self._exported = exported
        self._weights = weights
        self._fields = fields
        self._inputs: dict[object, DraftInput] = {}
        self._drafts: list[Draft] = []
        self._next = 0

    def run(self) -> DraftGraph:
        program = self._exported.program
        placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
        bound = self._bind(placeholders)
        batch_size = self._add_input("batch size", BATCH_SIZE_NAME, InputKind.BATCH_SIZE)
        self._sizes = Sizes(self._symbol(placeholders), batch_size, self._emit_arithmetic)
        (loss,) = self._run_graph(program.graph_module, bound, _Region())
        if not isinstance(loss, Ref):
            raise CaptureError("model: its loss is a constant; it must depend on the parameters")
        order = {id(weight): index for index, weight in enumerate(self._weights.weights)}
        inputs = sorted(self._inputs.items(), key=lambda item: order.get(item[0], len(order)))  # type: ignore[call-overload]
        return DraftGraph(tuple(item for _, item in inputs), tuple(self._drafts), loss.value)

    # Inputs

    def _bind(self, placeholders: Sequence[fx.Node]) -> list[Ref]:
        specs = self._exported.program.graph_signature.input_specs
        return [self._bind_one(spec, node) for spec, node in zip(specs, placeholders, strict=True)]

    def _bind_one(self, spec: Any, node: fx.Node) -> Ref:
        if spec.kind in (ExportKind.PARAMETER, ExportKind.BUFFER):
            weight = self._weights.by_path[spec.target.removeprefix(f"{MODEL}.")]
            return self._add_input(id(weight), weight.name, weight.kind, weight.tensor, tuple(weight.aliases))
        if spec.kind is ExportKind.CONSTANT_TENSOR:
            return self._bind_constant(spec.target, used=bool(node.users))
        if spec.kind is ExportKind.USER_INPUT:
            name = self._fields[sum(item.kind is InputKind.BATCH for item in self._inputs.values())]
            return self._add_input(f"field {name}", name, InputKind.BATCH, node.meta["val"])
        raise CaptureError(f"model: it holds {spec.target!r}, a {spec.kind.name.lower()}; allowed: plain tensors")

    def _bind_constant(self, target: str, *, used: bool) -> Ref:
        path = target.removeprefix(f"{MODEL}.")
        tensor = self._exported.program.constants[target]
        if used and path.rpartition(".")[2] in self._exported.assigned:
            raise CaptureError(
                f"model: it keeps a tensor from one step to the next in the attribute {path!r}; "
                "register it with register_buffer"
            )
        _check_dtype(tensor, Place(path))
        number = sum(item.kind is InputKind.CONSTANT for item in self._inputs.values())
        return self._add_input(target, f"{CONSTANT_PREFIX}{number}", InputKind.CONSTANT, tensor)

    def _add_input(
        self, key: object, name: str, kind: InputKind, tensor: Tensor | None = None, aliases: tuple[str, ...] = ()
    ) -> Ref:
        if key not in self._inputs:
            self._inputs[key] = DraftInput(self._new_value(), name, kind, tensor, aliases)
        return Ref(self._inputs[key].value)

    def _symbol(self, placeholders: Sequence[fx.Node]) -> Any:
        """Return the symbol that stands for the batch size, or None in a capture with a fixed batch."""
        if not self._exported.dynamic:
            return None
        size = placeholders[-1].meta["val"].shape[0]
        if not isinstance(size, torch.SymInt) or not size.node.expr.is_Symbol:
            raise NeedsFixedBatchError
        return size.node.expr

    # Operators

    def _run_graph(self, module: fx.GraphModule, arguments: Sequence[Any], region: _Region) -> tuple[Any, ...]:
        """Lower the nodes of `module`, called with `arguments`, and return what it returns."""
        known: dict[fx.Node, Any] = {}
        given = iter(arguments)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                known[node] = next(given)
            elif node.op == "get_attr":
                known[node] = getattr(module, node.target)
            elif node.op == "output":
                return tuple(known[item] if isinstance(item, fx.Node) else item for item in node.args[0])
            else:
                known[node] = self._run_node(node, known, region)
        raise AssertionError("a graph without an output node")

    def _run_node(self, node: fx.Node, known: dict[fx.Node, Any], region: _Region) -> Any:
        target, value = node.target, node.meta.get("val")
        if isinstance(value, _SYMBOLIC):
            return value  # an integer: computed where an operator takes it
        if target is operator.getitem:
            source, index = node.args
            return known[source][index]  # type: ignore[index]
        if isinstance(target, HigherOrderOperator):
            return self._inline(node, known, region)
        name = str(target) if isinstance(target, OpOverload) else getattr(target, "__name__", str(target))
        if name.startswith(_CHECKS):
            return None
        if name in _DROPOUTS:
            return self._dropout(node, known, region)
        if name == "aten.detach_.default":
            return self._detach_in_place(node, known, region)
        if name not in TABLE or not isinstance(target, OpOverload):
            raise CaptureError(
                f"{self._place(node)}: operator {name} is not one that nodes run; rewrite this line with other PyTorch "
                "operators, or ask for it to be added to the table in fusion/graph/operators.py"
            )
        return self._emit(node, name, target, node.args, node.kwargs, known, region)

    def _inline(self, node: fx.Node, known: dict[fx.Node, Any], region: _Region) -> tuple[Any, ...]:
        """Lower the inside of an autocast or grad-mode region in its place."""
        name = node.target.name()  # type: ignore[union-attr]
        values: list[Any] = [known[item] if isinstance(item, fx.Node) else item for item in node.args]
        if name == "wrap_with_set_grad_enabled":
            enabled, body, *arguments = values
            return self._run_graph(body, arguments, replace(region, no_grad=not enabled))
        if name == "wrap_with_autocast":
            device, dtype, enabled, _, body, *arguments = values
            inner = replace(region, autocast_dtype=_autocast(device, dtype, enabled, region))
            return self._run_graph(body, arguments, inner)
        raise CaptureError(
            f"{self._place(node)}: control flow by {name} cannot be captured; write it with torch.where, masks or a "
            "plain Python loop of fixed length"
        )

    def _dropout(self, node: fx.Node, known: dict[fx.Node, Any], region: _Region) -> Any:
        source, probability, train = node.args
        assert isinstance(source, fx.Node)
        if probability == 0 or not train:
            return known[source]
        name = _DROPOUTS[str(node.target)]
        arguments = (source, float(probability), True)  # type: ignore[arg-type]
        result = self._emit(node, name, _DROPOUT_CALLS[name], arguments, {}, known, region)
        if not str(node.target).endswith("_.default") or _only_owner(source):
            return result
        # others see the same memory, so the in-place change has to happen
        known[node] = result
        copy = torch.ops.aten.copy_.default
        return self._emit(node, str(copy), copy, (source, node), {}, known, region)

    def _detach_in_place(self, node: fx.Node, known: dict[fx.Node, Any], region: _Region) -> Any:
        """Detaching changes no memory: whatever uses the tensor from now on uses the detached one."""
        (source,) = node.args
        assert isinstance(source, fx.Node)
        if str(source.target) == "aten.lift_fresh_copy.default":
            return known[source]  # a literal, which has no gradient
        detach = torch.ops.aten.detach.default
        known[source] = self._emit(node, str(detach), detach, (source,), {}, known, region)
        return known[source]

    def _emit(
        self,
        node: fx.Node,
        name: str,
        run: Callable[..., Any],
        arguments: Sequence[Any],
        keywords: dict[str, Any],
        known: dict[fx.Node, Any],
        region: _Region,
    ) -> Any:
        place = self._place(node)
        converted = tuple(self._argument(item, known, place) for item in arguments)
        # where memory is pinned is the node's own business
        named = {key: self._argument(item, known, place) for key, item in keywords.items() if key != "pin_memory"}
        results, outputs = self._results(node.meta.get("val"), place)
        call = Operator(
            name=name,
            arguments=converted,
            keywords=tuple(sorted(named.items())),
            outputs=outputs,
            module_path=place.module_path,
            no_grad=region.no_grad,
            autocast_dtype=region.autocast_dtype,
        )
        self._drafts.append(Draft(call, run, place))
        return results

    def _emit_arithmetic(self, name: str, operands: tuple[Argument, ...]) -> Ref:
        out = self._new_value()
        self._drafts.append(Draft(Operator(name, operands, outputs=(out,)), ARITHMETIC[name], Place()))
        return Ref(out)

    def _results(self, value: Any, place: Place) -> tuple[Any, tuple[ValueId, ...]]:
        if isinstance(value, Tensor):
            _check_dtype(value, place)
            out = self._new_value()
            return Ref(out), (out,)
        if value is None:
            return None, ()
        for item in value:
            if not isinstance(item, Tensor):
                raise CaptureError(f"{place}: an operator returns a {type(item).__name__}; allowed: tensors")
            _check_dtype(item, place)
        outputs = tuple(self._new_value() for _ in value)
        return tuple(Ref(out) for out in outputs), outputs

    def _argument(self, item: Any, known: dict[fx.Node, Any], place: Place) -> Argument:
        if isinstance(item, fx.Node):
            item = known[item]
        if isinstance(item, Ref):
            return item
        if isinstance(item, (tuple, list)):
            return tuple(self._argument(part, known, place) for part in item)
        if isinstance(item, _SYMBOLIC):
            return self._size(item, place)
        try:
            return constant(item)
        except ValueError as error:
            raise CaptureError(f"{place}: {error} cannot be captured; use plain numbers, dtypes and tensors") from error

    def _size(self, value: torch.SymInt | torch.SymFloat | torch.SymBool, place: Place) -> int | Ref:
        if self._sizes.is_data_dependent(value):
            raise CaptureError(
                f"{place}: a number is taken out of a tensor's values (.item(), int(), or the size of a selection); "
                "keep it a tensor, or use masks of fixed shape"
            )
        try:
            return self._sizes.argument(value)
        except UnsupportedSizeError as error:
            raise NeedsFixedBatchError(f"{place}: {error}") from error

    def _place(self, node: fx.Node) -> Place:
        return place_of_node(node, MODEL)

    def _new_value(self) -> ValueId:
        self._next += 1
        return ValueId(self._next - 1)


def _check_dtype(tensor: Tensor, place: Place) -> None:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise CaptureError(f"{place}: a tensor of dtype {dtype}; allowed: {', '.join(DTYPE_BYTES)}")


def _autocast(device: str, dtype: torch.dtype | None, enabled: bool, region: _Region) -> str:
    """Return the region's own setting. It holds on whatever device a node has, not only on the one it names."""
    if not enabled:
        # torch itself turns a region off where its device is absent: then it says nothing about the model
        absent = device != "cpu" and not torch.accelerator.is_available()
        return region.autocast_dtype if absent else "off"
    return str(dtype or torch.get_autocast_dtype(device)).removeprefix("torch.")


def _only_owner(node: fx.Node) -> bool:
    """Whether nothing but its one user sees the memory of `node`, so that changing it in place shows nowhere else."""
    if node.op != "call_function" or len(node.users) != 1:
        return False
    info = TABLE.get(str(node.target))
    if info is None:
        return False
    return all(_only_owner(source) for source in _sharing(node, info.aliases))


def _sharing(node: fx.Node, indices: tuple[int, ...]) -> Iterator[fx.Node]:
    for index in indices:
        if index < len(node.args) and isinstance(node.args[index], fx.Node):
            yield node.args[index]  # type: ignore[misc]
