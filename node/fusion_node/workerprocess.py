"""How a worker's process is started, and what it finds around it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence

import fusion
import fusion_node
from fusion.base.children import child_environment
from fusion.base.units import MIB
from fusion_node.ipc import MAX_LINE_BYTES

WORKER_COMMAND = (sys.executable, "-P", "-m", "fusion_node.worker")
MARK = "--prepared"  #: on the command line of one that is to load everything before it has work
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
#: glibc gives memory back to the system, and faults it in again, with every micro-batch: 6-9 % of a small stage's time.
_KEPT_MEMORY = {"MALLOC_TRIM_THRESHOLD_": 1024 * MIB, "MALLOC_MMAP_THRESHOLD_": 256 * MIB}


def worker_environment(threads: int, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a worker: its thread count, and a path on which it finds this very package."""
    environment = child_environment((fusion, fusion_node), base)
    environment.update({name: str(threads) for name in THREAD_VARIABLES})
    for name, size in _KEPT_MEMORY.items():
        environment.setdefault(name, str(size))
    environment["PYTHONFAULTHANDLER"] = "1"  # a crash in C code leaves its stack in the log
    return environment


async def start_process(command: Sequence[str], threads: int) -> asyncio.subprocess.Process:
    """Start a worker's process, which waits for its configuration. OSError if that is not possible."""
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=worker_environment(threads),
        start_new_session=True,  # Ctrl-C in the daemon's terminal is for the daemon alone
        limit=MAX_LINE_BYTES,
    )


def close_pipes(process: asyncio.subprocess.Process) -> None:
    """asyncio closes them only when the object is collected, and a child of the worker may hold them open."""
    transport = getattr(process, "_transport", None)
    if transport is not None:
        transport.close()
