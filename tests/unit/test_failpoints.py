"""Failpoints fire where they are told to, once over all processes, and never without FUSION_TEST=1."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fusion.base.errors import ConfigError
from fusion.observe.failpoints import Failpoint, parse

PROGRAM = """
import sys
from fusion.observe import failpoints, history
history.begin("worker", node="n")
for step in (1, 2, 3):
    word = failpoints.reach("stage.forward", stage=1, step=step)
    print(step, word, flush=True)
"""


def run(points: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "FUSION_FAILPOINTS": points, **variables}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False, timeout=60
    )


def test_a_failpoint_is_a_place_with_conditions_an_action_and_a_count() -> None:
    assert parse("a.b@stage=1,step=7:kill9; c:sleep=2*3;d:nan*all") == [
        Failpoint("a.b", (("stage", "1"), ("step", "7")), "kill9"),
        Failpoint("c", (), "sleep", "2", 3),
        Failpoint("d", (), "nan", times=2**31),
    ]
    assert parse("") == []


@pytest.mark.parametrize("text", ["a", "a:", ":kill9", "a@x:kill9", "a:kill9*0", "a:kill9*x"])
def test_what_is_no_failpoint_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="FUSION_FAILPOINTS"):
        parse(text)


def test_nothing_fires_outside_of_tests() -> None:
    assert run("stage.forward:kill9", FUSION_TEST="0").stdout == "1 \n2 \n3 \n"


def test_a_word_that_is_no_action_is_for_the_caller() -> None:
    done = run("stage.forward@step=2,stage=1:nan;stage.forward@stage=2:nan", FUSION_TEST="1")
    assert done.stdout == "1 \n2 nan\n3 \n"


def test_a_kill_happens_once_over_all_processes_and_the_history_keeps_it(tmp_path: Path) -> None:
    variables = {"FUSION_TEST": "1", "FUSION_HISTORY": str(tmp_path)}
    first = run("stage.forward@step=2:kill9", **variables)
    assert (first.returncode, first.stdout) == (-9, "1 \n")
    assert run("stage.forward@step=2:kill9", **variables).stdout == "1 \n2 \n3 \n"
    lines = [json.loads(line) for path in tmp_path.glob("worker-*.jsonl") for line in path.read_text().splitlines()]
    assert [(line["event"], line["point"], line["step"], line["node"]) for line in lines] == [
        ("failpoint", "stage.forward", 2, "n")
    ]


def test_a_full_disk_is_an_os_error() -> None:
    done = run("stage.forward@step=3:enospc", FUSION_TEST="1")
    assert done.stdout == "1 \n2 \n"
    assert "OSError: [Errno 28]" in done.stderr
