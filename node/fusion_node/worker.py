"""One worker: the process that holds torch, runs one stage of one job, and talks to the workers of the other stages.

Started by the daemon with a configuration on stdin (see `fusion_node.ipc`). It ends when the job's last step is done,
when it is told to stop, when a peer is lost, or when its daemon is gone.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import torch

from fusion.base.errors import ConfigError, DataError, FusionError, StoppedError, UnreachableError, WireError
from fusion.base.ids import Incarnation, JobId, StageIndex
from fusion.base.units import MIB, format_bytes
from fusion.graph.partition import Partition, partition, stage_cost
from fusion.observe import history
from fusion.observe.spans import SpanRecorder, is_traced
from fusion.plan.codecs import codec_schedule, plan_with_change
from fusion.plan.plan_simulation import schedules_of
from fusion.plan.schedule import most_in_flight
from fusion.plan.types import Plan
from fusion.protocol.graph import graph_from_proto
from fusion.protocol.job import BlobRef, DataSpec, JobSpec, job_from_proto
from fusion.protocol.messages import MessageKind
from fusion.protocol.passes import CodecPass
from fusion.protocol.plan import Resume, plan_from_proto, plan_to_proto, resume_from_proto
from fusion.runtime.coding import StageCoder
from fusion.runtime.data import DataSet, files_needed, open_data
from fusion.runtime.executor import ShardExecutor
from fusion.runtime.local import apply_settings
from fusion.runtime.machine import StageRole
from fusion.runtime.stage import Pace, StageRecord, StageRunner
from fusion.runtime.tensorfile import ChunkSource, file_pieces, save_tensors
from fusion.security.credentials import Credentials
from fusion.security.roles import Access, Authorizer
from fusion.security.tls import coordinator_server_name, server_credentials
from fusion.transport.blobs import BlobClient
from fusion.transport.channels import open_channel
from fusion.transport.grpc import GrpcTransport, PeerInfo
from fusion.wire.v1 import graph_pb2, job_pb2, plan_pb2
from fusion_node.contact import ContactTalk
from fusion_node.exchange import MessageReceiver, PayloadLimits, WireOutbox, window_bytes
from fusion_node.hardware import available_memory_bytes
from fusion_node.ipc import (
    Cause,
    ClockItem,
    Lease,
    Recode,
    SpanItem,
    StateName,
    StateUploaded,
    StepReport,
    Unheard,
    WorkerChannel,
    WorkerConfig,
)
from fusion_node.linkmeter import LinkMeter
from fusion_node.safekeeping import Safekeeping, partners
from fusion_node.stagestate import HandedOn, foreign_parameters, load_stage, tensor_digest
from fusion_node.statefiles import FileSource, Kept, StateFiles
from fusion_node.usage import peak_memory_bytes
from fusion_node.workerprocess import MARK

CONNECT_TIMEOUT_S = 120.0
MAX_GRAPH_BYTES = 256 * MIB
DRAIN_PATIENCE_S = 60.0
UPLOAD_PATIENCE_S = 86_400.0  #: the coordinator may be away; that ends with the node's lease, and the worker with it
CLOSE_S = 4.0  #: for a version that is only in memory: less than the daemon waits before it ends the process
#: What torch says of a device that is lost or in an error that stays: the same process can never use it again.
DEVICE_ERROR = re.compile(
    r"\b(CUDA|HIP|MPS|XPU|cuDNN|CUBLAS|NCCL)[ _]?(driver )?error\b|device-side assert", re.IGNORECASE
)
WAITING_PART = 4  #: of this machine's free memory, at most one in so many bytes for what waits to be used
SAY_S = 10.0  #: between two reports of a state that may last


class PeerLostError(UnreachableError):
    """A stage that this one exchanges messages with is gone."""

    def __init__(self, peer: StageIndex, reason: str) -> None:
        super().__init__(reason)
        self.peer = peer


@dataclass(frozen=True, slots=True)
class Task:
    """What the assignment says, read and checked."""

    job_id: JobId
    job: JobSpec
    plan: Plan
    stage: StageIndex
    resume: Resume | None

    @staticmethod
    def read(assignment: bytes) -> Task:
        """Parse an assignment; ConfigError or WireError if it is not one."""
        message = plan_pb2.Assignment.FromString(assignment)
        spec = job_pb2.JobSpec.FromString(message.job_spec)
        plan = plan_from_proto(message.plan)
        if message.stage >= len(plan.stages):
            raise ConfigError(f"assignment: stage {message.stage} of a plan with {len(plan.stages)} stages")
        resume = resume_from_proto(message)
        return Task(JobId(message.job_id), job_from_proto(spec), plan, StageIndex(message.stage), resume)


class Worker:
    """Runs one stage from its assignment to the upload of its weights."""

    def __init__(self, config: WorkerConfig, channel: WorkerChannel) -> None:
        self._config = config
        self._channel = channel
        self._task = Task.read(config.assignment)
        self._spans = SpanRecorder(self._task.stage)
        self._transport: GrpcTransport | None = None
        self._begin_history()
        self._credentials = Credentials.load(Path(config.credentials_dir))
        self._stop_reason: str | None = None
        self._lost: PeerLostError | None = None
        self._failure: FusionError | None = None
        self._finished = threading.Event()
        self._connecting: GrpcTransport | None = None
        self._contact: ContactTalk | None = None
        self._lease: Lease | None = None
        self._hold_wanted = False
        self._emulate_flops = config.emulate_flops
        self._parts: Partition | None = None
        self._runner: StageRunner | None = None
        self._states = StateFiles([Path(path) for path in config.state_dirs] or [Path(config.cache_dir) / "state"])
        self._safekeeping: Safekeeping | None = None
        self._handed_on: HandedOn | None = None
        self._meter: LinkMeter | None = None
        self._rates: Callable[[], Mapping[StageIndex, float]] = dict
        self._coder: StageCoder | None = None
        self._passes = 0
        self._step = 0

    def _begin_history(self) -> None:
        plan, stage, resume = self._task.plan, self._task.stage, self._task.resume
        mine = plan.stages[stage]
        history.begin(
            "worker", node=mine.node, name=mine.node_name, incarnation=mine.incarnation,
            job=self._task.job_id, epoch=plan.epoch, stage=stage,
        )  # fmt: skip
        history.note("started", stages=len(plan.stages), resume_step=0 if resume is None else resume.step)

    def stop(self, reason: str) -> None:
        """Ask the worker to end in order; may be called from any thread."""
        self._stop_reason = reason or "stopped"
        if self._connecting is not None:
            self._connecting.close(self._stop_reason)

    def hold(self) -> None:
        """Ask for an end at a step's end, alike on all stages; may be called from any thread."""
        self._hold_wanted = True
        if self._runner is not None:
            self._runner.hold()

    def leased(self, lease: Lease) -> None:
        """Take note of the last contact with the coordinator; may be called from any thread."""
        self._lease = lease
        if self._contact is not None:
            self._contact.leased(lease.contact_s, lease.fence_s)

    def recode(self, change: Recode) -> None:
        """Ask for other codecs from one of the next steps on; may be called from any thread.

        What makes no sense is refused with a line in the log, and the run goes on as it was.
        """
        if self._runner is None or self._coder is None:
            return  # it is asked for again
        links = tuple((StageIndex(source), StageIndex(target), codec) for source, target, codec in change.links)
        try:
            plan = plan_with_change(self._task.plan, self._task.job.steps + 1, links)
            codec_schedule(plan_from_proto(plan_to_proto(plan)))
        except FusionError as error:
            self._channel.log("warning", f"change of codecs refused: {error}")
            return
        self._runner.recode(CodecPass(change.revision, links))

    def emulate(self, flops: float) -> None:
        """Stand for a device of this speed from now on; may be called from any thread."""
        self._emulate_flops = flops
        if self._runner is not None and self._parts is not None:
            self._runner.pace = self._pace(self._parts)

    def run(self) -> None:
        """Work until the end; reports every state. Raises what made it fail."""
        server_name = coordinator_server_name(self._credentials.cluster)
        with open_channel(self._config.coordinator, self._credentials, server_name) as control:
            blobs, patient = BlobClient(control), BlobClient(control, UPLOAD_PATIENCE_S)
            with self._saying("starting"):
                parts = self._load_partition(blobs)
                runner, transport = self._build(parts, blobs, control)
            self._parts, self._runner = parts, runner
            runner.pace = self._pace(parts)  # the speed to emulate may have changed in the meantime
            if self._hold_wanted:
                runner.hold()
            reason, held = "failed", None
            try:
                self._channel.state("ready")
                self._connect(transport, runner)
                self._talk.start()
                self._channel.state("running")
                runner.run(self._look)
                self._finished.set()
                self._channel.progress(self._step, self._passes)
                if runner.held_after is None:
                    if self._keeping.keeper.owes_checkpoint:
                        with self._saying("running", "uploads the last checkpoint"):
                            self._keeping.keeper.finish(lambda: self._stop_reason is not None)
                    weights = self._upload_weights(runner.executor, parts, patient)
                    self._drain(transport)
                    self._channel.state(
                        "finished", weights_digest=weights.digest, weights_size_bytes=weights.size_bytes
                    )
                    reason = "finished"
                else:
                    with self._saying("running", f"holds after step {runner.held_after}", step=runner.held_after):
                        held = self._save_state(runner, runner.held_after, patient)
                        self._drain(transport)
                    reason = "held"
            finally:
                # First, because the job may have to go on from it; the daemon kills a worker that it has asked to end.
                self._keeping.close(CLOSE_S)
                self._talk.close()
                transport.close(self._stop_reason or reason)
            if held is not None:  # only now, because the next worker needs the port
                step = runner.held_after or 0
                self._channel.state("held", step=step, held_digest=held.digest, held_size_bytes=held.size_bytes)

    @property
    def _talk(self) -> ContactTalk:
        assert self._contact is not None  # made with the transport
        return self._contact

    @property
    def _keeping(self) -> Safekeeping:
        assert self._safekeeping is not None  # made with the stage
        return self._safekeeping

    def _load_partition(self, blobs: BlobClient) -> Partition:
        message = graph_pb2.Graph.FromString(blobs.download_bytes(self._task.job.graph, MAX_GRAPH_BYTES))
        cuts = [stage.first_operator for stage in self._task.plan.stages[1:]]
        return partition(graph_from_proto(message), cuts)

    def _build(self, parts: Partition, blobs: BlobClient, control: grpc.Channel) -> tuple[StageRunner, GrpcTransport]:
        job, plan, stage = self._task.job, self._task.plan, self._task.stage
        self._limit_memory()
        torch.set_num_threads(max(1, self._config.threads))
        apply_settings(job)
        resume = self._task.resume
        states = [self._state_source(blobs, ref) for ref in (() if resume is None else resume.states)]
        self._coder = coder = StageCoder(parts, stage, codec_schedule(plan), seed=job.seed, device=self._config.device)
        tensors = load_stage(parts, stage, blobs.reader(job.weights), states, coder.state_names)
        executor = ShardExecutor(
            parts,
            stage,
            tensors.inputs,
            device=self._config.device,
            seed=job.seed,
            precision=job.precision,
            draw_on_cpu=job.determinism == "strict",
            take_over=True,
            recompute=plan.stages[stage].recompute,
        )
        transport = self._transport = self._make_transport(parts)
        self._meter = LinkMeter(transport.counters, coder)
        self._rates = transport.rates
        schedule = schedules_of(plan)[stage]
        start = 0 if resume is None else resume.step
        self._handed_on = HandedOn(executor, parts, f"{self._task.job_id}.e{plan.epoch}.s{stage}")
        self._safekeeping = Safekeeping.start(
            self._states,
            self._task.job_id,
            plan,
            stage,
            start,
            select=self._handed_on,
            transport=transport,
            upload=lambda path: BlobClient(control).upload_file(path),
            channel=self._channel,
        )
        runner = StageRunner(
            job,
            parts,
            schedule,
            executor,
            self._open_data(job.data, executor, blobs),
            None if job.eval_data is None else self._open_data(job.eval_data, executor, blobs),
            WireOutbox(transport, coder, self._spans),
            self._on_step,
            first_step=start + 1,
            pace=self._pace(parts),
            coder=coder,
            keeper=self._safekeeping.keeper,
        )
        runner.spans = self._spans
        runner.load_state(tensors.optimizer | tensors.coding)
        return runner, transport

    def _state_source(self, blobs: BlobClient, state: BlobRef) -> ChunkSource:
        kept = self._states.find(self._task.job_id, state)
        return blobs.reader(state) if kept is None else FileSource(kept)

    @contextmanager
    def _saying(self, state: StateName, detail: str = "", **rest: Any) -> Iterator[None]:
        """Report a state now and again during what may take long, so that silence means that something hangs."""
        over = threading.Event()

        def say() -> None:
            while not over.wait(SAY_S):
                self._channel.state(state, detail, **rest)

        self._channel.state(state, detail, **rest)
        thread = threading.Thread(target=say, name="saying", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _pace(self, parts: Partition) -> Pace | None:
        """Return how long passes take at the emulated speed, if there is one."""
        flops = self._emulate_flops
        if not flops:
            return None
        cost = stage_cost(parts.graph, parts.shards[self._task.stage])
        again = cost.forward_flops if self._task.plan.stages[self._task.stage].recompute else 0.0
        return Pace(cost.forward_flops / flops, (cost.backward_flops + again) / flops)

    def _limit_memory(self) -> None:
        """Refuse a stage that is planned larger than the owner allows, and hold a CUDA device to that limit."""
        need, limit = self._task.plan.stages[self._task.stage].memory_bytes, self._config.memory_limit_bytes
        if limit and need > limit:
            raise ConfigError(
                f"stage {self._task.stage} needs about {format_bytes(need)}, this node's owner allows "
                f"{format_bytes(limit)}; raise --max-memory or use more nodes"
            )
        if limit and self._config.device.startswith("cuda"):
            device = torch.device(self._config.device)
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)

    def _open_data(self, spec: DataSpec, executor: ShardExecutor, blobs: BlobClient) -> DataSet | None:
        """Open what this stage reads of the data: its graph's inputs, and the labels that weigh its loss."""
        fields = set(executor.batch_fields)
        if executor.makes_loss and self._task.job.loss_weight.field:
            fields.add(self._task.job.loss_weight.field)
        if not fields:
            return None
        needed = files_needed(spec, fields)
        files = [self._data_file(spec, index, blobs) if index in needed else None for index in range(len(spec.files))]
        return open_data(spec, files, fields)

    def _data_file(self, spec: DataSpec, index: int, blobs: BlobClient) -> Path:
        file = spec.files[index]
        if file.blob is None:
            return self._allowed_path(file.node_path)
        path = Path(self._config.cache_dir) / "data" / file.blob.digest
        if not (path.exists() and path.stat().st_size == file.blob.size_bytes):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._channel.log("info", f"fetching {format_bytes(file.blob.size_bytes)} of data")
            blobs.download_file(file.blob, path)
        return path

    def _allowed_path(self, text: str) -> Path:
        path = Path(text).resolve()
        for directory in self._config.allow_data:
            if path.is_relative_to(Path(directory).resolve()):
                return path
        allowed = ", ".join(self._config.allow_data) or "none"
        raise DataError(
            f"data path {text[:200]!r} is not allowed on this node; allowed directories (--allow-data): {allowed}"
        )

    def _make_transport(self, parts: Partition) -> GrpcTransport:
        plan, stage = self._task.plan, self._task.stage
        peers = {
            peer: PeerInfo(planned.node, planned.node_name, planned.address, planned.incarnation)
            for peer in sorted({*StageRole.of(parts, stage).peers(parts), *partners(plan, stage)})
            for planned in (plan.stages[peer],)
        }
        in_flight = [most_in_flight(schedule) for schedule in schedules_of(plan)]
        first_bytes, most_bytes = window_bytes(parts, stage, in_flight, self._spare_bytes() // max(1, len(peers)))
        transport = GrpcTransport(
            credentials=self._credentials,
            server_tls=server_credentials(Path(self._config.credentials_dir)),
            interceptors=[Authorizer(Access(self._credentials.cluster))],
            listen=self._config.listen,
            job=self._task.job_id,
            epoch=plan.epoch,
            stage=stage,
            incarnation=Incarnation(self._config.incarnation),
            peers=peers,
            limit=PayloadLimits(parts, stage),
            window_bytes=first_bytes,
            most_window_bytes=most_bytes,
            routes=self._config.routes,
            answering=self._config.answering,
        )
        self._contact = ContactTalk(stage, len(plan.stages), self._unheard, transport.send, peers)
        if self._lease is not None:
            self.leased(self._lease)
        return transport

    def _unheard(self, quiet_s: float) -> None:
        self._channel.report(Unheard(quiet_s))

    def _spare_bytes(self) -> int:
        """Return the memory for what has arrived and waits: what the owner allows beyond the plan's need.

        Beside a device with memory of its own, or without a limit, it is a part of what this machine has left.
        """
        limit = self._config.memory_limit_bytes
        if limit and self._config.device == "cpu":
            return max(0, limit - self._task.plan.stages[self._task.stage].memory_bytes)
        return available_memory_bytes() // WAITING_PART

    def _connect(self, transport: GrpcTransport, runner: StageRunner) -> None:
        """Wait for all peers; a stop that comes meanwhile ends the wait."""
        assert self._coder is not None  # made with the runner
        takers = {**self._keeping.takers(), MessageKind.CONTACT: self._talk.take}
        receiver = MessageReceiver(runner, self._coder, self._on_lost, self._on_failure, takers, self._spans)
        self._connecting = transport
        try:
            if self._stop_reason is None:
                transport.start(receiver, CONNECT_TIMEOUT_S)
        except UnreachableError as error:
            if self._stop_reason is None:  # that peer's own node may know better what happened
                raise PeerLostError(StageIndex(-1), str(error)) from error
        except FusionError:
            if self._stop_reason is None:
                raise
        finally:
            self._connecting = None
        if self._stop_reason is not None:
            raise StoppedError(self._stop_reason)

    def _on_lost(self, peer: StageIndex, reason: str) -> None:
        name = self._task.plan.stages[peer].node_name
        if not self._finished.is_set() and self._lost is None:
            self._lost = PeerLostError(peer, f"lost stage {peer} on node {name}: {reason}")

    def _on_failure(self, error: FusionError) -> None:
        self._failure = self._failure or error

    def _look(self) -> str | None:
        """Called between instructions: say that the worker lives, and end it where it must."""
        self._passes += 1
        self._channel.progress(self._step, self._passes, at_work=True)
        if self._failure is not None:
            raise self._failure
        if self._stop_reason is None and self._lost is not None:
            raise self._lost
        return self._stop_reason

    def _on_step(self, record: StageRecord) -> None:
        assert self._meter is not None  # made with the transport
        assert self._coder is not None
        self._step = record.step
        if record.spoiled:
            text = f"gradients of step {record.step} are not finite, on this stage before any other; it is skipped"
            self._channel.log("warning", text)
        if history.active():
            self._note_step(record)
        sending, received = self._meter.step(record.step, record.waited_s)
        for peer, rate in self._rates().items():
            self._coder.set_rate(peer, rate)
        spans, clocks = self._measured(record)
        self._channel.report(
            StepReport(
                step=record.step,
                loss=record.loss,
                eval_loss=record.eval_loss,
                grad_norm=record.grad_norm,
                learning_rate=record.learning_rate,
                skipped=record.skipped,
                step_s=record.step_s,
                compute_s=record.compute_s,
                wait_s=record.wait_s,
                samples=record.samples,
                tokens=record.tokens,
                sent={int(target): count for target, count in record.sent_bytes.items()},
                peak_memory_bytes=peak_memory_bytes(self._config.device),
                sending=sending,
                received=received,
                codec_revision=self._coder.revision(record.step),
                spans=spans,
                clocks=clocks,
            )
        )

    def _measured(self, record: StageRecord) -> tuple[tuple[SpanItem, ...], dict[int, ClockItem]]:
        """Return what a step was spent on, and the peers' clocks; nothing for most of many short steps."""
        spans = self._spans.take(record.step)
        if self._transport is None or not is_traced(record.step, record.step_s):
            return (), {}
        items = tuple(
            SpanItem(span.stage, span.target, span.kind, span.micro_batch, span.start_s, span.end_s) for span in spans
        )
        clocks = self._transport.clocks()
        return items, {int(peer): ClockItem(clock.offset_s, clock.error_s) for peer, clock in clocks.items()}

    def _note_step(self, record: StageRecord) -> None:
        assert self._runner is not None
        digests = {name: tensor_digest(tensor) for name, tensor in self._runner.state().items()}
        history.note(
            "step", step=record.step, applied=not record.skipped, micro_batches=record.micro_batches,
            loss=record.loss, digests=digests,
        )  # fmt: skip

    def _drain(self, transport: GrpcTransport) -> None:
        """Wait for slow links: what others need to end the step may still be under way."""
        transport.drain(DRAIN_PATIENCE_S, lambda: self._stop_reason is not None)

    def _upload_weights(self, executor: ShardExecutor, parts: Partition, blobs: BlobClient) -> BlobRef:
        """Upload the stage's parameters and buffers; a shared parameter comes from the first of its holders."""
        stage = self._task.stage
        foreign = foreign_parameters(parts, stage)
        tensors = {name: tensor for name, tensor in executor.parameters.items() if name not in foreign}
        tensors |= executor.buffers
        directory = Path(self._config.cache_dir)
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, prefix="weights-", suffix=".safetensors") as file:
            save_tensors(Path(file.name), tensors)
            return blobs.upload_file(Path(file.name))

    def _save_state(self, runner: StageRunner, step: int, blobs: BlobClient) -> BlobRef:
        """Upload all that the job needs to go on after `step` under any plan, and keep a copy here."""
        assert self._handed_on is not None
        job, tensors = self._task.job_id, self._handed_on(step, runner.state())
        try:
            part = self._states.begin(job, sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()))
            save_tensors(part, tensors)
        except OSError as error:
            self._channel.log("warning", f"state of step {step} not kept here: {error.strerror}; uploaded from memory")
            return blobs.upload_bytes(b"".join(file_pieces(tensors)))
        blob = blobs.upload_file(part)
        self._states.keep(part, Kept(job, self._task.plan.epoch, self._task.stage, step, blob))
        self._channel.report(StateUploaded(blob.digest, blob.size_bytes, step))
        return blob


