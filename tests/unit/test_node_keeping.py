"""Versions of a stage's state reach files and a holder; a full disk, damage and old versions cost no training."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fusion.base.errors import WireError
from fusion.base.ids import StageIndex
from fusion.protocol.job import BlobRef
from fusion.protocol.messages import MessageKind
from fusion.transport.base import Incoming, Outgoing
from fusion_node import keeping, replicas
from fusion_node.keeping import StateKeeper
from fusion_node.replicas import ReplicaHolder, ReplicaSender
from fusion_node.statefiles import FileSource, Kept, StateFiles, file_digest

JOB = "job-aaaaaaaaaa"
OWNER, HOLDER = StageIndex(0), StageIndex(1)


def eventually(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


class Bench:
    """A keeper of stage 0 whose holder is a stage 1 with files of its own, joined without a network."""

    def __init__(self, directory: Path) -> None:
        self.mine, self.theirs = StateFiles([directory / "mine"]), StateFiles([directory / "theirs"])
        self.log: list[str] = []
        self.uploaded: list[Kept] = []
        self.damage = 0  #: so many parts arrive with another bit
        self.released = 0
        self.holder = ReplicaHolder(self.theirs, JOB, 3, {OWNER}, self.send, self.say)
        self.sender = ReplicaSender(HOLDER, "node-b", self.send, self.say)
        self.keeper = StateKeeper(
            self.mine, JOB, 3, OWNER, 0,
            select=lambda step, tensors: {"$held": torch.tensor(step)} | dict(tensors),
            log=self.say, upload=self.upload, uploaded=self.uploaded.append, replicator=self.sender,
        )  # fmt: skip

    def say(self, level: str, text: str) -> None:
        self.log.append(f"{level}: {text}")

    def upload(self, path: Path) -> BlobRef:
        return BlobRef(file_digest(path), path.stat().st_size)

    def send(self, target: StageIndex, outgoing: Outgoing) -> None:
        header, payload = outgoing.prepare()
        data = bytearray(payload)
        if header.kind is MessageKind.REPLICA_ACK:
            self.sender.answered(bytes(data))
            return
        if self.damage and header.micro_batch:
            self.damage -= 1
            data[0] ^= 1
        self.holder.take(Incoming(OWNER, header, memoryview(data), self.release))
        outgoing.sent(len(data))

    def release(self) -> None:
        self.released += 1

    def keep(self, step: int, *, checkpoint: bool = False) -> None:
        self.keeper.keep(step, {"weight": torch.full((40_000,), float(step))}, checkpoint=checkpoint)

    def close(self) -> None:
        self.keeper.close(5.0)
        self.holder.close()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(keeping, "AGAIN_S", 0.05)
    monkeypatch.setattr(replicas, "LINK_SHARE", 1.0)
    made = Bench(tmp_path)
    yield made
    made.close()


def steps(files: StateFiles) -> list[int]:
    return [kept.step for kept in files.all(JOB)]


def test_a_version_is_safe_when_its_file_and_its_replica_are_whole_and_older_ones_go(bench: Bench) -> None:
    bench.keep(1)
    eventually(lambda: bench.keeper.safe_step() == 1)
    assert bench.mine.all() == bench.theirs.all()
    (kept,) = bench.theirs.all()
    assert (kept.job, kept.epoch, kept.stage, kept.step) == (JOB, 3, 0, 1)
    path = bench.theirs.find(JOB, kept.blob)
    assert path is not None
    assert FileSource(path).size_bytes > 160_000
    bench.keep(2)
    eventually(lambda: bench.keeper.safe_step() == 2)
    assert steps(bench.mine) == [1, 2]
    bench.keeper.stable(2)
    eventually(lambda: steps(bench.mine) == [2])
    eventually(lambda: bench.released == 2 * (1 + -(-kept.blob.size_bytes // replicas.PART_BYTES)))


def test_a_full_disk_is_said_once_and_costs_nothing_but_the_version(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_job: str, _size_bytes: int) -> Path:
        raise OSError(errno.ENOSPC, "no space on it")

    monkeypatch.setattr(bench.mine, "begin", full)
    bench.keep(1)
    eventually(lambda: bool(bench.log))
    time.sleep(0.2)  # several tries
    bench.keep(2)
    time.sleep(0.2)
    assert bench.log == ["warning: state of step 1 not written: no space on it; training goes on without it"]
    assert bench.keeper.safe_step() == -1
    monkeypatch.undo()
    eventually(lambda: steps(bench.mine) == [2])


def test_a_replica_that_arrives_damaged_is_sent_again_and_in_the_end_given_up(bench: Bench) -> None:
    bench.damage = 1
    bench.keep(1)
    eventually(lambda: bench.keeper.safe_step() == 1)
    assert bench.log == ["warning: replica of step 1 arrived damaged at node-b; sent again"]
    assert steps(bench.theirs) == [1]
    bench.damage = 10**6
    bench.keep(2)
    eventually(lambda: bench.keeper.safe_step() == 2)
    assert steps(bench.theirs) == [1]
    assert "cannot hold a replica of step 2" in bench.log[-1]


def test_a_holder_without_room_says_so_and_the_own_copy_counts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_job: str, _size_bytes: int) -> Path:
        raise OSError(errno.ENOSPC, "no space there")

    monkeypatch.setattr(bench.theirs, "begin", full)
    bench.keep(1)
    eventually(lambda: bench.keeper.safe_step() == 1)
    assert sum("no space there" in line for line in bench.log) == 1


def test_a_checkpoint_is_uploaded_and_stays_until_then(bench: Bench) -> None:
    bench.keep(1, checkpoint=True)
    bench.keeper.finish(lambda: False)
    assert [kept.step for kept in bench.uploaded] == [1]
    assert bench.uploaded == bench.mine.all()
    assert not bench.keeper.owes_checkpoint


def test_the_end_writes_what_is_only_in_memory(bench: Bench) -> None:
    bench.keep(7)
    bench.keeper.close(5.0)
    assert steps(bench.mine) == [7]


def test_what_training_changes_afterwards_is_not_in_a_version(bench: Bench) -> None:
    weight = torch.zeros(10)
    bench.keeper.keep(1, {"weight": weight}, checkpoint=False)
    weight.add_(1.0)
    eventually(lambda: steps(bench.mine) == [1])
    (kept,) = bench.mine.all()
    path = bench.mine.path(kept)
    assert path is not None
    assert path.read_bytes().endswith(bytes(40))


def test_a_stage_for_which_nothing_is_held_is_refused(bench: Bench) -> None:
    header = replicas._header(MessageKind.REPLICA, 1, 0)
    with pytest.raises(WireError, match="for which this stage holds none"):
        bench.holder.take(Incoming(StageIndex(5), header, memoryview(b""), bench.release))
