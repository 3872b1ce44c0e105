"""The job as its owner writes it down: a model, data, an optimizer and settings."""

from __future__ import annotations

import hashlib
import operator
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fusion.base.errors import ConfigError
from fusion.base.ids import random_id
from fusion.job.settings import Checkpoint, LrSchedule, Optimizer, checkpoint_of, lr_schedule_spec, reject_unknown
from fusion.protocol.job import (
    BlobRef,
    DataSpec,
    Determinism,
    JobSpec,
    LossWeightSpec,
    PlannerName,
    Precision,
    RecomputeName,
    ScheduleName,
    job_to_proto,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fusion.job.prepare import Prepared
    from fusion.job.run import LocalRun, Run
    from fusion.job.source import Source
    from fusion.job.upload import UploadProgress
    from fusion.protocol.metrics import StepMetrics
    from fusion.security.credentials import Credentials

Loss = Callable[[Any, dict[str, "torch.Tensor"]], "torch.Tensor"]

_KNOWN = (
    *("model", "data", "optimizer", "steps", "batch_size", "micro_batches", "loss", "loss_weight", "lr_schedule"),
    *("eval_data", "eval_every", "eval_batches", "grad_clip", "seed", "determinism", "precision", "schedule"),
    *("stages", "cuts", "planner", "replan", "compression", "checkpoint", "recompute", "shuffle", "threads", "name"),
)


class Job:
    """A training run, defined but not started.

    model: any torch.nn.Module that torch.export can capture. Its forward takes the data's fields by name.
    data: `TextData`, `TokenData`, `TensorData`, `NodePath`, or a dict of tensors.
    optimizer: `AdamW`, `Adam` or `SGD`.
    steps: optimizer steps.
    batch_size: samples per step; cut into `micro_batches` equal parts, of which only the last may be smaller.
    loss: a function of the model's output and the batch (a dict of tensors) that returns the mean loss of the batch.
        Without one the loss is the model's own output, or that output's `.loss`.
    loss_weight: what a micro-batch's mean counts by: samples (default), or `fusion.tokens(field)`.
    lr_schedule: `Constant`, `Linear` or `Cosine`; a function from the step (from 1) to a factor on the learning rate,
        evaluated here, once for each step; or a list of factors, one per step.
    eval_data, eval_every, eval_batches: held-out data, every how many steps to evaluate on it (and after the last
        step), and on how many batches of it (0: on all).
    grad_clip: largest global 2-norm of the gradients; 0: no clipping.
    seed: of the shuffling and of dropout. The same job with the same seed gives the same losses, wherever it runs.
    determinism: "strict" makes them the same bit by bit, for some speed; "fast" up to rounding. Where links have a
        codec, of `compression`, losses differ by what it loses.
    precision: "fp32", or "bf16" for autocast.
    schedule: "1f1b" or "gpipe".
    stages: the most parts that the model may be cut into; 0: as many as there are nodes and the planner likes.
    cuts: operator positions to cut at, instead of the planner's choice.
    planner: "fusion", which uses as many nodes as make the step faster; or one to compare it with: "op-fence",
        "equal-number", "equal-compute" (as many nodes as `stages` allows), or "exact" (at most 12 nodes).
    replan: whether the running job may move to another plan once measurements show that it is clearly better. The
        losses stay the same. A job with `cuts`, or with another planner than "fusion", stays where it is.
    compression: how values and gradients travel between stages; see docs/compression.md. "auto" (default): each link
        has the mildest codec that takes it off the critical path, never stronger than "auto:R" allows, and none where
        that is as fast. On slow links weights of the first 70 % of such a run should not be served. "none": never any
        codec, the default with determinism="strict". A codec, or FORWARD/BACKWARD, such as "int8/int4"; "adatopk:R".
        Several, one after the other: "auto:12 int8@70% none@90%".
    checkpoint: every how many steps the job's whole state is put on the coordinator's disk, in the background; or
        `fusion.Checkpoint(every_steps=, keep=)`. By default never: nodes keep copies of each other's state anyway.
    recompute: whether stages keep only what came in of each micro-batch under way, and run its forward again before
        its backward: "auto", where a node's memory would otherwise cost more time; "never"; "always". The losses stay
        the same.
    shuffle: whether each pass over the data has a new order; otherwise the data's own.
    threads: compute threads of every worker; 0: each node's own choice.
    name: for people; default: the model's class.

    Raises ConfigError with one line for a setting that cannot be used. Nothing is captured or sent yet.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Source | Mapping[str, Any],
        optimizer: Optimizer,
        *,
        steps: int,
        batch_size: int,
        micro_batches: int = 1,
        loss: Loss | None = None,
        loss_weight: LossWeightSpec | None = None,
        lr_schedule: LrSchedule = None,
        eval_data: Source | Mapping[str, Any] | None = None,
        eval_every: int = 0,
        eval_batches: int = 0,
        grad_clip: float = 0.0,
        seed: int = 0,
        determinism: str = "fast",
        precision: str = "fp32",
        schedule: str = "1f1b",
        stages: int = 0,
        cuts: Sequence[int] = (),
        planner: str = "fusion",
        replan: bool = True,
        compression: str | None = None,
        checkpoint: int | Checkpoint | None = None,
        recompute: str = "auto",
        shuffle: bool = True,
        threads: int = 0,
        name: str | None = None,
        **unknown: Any,
    ) -> None:
        from fusion.job.prepare import check_model, check_sources

        reject_unknown("Job", unknown, _KNOWN)
        self.model = model
        self.data = _as_source(data)
        self.eval_data = None if eval_data is None else _as_source(eval_data)
        self.optimizer, self.loss, self.loss_weight = optimizer, loss, loss_weight
        self.steps, self.batch_size, self.micro_batches = _whole(steps), _whole(batch_size), _whole(micro_batches)
        self.eval_every, self.eval_batches = _whole(eval_every), _whole(eval_batches)
        self.grad_clip, self.seed, self.shuffle = grad_clip, _whole(seed), shuffle
        self.determinism, self.precision, self.schedule = determinism, precision, schedule
        self.stages, self.threads, self.cuts = _whole(stages), _whole(threads), tuple(_whole(cut) for cut in cuts)
        self.planner, self.replan = planner, replan
        self.compression = default_compression(determinism) if compression is None else compression
        self.checkpoint, self.recompute = checkpoint_of(checkpoint), recompute
        self.name = _default_name(model) if name is None else name
        self._pending: tuple[bytes, str] | None = None
        self._check_kinds()
        self._lr_schedule = lr_schedule_spec(lr_schedule, self.steps)
        check_model(model)
        check_sources(self)
        self._check_settings()

    def __repr__(self) -> str:
        return f"Job({self.name!r}, steps={self.steps}, batch_size={self.batch_size})"

    def _check_kinds(self) -> None:
        if not isinstance(self.optimizer, Optimizer):
            raise ConfigError(
                f"optimizer must be fusion.AdamW(...), Adam(...) or SGD(...), got {type(self.optimizer).__name__}"
            )
        if self.loss is not None and not callable(self.loss):
            raise ConfigError(f"loss must be a function of (outputs, batch), got {type(self.loss).__name__}")
        if self.loss_weight is not None and not isinstance(self.loss_weight, LossWeightSpec):
            raise ConfigError(f"loss_weight must be fusion.tokens(field), got {type(self.loss_weight).__name__}")
        for name, value in (("shuffle", self.shuffle), ("replan", self.replan)):
            if not isinstance(value, bool):
                raise ConfigError(f"{name} must be True or False, got {value!r:.40}")

    def _check_settings(self) -> None:
        from fusion.job.prepare import check_draft

        check_draft(self)

    def spec(self, graph: BlobRef, weights: BlobRef, data: DataSpec, eval_data: DataSpec | None) -> JobSpec:
        """Return the job as data, around blobs and data sets that the caller states."""
        import torch

        return JobSpec(
            name=self.name,
            graph=graph,
            weights=weights,
            data=data,
            eval_data=eval_data,
            eval_every_steps=self.eval_every,
            eval_batches=self.eval_batches,
            optimizer=self.optimizer.spec,
            lr_schedule=self._lr_schedule,
            batch_size=self.batch_size,
            micro_batches=self.micro_batches,
            steps=self.steps,
            grad_clip=self.grad_clip,
            seed=self.seed,
            determinism=cast(Determinism, self.determinism),
            precision=cast(Precision, self.precision),
            schedule=cast(ScheduleName, self.schedule),
            max_stages=self.stages,
            loss_weight=self.loss_weight or LossWeightSpec(),
            torch_version=torch.__version__.partition("+")[0],
            threads=self.threads,
            cuts=self.cuts,
            shuffle=self.shuffle,
            planner=cast(PlannerName, self.planner),
            replan=self.replan,
            compression=self.compression,
            checkpoint_every_steps=self.checkpoint.every_steps,
            checkpoint_keep=self.checkpoint.keep,
            recompute=cast(RecomputeName, self.recompute),
        )

    def prepare(self, directory: Path) -> Prepared:
        """Capture the model and write the data files into `directory`, which the caller removes."""
        from fusion.job.prepare import prepare

        return prepare(self, directory)

    def run_local(
        self,
        on_step: Callable[[StepMetrics], None] | None = None,
        *,
        cuts: Sequence[int] = (),
        device: str = "cpu",
    ) -> LocalRun:
        """Train in this process, in one piece: the reference that every distributed run equals.

        on_step: called with each step's metrics.
        cuts: operator positions at which to cut all the same, to try pieces and compression without a network.

        The job's model is not changed; see `LocalRun.state_dict`.
        """
        from fusion.job.run import LocalRun
        from fusion.plan.codecs import schedule_without_links
        from fusion.runtime.local import run_local

        with tempfile.TemporaryDirectory(prefix="fusion-job-") as directory:
            made = self.prepare(Path(directory))
            result = run_local(
                made.spec,
                made.graph,
                made.tensors,
                made.data.open("data"),
                None if made.eval_data is None else made.eval_data.open("eval_data"),
                on_step=on_step,
                stages=cuts,
                device=device,
                codecs=schedule_without_links(self.compression, self.steps) if cuts else None,
            )
        return LocalRun(result.steps, made.graph, made.tensors, result.tensors)

    def submit(
        self,
        address: str | None = None,
        credentials: Credentials | str | os.PathLike[str] | None = None,
        *,
        progress: UploadProgress | None = None,
    ) -> Run:
        """Upload the job to a coordinator, start it, and return at once.

        address: host:port of the coordinator; default: the one in the credentials.
        credentials: as made by `fusion join`, or their directory; default: $FUSION_CREDENTIALS, else ~/.fusion/owner.
        progress: called with what is uploaded, bytes done and bytes in all.

        Each call that returns starts a job of its own. A call that failed because the coordinator did not answer may
        be made again: it never starts a second job, even if the first request had arrived.
        """
        from fusion.job.client import Client
        from fusion.job.run import Run
        from fusion.job.upload import upload

        client = Client(address, credentials)
        try:
            with tempfile.TemporaryDirectory(prefix="fusion-job-") as directory:
                spec = upload(self.prepare(Path(directory)), client.blobs, Path(directory), progress)
            job_id = client.submit(spec, self._request_id(spec, client.address))
        except BaseException:
            client.close()
            raise
        self._pending = None
        return Run(client, job_id)

    def _request_id(self, spec: JobSpec, address: str) -> str:
        """Return the id of the request that is under way for exactly this job there, or of a new one."""
        content = hashlib.sha256(job_to_proto(spec).SerializeToString(deterministic=True) + address.encode()).digest()
        if self._pending is None or self._pending[0] != content:
            self._pending = (content, random_id("req-", 20))
        return self._pending[1]


def default_compression(determinism: str) -> str:
    """Return the compression of a job that names none: a codec changes losses, and "strict" promises they are equal."""
    return "none" if determinism == "strict" else "auto"


def _as_source(data: Any) -> Source:
    from fusion.job.tensordata import TensorData

    return TensorData(data) if isinstance(data, Mapping) else data


def _whole(value: Any) -> int:
    """Return numpy's and torch's integers as plain ones; anything else is left for the checks to name."""
    if isinstance(value, bool | float | str):
        return value  # type: ignore[return-value]
    try:
        return operator.index(value)
    except TypeError:
        return value  # type: ignore[no-any-return]


def _default_name(model: object) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "", type(model).__name__)[:60].strip("_-").lower() or "job"
