"""A job as data: what a worker needs to know beside the graph. Checked here once, by owner and coordinator alike."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, get_args

from fusion.base.errors import ConfigError
from fusion.base.ids import check_name
from fusion.graph.dag import DTYPE_BYTES, TensorSpec
from fusion.plan.codecs import parse_compression
from fusion.plan.types import JobView
from fusion.wire.v1 import job_pb2, tensor_pb2

Determinism = Literal["fast", "strict"]
Precision = Literal["fp32", "bf16"]
ScheduleName = Literal["1f1b", "gpipe"]
PlannerName = Literal["fusion", "op-fence", "equal-number", "equal-compute", "exact"]
RecomputeName = Literal["auto", "never", "always"]
OptimizerKind = Literal["adamw", "adam", "sgd"]

#: Settings of each optimizer with their defaults, and the bytes of state that it keeps per fp32 parameter.
OPTIMIZER_SETTINGS: dict[str, dict[str, float]] = {
    "adamw": {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01},
    "adam": {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0},
    "sgd": {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": 0.0},
}


@dataclass(frozen=True, slots=True)
class BlobRef:
    """A run of bytes in the coordinator's content-addressed store."""

    digest: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class RowSource:
    """Sample i is row i of a tensor in a file."""

    file: int
    tensor: str


@dataclass(frozen=True, slots=True)
class WindowSource:
    """Sample i is elements [i * stride + offset, i * stride + offset + length) of a one-dimensional tensor."""

    file: int
    tensor: str
    stride: int
    offset: int


@dataclass(frozen=True, slots=True)
class DataField:
    """One named input of the model or of the loss, a pure function of the sample id."""

    name: str
    sample: TensorSpec  #: of one sample, without the batch dimension
    source: RowSource | WindowSource


@dataclass(frozen=True, slots=True)
class DataFile:
    """A safetensors file: in the blob store, or at a path on the node that its owner allows."""

    blob: BlobRef | None = None
    node_path: str = ""


@dataclass(frozen=True, slots=True)
class DataSpec:
    """A data set of `samples` samples."""

    fields: tuple[DataField, ...]
    files: tuple[DataFile, ...]
    samples: int


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """An optimizer of OPTIMIZER_SETTINGS, by torch's own names and defaults."""

    kind: str
    learning_rate: float
    settings: dict[str, float] = field(default_factory=dict)
    no_decay: tuple[str, ...] = ()  #: glob patterns over parameter names that weight decay leaves alone

    @property
    def state_bytes_per_parameter(self) -> int:
        """Bytes of optimizer state per fp32 parameter, beside the weight and its gradient."""
        if self.kind == "sgd":
            return 4 if self.settings.get("momentum", 0.0) else 0
        return 8


@dataclass(frozen=True, slots=True)
class LrScheduleSpec:
    """Factor on the learning rate by step."""

    kind: str = "constant"  #: "constant", "linear", "cosine" (both after a linear warm-up) or "table"
    warmup_steps: int = 0
    final_factor: float = 0.0  #: of "linear" and "cosine": the factor at the last step
    factors: tuple[float, ...] = ()  #: of "table": one per step

    def factor(self, step: int, steps: int) -> float:
        """Return the factor for `step`, from 1, of `steps`.

        During the warm-up it is step / warmup_steps; "linear" and "cosine" then fall from 1 to `final_factor`,
        which they reach at the last step.
        """
        if self.kind == "table":
            return self.factors[step - 1]
        if step <= self.warmup_steps:
            return step / self.warmup_steps
        if self.kind == "constant":
            return 1.0
        done = (step - self.warmup_steps) / max(1, steps - self.warmup_steps)
        fall = done if self.kind == "linear" else (1 - math.cos(math.pi * done)) / 2
        return 1.0 - (1.0 - self.final_factor) * fall


@dataclass(frozen=True, slots=True)
class LossWeightSpec:
    """How a micro-batch's loss counts in the step's: by samples, or by entries of a field that are not `ignore`."""

    field: str = ""
    ignore: int = -100


