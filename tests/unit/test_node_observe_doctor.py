"""The general checks of both doctors: versions, key, certificate, clock, disk, congestion control."""

from __future__ import annotations

import shutil
import socket
import threading
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fusion.base.errors import AuthError, UnreachableError
from fusion.observe import doctor
from fusion.observe.doctor import Check, Status
from fusion.security.ca import CertificateAuthority
from fusion.security.credentials import Role, load_key
from tests.support.node import CLUSTER, ScriptedCoordinator, free_port, serve


@pytest.mark.parametrize(
    ("version", "wanted", "expected"),
    [
        ("1.85.3", ">=1.80,<2", True),
        ("1.79.9", ">=1.80,<2", False),
        ("2.0", ">=1.80,<2", False),
        ("2.13.0+cpu", ">=2.10", True),
        ("2.9.1", ">=2.10", False),
        ("6.33.5", "<8,>=6.33.5", True),
        ("6.33.4", "<8,>=6.33.5", False),
        ("8.0.0rc1", "<8,>=6.33.5", False),
        ("1.2", "==1.2.0", True),
        ("1.2", "!=1.2", False),
        ("3", "", True),
    ],
)
def test_p21_versions_are_compared_by_their_numbers(version: str, wanted: str, expected: bool):
    assert doctor.satisfies(version, wanted) is expected


def test_p21_this_installation_meets_its_own_requirements():
    checks = [*doctor.check_packages(), doctor.check_protobuf(), doctor.check_python()]
    assert {check.status for check in checks} == {Status.OK}
    assert {"fusionllm", "torch", "grpcio", "protobuf"} <= {check.name for check in checks}


def test_p21_a_missing_and_an_old_package_are_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch):
    versions = {"fusionllm": "1.0", "grpcio": "1.60.0"}

    def version(package: str) -> str:
        if package not in versions:
            raise metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(
        metadata, "requires", lambda _name: ["grpcio<2,>=1.80", "protobuf>=6", 'pytest>=8; extra == "test"']
    )
    _, old, missing = doctor.check_packages()
    assert old == Check("grpcio", Status.FAIL, "1.60.0, but <2,>=1.80 is needed", "run: pip install 'grpcio<2,>=1.80'")
    assert missing == Check("protobuf", Status.FAIL, "is not installed", "run: pip install 'protobuf>=6'")


@pytest.mark.parametrize(("mode", "status"), [(0o600, Status.OK), (0o640, Status.FAIL), (0o604, Status.FAIL)])
def test_b10_a_key_that_others_may_read_fails(tmp_path: Path, mode: int, status: Status):
    key = tmp_path / "key.pem"
    key.touch()
    key.chmod(mode)
    check = doctor.check_key(key)
    assert check.status is status
    assert status is Status.OK or check.remedy == f"run: chmod 600 {key}"


def test_a_missing_key_fails(tmp_path: Path):
    assert doctor.check_key(tmp_path / "key.pem").status is Status.FAIL


@pytest.mark.parametrize(
    ("age_s", "problem", "status"),
    [(0.0, "", Status.OK), (900.0, "", Status.WARN), (0.0, "issued by another CA", Status.FAIL)],
)
def test_a_certificate_is_judged_by_what_is_left_of_it(age_s: float, problem: str, status: Status):
    now_s = 1_800_000_000.0
    ca = CertificateAuthority.create(CLUSTER, now_s)
    key = load_key(ca.new_credentials(Role.NODE, "n", "", now_s).key_pem).public_key()
    pem = ca.issue(key, Role.NODE, now_s, valid_s=1000.0)
    assert doctor.check_certificate(pem, problem, now_s + age_s).status is status


@pytest.mark.parametrize(
    ("difference_s", "status"),
    [(0.4, Status.OK), (-59.0, Status.OK), (61.0, Status.WARN), (-299.0, Status.WARN), (312.0, Status.FAIL)],
)
def test_f24_clocks_may_differ_by_a_minute_and_must_not_by_five(difference_s: float, status: Status):
    check = doctor.check_clock(difference_s)
    assert check.status is status
    assert f"{abs(difference_s):.0f} s" in check.detail


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.mark.parametrize(("free_gib", "status"), [(100, Status.OK), (5, Status.WARN), (0.5, Status.FAIL)])
def test_a_full_disk_is_found_even_before_its_directory_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_gib: float, status: Status
):
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: Usage(0, 0, int(free_gib * 2**30)))
    assert doctor.check_disk(tmp_path / "not" / "there" / "yet").status is status


