"""What this machine offers: device, memory, threads and speed. Torch is only ever imported by a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import msgspec
import psutil

from fusion.base.errors import ConfigError
from fusion.base.units import format_bytes
from fusion.wire.v1 import node_pb2
from fusion_node.ipc import one_line
from fusion_node.workerprocess import worker_environment

MEMORY_SHARE = 0.8  #: of what is there, unless the owner states a limit
BENCHMARK_COMMAND = (sys.executable, "-P", "-m", "fusion_node.benchmark")
BENCHMARK_S = 2.0
BENCHMARK_VERSION = 2  #: what an older one has measured is measured again
BENCHMARK_DEADLINE_S = 120.0  #: with the import of torch on a slow disk
MAX_FLOPS = 1e18
_DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d{1,3})?")


@dataclass(frozen=True, slots=True)
class Limits:
    """What the owner of the machine allows."""

    device: str = "auto"
    max_memory_bytes: int = 0  #: 0: MEMORY_SHARE of what is there
    threads: int = 0  #: 0: one for each core that this process may use
    flops: float = 0.0  #: 0: measured

    def check(self) -> None:
        """Raise ConfigError for a limit that makes no sense."""
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError(f"--device: {self.device[:40]!r} is none of auto, cpu, cuda, cuda:0, cuda:1, ..., mps")
        if self.max_memory_bytes < 0:
            raise ConfigError(f"--max-memory: {self.max_memory_bytes} is negative")
        if not 0 <= self.threads <= 1024:
            raise ConfigError(f"--threads: {self.threads} is not in 1..1024")
        if not 0 <= self.flops <= MAX_FLOPS:
            raise ConfigError(f"--speed: {self.flops} is not in 1..{MAX_FLOPS:.0e} operations per second")


class _Measured(msgspec.Struct, frozen=True):
    """The benchmark's answer."""

    device: str = ""
    device_name: str = ""
    device_memory_bytes: int = 0
    flops: float = 0.0
    bytes_per_s: float = 0.0
    efficiency: dict[str, float] = {}
    error: str = ""


@dataclass(frozen=True, slots=True)
class Hardware:
    """What the node registers with."""

    device: str
    device_name: str
    memory_bytes: int
    flops: float
    threads: int
    bytes_per_s: float = 0.0  #: memory traffic of operators that only move bytes; 0: not measured
    efficiency: Mapping[str, float] = field(default_factory=dict)  #: what each kind of operator reaches

    def to_proto(self) -> node_pb2.Hardware:
        """Return the message, with the versions of what a worker here would run on."""
        return node_pb2.Hardware(
            device=self.device,
            device_name=self.device_name,
            memory_bytes=self.memory_bytes,
            flops=self.flops,
            threads=self.threads,
            platform=f"{platform.system()} {platform.machine()}",
            python_version=platform.python_version(),
            torch_version=package_version("torch"),
            package_version=package_version("fusionllm"),
            bytes_per_s=self.bytes_per_s,
            efficiency=self.efficiency,
        )


