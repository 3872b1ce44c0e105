"""A log is one line per event, and nothing in it steers a terminal."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from fusion.observe.logs import escape_control, fields, setup_logging


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    made = io.StringIO()
    setup_logging("node", stream=made)
    yield made
    root.handlers = handlers
    root.setLevel(level)


def test_a_line_has_time_level_process_text_and_fields(stream: io.StringIO):
    logging.getLogger("fusion.node").info(
        "worker started", extra=fields(pid=4711, log="/a b/c.log", share=0.25, why='no "x"')
    )
    line = stream.getvalue()
    assert line.endswith('Z INFO node: worker started pid=4711 log="/a b/c.log" share=0.25 why="no \\"x\\""\n')
    assert line[4] == line[7] == "-"
    assert line[10] == "T"


def test_levels_below_the_threshold_are_left_out(stream: io.StringIO):
    logging.getLogger("fusion.node").debug("not wanted")
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("\x1b[2Jgone", "\\x1b[2Jgone"),
        ("two\nlines\r", "two\\nlines\\r"),
        ("\x9b31m", "\\x9b31m"),
        ("\x00\x7f", "\\x00\\x7f"),
        ("\u202etxt.exe", "\\u202etxt.exe"),
        ("\u2028", "\\u2028"),
        ("naïve ü 漢", "naïve ü 漢"),
    ],
)
def test_t17_control_characters_are_written_out(hostile: str, shown: str, stream: io.StringIO):
    assert escape_control(hostile) == shown
    logging.getLogger("x").warning("name %s", hostile, extra=fields(name=hostile))
    assert stream.getvalue().count("\n") == 1
    assert stream.getvalue().count(shown) == 2


def test_an_exception_stays_on_the_line(stream: io.StringIO):
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        logging.getLogger("x").exception("failed")
    assert stream.getvalue().count("\n") == 1
    assert "ValueError: first\\nsecond" in stream.getvalue()
