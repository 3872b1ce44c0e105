"""Reading micro-batches from safetensors files: exact values, bounds checked, one clear line for anything off."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from fusion.base.errors import DataError
from fusion.graph.dag import TensorSpec
from fusion.protocol.job import DataField, DataFile, DataSpec, RowSource, WindowSource
from fusion.protocol.tensorheader import header_bytes, read_header
from fusion.runtime.data import files_needed, open_data


def _ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def _rows(samples: int, **fields: tuple[str, tuple[int, ...]]) -> DataSpec:
    items = tuple(DataField(name, TensorSpec(*spec), RowSource(0, name)) for name, spec in fields.items())
    return DataSpec(items, (DataFile(),), samples)


@pytest.mark.parametrize(
    "dtype",
    ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64"],
)
def test_rows_of_every_dtype_come_back_exactly(tmp_path: Path, dtype: str) -> None:
    whole = (torch.arange(24).reshape(4, 3, 2) - (0 if dtype in ("bool", "uint8") else 7)).to(getattr(torch, dtype))
    save_file({"x": whole}, tmp_path / "f")
    data = open_data(_rows(4, x=(dtype, (3, 2))), [tmp_path / "f"])
    batch = data.batch(["x"], _ids(2, 0, 2))
    assert batch["x"].dtype == whole.dtype
    assert torch.equal(batch["x"], whole[[2, 0, 2]])
    assert batch["x"].is_contiguous()


def test_rows_may_be_single_numbers(tmp_path: Path) -> None:
    save_file({"y": torch.tensor([5, 6, 7])}, tmp_path / "f")
    batch = open_data(_rows(3, y=("int64", ())), [tmp_path / "f"]).batch(["y"], _ids(2, 1))
    assert batch["y"].tolist() == [7, 6]


@pytest.mark.parametrize("stored", ["uint8", "uint16", "int32"])
def test_windows_of_compact_tokens_are_widened(tmp_path: Path, stored: str) -> None:
    tokens = torch.from_numpy(np.arange(20).astype(stored))
    save_file({"tokens": tokens}, tmp_path / "f")
    sample = TensorSpec("int64", (4,))
    spec = DataSpec(
        (
            DataField("inputs", sample, WindowSource(0, "tokens", 5, 0)),
            DataField("labels", sample, WindowSource(0, "tokens", 5, 1)),
        ),
        (DataFile(),),
        4,
    )
    batch = open_data(spec, [tmp_path / "f"]).batch(["labels", "inputs"], _ids(3, 0))
    assert batch["inputs"].tolist() == [[15, 16, 17, 18], [0, 1, 2, 3]]
    assert batch["labels"].tolist() == [[16, 17, 18, 19], [1, 2, 3, 4]]
    assert batch["labels"].dtype == torch.int64


def test_last_batch_may_be_smaller_and_even_empty(tmp_path: Path) -> None:
    save_file({"x": torch.rand(5, 2)}, tmp_path / "f")
    data = open_data(_rows(5, x=("float32", (2,))), [tmp_path / "f"])
    assert data.batch(["x"], _ids(4))["x"].shape == (1, 2)
    assert data.batch(["x"], _ids())["x"].shape == (0, 2)


def test_batches_do_not_touch_the_file(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(2, 2)}, tmp_path / "f")
    data = open_data(_rows(2, x=("float32", (2,))), [tmp_path / "f"])
    data.batch(["x"], _ids(0, 1))["x"].fill_(9)
    assert data.batch(["x"], _ids(0, 1))["x"].sum() == 0
    assert load_file(tmp_path / "f")["x"].sum() == 0


def test_only_the_files_of_the_wanted_fields_are_opened(tmp_path: Path) -> None:
    save_file({"y": torch.tensor([1, 2])}, tmp_path / "y")
    spec = DataSpec(
        (
            DataField("x", TensorSpec("float32", (2,)), RowSource(0, "x")),
            DataField("y", TensorSpec("int64", ()), RowSource(1, "y")),
        ),
        (DataFile(), DataFile()),
        2,
    )
    assert files_needed(spec, {"y"}) == [1]
    data = open_data(spec, [None, tmp_path / "y"], ["y"])
    assert data.batch(["y"], _ids(1))["y"].tolist() == [2]
    with pytest.raises(DataError, match="no field 'x'; it has y"):
        data.batch(["x"], _ids(1))
    with pytest.raises(DataError, match="file 0, which was not fetched"):
        open_data(spec, [None, tmp_path / "y"])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (_rows(4, z=("float32", (2,))), "no tensor 'z'; the file has x"),
        (_rows(4, x=("float64", (2,))), "is float32, the job wants float64"),
        (_rows(4, x=("int64", (2,))), "is float32, the job wants int64"),
        (_rows(4, x=("float32", (3,))), r"rows have shape \(2,\), the job wants \(3,\)"),
        (_rows(5, x=("float32", (2,))), "4 rows, the job wants 5 samples"),
    ],
)
def test_b27_a_file_that_is_not_what_the_job_says_is_refused(tmp_path: Path, spec: DataSpec, message: str) -> None:
    save_file({"x": torch.zeros(4, 2)}, tmp_path / "f")
    with pytest.raises(DataError, match=message):
        open_data(spec, [tmp_path / "f"])


def test_b27_too_few_tokens_for_the_windows(tmp_path: Path) -> None:
    save_file({"t": torch.zeros(20, dtype=torch.int64)}, tmp_path / "f")
    field = DataField("x", TensorSpec("int64", (4,)), WindowSource(0, "t", 4, 1))
    open_data(DataSpec((field,), (DataFile(),), 4), [tmp_path / "f"])
    with pytest.raises(DataError, match="5 windows need 21 tokens, the file has 20"):
        open_data(DataSpec((field,), (DataFile(),), 5), [tmp_path / "f"])


def test_ids_outside_the_data_are_refused(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(4, 2)}, tmp_path / "f")
    data = open_data(_rows(4, x=("float32", (2,))), [tmp_path / "f"])
    for wrong in (_ids(4), _ids(-1, 0)):
        with pytest.raises(DataError, match=r"samples 0\.\.3"):
            data.batch(["x"], wrong)


def _file(path: Path, header: bytes | dict[str, Any], data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def _entry(dtype: str = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"", b"", "not valid"),
        (b"[]", b"", "not an object"),
        (b"\xff\xfe", b"", "not valid"),
        (b"[" * 100_000, b"", "not valid"),
        (b'{"x":{"dtype":"U8","shape":[],"data_offsets":[0,1]},"x":1}', b"0", "two entries are named 'x'"),
        (b'{"x": NaN}', b"", "NaN is not allowed"),
        ({"x": 5}, b"", "'x' has a bad entry"),
        ({"x": {"dtype": "F32", "shape": [1]}}, b"0000", "'x' has a bad entry"),
        (_entry(dtype="F8_E4M3"), b"0000", "unknown dtype 'F8_E4M3'"),
        (_entry(shape=[-1]), b"0000", "-1 is not a size"),
        (_entry(shape=[1.0]), b"0000", "1.0 is not a size"),
        (_entry(shape=[True]), b"0000", "True is not a size"),
        (_entry(shape=[1] * 17), b"0000", "at most 16"),
        (_entry(shape=[0, 2**63]), b"0000", "is not a size"),
        (_entry(shape=[2**32, 2**32]), b"0000", "needs 73786976294838206464 bytes"),
        (_entry(shape=[2]), b"0000", r"shape \[2\] needs 8 bytes, its offsets hold 4"),
        (_entry(offsets=[0, 4, 8]), b"0000", "'x' has a bad entry"),
        (_entry(offsets=[4, 0]), b"0000", "'x' has a bad entry"),
        (_entry(), b"000", "cut short"),
    ],
)
def test_b23_malformed_files_are_refused(tmp_path: Path, header: Any, data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read_header(_file(tmp_path / "f", header, data))
    assert "\n" not in str(caught.value)


def test_b23_header_lengths_beyond_the_file_allocate_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not fit"):
        read_header(_file(tmp_path / "f", b"{}", length=2**63))
    (tmp_path / "g").write_bytes(b"12")
    with pytest.raises(DataError, match="it has 2 bytes"):
        read_header(tmp_path / "g")
    with pytest.raises(DataError, match="No such file"):
        read_header(tmp_path / "missing")
    with pytest.raises(DataError, match="Is a directory"):
        read_header(tmp_path)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200), st.integers(0, 250))
def test_b23_random_bytes_never_end_in_another_error(tmp_path: Path, noise: bytes, cut: int) -> None:
    whole = header_bytes([("a", "float32", (2, 3)), ("b", "uint8", ())]) + bytes(25)
    damaged = bytearray(whole[:cut] + noise)
    (tmp_path / "f").write_bytes(damaged)
    with contextlib.suppress(DataError):
        read_header(tmp_path / "f")


def test_written_headers_are_read_by_the_library(tmp_path: Path) -> None:
    start = header_bytes([("ä", "float32", (2, 2)), ("b", "bool", (3,)), ("c", "int64", ())])
    assert len(start) % 64 == 0
    body = np.arange(4, dtype="<f4").tobytes() + b"\1\0\1" + struct.pack("<q", -5)
    (tmp_path / "f").write_bytes(start + body)
    loaded = load_file(tmp_path / "f")
    assert loaded["ä"].tolist() == [[0, 1], [2, 3]]
    assert loaded["b"].tolist() == [True, False, True]
    assert loaded["c"].item() == -5
    assert set(read_header(tmp_path / "f")) == {"ä", "b", "c"}
