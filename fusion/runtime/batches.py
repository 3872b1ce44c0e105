"""How a job's samples become micro-batches with weights, in training and in evaluation."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from fusion.protocol.job import DataSpec, JobSpec, LossWeightSpec
from fusion.runtime.sampling import micro_batch_ids


class Samples(Protocol):
    """A data set: gives the fields of samples by id."""

    def batch(self, fields: Collection[str], ids: npt.NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """Return the named fields of the samples `ids`, each with the samples along its first dimension."""
        ...


class Batches:
    """The micro-batches of a job's steps, or of one evaluation."""

    def __init__(self, job: JobSpec, data: Samples | None, *, evaluation: bool = False, dynamic: bool = True) -> None:
        """`dynamic` tells whether a smaller last micro-batch may be run; if not, an evaluation leaves it out."""
        self._job = job
        self._data = data
        self._evaluation = evaluation
        self.sizes = evaluation_sizes(job, dynamic) if evaluation else job.micro_batch_sizes()

    def fields(self, names: Collection[str], step: int, micro_batch: int) -> dict[str, torch.Tensor]:
        """Return the named fields of one micro-batch."""
        if not names or self._data is None:
            return {}
        return self._data.batch(names, self._ids(step, micro_batch))

    def loss_weights(self, step: int) -> list[float]:
        """Return how each micro-batch's mean loss counts, adding up to 1: as if the batch had been one."""
        rule = self._job.loss_weight
        if not rule.field:
            total = sum(self.sizes)
            return [size / total for size in self.sizes]
        counts = [self._entries(rule, step, micro_batch) for micro_batch in range(len(self.sizes))]
        total = sum(counts)
        return [count / total if total else 0.0 for count in counts]

    def _entries(self, rule: LossWeightSpec, step: int, micro_batch: int) -> int:
        labels = self.fields([rule.field], step, micro_batch)[rule.field]
        return int((labels != rule.ignore).sum())

    def _ids(self, step: int, micro_batch: int) -> npt.NDArray[np.int64]:
        if self._evaluation:
            first = sum(self.sizes[:micro_batch])
            return np.arange(first, first + self.sizes[micro_batch], dtype=np.int64)
        job = self._job
        return micro_batch_ids(job.seed, job.data.samples, job.shuffle, self.sizes, step=step, micro_batch=micro_batch)


def evaluation_sizes(job: JobSpec, dynamic: bool) -> tuple[int, ...]:
    """Return the samples of each micro-batch of an evaluation: the first ones of the held-out data, in order."""
    if job.eval_data is None or not job.eval_every_steps:
        return ()
    wanted = job.eval_batches * job.batch_size or job.eval_data.samples
    size = job.micro_batch_sizes()[0]
    full, rest = divmod(min(wanted, job.eval_data.samples), size)
    return (size,) * full + ((rest,) if rest and dynamic else ())


def tokens_per_sample(data: DataSpec) -> int:
    """Return the length of a sample's token sequence: of the first field of integers with one dimension, else 0."""
    for item in data.fields:
        if item.sample.dtype.startswith(("int", "uint")) and len(item.sample.shape) == 1:
            return item.sample.elements
    return 0


def weighted_mean(losses: list[float], weights: list[float]) -> float:
    """Return the sum of weight times loss, rounded once."""
    products = [weight * loss for weight, loss in zip(weights, losses, strict=True)]
    return math.fsum(products) if all(map(math.isfinite, products)) else math.nan
