"""The OP-DAG: a model with its loss as a list of operators over numbered values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from fusion.base.ids import ValueId

#: Bytes per element of every dtype that a value may have, by torch's name without the prefix.
DTYPE_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
}


class InputKind(StrEnum):
    """Where a graph's input comes from."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    BATCH = "batch"
    BATCH_SIZE = "batch_size"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Element type and shape. A graph states shapes at its nominal micro-batch size."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements, by exact integers."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def bytes(self) -> int:
        """Bytes of the contiguous tensor."""
        return self.elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Value:
    """What an operator returns or an input brings: a tensor, or an integer that follows from the batch size."""

    spec: TensorSpec | None  #: None for an integer
    nominal: int = 0  #: an integer's value at the nominal micro-batch size
    requires_grad: bool = False  #: whether a gradient flows back through it in training

    @property
    def bytes(self) -> int:
        """Bytes at the nominal micro-batch size; 0 for an integer, which every stage computes for itself."""
        return 0 if self.spec is None else self.spec.bytes


@dataclass(frozen=True, slots=True)
class Input:
    """A parameter, buffer, constant, batch field or the batch size."""

    name: str
    kind: InputKind
    value: ValueId
    aliases: tuple[str, ...] = ()  #: the module's other names for the same tensor (tied weights)


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is a value of the graph."""

    value: ValueId


@dataclass(frozen=True, slots=True)
class DType:
    """An argument that is an element type, such as "bfloat16"."""

    name: str


@dataclass(frozen=True, slots=True)
class MemoryFormat:
    """An argument that is a memory format, such as "channels_last"."""

    name: str


@dataclass(frozen=True, slots=True)
class Layout:
    """An argument that is a tensor layout; only "strided" exists here."""

    name: str


@dataclass(frozen=True, slots=True)
class Device:
    """An argument that is a device: always the one that the stage runs on, whatever was captured."""


Argument = Ref | DType | MemoryFormat | Layout | Device | bool | int | float | str | None | tuple["Argument", ...]


@dataclass(frozen=True, slots=True)
class Cost:
    """What one operator costs at the nominal micro-batch size."""

    forward_flops: float = 0.0
    backward_flops: float = 0.0
    saved_bytes: int = 0  #: kept from the forward for the backward; a tensor counts at the first operator that keeps it
    moved_bytes: int = 0  #: read and written by the forward


@dataclass(frozen=True, slots=True)
class Operator:
    """One call of an operator of the table. Its position in the graph's list is its identity everywhere."""

    name: str
    arguments: tuple[Argument, ...]
    keywords: tuple[tuple[str, Argument], ...] = ()
    outputs: tuple[ValueId, ...] = ()
    module_path: str = ""
    no_grad: bool = False
    autocast_dtype: str = ""  #: "" as the job says, "off", or a dtype that the model's own autocast region sets
    cost: Cost = field(default_factory=Cost)

    def reads(self) -> Iterator[ValueId]:
        """Yield each value that it takes, once per place it is taken in (so with repeats), in argument order."""
        yield from refs(self.arguments)
        for _, argument in self.keywords:
            yield from refs((argument,))


def refs(arguments: tuple[Argument, ...]) -> Iterator[ValueId]:
    """Yield each value among `arguments`, also inside lists, in order."""
    for argument in arguments:
        if isinstance(argument, Ref):
            yield argument.value
        elif isinstance(argument, tuple):
            yield from refs(argument)


@dataclass(frozen=True)
class Graph:
    """The OP-DAG. Operators are in a topological order; `fusion.graph.check.check_graph` holds that."""

    values: tuple[Value, ...]
    inputs: tuple[Input, ...]
    operators: tuple[Operator, ...]
    loss: ValueId
    nominal_micro_batch: int
    dynamic_batch: bool = True

    @cached_property
    def input_of(self) -> dict[ValueId, Input]:
        """The input that brings a value, for the values that are brought."""
        return {item.value: item for item in self.inputs}

    @cached_property
    def producer(self) -> dict[ValueId, int]:
        """Position of the operator that makes a value, for the values that are made."""
        return {out: position for position, op in enumerate(self.operators) for out in op.outputs}

    @cached_property
    def readers(self) -> dict[ValueId, tuple[int, ...]]:
        """Positions that read a value, ascending, once per place: a value that one operator reads twice repeats."""
        found: dict[ValueId, list[int]] = {}
        for position, op in enumerate(self.operators):
            for value in op.reads():
                found.setdefault(value, []).append(position)
        return {value: tuple(positions) for value, positions in found.items()}
