"""Commands on the same machine reach the running daemon, and nothing else does."""

from __future__ import annotations

import asyncio
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fusion.base.errors import StateError, UnreachableError
from fusion_node.cli import cli
from fusion_node.localport import SOCKET, EmulateSpeed, ask, listening


def during(home: Path, handle: Callable[[EmulateSpeed], str], work: Callable[[], Any]) -> Any:
    async def run() -> Any:
        async with listening(home, handle):
            return await asyncio.to_thread(work)

    return asyncio.run(run())


def test_a_request_is_done_by_the_daemon_and_its_answer_comes_back(tmp_path: Path) -> None:
    heard: list[float] = []

    def handle(request: EmulateSpeed) -> str:
        heard.append(request.flops)
        return f"now {request.flops:g}"

    assert during(tmp_path, handle, lambda: ask(tmp_path, EmulateSpeed(2.5e9))) == "now 2.5e+09"
    assert heard == [2.5e9]
    assert not (tmp_path / SOCKET).exists()


def test_the_command_takes_speeds_as_people_write_them(tmp_path: Path) -> None:
    arguments = ["emulate-speed", "500M", "--home", str(tmp_path)]
    result = during(tmp_path, lambda request: f"{request.flops:.0f}", lambda: CliRunner().invoke(cli, arguments))
    assert (result.exit_code, result.output) == (0, "500000000\n")


def test_a_refusal_is_told_as_such(tmp_path: Path) -> None:
    def refuse(_request: EmulateSpeed) -> str:
        raise StateError("not now")

    def expect() -> None:
        with pytest.raises(StateError, match=r"^not now$"):
            ask(tmp_path, EmulateSpeed(1.0))

    during(tmp_path, refuse, expect)


@pytest.mark.parametrize(
    "line", [b"\n", b"{}\n", b'{"type":"emulate-speed","flops":-1}\n', b'{"type":"rm","flops":1}\n', b"x" * 10_000]
)
def test_what_is_no_request_is_refused_and_the_next_one_is_heard(tmp_path: Path, line: bytes) -> None:
    def work() -> tuple[bytes, str]:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10)
            connection.connect(str(tmp_path / SOCKET))
            connection.sendall(line)
            said = connection.recv(4096)
        return said, ask(tmp_path, EmulateSpeed(1.0))

    said, after = during(tmp_path, lambda _request: "done", work)
    assert b"not understood" in said
    assert after == "done"


def test_only_the_owner_may_connect_and_a_socket_left_behind_is_no_obstacle(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / SOCKET))
    mode = during(tmp_path, lambda _request: "", lambda: (tmp_path / SOCKET).stat().st_mode)
    assert stat.S_IMODE(mode) == 0o600


def test_a_home_with_a_long_path_has_its_socket_too(tmp_path: Path) -> None:
    home = tmp_path / ("x" * 120)
    home.mkdir()
    assert during(home, lambda _request: "heard", lambda: ask(home, EmulateSpeed(1.0))) == "heard"


def test_without_a_daemon_it_says_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(UnreachableError, match=r"no fusion-node that emulates .*--emulate-speed"):
        ask(tmp_path, EmulateSpeed(1.0))