@pytest.mark.parametrize(
    ("current", "available", "status", "remedy"),
    [
        ("bbr", "reno cubic bbr", Status.OK, ""),
        ("cubic", "reno cubic bbr", Status.WARN, "run as root: sysctl -w net.ipv4.tcp_congestion_control=bbr"),
        ("cubic", "reno cubic", Status.WARN, "run as root: modprobe tcp_bbr && sysctl -w"),
    ],
)
def test_bbr_is_recommended(tmp_path: Path, current: str, available: str, status: Status, remedy: str):
    (tmp_path / "tcp_congestion_control").write_text(current + "\n")
    (tmp_path / "tcp_available_congestion_control").write_text(available + "\n")
    check = doctor.check_congestion_control(tmp_path)
    assert check.status is status
    assert check.remedy.startswith(remedy)


def test_a_system_without_that_setting_is_not_blamed(tmp_path: Path):
    assert doctor.check_congestion_control(tmp_path).status is Status.OK


def test_lines_and_json_say_the_same_and_only_a_failure_fails():
    checks = [doctor.ok("a", "fine"), doctor.warn("b", "hm\x1b[2J", "do this")]
    assert doctor.render(checks) == ["ok   a: fine", "warn b: hm\\x1b[2J  -> do this"]
    assert doctor.exit_code(checks) == 0
    assert doctor.to_data(checks)["ok"] is True
    checks.append(doctor.fail("c", "broken", "mend it"))
    assert doctor.exit_code(checks) == 1
    assert doctor.to_data(checks)["checks"][2] == {
        "name": "c",
        "status": "fail",
        "detail": "broken",
        "remedy": "mend it",
    }


# ---- why there is no connection ----


def credentials(directory: Path) -> Path:
    ca = CertificateAuthority.create(CLUSTER, time.time())
    ca.new_credentials(Role.NODE, "n", "c:1", time.time()).save(directory)
    return directory


def diagnosis(address: str, directory: Path) -> Any:
    return doctor.diagnose_server(address, f"coordinator.{CLUSTER}.fusion", directory)


def test_b33_a_server_that_refuses_our_certificate_and_one_of_another_cluster(tmp_path: Path):
    coordinator = ScriptedCoordinator()
    with serve(coordinator) as address:
        coordinator.make_node(tmp_path, address)
        assert diagnosis(address, tmp_path) is None
        foreign = ScriptedCoordinator().make_node(tmp_path, address)
        assert isinstance(diagnosis(address, tmp_path), AuthError)  # our CA did not sign that server
        replace(foreign, ca_pem=coordinator.ca.pem).save(tmp_path)
        assert "closes the connection on seeing this machine's certificate" in str(diagnosis(address, tmp_path))


def test_b33_nothing_listens(tmp_path: Path):
    cause = diagnosis(f"127.0.0.1:{free_port()}", credentials(tmp_path))
    assert isinstance(cause, UnreachableError)
    assert "nothing listens" in str(cause)


def test_b33_a_name_that_means_nothing(tmp_path: Path):
    cause = diagnosis("no-such-host.invalid:7443", credentials(tmp_path))
    assert "cannot be resolved" in str(cause)


def test_b33_something_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        cause = diagnosis(f"127.0.0.1:{silent.getsockname()[1]}", credentials(tmp_path))
    assert "does not answer within" in str(cause)


def test_b33_something_that_speaks_no_tls(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def speak() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10)
                connection.recv(2**16)

        thread = threading.Thread(target=speak)
        thread.start()
        cause = diagnosis(f"127.0.0.1:{server.getsockname()[1]}", credentials(tmp_path))
        thread.join(10)
    assert isinstance(cause, UnreachableError)
    assert not isinstance(cause, AuthError)
    assert "does not speak TLS" in str(cause)
