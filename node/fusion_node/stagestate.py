"""What a stage hands on when its job moves to another plan, and how the stages of that plan put theirs together."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fusion.base.errors import DataError
from fusion.base.ids import StageIndex
from fusion.graph.dag import InputKind
from fusion.graph.partition import Partition
from fusion.runtime.executor import ShardExecutor
from fusion.runtime.optimizer import OPTIMIZER_PREFIX, split_state_name
from fusion.runtime.tensorfile import ChunkSource, blob_header, load_tensors

HELD_PREFIX = "$held."  #: of one scalar in each state: the step; its name makes the file one of its kind


@dataclass(slots=True)
class Tensors:
    """What a stage starts with."""

    inputs: dict[str, torch.Tensor]  #: parameters, buffers and constants
    optimizer: dict[str, torch.Tensor] = field(default_factory=dict)
    coding: dict[str, torch.Tensor] = field(default_factory=dict)  #: of codecs: residuals and bases


def foreign_parameters(parts: Partition, stage: StageIndex) -> set[str]:
    """Return a stage's shared parameters for which an earlier one answers; they are alike on all holders."""
    return {parts.graph.input_of[shared.value].name for shared in parts.shared if stage in shared.holders[1:]}


class HandedOn:
    """What a stage hands on of its tensors: all that training changes, shared parameters by the first holder only.

    Frozen parameters and constants are not in it: they are still as submitted.
    """

    def __init__(self, executor: ShardExecutor, parts: Partition, mark: str) -> None:
        """`mark` names the stage and its plan, which makes every state a blob of its own."""
        self._mark = mark
        frozen = {name for name, tensor in executor.parameters.items() if not tensor.requires_grad}
        self._left_out = foreign_parameters(parts, executor.stage) | frozen

    def __call__(self, step: int, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what is handed on after `step` of all `tensors` of the stage's runner."""
        state = {name: tensor for name, tensor in tensors.items() if _parameter(name) not in self._left_out}
        return {HELD_PREFIX + self._mark: torch.tensor(step)} | state


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return a digest of a tensor's type, shape and bits."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    hasher = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=8)
    hasher.update(flat.numpy().data)
    return hasher.hexdigest()


def _parameter(name: str) -> str:
    return split_state_name(name)[1] if name.startswith(OPTIMIZER_PREFIX) else name


def initial_names(parts: Partition, stage: StageIndex, *, resumed: bool) -> list[str]:
    """Return what a stage takes from the job's weights: everything, or of a resumed job what training leaves alone."""
    return [name for name, changes in _inputs(parts, stage) if not (resumed and changes)]


def _inputs(parts: Partition, stage: StageIndex) -> Iterable[tuple[str, bool]]:
    """Yield the tensors that a stage's operators read, by name, and whether training may change them."""
    for value in parts.shards[stage].inputs:
        source = parts.graph.input_of[value]
        if source.kind is InputKind.PARAMETER:
            yield source.name, parts.graph.values[value].requires_grad
        elif source.kind in (InputKind.BUFFER, InputKind.CONSTANT):
            yield source.name, source.kind is InputKind.BUFFER


def load_stage(
    parts: Partition,
    stage: StageIndex,
    weights: ChunkSource,
    states: Sequence[ChunkSource],
    coding_names: Callable[[Iterable[str]], set[str]] = lambda _names: set(),
) -> Tensors:
    """Return what a stage starts with: from the job's weights, and of a resumed job from the states handed on.

    `coding_names` picks what the stage's codecs take over of a state. DataError names a tensor that none of them has.
    """
    found = Tensors(load_tensors(weights, initial_names(parts, stage, resumed=bool(states))))
    if not states:
        return found
    wanted = {name for name, changes in _inputs(parts, stage) if changes}
    for source in states:
        header = blob_header(source)
        inputs = wanted & header.keys()
        optimizer = {name for name in header if name.startswith(OPTIMIZER_PREFIX) and _parameter(name) in inputs}
        coding = coding_names(header)
        if not inputs | coding:
            continue
        tensors = load_tensors(source, inputs | optimizer | coding)
        found.coding |= {name: tensors[name] for name in coding}
        found.inputs |= {name: tensors[name] for name in inputs}
        found.optimizer |= {name: tensors[name] for name in optimizer}
        wanted -= inputs
    if wanted:
        raise DataError(f"{min(wanted)!r} is in none of the {len(states)} states that the job goes on from")
    return found
