"""The daemon's dealings with kept states: tells the coordinator what there is, and uploads what it asks for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection

from fusion.base.errors import AuthError, FusionError, NotFoundError, StateError
from fusion.observe.logs import fields
from fusion.security.credentials import Credentials
from fusion.security.tls import coordinator_server_name
from fusion.transport.blobs import BlobClient
from fusion.transport.channels import backoff_s, open_channel
from fusion.wire.v1 import node_pb2
from fusion_node.control import Control
from fusion_node.statefiles import Kept, StateFiles

log = logging.getLogger("fusion.node")

UPLOAD_TRIES = 5


class StateClerk:
    """Reports the states in `files`, the newest word only, and as often as it takes."""

    def __init__(self, files: StateFiles, control: Control, incarnation: Callable[[], int]) -> None:
        """`incarnation` returns the number of the present registration; 0 without one."""
        self._files, self._control, self._incarnation = files, control, incarnation
        self._uploaded: set[str] = set()  #: digests that the blob store is known to have
        self._changed = asyncio.Event()
        self._uploads = asyncio.Lock()

    def report(self, uploaded: str = "") -> None:
        """Have the states reported soon; `uploaded` is the digest of one that the blob store has now."""
        if uploaded:
            self._uploaded.add(uploaded)
        self._changed.set()

    async def run(self) -> None:
        """Report whenever there is something to tell, for ever. Without a registration there is nobody to tell."""
        attempt = 0
        while True:
            await self._changed.wait()
            self._changed.clear()
            incarnation = self._incarnation()
            if not incarnation:
                continue
            try:
                await self._report(incarnation)
                attempt = 0
            except (StateError, NotFoundError, AuthError) as error:  # the next registration reports anew
                log.info("kept states not told", extra=fields(reason=error))
            except FusionError as error:
                log.info("kept states not told yet", extra=fields(reason=error))
                await asyncio.sleep(backoff_s(attempt))
                attempt += 1
                self._changed.set()

    async def _report(self, incarnation: int) -> None:
        states = await asyncio.to_thread(self._files.all)
        self._uploaded &= {kept.blob.digest for kept in states}
        report = node_pb2.StatesReport(incarnation=incarnation)
        for kept in states:
            state = report.states.add(
                job_id=kept.job,
                epoch=kept.epoch,
                stage=kept.stage,
                step=kept.step,
                uploaded=kept.blob.digest in self._uploaded,
            )
            state.state.digest, state.state.size_bytes = kept.blob.digest, kept.blob.size_bytes
        answer = await self._control.report_states(report)
        mine = {kept.job for kept in states}
        for job in answer.ended_jobs:
            if job in mine:
                await asyncio.to_thread(self._files.clear, job)

    async def upload(self, credentials: Credentials, job: str, digests: Collection[str]) -> None:
        """Put states into the blob store, one after the other, and report. What is damaged is deleted instead."""
        async with self._uploads:
            wanted = [kept for kept in await asyncio.to_thread(self._files.all, job) if kept.blob.digest in digests]
            for kept in wanted:
                await self._upload(credentials, kept)
            self.report()

    async def _upload(self, credentials: Credentials, kept: Kept) -> None:
        for attempt in range(UPLOAD_TRIES):
            try:
                whole = await asyncio.to_thread(self._upload_file, credentials, kept)
            except FusionError as error:
                log.warning(
                    f"state of {kept.job} not uploaded: {error}", extra=fields(stage=kept.stage, step=kept.step)
                )
                await asyncio.sleep(backoff_s(attempt))
                continue
            if whole:
                self._uploaded.add(kept.blob.digest)
                log.info(f"state of {kept.job} uploaded", extra=fields(stage=kept.stage, step=kept.step))
            return

    def _upload_file(self, credentials: Credentials, kept: Kept) -> bool:
        """Upload a state; False if its content is not what its name says."""
        path = self._files.path(kept)
        if path is None:
            return False
        name = coordinator_server_name(credentials.cluster)
        with open_channel(credentials.coordinator, credentials, name) as channel:
            blob = BlobClient(channel).upload_file(path)
        if blob != kept.blob:
            log.error(f"{path} is damaged: digest {blob.digest}, expected {kept.blob.digest}; deleted")
            self._files.delete(kept)
        return blob == kept.blob
