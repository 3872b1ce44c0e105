"""`import fusion` is light, and everything that it promises is there."""

from __future__ import annotations

import subprocess
import sys

import pytest

import fusion


def test_every_public_name_exists_and_says_what_it_is() -> None:
    for name in fusion.__all__:
        item = getattr(fusion, name)
        assert isinstance(item, str) or item.__doc__, name


def test_every_lazy_name_is_public() -> None:
    assert set(fusion._HOME_OF) | {"__version__"} == set(fusion.__all__)
    assert set(dir(fusion)) == set(fusion.__all__)


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Jop'"):
        _ = fusion.Jop


def _modules_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_fusion_loads_neither_torch_nor_grpc() -> None:
    loaded = _modules_after("import fusion; fusion.FusionError; fusion.__all__")
    assert not {"torch", "grpc", "numpy", "google.protobuf"} & loaded


@pytest.mark.slow
def test_following_a_job_does_not_need_torch() -> None:
    loaded = _modules_after("import fusion; fusion.attach; fusion.Run; import fusion.cli.status, fusion.cli.submit")
    assert "grpc" in loaded
    assert "torch" not in loaded
