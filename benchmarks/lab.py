"""Networks of several hosts on this machine, through the `wanlab.py` that the command line names.

The lab makes one network namespace for each host and shapes every directed link between them; it needs root. What it
offers us: `wanlab.py run TOPOLOGY -- CMD`, `exec HOST -- CMD` and `each -- CMD`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusion.base.errors import ConfigError, JobError

Topology = Mapping[str, Any]
CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")


def line(hosts: int, rate_mbps: float, delay_ms: float, **link: float) -> dict[str, Any]:
    """Return a topology of hosts h0, h1, ... with all links alike."""
    defaults = {"rate_mbps": rate_mbps, "delay_ms": delay_ms, **link}
    return {"hosts": [f"h{index}" for index in range(hosts)], "defaults": defaults}


def hosts_of(topology: Topology) -> list[str]:
    """Return the names of a topology's hosts in their order."""
    return list(topology["hosts"])


def link_between(topology: Topology, a: str, b: str) -> dict[str, Any]:
    """Return rate_mbps, delay_ms and so on between two hosts: an entry for hosts goes before one for their sites."""
    hosts = topology["hosts"]
    sites = hosts if isinstance(hosts, dict) else {host: host for host in hosts}
    found = dict(topology["defaults"])
    for entry in sorted(topology.get("links", []), key=lambda entry: {entry["a"], entry["b"]} <= set(hosts)):
        if {entry["a"], entry["b"]} in ({a, b}, {sites[a], sites[b]}) and sites[a] != sites[b]:
            found |= entry
    return found


def congestion_control() -> str:
    """Return what TCP uses on this machine unless a topology says otherwise."""
    try:
        return CONGESTION_CONTROL.read_text().strip()
    except OSError:
        return "unknown"


@dataclass(frozen=True, slots=True)
class Lab:
    """A lab that is up."""

    script: Path
    name: str
    topology: Topology

    @property
    def hosts(self) -> list[str]:
        """Names of the hosts, in order."""
        return hosts_of(self.topology)

    def command(self, host: str, command: Sequence[str]) -> list[str]:
        """Return the command line that runs a command on a host."""
        return [sys.executable, str(self.script), "exec", "--name", self.name, host, "--", *command]

    def run(self, host: str, command: Sequence[str], timeout_s: float, stdin: str = "") -> str:
        """Run a command on a host and return its stdout; JobError with the end of stderr if it fails."""
        return _run(self.command(host, command), timeout_s, stdin)

    def each(self, command: Sequence[str], timeout_s: float) -> str:
        """Run a command on every host at once and return all that they print; JobError if one fails."""
        line = [sys.executable, str(self.script), "each", "--name", self.name, "--", *command]
        return _run(line, timeout_s)


def _run(command: Sequence[str], timeout_s: float, stdin: str = "") -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=environment,
            input=stdin,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise JobError(f"{' '.join(command[:8])} ... has not ended within {timeout_s:.0f} s") from None
    if done.returncode:
        words = [text for text in done.stderr.strip().splitlines()[-3:] if text]
        raise JobError(f"{' '.join(command[:8])} ... ended with {done.returncode}: {' | '.join(words)}")
    return done.stdout


def _leave(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


@contextmanager
def lab_up(script: Path, topology: Topology) -> Iterator[Lab]:
    """Make a lab of a topology, and remove it with all that runs in it at the end."""
    if not script.is_file():
        raise ConfigError(f"--lab: {script} is no file; it must be the path of wanlab.py")
    name = f"fusion{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="fusion-lab-") as directory:
        file = Path(directory) / "topology.json"
        file.write_text(json.dumps(topology))
        lab = Lab(script, name, topology)
        signal.signal(signal.SIGTERM, _leave)  # so that the lab is removed then, too
        base = [sys.executable, str(script)]
        _run([*base, "up", "--name", name, str(file)], 60)
        try:
            yield lab
        finally:
            _run([*base, "down", "--name", name], 60)