def package_version(package: str) -> str:
    """Return the installed version of `package`, empty if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


async def look(limits: Limits, cache: Path) -> Hardware:
    """Find out what this machine offers within `limits`; takes seconds when the speed is not in the file `cache`.

    ConfigError if the device is not there, or the benchmark cannot run.
    """
    limits.check()
    threads = limits.threads or usable_cores()
    known = limits.device == "cpu" or (limits.device == "auto" and not accelerator_possible())
    if limits.flops and known:
        found = _Measured("cpu", cpu_name())
    elif limits.flops:
        found = await _benchmark(limits.device, threads, 0.0)
    else:
        found = await _cached_speed("cpu" if known else limits.device, threads, cache)
    _check_memory(limits.max_memory_bytes, found)
    total_bytes = found.device_memory_bytes or available_memory_bytes()
    return Hardware(
        device=found.device,
        device_name=cpu_name() if found.device == "cpu" else found.device_name,
        memory_bytes=limits.max_memory_bytes or int(total_bytes * MEMORY_SHARE),
        flops=limits.flops or found.flops,
        threads=threads,
        bytes_per_s=0.0 if limits.flops else found.bytes_per_s,
        efficiency={} if limits.flops else found.efficiency,
    )


def _check_memory(limit_bytes: int, found: _Measured) -> None:
    there_bytes = found.device_memory_bytes or psutil.virtual_memory().total
    if limit_bytes > there_bytes:
        raise ConfigError(
            f"--max-memory: {format_bytes(limit_bytes)} is more than {found.device} has ({format_bytes(there_bytes)})"
        )


def accelerator_possible() -> bool:
    """Whether "auto" could mean anything but the CPU; says so without torch."""
    if sys.platform == "darwin":
        return platform.machine() == "arm64"
    return any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/dxg", "/proc/driver/nvidia/version"))


def usable_cores() -> int:
    """Return how many physical cores this process may use: affinity and a container's quota count."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    physical = psutil.cpu_count(logical=False) or cores
    quota = _cgroup_text("cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit():
        cores = min(cores, -(-int(quota[0]) // int(quota[1])))
    return max(1, min(cores, physical))


def available_memory_bytes() -> int:
    """Return the memory that a new process here may take, within a container's limit."""
    available = psutil.virtual_memory().available
    limit, used = _cgroup_text("memory.max"), _cgroup_text("memory.current")
    if limit.isdigit() and used.isdigit():
        available = min(available, int(limit) - int(used))
    return max(0, available)


def _cgroup_text(name: str) -> str:
    """Return a file of this process's version-2 control group; empty where there is none."""
    try:
        own = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2]
        return (Path("/sys/fs/cgroup") / own.lstrip("/") / name).read_text().strip()
    except OSError:
        return ""


def cpu_name() -> str:
    """Return what the maker calls the processor."""
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match[1].strip() if match else platform.processor() or platform.machine()


async def _cached_speed(device: str, threads: int, cache: Path) -> _Measured:
    """Return the measurement in `cache` for this device, thread count and torch version, or make it."""
    key = f"{device} threads={threads} torch={package_version('torch')} cpu={cpu_name()} v{BENCHMARK_VERSION}"
    known = _read_cache(cache)
    if key not in known:
        known[key] = await _benchmark(device, threads, BENCHMARK_S)
        _write_cache(cache, known)
    return known[key]


def _read_cache(cache: Path) -> dict[str, _Measured]:
    try:
        return msgspec.json.decode(cache.read_bytes(), type=dict[str, _Measured])
    except (OSError, msgspec.DecodeError):
        return {}  # missing or damaged: measure anew


def _write_cache(cache: Path, known: dict[str, _Measured]) -> None:
    temporary = cache.with_name(f"{cache.name}.{os.getpid()}.tmp")
    with contextlib.suppress(OSError):  # measured again the next time
        cache.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(known)))
        temporary.replace(cache)


def _not_measured(device: str, reason: str) -> ConfigError:
    return ConfigError(f"the speed of {device} cannot be measured: {reason}; state it with --speed")


async def _benchmark(device: str, threads: int, seconds: float) -> _Measured:
    options = ["--device", device, "--threads", str(threads), "--seconds", str(seconds)]
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *BENCHMARK_COMMAND,
            *options,
            env=worker_environment(threads),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
        )
    except OSError as error:
        raise _not_measured(device, str(error)) from None
    try:
        output, errors = await asyncio.wait_for(process.communicate(), BENCHMARK_DEADLINE_S)
    except TimeoutError:
        raise ConfigError(f"the speed of {device} was not measured within {BENCHMARK_DEADLINE_S:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        found = msgspec.convert(json.loads(output.splitlines()[-1]), _Measured)
    except (IndexError, ValueError, msgspec.ValidationError):
        reason = one_line(errors.decode("utf-8", "replace"))[-300:] or f"exit code {process.returncode}"
        raise _not_measured(device, reason) from None
    if found.error:
        raise ConfigError(f"--device: {found.error}")
    return found
