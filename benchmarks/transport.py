"""How much of a link our streams use, and what they cost: one directed link, mutual TLS, tensors one after another.

    python -m benchmarks.transport --lab PATH/wanlab.py --json

"share" figures are goodput of payload over that of iperf3 on the same emulated link, measured just before and after in
the same lab; for the link with 1 % loss it is over the link's rate, because there iperf3 itself suffers. iperf3 must be
installed (`apt install iperf3`). Both ends run with the environment that workers get. Loopback figures are of two
processes on this machine without an emulated link.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.lab import Lab, congestion_control, lab_up, line
from benchmarks.transport_end import EndSettings
from fusion.base.errors import ConfigError, JobError
from fusion.base.ids import ClusterId
from fusion.base.units import MIB
from fusion.cli.democluster import free_ports
from fusion.security.ca import CertificateAuthority
from fusion.security.credentials import Role
from fusion_node.workerprocess import worker_environment

PORT = 7445
GRACE_S = 90.0

Place = Callable[[int, list[str]], list[str]]  #: puts a command line on the host of an end


@dataclass(frozen=True, slots=True)
class Case:
    """A link to measure."""

    name: str
    rate_mbps: float
    delay_ms: float  #: one way
    loss_pct: float = 0.0
    sysctl: tuple[tuple[str, str], ...] = ()
    warm_up_s: float = 4.0
    seconds: float = 8.0
    message_bytes: int = 4 * MIB


CUBIC = (("net.ipv4.tcp_congestion_control", "cubic"),)
CASES = (
    Case("share_100_20", 100, 20),
    Case("share_1000_1", 1000, 1, message_bytes=16 * MIB),
    Case("share_100_100_loss1", 100, 100, 1.0, warm_up_s=25.0, seconds=12.0),
    Case("share_100_100_loss1_cubic", 100, 100, 1.0, CUBIC, warm_up_s=25.0, seconds=12.0),
)


def ends(directory: Path, addresses: Sequence[str], place: Place, case: Case) -> list[dict[str, Any]]:
    """Run both ends of a link and return what the sender and the receiver saw."""
    authority = CertificateAuthority.create(ClusterId("benchmark"), time.time())
    made = [authority.new_credentials(Role.NODE, f"end-{index}", "127.0.0.1:1", time.time()) for index in range(2)]
    processes = []
    for index, credentials in enumerate(made):
        home = directory / f"end-{index}"
        credentials.save(home)
        settings = EndSettings(
            index,
            str(home),
            made[1 - index].identity,
            addresses[index],
            addresses[1 - index],
            case.warm_up_s,
            case.seconds,
            case.message_bytes,
        )
        process = subprocess.Popen(
            place(index, [sys.executable, "-m", "benchmarks.transport_end"]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=worker_environment(1),
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(settings))
        process.stdin.close()
        process.stdin = None
        processes.append(process)
    found = []
    for process in processes:
        output, errors = process.communicate(timeout=case.warm_up_s + case.seconds + GRACE_S)
        if process.returncode or not output:
            raise JobError(f"an end failed: {errors.decode(errors='replace').strip()[-400:]}")
        found.append(json.loads(output))
    if any(end["lost"] for end in found):
        raise JobError("an end lost the other one")
    return found


def iperf_bytes_per_s(lab: Lab, seconds: float) -> float:
    """Return iperf3's goodput from the first host to the second, without its first seconds."""
    server = subprocess.Popen(
        lab.command(lab.hosts[1], ["iperf3", "-s", "-1"]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        address = lab.run(lab.hosts[0], ["getent", "hosts", lab.hosts[1]], 10).split()[0]
        time.sleep(0.5)
        command = ["iperf3", "-c", address, "-t", f"{seconds:.0f}", "-O", "3", "-J"]
        report = json.loads(lab.run(lab.hosts[0], command, seconds + 30))
        return float(report["end"]["sum_received"]["bits_per_second"]) / 8
    except FileNotFoundError:
        raise ConfigError("iperf3 is not installed; 'apt install iperf3' does it") from None
    finally:
        server.kill()
        server.wait()


def goodput_on(lab: Lab, case: Case) -> float:
    """Return our goodput in bytes per second from the first host to the second."""
    addresses = [lab.run(host, ["getent", "hosts", host], 10).split()[0] + f":{PORT}" for host in lab.hosts]

    def place(index: int, command: list[str]) -> list[str]:
        return lab.command(lab.hosts[index], command)

    with tempfile.TemporaryDirectory(prefix="fusion-bench-") as directory:
        received = ends(Path(directory), addresses, place, case)[1]
    return float(received["bytes"] / received["seconds"])


def measure(case: Case, script: Path, seconds: float) -> dict[str, float]:
    """Return the figures of one link."""
    topology = line(2, case.rate_mbps, case.delay_ms, loss_pct=case.loss_pct) | {"sysctl": dict(case.sysctl)}
    with lab_up(script, topology) as lab:
        before = iperf_bytes_per_s(lab, seconds)
        ours = goodput_on(lab, case)
        iperf = max(before, iperf_bytes_per_s(lab, seconds))
    rate = case.rate_mbps * 1e6 / 8
    return {
        "ours_mbit_per_s": ours * 8 / 1e6,
        "iperf3_mbit_per_s": iperf * 8 / 1e6,
        "share_of_iperf3": ours / iperf,
        "share_of_rate": ours / rate,
    }


def loopback(rounds: int) -> dict[str, float]:
    """Return GB/s and CPU-seconds per GB of both ends together, over TLS on this machine."""
    case = Case("loopback", 0, 0, warm_up_s=1.0, seconds=4.0, message_bytes=16 * MIB)
    rates, costs = [], []
    for _ in range(rounds):
        addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
        with tempfile.TemporaryDirectory(prefix="fusion-bench-") as directory:
            sent, received = ends(Path(directory), addresses, lambda _index, command: command, case)
        rates.append(received["bytes"] / received["seconds"] / 1e9)
        costs.append((sent["cpu_s"] + received["cpu_s"]) / (received["bytes"] / 1e9))
    return {"gbytes_per_s": statistics.median(rates), "cpu_s_per_gbyte": statistics.median(costs)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lab", type=Path, required=True, metavar="PATH/wanlab.py")
    names = [*(case.name for case in CASES), "loopback"]
    parser.add_argument("--case", action="append", choices=names, help="only this one")
    parser.add_argument("--iperf-seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=3, help="of the loopback measurement")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    wanted = options.case or names
    result: dict[str, Any] = {"congestion_control": congestion_control(), "links": {}}
    for case in CASES:
        if case.name in wanted:
            try:
                found = measure(case, options.lab, options.iperf_seconds)
            except JobError as error:
                if not case.sysctl or "tcp_allowed_congestion_control" not in str(error):
                    raise
                print(f"{case.name} left out: {error}", file=sys.stderr)
                result[case.name] = None
                continue
            result["links"][case.name] = found
            result[case.name] = found["share_of_rate" if case.loss_pct else "share_of_iperf3"]
    if "loopback" in wanted:
        local = loopback(options.rounds)
        result["loopback_tls_gbytes_per_s"], result["cpu_s_per_gbyte"] = local["gbytes_per_s"], local["cpu_s_per_gbyte"]
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:28} {value:.3f}" if isinstance(value, float) else f"{name:28} {value}")


if __name__ == "__main__":
    main()
