"""Checks that a user runs when something does not work: each says ok, warn or fail, and what to do about it."""

from __future__ import annotations

import platform
import re
import shutil
import socket
import ssl
import stat
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cryptography import x509

from fusion.base.address import split_address
from fusion.base.errors import AuthError, FusionError, UnreachableError
from fusion.base.units import GIB, format_bytes, format_duration
from fusion.observe.logs import escape_control

if TYPE_CHECKING:
    import grpc

DISTRIBUTION = "fusionllm"
CLOCK_WARN_S, CLOCK_FAIL_S = 60.0, 300.0
DISK_WARN_BYTES, DISK_FAIL_BYTES = 20 * GIB, 1 * GIB
CONNECT_S = 5.0
CALL_S = 10.0
_REQUIREMENT = re.compile(r"([A-Za-z0-9_.-]+)\s*(?:\[[^\]]*\])?\s*\(?([^;()]*)\)?\s*(;.*)?")
_BOUND = re.compile(r"(>=|<=|==|!=|>|<)\s*([0-9][0-9a-zA-Z.+*-]*)")


class Status(StrEnum):
    """How a check went. Only `fail` makes the command fail."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of a doctor."""

    name: str
    status: Status
    detail: str
    remedy: str = ""  #: what to do, unless all is well


def ok(name: str, detail: str) -> Check:
    """Return a check that went well."""
    return Check(name, Status.OK, detail)


def warn(name: str, detail: str, remedy: str) -> Check:
    """Return a check whose result may hurt."""
    return Check(name, Status.WARN, detail, remedy)


def fail(name: str, detail: str, remedy: str) -> Check:
    """Return a check whose result must be mended."""
    return Check(name, Status.FAIL, detail, remedy)


def render(checks: Iterable[Check]) -> list[str]:
    """Return the lines to print."""
    lines = []
    for check in checks:
        remedy = f"  -> {check.remedy}" if check.remedy else ""
        lines.append(escape_control(f"{check.status:<5}{check.name}: {check.detail}{remedy}"))
    return lines


def to_data(checks: Iterable[Check]) -> dict[str, Any]:
    """Return what `--json` prints."""
    listed = [asdict(check) for check in checks]
    return {"ok": all(item["status"] != Status.FAIL for item in listed), "checks": listed}


def exit_code(checks: Iterable[Check]) -> int:
    """Return 0 unless a check failed."""
    return int(any(check.status is Status.FAIL for check in checks))


# ---- this installation ----


def check_python() -> Check:
    """Whether this Python is new enough."""
    version = platform.python_version()
    if sys.version_info < (3, 11):  # noqa: UP036  # the point of the check
        return fail("python", version, "install Python 3.11 or newer")
    return ok("python", f"{version} at {sys.executable}")


def check_packages(distribution: str = DISTRIBUTION) -> list[Check]:
    """Whether what this package depends on is there in a version that it works with; imports none of it."""
    try:
        requirements = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return [fail(distribution, "is not installed", "run: pip install -e . (in the checkout)")]
    checks = [ok(distribution, metadata.version(distribution))]
    for text in requirements:
        match = _REQUIREMENT.fullmatch(text)
        if match is not None and "extra" not in (match[3] or ""):
            checks.append(_check_requirement(match[1], match[2].strip()))
    return checks


def _check_requirement(package: str, wanted: str) -> Check:
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return fail(package, "is not installed", f"run: pip install '{package}{wanted}'")
    if satisfies(version, wanted):
        return ok(package, version)
    return fail(package, f"{version}, but {wanted} is needed", f"run: pip install '{package}{wanted}'")


