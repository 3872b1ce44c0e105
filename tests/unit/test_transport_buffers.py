"""Memory of payloads is used again, but never while anybody may still look at it."""

from __future__ import annotations

import gc

import numpy as np

from fusion.base.units import MIB
from fusion.transport.buffers import BufferPool


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0])


def test_a_buffer_comes_back_once_nothing_refers_to_it() -> None:
    pool = BufferPool()
    first = pool.take(2 * MIB)
    place = address(first)
    del first
    gc.collect()
    assert pool.idle_bytes == 2 * MIB
    other = pool.take(3 * MIB)  # of another size
    assert address(other) != place
    again = pool.take(2 * MIB)
    assert address(again) == place
    assert pool.idle_bytes == 0


def test_what_was_made_of_a_buffer_keeps_it() -> None:
    pool = BufferPool()
    buffer = pool.take(MIB)
    buffer[:] = b"\x07" * MIB
    values = np.frombuffer(buffer[4:], dtype=np.float32)  # as a decoded tensor lies in the payload
    place = address(buffer)
    del buffer
    gc.collect()
    other = pool.take(MIB)
    assert address(other) != place
    other[:] = bytes(MIB)
    assert set(values.view(np.uint8).tolist()) == {7}
    del values
    gc.collect()
    assert pool.idle_bytes == MIB


def test_little_lies_idle_and_large_buffers_go_at_once() -> None:
    pool = BufferPool(most_bytes=4 * MIB)
    buffers = [pool.take(size * MIB) for size in (1, 2, 3, 5)]
    for _ in range(len(buffers)):
        buffers.pop(0)
    gc.collect()
    assert pool.idle_bytes == 3 * MIB  # the latest: 1 and 2 went for it, and 5 is too large


def test_small_buffers_are_python_s_own_and_all_are_writable() -> None:
    pool = BufferPool()
    for size in (0, 1, MIB - 1, MIB, 3 * MIB + 5):
        buffer = pool.take(size)
        assert (len(buffer), buffer.format, buffer.readonly) == (size, "B", False)
    small = pool.take(10)
    del small
    assert pool.idle_bytes <= 4 * MIB + 5
