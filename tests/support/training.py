"""Jobs for tests of the runtime: a captured model, a data set in memory, a specification."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fusion.capture import Captured, capture
from fusion.compress import raw
from fusion.compress.linkcodecs import CodecSchedule
from fusion.graph.dag import TensorSpec
from fusion.graph.partition import legal_cuts
from fusion.protocol.job import BlobRef, DataField, DataFile, DataSpec, JobSpec, OptimizerSpec, RowSource
from fusion.runtime.local import LocalResult, run_local
from fusion.runtime.versions import Keeper

Batch = dict[str, torch.Tensor]


class Held:
    """A data set in memory."""

    def __init__(self, rows: Mapping[str, torch.Tensor]) -> None:
        self.rows = dict(rows)

    def batch(self, fields: Collection[str], ids: npt.NDArray[np.int64]) -> Batch:
        index = torch.from_numpy(ids)
        return {name: self.rows[name][index] for name in fields}


@dataclass(frozen=True)
class Training:
    """A job that can be run in pieces."""

    spec: JobSpec
    captured: Captured
    data: Held
    eval_data: Held | None = None

    def run(
        self,
        cuts: Collection[int] = (),
        first_step: int = 1,
        codecs: CodecSchedule | None = None,
        code_evaluation: bool = False,
        keepers: Sequence[Keeper | None] = (),
        **changes: Any,
    ) -> LocalResult:
        """Run it, cut at `cuts`; every tensor between pieces goes through its codec, "none" unless told otherwise."""
        spec = replace(self.spec, **changes)
        return run_local(
            spec,
            self.captured.graph,
            self.captured.tensors,
            self.data,
            self.eval_data,
            stages=sorted(cuts),
            codecs=codecs or CodecSchedule(),
            code_evaluation=code_evaluation,
            first_step=first_step,
            keepers=keepers,
        )


def carry(tensor: torch.Tensor) -> torch.Tensor:
    """Take a tensor through bytes and back, as a link does."""
    layout, payload = raw.encode(tensor)
    return raw.decode(layout, bytes(payload))


def data_spec(rows: Mapping[str, torch.Tensor]) -> DataSpec:
    """Describe rows in memory as a data set."""
    fields = tuple(
        DataField(
            name, TensorSpec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape[1:])), RowSource(0, name)
        )
        for name, tensor in rows.items()
    )
    return DataSpec(fields, (DataFile(BlobRef("0" * 64, 0)),), len(next(iter(rows.values()))))


def make_training(
    model: nn.Module,
    rows: Mapping[str, torch.Tensor],
    loss: Callable[[Any, Mapping[str, torch.Tensor]], torch.Tensor] | None = None,
    **settings: Any,
) -> Training:
    """Capture `model` and describe a strict job over `rows` (all samples, in their order unless shuffle is set)."""
    eval_rows = settings.pop("eval_rows", None)
    values: dict[str, Any] = {
        "name": "test",
        "graph": BlobRef("0" * 64, 0),
        "weights": BlobRef("0" * 64, 0),
        "data": data_spec(rows),
        "eval_data": None if eval_rows is None else data_spec(eval_rows),
        "optimizer": OptimizerSpec("adamw", 1e-2),
        "batch_size": 8,
        "micro_batches": 4,
        "steps": 3,
        "determinism": "strict",
        "shuffle": False,
    }
    spec = JobSpec(**(values | settings))
    micro_batch = spec.micro_batch_sizes()[0]
    example = {name: tensor[:micro_batch] for name, tensor in rows.items()}
    captured = capture(model.train(), example, loss=loss, micro_batch=micro_batch)
    return Training(spec, captured, Held(rows), None if eval_rows is None else Held(eval_rows))


def spread_cuts(training: Training, pieces: int, shift: float = 0.0) -> list[int]:
    """Return legal cuts that give pieces of about equal numbers of operators, moved by `shift` of a piece."""
    legal = legal_cuts(training.captured.graph)
    count = len(training.captured.graph.operators)
    wanted = [count * (index + shift) / pieces for index in range(1, pieces)]
    return sorted({min(legal, key=lambda cut, at=at: abs(cut - at)) for at in wanted})