@dataclass(frozen=True, slots=True)
class JobSpec:
    """Everything that defines a training run; bulk lies in the blob store."""

    name: str
    graph: BlobRef
    weights: BlobRef
    data: DataSpec
    optimizer: OptimizerSpec
    batch_size: int  #: samples per step
    micro_batches: int  #: per step
    steps: int
    eval_data: DataSpec | None = None
    eval_every_steps: int = 0
    eval_batches: int = 0
    lr_schedule: LrScheduleSpec = LrScheduleSpec()
    grad_clip: float = 0.0
    seed: int = 0
    determinism: Determinism = "fast"
    precision: Precision = "fp32"
    schedule: ScheduleName = "1f1b"
    max_stages: int = 0
    loss_weight: LossWeightSpec = LossWeightSpec()
    torch_version: str = ""
    threads: int = 0
    cuts: tuple[int, ...] = ()
    shuffle: bool = True
    planner: PlannerName = "fusion"
    replan: bool = True  #: let the coordinator move the running job to a plan that is clearly better
    compression: str = "none"
    checkpoint_every_steps: int = 0  #: 0: never
    checkpoint_keep: int = 3  #: so many of the latest ones
    recompute: RecomputeName = "auto"  #: whether stages run forwards again instead of keeping what they made

    def micro_batch_sizes(self) -> tuple[int, ...]:
        """Return the samples of each micro-batch: equal ones, and a smaller last one where it does not divide."""
        size = -(-self.batch_size // self.micro_batches)
        full, rest = divmod(self.batch_size, size)
        return (size,) * full + ((rest,) if rest else ())


def job_view(spec: JobSpec) -> JobView:
    """Return what planners look at."""
    return JobView(
        micro_batches=spec.micro_batches,
        schedule=spec.schedule,
        optimizer_bytes_per_parameter=spec.optimizer.state_bytes_per_parameter,
        max_stages=spec.max_stages,
        cuts=spec.cuts,
        compression=spec.compression,
        steps=spec.steps,
        recompute=spec.recompute,
    )


def _whole(field_name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{field_name} must be an integer {low}..{high}, got {value!r}")


def _real(field_name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (low <= value <= high):
        raise ConfigError(f"{field_name} must be a number {low:g}..{high:g}, got {value!r}")


def _choice(field_name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{field_name} must be one of {', '.join(choices)}; got {value!r}")


def check_settings(job: JobSpec) -> None:
    """Raise ConfigError with one line for the first setting that cannot be used."""
    check_name("name", job.name)
    _whole("steps", job.steps, 1, 10**9)
    _whole("batch_size", job.batch_size, 1, 10**6)
    _whole("micro_batches", job.micro_batches, 1, 4096)
    if job.micro_batches > job.batch_size:
        raise ConfigError(f"micro_batches={job.micro_batches} must not exceed batch_size={job.batch_size}")
    if len(job.micro_batch_sizes()) != job.micro_batches:
        fits = len(job.micro_batch_sizes())
        raise ConfigError(
            f"batch_size={job.batch_size} cannot be cut into micro_batches={job.micro_batches} of which only the last "
            f"is smaller; micro_batches={fits} works"
        )
    _whole("seed", job.seed, 0, 2**63 - 1)
    _whole("eval_every_steps", job.eval_every_steps, 0, 10**9)
    _whole("eval_batches", job.eval_batches, 0, 10**6)
    _whole("max_stages", job.max_stages, 0, 10_000)
    _whole("threads", job.threads, 0, 1024)
    _whole("checkpoint_every_steps", job.checkpoint_every_steps, 0, 10**9)
    _whole("checkpoint_keep", job.checkpoint_keep, 1, 1000)
    _real("grad_clip", job.grad_clip, 0.0, 1e30)
    _choice("determinism", job.determinism, get_args(Determinism))
    _choice("precision", job.precision, get_args(Precision))
    _choice("schedule", job.schedule, get_args(ScheduleName))
    _choice("planner", job.planner, get_args(PlannerName))
    _choice("recompute", job.recompute, get_args(RecomputeName))
    check_compression(job)
    check_optimizer(job.optimizer)
    check_lr_schedule(job.lr_schedule, job.steps)
    check_data("data", job.data)
    if job.eval_data is not None:
        check_data("eval_data", job.eval_data)
    elif job.eval_every_steps:
        raise ConfigError(f"eval_every_steps={job.eval_every_steps} needs eval_data")


def check_compression(job: JobSpec) -> None:
    """Raise ConfigError for a compression that does not exist, or phases that the run is too short for."""
    if not isinstance(job.compression, str):
        raise ConfigError(f"compression must be text such as 'int8/int4', got {job.compression!r:.40}")
    begins = [phase.begins(job.steps) for phase in parse_compression(job.compression)]
    if len(job.compression.split()) == 1:
        return  # what "auto" does later is left out of a run that ends before
    if any(after <= before for before, after in pairwise(begins)) or begins[-1] > job.steps:
        raise ConfigError(
            f"compression: the phases of {job.compression[:60]!r} begin with the steps {begins[:16]}; "
            f"they must ascend, up to steps={job.steps}"
        )


def check_optimizer(spec: OptimizerSpec) -> None:
    """Raise ConfigError for an unknown optimizer or setting, or a value out of range."""
    _choice("optimizer", spec.kind, tuple(OPTIMIZER_SETTINGS))
    _real("optimizer.learning_rate", spec.learning_rate, 0.0, 1e6)
    for name, value in spec.settings.items():
        _choice(f"setting of {spec.kind}", name, tuple(OPTIMIZER_SETTINGS[spec.kind]))
        _real(f"optimizer.{name}", value, 0.0, 1.0 - 1e-12 if name.startswith("beta") else 1e6)


def check_lr_schedule(spec: LrScheduleSpec, steps: int) -> None:
    """Raise ConfigError for an unknown schedule, or a table that does not have a factor for every step."""
    _choice("lr_schedule", spec.kind, ("constant", "linear", "cosine", "table"))
    _whole("lr_schedule.warmup_steps", spec.warmup_steps, 0, steps)
    _real("lr_schedule.final_factor", spec.final_factor, 0.0, 1e6)
    if spec.kind == "table":
        if len(spec.factors) != steps:
            raise ConfigError(
                f"lr_schedule has {len(spec.factors)} factors, the job has steps={steps}; give one per step"
            )
        for factor in spec.factors:
            _real("lr_schedule factor", factor, 0.0, 1e6)


def check_data(field_name: str, data: DataSpec) -> None:
    """Raise ConfigError for a data set without samples or fields, or with fields that point outside its files."""
    _whole(f"{field_name}.samples", data.samples, 1, 2**62)
    if not data.fields:
        raise ConfigError(f"{field_name} has no fields; give at least one input of the model")
    names = [item.name for item in data.fields]
    if len(set(names)) != len(names):
        raise ConfigError(f"{field_name} has two fields of the same name: {', '.join(sorted(names))}")
    for item in data.fields:
        _choice(f"{field_name} field {item.name!r} dtype", item.sample.dtype, tuple(DTYPE_BYTES))
        if not 0 <= item.source.file < len(data.files):
            raise ConfigError(f"{field_name} field {item.name!r} names file {item.source.file} of {len(data.files)}")


def blob_to_proto(blob: BlobRef) -> tensor_pb2.BlobRef:
    """Return the message for a blob."""
    return tensor_pb2.BlobRef(digest=blob.digest, size_bytes=blob.size_bytes)


def blob_from_proto(message: tensor_pb2.BlobRef) -> BlobRef:
    """Return the blob of a message."""
    return BlobRef(message.digest, message.size_bytes)


def _spec_to_proto(spec: TensorSpec) -> tensor_pb2.TensorSpec:
    return tensor_pb2.TensorSpec(dtype=spec.dtype, shape=spec.shape)


def _spec_from_proto(message: tensor_pb2.TensorSpec) -> TensorSpec:
    return TensorSpec(message.dtype, tuple(message.shape))


def data_to_proto(data: DataSpec) -> job_pb2.Data:
    """Return the message for a data set."""
    message = job_pb2.Data(samples=data.samples)
    for item in data.fields:
        proto = message.fields.add(name=item.name, sample=_spec_to_proto(item.sample))
        if isinstance(item.source, RowSource):
            proto.rows.CopyFrom(job_pb2.RowSource(file=item.source.file, tensor=item.source.tensor))
        else:
            window = item.source
            proto.window.CopyFrom(
                job_pb2.WindowSource(file=window.file, tensor=window.tensor, stride=window.stride, offset=window.offset)
            )
    for file in data.files:
        entry = message.files.add(node_path=file.node_path)
        if file.blob is not None:
            entry.blob.CopyFrom(blob_to_proto(file.blob))
    return message


def data_from_proto(message: job_pb2.Data) -> DataSpec:
    """Return the data set of a message; ConfigError if a field has no source."""
    fields = []
    for item in message.fields:
        source: RowSource | WindowSource
        match item.WhichOneof("source"):
            case "rows":
                source = RowSource(item.rows.file, item.rows.tensor)
            case "window":
                window = item.window
                source = WindowSource(window.file, window.tensor, window.stride, window.offset)
            case _:
                raise ConfigError(f"data field {item.name!r} has no source")
        fields.append(DataField(item.name, _spec_from_proto(item.sample), source))
    files = tuple(
        DataFile(blob_from_proto(file.blob) if file.HasField("blob") else None, file.node_path)
        for file in message.files
    )
    return DataSpec(tuple(fields), files, message.samples)


def job_to_proto(job: JobSpec) -> job_pb2.JobSpec:
    """Return the message for a job."""
    message = job_pb2.JobSpec(
        name=job.name,
        graph=blob_to_proto(job.graph),
        weights=blob_to_proto(job.weights),
        data=data_to_proto(job.data),
        eval_every_steps=job.eval_every_steps,
        eval_batches=job.eval_batches,
        optimizer=job_pb2.Optimizer(
            kind=job.optimizer.kind,
            learning_rate=job.optimizer.learning_rate,
            settings=job.optimizer.settings,
            no_decay=job.optimizer.no_decay,
        ),
        lr_schedule=job_pb2.LrSchedule(
            kind=job.lr_schedule.kind,
            warmup_steps=job.lr_schedule.warmup_steps,
            final_factor=job.lr_schedule.final_factor,
            factors=job.lr_schedule.factors,
        ),
        batch_size=job.batch_size,
        micro_batches=job.micro_batches,
        steps=job.steps,
        grad_clip=job.grad_clip,
        seed=job.seed,
        determinism=job.determinism,
        precision=job.precision,
        schedule=job.schedule,
        max_stages=job.max_stages,
        loss_weight=job_pb2.LossWeight(field=job.loss_weight.field, ignore=job.loss_weight.ignore),
        torch_version=job.torch_version,
        threads=job.threads,
        cuts=job.cuts,
        shuffle=job.shuffle,
        planner=job.planner,
        replan=job.replan,
        compression=job.compression,
        checkpoint_every_steps=job.checkpoint_every_steps,
        checkpoint_keep=job.checkpoint_keep,
        recompute=job.recompute,
    )
    if job.eval_data is not None:
        message.eval_data.CopyFrom(data_to_proto(job.eval_data))
    return message


def job_from_proto(message: job_pb2.JobSpec) -> JobSpec:
    """Return the job of a message, checked; ConfigError names the first bad setting."""
    optimizer = message.optimizer
    schedule = message.lr_schedule
    job = JobSpec(
        name=message.name,
        graph=blob_from_proto(message.graph),
        weights=blob_from_proto(message.weights),
        data=data_from_proto(message.data),
        eval_data=data_from_proto(message.eval_data) if message.HasField("eval_data") else None,
        eval_every_steps=message.eval_every_steps,
        eval_batches=message.eval_batches,
        optimizer=OptimizerSpec(
            optimizer.kind, optimizer.learning_rate, dict(optimizer.settings), tuple(optimizer.no_decay)
        ),
        lr_schedule=LrScheduleSpec(
            schedule.kind, schedule.warmup_steps, schedule.final_factor, tuple(schedule.factors)
        ),
        batch_size=message.batch_size,
        micro_batches=message.micro_batches,
        steps=message.steps,
        grad_clip=message.grad_clip,
        seed=message.seed,
        determinism=message.determinism,  # type: ignore[arg-type]  # checked below
        precision=message.precision,  # type: ignore[arg-type]
        schedule=message.schedule,  # type: ignore[arg-type]
        max_stages=message.max_stages,
        loss_weight=LossWeightSpec(message.loss_weight.field, message.loss_weight.ignore),
        torch_version=message.torch_version,
        threads=message.threads,
        cuts=tuple(message.cuts),
        shuffle=message.shuffle,
        planner=message.planner or "fusion",  # type: ignore[arg-type]
        replan=message.replan,
        compression=message.compression or "none",
        checkpoint_every_steps=message.checkpoint_every_steps,
        checkpoint_keep=message.checkpoint_keep or 3,
        recompute=message.recompute or "auto",  # type: ignore[arg-type]
    )
    check_settings(job)
    return job