def satisfies(version: str, wanted: str) -> bool:
    """Whether `version` is within bounds such as ">=1.80,<2"; compares the numbers and ignores suffixes."""
    have = _numbers(version)
    for operator, bound in _BOUND.findall(wanted):
        want = _numbers(bound)
        width = max(len(have), len(want))
        left, right = (numbers + (0,) * (width - len(numbers)) for numbers in (have, want))
        holds = {
            ">=": left >= right,
            "<=": left <= right,
            "==": left == right,
            "!=": left != right,
            ">": left > right,
            "<": left < right,
        }
        if not holds[operator]:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def check_protobuf() -> Check:
    """Whether protobuf runs its own parser in C; the pure Python one has known holes and is slow."""
    from google.protobuf.internal import api_implementation

    kind = api_implementation.Type()
    if kind != "upb":
        return fail(
            "protobuf parser", kind, "unset PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION, or reinstall protobuf from a wheel"
        )
    return ok("protobuf parser", kind)


# ---- this machine ----


def check_disk(directory: Path) -> Check:
    """Whether there is room where weights and data are kept."""
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    free_bytes = shutil.disk_usage(existing).free
    detail = f"{format_bytes(free_bytes)} free at {existing}"
    remedy = "free some space, or move FUSION_HOME to a larger disk"
    if free_bytes < DISK_FAIL_BYTES:
        return fail("disk", detail, remedy)
    return warn("disk", detail, remedy) if free_bytes < DISK_WARN_BYTES else ok("disk", detail)


def check_congestion_control(directory: Path = Path("/proc/sys/net/ipv4")) -> Check:
    """Whether TCP keeps its rate on a long path that loses packets: BBR does, cubic does not."""
    name = "tcp congestion control"
    try:
        current = (directory / "tcp_congestion_control").read_text().strip()
        available = (directory / "tcp_available_congestion_control").read_text().split()
    except OSError:
        return ok(name, "not known on this system")
    if current.startswith("bbr"):
        return ok(name, current)
    load = "" if "bbr" in available else "modprobe tcp_bbr && "
    return warn(
        name,
        f"{current}: slow on long paths that lose packets",
        f"run as root: {load}sysctl -w net.ipv4.tcp_congestion_control=bbr",
    )


# ---- credentials and coordinator ----