def main() -> None:
    """Run one worker over this process's stdin and stdout."""
    channel = WorkerChannel.take_stdio()
    if MARK in sys.argv:
        importlib.import_module("torch._dynamo")  # the first optimizer would: it takes as long as torch itself
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # strict determinism on CUDA asks for it
    try:
        worker = Worker(channel.read_config(), channel)
        channel.watch(
            worker.stop,
            on_hold=worker.hold,
            on_emulate=worker.emulate,
            on_recode=worker.recode,
            on_lease=worker.leased,
        )
        worker.run()
    except PeerLostError as error:
        channel.state("failed", str(error), cause="peer-lost", peer_stage=error.peer)
    except StoppedError as error:
        channel.state("stopped", str(error))
    except WireError as error:  # bytes that are not what they were, most likely: not the job's fault
        channel.state("failed", str(error), cause="crash")
    except FusionError as error:
        channel.state("failed", str(error), cause="error")
    except (MemoryError, torch.OutOfMemoryError) as error:
        channel.state("failed", f"out of memory: {error}", cause="out-of-memory")
    except Exception as error:  # noqa: BLE001 - the process ends here; the daemon must hear why
        traceback.print_exc()
        cause: Cause = "device" if DEVICE_ERROR.search(str(error)) else "error"
        channel.state("failed", f"{type(error).__name__}: {error}", cause=cause)
    channel.close()
    sys.stderr.flush()
    # All is said and closed. The interpreter's own end would wait for gRPC's threads whose peers are gone, for seconds,
    # and the next worker would wait for this one.
    os._exit(0)


if __name__ == "__main__":
    main()
