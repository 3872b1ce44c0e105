"""Bulk in and out. Disks and digests are worked on threads; the event loop only passes chunks on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from fusion.base.digest import BLOB_CHUNK_BYTES
from fusion.base.errors import ConfigError, NotFoundError, WireError
from fusion.wire.v1 import coordinator_pb2, coordinator_pb2_grpc
from fusion_coordinator.blobs import MAX_BLOB_BYTES, Partial, check_digest
from fusion_coordinator.controller import Controller
from fusion_coordinator.services.guard import who
from fusion_coordinator.store.base import BlobRecord

P = ParamSpec("P")
R = TypeVar("R")
_THREADS = 4


class BlobsService(coordinator_pb2_grpc.BlobsServicer):
    """The content-addressed store."""

    def __init__(self, controller: Controller) -> None:
        self._controller, self._files = controller, controller.files
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="blobs")

    async def _run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, lambda: function(*args, **kwargs))

    async def _record(self, digest: str) -> BlobRecord | None:
        store = self._controller.store
        return await store.run(store.store.blob, check_digest(digest))

    async def Stat(self, request: coordinator_pb2.StatBlobRequest, context: Any) -> coordinator_pb2.StatBlobResponse:  # noqa: N802
        """Say whether a blob is complete, or where the caller's upload of it goes on."""
        record = await self._record(request.digest)
        if record is not None:
            return coordinator_pb2.StatBlobResponse(
                complete=True,
                received_bytes=record.size_bytes - record.size_bytes % BLOB_CHUNK_BYTES,
                size_bytes=record.size_bytes,
                chunk_digests=record.chunk_digests if request.with_chunk_digests else b"",
            )
        answer = coordinator_pb2.StatBlobResponse(size_bytes=request.size_bytes)
        if request.size_bytes:
            partial = await self._run(
                self._files.partial, request.digest, who(context).identity, request.size_bytes, create=False
            )
            answer.received_bytes = partial.received_bytes if partial is not None else 0
        return answer

    async def Put(  # noqa: N802
        self, request_iterator: AsyncIterator[coordinator_pb2.PutBlobRequest], context: Any
    ) -> coordinator_pb2.PutBlobResponse:
        """Take an upload from where Stat said; an interrupted one keeps its whole chunks."""
        caller = who(context).identity
        first = await anext(request_iterator, None)
        if first is None:
            raise WireError("an upload begins with its digest and size")
        digest, size_bytes = check_digest(first.digest), first.size_bytes
        if size_bytes > MAX_BLOB_BYTES or first.offset % BLOB_CHUNK_BYTES or first.offset > size_bytes:
            raise WireError(f"blob {digest}: an upload of {size_bytes} bytes cannot begin at offset {first.offset}")
        if await self._record(digest) is not None:
            return coordinator_pb2.PutBlobResponse(received_bytes=size_bytes, complete=True)
        partial = await self._run(self._files.partial, digest, caller, size_bytes, create=True)
        assert partial is not None  # asked to be created
        await self._run(self._files.check_space, digest, size_bytes - partial.received_bytes)
        whole = await self._receive(first, request_iterator, partial)
        if not whole:
            return coordinator_pb2.PutBlobResponse(received_bytes=partial.received_bytes)
        chunk_digests = await self._run(self._files.finish, partial, caller)
        store, wall_s = self._controller.store, self._controller.clock.wall_s()
        await store.run(store.store.add_blob, BlobRecord(digest, size_bytes, chunk_digests, wall_s))
        return coordinator_pb2.PutBlobResponse(received_bytes=size_bytes, complete=True)

    async def _receive(
        self,
        first: coordinator_pb2.PutBlobRequest,
        more: AsyncIterator[coordinator_pb2.PutBlobRequest],
        partial: Partial,
    ) -> bool:
        """Write chunks as they fill; True once all are there. At most one chunk and one message are in memory."""
        waiting, position = bytearray(), first.offset
        message: coordinator_pb2.PutBlobRequest | None = first
        while message is not None:
            end = position + len(waiting)
            if message.offset != end or end + len(message.data) > partial.size_bytes:
                raise WireError(
                    f"blob {partial.digest}: {len(message.data)} bytes at offset {message.offset}; "
                    f"expected offset {end} and an end at {partial.size_bytes}"
                )
            waiting += message.data
            while len(waiting) >= BLOB_CHUNK_BYTES or (waiting and position + len(waiting) == partial.size_bytes):
                chunk = bytes(waiting[:BLOB_CHUNK_BYTES])
                if not await self._run(partial.add, position // BLOB_CHUNK_BYTES, chunk):
                    return False  # an earlier chunk is missing here: the caller asks Stat
                del waiting[:BLOB_CHUNK_BYTES]
                position += len(chunk)
            if partial.chunks == partial.chunk_count and position == partial.size_bytes:
                return True
            message = await anext(more, None)
        return False

    async def Get(  # noqa: N802
        self,
        request: coordinator_pb2.GetBlobRequest,
        context: Any,
    ) -> AsyncIterator[coordinator_pb2.GetBlobResponse]:
        """Send a range of a complete blob in pieces of at most 1 MiB."""
        record = await self._record(request.digest)
        if record is None:
            raise NotFoundError(f"blob {request.digest} is not in the store")
        end = request.offset + request.length if request.length else record.size_bytes
        if not request.offset <= end <= record.size_bytes:
            raise ConfigError(
                f"blob {request.digest}: bytes {request.offset}..{end} asked for, it has {record.size_bytes}"
            )
        position = request.offset
        while position < end:
            data = await self._run(self._files.read, record.digest, position, min(BLOB_CHUNK_BYTES, end - position))
            yield coordinator_pb2.GetBlobResponse(offset=position, data=data)
            position += len(data)

    def close(self) -> None:
        """Let no further work begin."""
        self._executor.shutdown(wait=False, cancel_futures=True)
