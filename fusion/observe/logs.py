"""Logs of the long-running processes: one line per event, with its fields, and nothing that steers a terminal.

2026-03-01T12:00:00.123Z INFO node: worker started job=job-abc epoch=3 pid=4711
"""

from __future__ import annotations

import logging
import sys
import time
from typing import IO, Any

_ESCAPES = {
    **{code: f"\\x{code:02x}" for code in [*range(0x20), *range(0x7F, 0xA0)]},
    # line and paragraph separators, and what turns the direction of text around
    **{code: f"\\u{code:04x}" for code in [0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)]},
    0x09: "\\t",
    0x0A: "\\n",
    0x0D: "\\r",
}


def escape_control(text: str) -> str:
    """Return `text` with every control character written out, so that it stays on one line and steers no terminal."""
    return text.translate(_ESCAPES)


def fields(**values: object) -> dict[str, Any]:
    """Return the `extra` argument of a log call: `log.info("worker started", extra=fields(pid=4711))`."""
    return {"fields": values}


def _format_value(value: object) -> str:
    text = escape_control(f"{value:.6g}" if isinstance(value, float) else str(value))
    if text and " " not in text and '"' not in text:
        return text
    quoted = text.replace('"', '\\"')
    return f'"{quoted}"'


class LineFormatter(logging.Formatter):
    """Formats a record, its fields and its exception as one line."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        text = escape_control(record.getMessage())
        for name, value in getattr(record, "fields", {}).items():
            text += f" {name}={_format_value(value)}"
        if record.exc_info:
            text += f" exception={_format_value(self.formatException(record.exc_info))}"
        return f"{stamp}.{int(record.msecs):03d}Z {record.levelname} {self._process}: {text}"


def setup_logging(process: str, level: str = "info", stream: IO[str] | None = None) -> None:
    """Send this process's logs to `stream` (default stderr), one line each, under the name `process`."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LineFormatter(process))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
