"""The one gate to what only tests may switch on."""

from __future__ import annotations

import os


def setting_for_tests(name: str) -> str | None:
    """Return an environment variable that only tests may set: None without FUSION_TEST=1, and where it is not set."""
    return os.environ.get(name) if os.environ.get("FUSION_TEST") == "1" else None
