"""What holds for every test: one compute thread, and no user's own FUSION_HOME."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before anything imports torch: on two cores, several processes with several threads each fight.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep tests away from the credentials of whoever runs them."""
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "fusion-home"))


@pytest.fixture(autouse=True, scope="session")
def _own_states(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nodes of tests keep states below the tests' directory, not in memory that nobody would free."""
    os.environ["FUSION_STATE_DIR"] = str(tmp_path_factory.mktemp("states"))
