"""The `fusion-coordinator` command as its user sees it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from fusion.security.credentials import Credentials, Role
from fusion.security.enrolment import enrol, parse_join_string


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


def command(home, *arguments):
    environment = {**os.environ, "FUSION_HOME": str(home)}
    return [sys.executable, "-m", "fusion_coordinator.cli", *arguments], environment


def run(home, *arguments):
    line, environment = command(home, *arguments)
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def served(home):
    done = run(home, "init", "--name", "paris")
    assert (done.returncode, done.stderr) == (0, "")
    assert "fusion-coordinator serve" in done.stdout
    line, environment = command(home, "serve", "--listen", "127.0.0.1:0")
    process = subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    yield process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "Traceback" not in errors


def test_init_makes_private_keys_and_credentials_for_admin_and_owner(home, served):
    state = home / "coordinator"
    assert state.stat().st_mode & 0o777 == 0o700
    for name in ("ca-key.pem", "coordinator.db", "admin/key.pem", "own/key.pem"):
        assert (state / name).stat().st_mode & 0o077 == 0, name
    admin, owner = Credentials.load(state / "admin"), Credentials.load(home / "owner")
    assert (admin.role, owner.role, admin.cluster) == (Role.ADMIN, Role.OWNER, owner.cluster)
    assert owner.coordinator == "127.0.0.1:7443"
    assert json.loads((state / "config.json").read_text())["name"] == "paris"


def test_init_overwrites_nothing(home, served):
    done = run(home, "init")
    assert done.returncode == 10
    assert done.stderr.startswith("fusion-coordinator: ")
    assert "holds a cluster already" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_serve_says_where_it_listens(served):
    assert served.startswith("listening on 127.0.0.1:")
    assert "(mutual TLS)" in served
    assert "(enrolment only)" in served


def test_token_create_prints_a_join_string_and_nothing_else(home, served):
    done = run(home, "token", "create", "--valid", "90s")
    assert (done.returncode, done.stderr) == (0, "")
    join = parse_join_string(done.stdout)
    assert done.stdout == done.stdout.strip() + "\n"
    assert 80 < join.expires_wall_s - time.time() <= 90
    assert enrol(join, "n0").role is Role.NODE
    owner = parse_join_string(run(home, "token", "create", "--role", "owner").stdout)
    assert owner.role is Role.OWNER


def test_lists_are_json_for_programs_and_columns_for_pipes(home, served):
    for what in ("nodes", "jobs"):
        done = run(home, what, "--json")
        assert (done.returncode, json.loads(done.stdout)) == (0, [])
        plain = run(home, what).stdout.splitlines()
        assert "STATE" in plain[0].split("\t")
    info = json.loads(run(home, "info", "--json").stdout)
    assert info["cluster"] == Credentials.load(home / "owner").cluster


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["token", "create", "--valid", "soon"], 2, "is not a duration"),
        (["token", "create", "--role", "king"], 2, "king"),
        (["serve", "--listen", "nonsense"], 10, "--listen"),
        (["serve", "--listen", "127.0.0.1:99999"], 10, "must be 0..65535"),
        (["revoke", "nobody"], 40, "is not known"),
        (["frobnicate"], 2, "frobnicate"),
    ],
)
def test_b9_mistakes_end_with_one_line_and_their_familys_code(home, served, arguments, code, message):
    done = run(home, *arguments)
    assert done.returncode == code
    assert done.stdout == ""
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_without_a_cluster_or_a_running_coordinator_it_says_what_to_do(tmp_path):
    done = run(tmp_path, "nodes")
    assert done.returncode == 10
    assert "run 'fusion-coordinator init' first" in done.stderr
    assert run(tmp_path, "init", "--state-dir", str(tmp_path / "s"), "--advertise", "train.example.org").returncode == 0
    assert Credentials.load(tmp_path / "owner").coordinator == "train.example.org:7443"
    done = run(tmp_path, "nodes", "--state-dir", str(tmp_path / "s"))
    assert done.returncode == 10
    assert "start it with 'fusion-coordinator serve'" in done.stderr


def test_it_starts_without_torch_and_without_delay():
    code = "import sys, fusion_coordinator.cli, fusion_coordinator.server; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False"
