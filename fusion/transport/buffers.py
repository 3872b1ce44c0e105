"""Memory for payloads that arrive, used again: fresh pages from the kernel cost more than all copies together."""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque
from contextlib import suppress

import numpy as np

from fusion.base.units import MIB

__all__ = ["BufferPool"]

_POOLED_BYTES = MIB  #: smaller ones come from Python's heap, which keeps its pages
_HUGE_BYTES = 4 * MIB  #: buffers from that size on ask for huge pages
#: where there is a choice, because in the shared memory of the default no huge pages are to be had
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}


class BufferPool:
    """Writable buffers, 64-byte aligned from 1 MiB on; a buffer comes back once nothing refers to it any more.

    Its content is whatever it was. At most `most_bytes` lie idle; the oldest go first. Thread-safe.
    """

    def __init__(self, most_bytes: int = 64 * MIB) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._idle: deque[mmap.mmap] = deque()  #: the latest last
        self._idle_bytes = 0

    @property
    def idle_bytes(self) -> int:
        """Bytes that wait to be used again."""
        return self._idle_bytes

    def take(self, size: int) -> memoryview:
        """Return a buffer of `size` bytes."""
        if size < _POOLED_BYTES:
            return memoryview(bytearray(size))
        memory = self._idle_of(size)
        if memory is None:
            memory = _mapped(size)
        # All views of the memory, and tensors over them, refer to this array: when it dies, none is left.
        array = np.frombuffer(memory, dtype=np.uint8)
        weakref.finalize(array, self._back, memory).atexit = False
        return memoryview(array)  # type: ignore[arg-type]  # numpy's stubs for Python 3.11 do not say that it may

    def _idle_of(self, size: int) -> mmap.mmap | None:
        with self._lock:
            for memory in reversed(self._idle):
                if len(memory) == size:
                    self._idle.remove(memory)
                    self._idle_bytes -= size
                    return memory
        return None

    def _back(self, memory: mmap.mmap) -> None:
        """Called by whoever drops the last reference, perhaps in the middle of `take`: it never waits."""
        if len(memory) > self._most_bytes or not self._lock.acquire(blocking=False):
            return
        try:
            self._idle.append(memory)
            self._idle_bytes += len(memory)
            while self._idle_bytes > self._most_bytes:
                self._idle_bytes -= len(self._idle.popleft())
        finally:
            self._lock.release()


def _mapped(size: int) -> mmap.mmap:
    """Return memory from the kernel, page by page as it fills. A bytearray would be zeroed first: seconds for a few
    gigabytes, in which no other Python thread runs.
    """
    memory = mmap.mmap(-1, size, **_PRIVATE)
    if size >= _HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