def check_key(path: Path) -> Check:
    """Whether nobody but its owner can read the private key."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        return fail("private key", f"{path}: {error.strerror}", "join the cluster again")
    if mode & 0o077:
        return fail("private key", f"{path} may be read by others (mode {mode:04o})", f"run: chmod 600 {path}")
    return ok("private key", f"{path} (mode {mode:04o})")


def check_certificate(certificate_pem: bytes, problem: str, wall_s: float) -> Check:
    """Whether the certificate is valid, and for how long. `problem` is what else was found wrong with it."""
    if problem:
        return fail("certificate", problem, "ask the cluster's operator for a join string and join again")
    certificate = x509.load_pem_x509_certificate(certificate_pem)
    end_s = certificate.not_valid_after_utc.timestamp()
    life_s = end_s - certificate.not_valid_before_utc.timestamp()
    detail = f"valid until {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
    if end_s - wall_s < life_s / 6:  # it should have been renewed at two thirds
        remedy = "keep the program running and the coordinator reachable, so that it is renewed"
        return warn("certificate", f"{detail}, only {format_duration(max(0.0, end_s - wall_s))} more", remedy)
    return ok("certificate", detail)


def check_clock(difference_s: float) -> Check:
    """Whether this machine's clock agrees with the coordinator's; `difference_s` is ours minus theirs."""
    detail = f"differs from the coordinator's by {abs(difference_s):.0f} s"
    remedy = "set the clock: switch on NTP (timedatectl set-ntp true)"
    if abs(difference_s) > CLOCK_FAIL_S:
        return fail("clock", detail, remedy)
    return warn("clock", detail, remedy) if abs(difference_s) > CLOCK_WARN_S else ok("clock", detail)


def diagnose_server(address: str, server_name: str, credentials: Path) -> FusionError | None:
    """Return why no connection to `address` comes about, None if one does.

    gRPC reports every failed TLS handshake alike; this dials once with the machine's own TLS to tell the cause.
    `credentials` is the directory with ca.pem, certificate.pem and key.pem. Takes at most about 10 s.
    """
    host, port = split_address("coordinator", address)
    context = ssl.create_default_context(cafile=str(credentials / "ca.pem"))
    context.load_cert_chain(credentials / "certificate.pem", credentials / "key.pem")
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host, port), CONNECT_S) as connection,
            context.wrap_socket(connection, server_hostname=server_name) as secured,
        ):
            # With TLS 1.3 the server judges our certificate only now; a content one sends its HTTP/2 settings.
            if not secured.recv(1):
                return UnreachableError(
                    f"{address} closes the connection on seeing this machine's certificate: it refuses it "
                    "(join again with a new token), or is just ending"
                )
    except ssl.SSLCertVerificationError as error:
        return _server_certificate_problem(address, error)
    except ssl.SSLError as error:
        reason = (error.reason or str(error)).lower().replace("_", " ")
        if "alert" in reason:
            return AuthError(f"{address} refuses this machine's certificate ({reason}); join again with a new token")
        return UnreachableError(f"{address} does not speak TLS as a coordinator does ({reason}); check the port")
    except OSError as error:
        return UnreachableError(_connection_problem(address, error))
    return None


def _server_certificate_problem(address: str, error: ssl.SSLCertVerificationError) -> FusionError:
    if error.verify_code in (9, 10):  # not yet valid, has expired
        return UnreachableError(
            f"the certificate of {address} is not valid by this machine's clock ({error.verify_message}); "
            "check the clocks of both"
        )
    return AuthError(
        f"{address} is not the coordinator of this cluster ({error.verify_message}); "
        "check the address, or join again if the coordinator was set up anew"
    )


def _connection_problem(address: str, error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return f"the name in {address} cannot be resolved; check the address and DNS"
    if isinstance(error, ConnectionRefusedError):
        return f"nothing listens at {address}; check that the coordinator runs and the port is right"
    if isinstance(error, TimeoutError):
        return f"{address} does not answer within {CONNECT_S:.0f} s; a firewall may drop the connection"
    return f"no connection to {address}: {error.strerror or error}"


@dataclass(frozen=True, slots=True)
class CoordinatorAnswer:
    """What a coordinator says of itself."""

    version: str
    clock_difference_s: float  #: ours minus theirs
    round_trip_s: float


def ask_coordinator(channel: grpc.Channel) -> CoordinatorAnswer:
    """Call Admin.Info; raises grpc.RpcError."""
    from fusion.wire.v1 import coordinator_pb2, coordinator_pb2_grpc

    stub = coordinator_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]
    stub.Info(coordinator_pb2.InfoRequest(), timeout=CALL_S, wait_for_ready=False)  # the handshake is not timed
    start_s = time.monotonic()
    answer = stub.Info(coordinator_pb2.InfoRequest(), timeout=CALL_S)
    round_trip_s = time.monotonic() - start_s
    theirs_s = answer.wall_clock_s + round_trip_s / 2
    return CoordinatorAnswer(answer.package_version, time.time() - theirs_s, round_trip_s)


def check_coordinator(channel: grpc.Channel, address: str, server_name: str, credentials: Path) -> list[Check]:
    """Whether the coordinator answers over mutual TLS, and what its clock says."""
    import grpc

    cause = diagnose_server(address, server_name, credentials)
    if cause is not None:
        return [
            fail("coordinator", str(cause), "see the cause; on the coordinator's machine: fusion-coordinator serve")
        ]
    try:
        answer = ask_coordinator(channel)
    except grpc.RpcError as error:
        details = str(error.details() if hasattr(error, "details") else error)
        return [fail("coordinator", f"{address}: {details}", "see the coordinator's log")]
    detail = f"{address} answers in {format_duration(answer.round_trip_s)}, version {answer.version}"
    return [_versions(detail, answer.version), check_clock(answer.clock_difference_s)]


def _versions(detail: str, theirs: str) -> Check:
    ours = metadata.version(DISTRIBUTION)
    if theirs != ours:
        return warn("coordinator", f"{detail}, this is {ours}", "install the same version everywhere")
    return ok("coordinator", detail)
