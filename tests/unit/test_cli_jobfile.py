"""`fusion submit FILE`: every way in which a job file can be wrong is told in one line, with the file's line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from fusion.base.errors import ConfigError, DataError, FusionError, UsageError
from fusion.cli.jobfile import load_job, parse_settings

GOOD = """
import torch
import fusion

def make_job(steps=3, lr=0.1, name="from-file", shuffle=True):
    data = {"input": torch.zeros(4, 2)}
    model = torch.nn.Linear(2, 1)
    return fusion.Job(model, data, fusion.SGD(lr), loss=lambda out, batch: out.sum(), steps=steps, batch_size=2,
                      name=name, shuffle=shuffle)
"""


def _file(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "job file é.py"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_a_job_at_top_level_is_found(tmp_path: Path) -> None:
    job = load_job(_file(tmp_path, GOOD + "job = make_job()\n"))
    assert (job.name, job.steps) == ("from-file", 3)


def test_a_function_may_make_the_job_with_settings(tmp_path: Path) -> None:
    path = _file(tmp_path, GOOD)
    assert load_job(path).steps == 3
    assert load_job(_file(tmp_path, GOOD + "job = make_job(4)\n"), {"steps": 6}).steps == 6
    job = load_job(path, parse_settings(("steps=50", "lr=1e-2", "name=other", "shuffle=false")))
    assert (job.steps, job.optimizer.spec.learning_rate, job.name, job.shuffle) == (50, 0.01, "other", False)


def test_b1_byte_order_marks_and_carriage_returns_are_accepted(tmp_path: Path) -> None:
    text = b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode()
    assert load_job(_file(tmp_path, text)).name == "from-file"


def test_files_beside_the_job_file_can_be_imported_and_main_does_not_run(tmp_path: Path) -> None:
    (tmp_path / "beside_the_job.py").write_text("STEPS = 7\n")
    text = f"from beside_the_job import STEPS\n{GOOD}\njob = make_job(STEPS)\n"
    try:
        job = load_job(_file(tmp_path, text + "if __name__ == '__main__':\n    raise SystemExit('main ran')\n"))
    finally:
        sys.modules.pop("beside_the_job", None)
    assert job.steps == 7
    assert str(tmp_path) not in sys.path


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        (b"", ConfigError, "is empty; it must define"),
        (b"\x00\x01\x02", ConfigError, r"\(3 bytes\) is no Python source"),
        ("x = 1\n", ConfigError, "defines neither 'job = fusion.Job"),
        ("job = 5\n", ConfigError, "has a job of type int, not 'job = fusion.Job"),
        ("make_job = 5\n", ConfigError, "make_job is not a function"),
        ("def make_job(): return None\n", ConfigError, "defines neither"),
        ("x = 1\nif x\n", ConfigError, r"line 2: expected ':'"),
        ("def f():\n\tif 1:\n        pass\n", ConfigError, "line 3: "),
        (b"x = '\xe4'\n", ConfigError, "job file .*utf-8"),
        ("x = 1\n\nraise RuntimeError('broken')\n", ConfigError, "line 3: RuntimeError: broken"),
        ("import does_not_exist_anywhere\n", ConfigError, "line 1: ModuleNotFoundError: No module named"),
        ("import sys\nsys.exit(3)\n", ConfigError, "line 2: SystemExit: 3"),
        ("import fusion\nfusion.TokenData([], 2)\n", DataError, "line 2: the token data is empty"),
        ("def make_job():\n    return 1 / 0\n", ConfigError, "line 2: ZeroDivisionError"),
    ],
)
def test_b1_bad_files_are_told_in_one_line(
    tmp_path: Path, text: str | bytes, kind: type[FusionError], message: str
) -> None:
    path = _file(tmp_path, text)
    with pytest.raises(kind, match=message) as caught:
        load_job(path)
    assert type(caught.value) is kind
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_b1_missing_directories_and_huge_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_job(tmp_path / "no.py")
    with pytest.raises(ConfigError, match="is a directory"):
        load_job(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot be read|does not exist"):
        load_job(Path("a\0b"))
    huge = tmp_path / "huge.py"
    with huge.open("wb") as file:
        file.truncate(200_000_000)
    with pytest.raises(ConfigError, match=r"\(200000000 bytes\) is no Python source"):
        load_job(huge)


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        (GOOD, {"stepz": 1}, "make_job has no parameter 'stepz'; it has steps, lr, name, shuffle"),
        ("job = 1\n", {"steps": 1}, "--set needs a function make_job"),
    ],
)
def test_settings_that_do_not_fit(tmp_path: Path, text: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_job(_file(tmp_path, text), settings)


def test_settings_are_read_as_what_they_look_like() -> None:
    pairs = ("a=1", "b=-2.5", "c=TRUE", "d=x=y", "e=", "f=1e3", "g=007x")
    assert parse_settings(pairs) == {"a": 1, "b": -2.5, "c": True, "d": "x=y", "e": "", "f": 1000.0, "g": "007x"}
    for wrong in (("steps",), ("=1",), ("a b=1",)):
        with pytest.raises(UsageError, match="takes name=value"):
            parse_settings(wrong)
    with pytest.raises(UsageError, match="'a' twice"):
        parse_settings(("a=1", "a=2"))
