"""A run of a job: here in this process, or on a cluster, followed from wherever its owner is."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fusion.base.errors import JobError
from fusion.graph.dag import Graph
from fusion.job.client import Client
from fusion.job.weights import WeightFiles, merged
from fusion.protocol.jobstatus import Checkpoint, JobState, JobStatus, LogLine
from fusion.protocol.metrics import StepMetrics
from fusion.security.credentials import Credentials

if TYPE_CHECKING:
    import torch
    from torch import nn

_NO_MORE = 2**62  #: a step or log line that is never reached


@dataclass(frozen=True)
class LocalRun:
    """What a run in this process left."""

    metrics: list[StepMetrics]
    _graph: Graph = field(repr=False)
    _initial: Mapping[str, torch.Tensor] = field(repr=False)
    _trained: Mapping[str, torch.Tensor] = field(repr=False)

    @property
    def losses(self) -> list[float]:
        """The loss of each step."""
        return [step.loss for step in self.metrics]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the trained parameters and buffers by the model's own names, ready for `load_state_dict`."""
        return merged(self._graph, self._initial, self._trained)

    def load_into(self, model: nn.Module) -> None:
        """Load the trained parameters and buffers into `model`."""
        model.load_state_dict(self.state_dict())


class Run:
    """A submitted job. Made by `Job.submit` and `fusion.attach`; any number of them may look at one job.

    Closing it, or ending the process, leaves the job running. It belongs to the process that made it; threads may
    share it.
    """

    def __init__(self, client: Client, job_id: str) -> None:
        self._client = client
        self.job_id = job_id

    def __repr__(self) -> str:
        return f"Run({self.job_id!r}, coordinator {self._client.address!r})"

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; the job goes on."""
        self._client.close()

    def status(self) -> JobStatus:
        """Return where the job is now."""
        return self._client.get(self.job_id)

    def cancel(self, reason: str = "cancelled by its owner") -> JobStatus:
        """Cancel the job and return its status; StateError if it has ended already."""
        return self._client.cancel(self.job_id, reason)

    def pause(self) -> JobStatus:
        """Let the job stop at a step's end; its nodes are free, and its state is kept until `resume`."""
        return self._client.pause(self.job_id)

    def resume(self, from_step: int | None = None) -> JobStatus:
        """Let the job go on: from where it paused, its last checkpoint, or the checkpoint of `from_step` (0: anew)."""
        return self._client.resume(self.job_id, from_step)

    def checkpoints(self) -> Sequence[Checkpoint]:
        """Return the job's checkpoints, the earliest step first."""
        return self._client.checkpoints(self.job_id)

    def metrics(self, after_step: int = 0, *, follow: bool = True) -> Iterator[StepMetrics]:
        """Yield the metrics of every step after `after_step`, in order; with `follow`, until the job has ended.

        Raises JobError with the reason if the job fails or is cancelled, and UnreachableError when the coordinator
        has not answered for 30 s; the job may then go on, and `fusion.attach` looks at it again.
        """
        for event in self._client.follow(self.job_id, after_step=after_step, after_log=_NO_MORE, wait=follow):
            if isinstance(event, StepMetrics):
                yield event
            elif isinstance(event, JobStatus):
                _raise_if_failed(event)

    def logs(self, after: int = 0, *, follow: bool = False) -> Iterator[LogLine]:
        """Yield the lines that nodes and coordinator wrote about the job, without the first `after` of them."""
        for event in self._client.follow(self.job_id, after_step=_NO_MORE, after_log=after, wait=follow):
            if isinstance(event, LogLine):
                yield event

    def wait(self, timeout: float | None = None) -> JobStatus:
        """Return the final status once the job has succeeded.

        Raises JobError with the reason if it fails or is cancelled, TimeoutError after `timeout` seconds (the job
        goes on), and UnreachableError when the coordinator has not answered for 30 s.
        """
        deadline_s = None if timeout is None else time.monotonic() + timeout
        events = self._client.follow(self.job_id, after_step=_NO_MORE, after_log=_NO_MORE, deadline_s=deadline_s)
        for event in events:
            if isinstance(event, JobStatus):
                _raise_if_failed(event)
                if event.state is JobState.SUCCEEDED:
                    return event
        return self.status()

    def state_dict(self, progress: Callable[[int, int], None] | None = None) -> dict[str, torch.Tensor]:
        """Download the trained parameters and buffers by the model's own names, ready for `load_state_dict`.

        StateError unless the job has succeeded. `progress` is called with bytes done and bytes in all.
        """
        with tempfile.TemporaryDirectory(prefix="fusion-weights-") as directory:
            return WeightFiles(self._client, self.status(), Path(directory), progress).state_dict()

    def load_into(self, model: nn.Module) -> None:
        """Load the trained parameters and buffers into `model`."""
        model.load_state_dict(self.state_dict())


def _raise_if_failed(status: JobStatus) -> None:
    if status.state in (JobState.FAILED, JobState.CANCELLED):
        raise JobError(f"job {status.job_id} {status.state} after step {status.step}: {status.reason or 'no reason'}")


def attach(
    job_id: str, address: str | None = None, credentials: Credentials | str | os.PathLike[str] | None = None
) -> Run:
    """Return a Run of a job that was submitted before, in this process or another.

    address: host:port of the coordinator; default: the one in the credentials. NotFoundError if there is no such job.
    """
    client = Client(address, credentials)
    try:
        client.get(job_id)
    except BaseException:
        client.close()
        raise
    return Run(client, job_id)
