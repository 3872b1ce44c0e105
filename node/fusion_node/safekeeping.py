"""A worker's part in nothing being lost: keeps its stage's states, sends replicas, and holds those of others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fusion.base.ids import JobId, StageIndex
from fusion.plan.types import Plan
from fusion.protocol.job import BlobRef
from fusion.protocol.messages import MessageKind
from fusion.transport.base import Incoming, Transport
from fusion_node.ipc import Level, StateUploaded, WorkerChannel
from fusion_node.keeping import Select, StateKeeper
from fusion_node.replicas import ReplicaHolder, ReplicaSender
from fusion_node.statefiles import Kept, StateFiles


def partners(plan: Plan, stage: StageIndex) -> set[StageIndex]:
    """Return the stages with which `stage` exchanges replicas, one way or the other."""
    found = held_for(plan, stage)
    holder = plan.stages[stage].replica_stage
    return found if holder is None else found | {holder}


def held_for(plan: Plan, stage: StageIndex) -> set[StageIndex]:
    """Return the stages whose replicas `stage` holds."""
    return {StageIndex(index) for index, one in enumerate(plan.stages) if one.replica_stage == stage}


@dataclass(slots=True)
class Safekeeping:
    """The ends of it, connected."""

    keeper: StateKeeper
    sender: ReplicaSender | None
    holder: ReplicaHolder | None

    @staticmethod
    def start(
        files: StateFiles,
        job: JobId,
        plan: Plan,
        stage: StageIndex,
        start_step: int,
        *,
        select: Select,
        transport: Transport,
        upload: Callable[[Path], BlobRef],
        channel: WorkerChannel,
    ) -> Safekeeping:
        """Delete what is left of a course that the job has given up, and start the threads."""
        for kept in files.all(job):
            if kept.step > start_step:
                files.delete(kept)

        def log(level: Level, text: str) -> None:
            channel.log(level, f"stage {stage}: {text}")

        def uploaded(kept: Kept) -> None:
            channel.report(StateUploaded(kept.blob.digest, kept.blob.size_bytes, kept.step))

        holder_stage, others = plan.stages[stage].replica_stage, held_for(plan, stage)
        sender = None
        if holder_stage is not None:
            sender = ReplicaSender(holder_stage, plan.stages[holder_stage].node_name, transport.send, log)
        holder = ReplicaHolder(files, job, plan.epoch, others, transport.send, log) if others else None
        keeper = StateKeeper(
            files,
            job,
            plan.epoch,
            stage,
            start_step,
            select=select,
            log=log,
            upload=upload,
            uploaded=uploaded,
            replicator=sender,
        )
        return Safekeeping(keeper, sender, holder)

    def takers(self) -> Mapping[MessageKind, Callable[[Incoming], None]]:
        """Return who takes which messages of the data plane."""
        return {MessageKind.REPLICA: self._replica, MessageKind.REPLICA_ACK: self._answer}

    def _replica(self, message: Incoming) -> None:
        if self.holder is not None:
            self.holder.take(message)
        else:
            message.release()

    def _answer(self, message: Incoming) -> None:
        if self.sender is not None:
            self.sender.answered(bytes(message.payload))
        message.release()

    def close(self, timeout_s: float) -> None:
        """Write what is only in this process's memory, for at most `timeout_s`."""
        self.keeper.close(timeout_s)
        if self.holder is not None:
            self.holder.close()
