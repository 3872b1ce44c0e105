"""Data sources on the owner's side: what a sample is, what is stored, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file

import fusion
from fusion.base.errors import DataError
from fusion.job.source import Source
from fusion.runtime.data import open_data


def _read(source: Source, directory: Path, ids: list[int], fields: tuple[str, ...] | None = None) -> dict[str, Any]:
    names = fields or source.field_names
    paths = source.write(directory, "data", names)
    return open_data(source.describe(names), paths).batch(names, np.array(ids))


def test_labels_are_the_next_tokens(tmp_path: Path) -> None:
    data = fusion.TokenData(list(range(100, 111)), 3)
    assert data.samples == 3  # a fourth would need the token after the last
    batch = _read(data, tmp_path, [2, 0])
    assert batch["input_ids"].tolist() == [[106, 107, 108], [100, 101, 102]]
    assert batch["labels"].tolist() == [[107, 108, 109], [101, 102, 103]]
    assert batch["labels"].dtype == torch.int64


def test_models_that_shift_inside_get_the_tokens_themselves(tmp_path: Path) -> None:
    data = fusion.TokenData(np.arange(9), 3, shift_labels=False, inputs="x", labels="y")
    assert data.samples == 3
    batch = _read(data, tmp_path, [2])
    assert batch["x"].tolist() == batch["y"].tolist() == [[6, 7, 8]]
    assert fusion.TokenData(np.arange(9), 3, labels=None).field_names == ("input_ids",)


def test_windows_may_overlap(tmp_path: Path) -> None:
    data = fusion.TokenData(torch.arange(10), 4, stride=2, dtype="int32")
    assert data.samples == 3
    batch = _read(data, tmp_path, [1])
    assert batch["input_ids"].tolist() == [[2, 3, 4, 5]]
    assert batch["input_ids"].dtype == torch.int32


@pytest.mark.parametrize(("largest", "stored"), [(255, "uint8"), (256, "uint16"), (65535, "uint16"), (65536, "int32")])
def test_tokens_are_stored_as_narrow_as_they_fit(tmp_path: Path, largest: int, stored: str) -> None:
    data = fusion.TokenData(np.array([0, 1, largest, 2], dtype=np.int64), 2)
    assert _read(data, tmp_path, [0])["labels"].tolist() == [[1, largest]]
    assert load_file(tmp_path / "data.safetensors")["tokens"].dtype == stored


def test_token_files_are_mapped(tmp_path: Path) -> None:
    tokens = np.arange(50, dtype=np.uint16)
    np.save(tmp_path / "t.npy", tokens)
    tokens.tofile(tmp_path / "t.bin")
    for path in (tmp_path / "t.npy", str(tmp_path / "t.bin")):
        data = fusion.TokenData(path, 10)
        assert not data.tokens.flags.owndata
        assert _read(data, tmp_path, [3])["labels"][0].tolist() == list(range(31, 41))


def test_split_holds_out_the_end_and_shares_no_token() -> None:
    data = fusion.TokenData(np.arange(1001), 10)
    train, held_out = data.split(0.1)
    assert (train.samples, held_out.samples) == (90, 9)
    assert train.tokens.tolist() == list(range(901))
    assert held_out.tokens[0] == 901
    for fraction in (0, 1, -0.1, 1.5, True, "half"):
        with pytest.raises(DataError, match="split fraction"):
            data.split(fraction)
    with pytest.raises(DataError, match="leaves no training data"):
        fusion.TokenData(np.arange(11), 10).split(0.5)


def test_text_as_bytes_and_through_tokenizers(tmp_path: Path) -> None:
    assert fusion.TextData("hällo", 2).tokens.tolist() == list("hällo".encode())
    (tmp_path / "a.txt").write_bytes(b"ab")
    (tmp_path / "b.txt").write_bytes(b"\xff\x00\r\n")
    joined = fusion.TextData([tmp_path / "a.txt", tmp_path / "b.txt"], 2)
    assert joined.tokens.tolist() == [97, 98, 255, 0, 13, 10]
    assert fusion.TextData("aab", 1, tokenizer=lambda text: [ord(letter) for letter in text]).tokens.tolist() == [
        97,
        97,
        98,
    ]
    encoding = SimpleNamespace(encode=lambda text: SimpleNamespace(ids=[len(text), 7]))
    assert fusion.TextData("four", 1, tokenizer=encoding).tokens.tolist() == [4, 7]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: fusion.TokenData([], 2), "the token data is empty"),
        (lambda d: fusion.TextData("", 2), "the token data is empty"),
        (lambda d: fusion.TextData([], 2), "the token data is empty"),
        (lambda d: fusion.TokenData([1, 2, 3], 3), r"has 3 tokens, one sample needs 4 \(block_size=3\)"),
        (lambda d: fusion.TokenData([1.5, 2.0, 3.0], 2), "must be integers, got float64"),
        (lambda d: fusion.TokenData(["a", "b", "c"], 2), "must be integers"),
        (lambda d: fusion.TokenData([[1, 2], [3, 4]], 2), r"one dimension, got shape \(2, 2\)"),
        (lambda d: fusion.TokenData([1, 2, 3], 0), "block_size must be a positive integer, got 0"),
        (lambda d: fusion.TokenData([1, 2, 3], "2"), "block_size must be a positive integer"),
        (lambda d: fusion.TokenData([1, 2, 3], 2, stride=-1), "stride must be a positive integer"),
        (lambda d: fusion.TokenData([1, 2, 3], 2, dtype="float32"), "int64 or int32, got 'float32'"),
        (lambda d: fusion.TokenData([1, 2, 3], 2, inputs="x", labels="x"), "both named 'x'"),
        (lambda d: fusion.TokenData(d / "no.npy", 2), "cannot read tokens from"),
        (lambda d: fusion.TokenData(d / "t.csv", 2), r"read from .npy and .bin files"),
        (lambda d: fusion.TokenData(d / "t.bin", 2, file_dtype="float32"), "file_dtype must be"),
        (lambda d: fusion.TextData(d / "no.txt", 2), "cannot read .*no.txt: No such file"),
        (lambda d: fusion.TextData(str(d), 2), "is the name of a file; for its content pass pathlib.Path"),
        (lambda d: fusion.TextData(7, 2), "must be a str"),
        (lambda d: fusion.TextData(["a"], 2), "must be a str"),
        (lambda d: fusion.TextData("abc", 2, tokenizer="gpt2"), "tokenizer must be 'bytes'"),
        (lambda d: fusion.TextData("abc", 2, tokenizer=5), "tokenizer must be 'bytes'"),
        (lambda d: fusion.TextData(d / "latin", 1, tokenizer=list), "not UTF-8 at byte 1"),
    ],
)
def test_b27_token_data_that_cannot_be_used(tmp_path: Path, make: Any, message: str) -> None:
    (tmp_path / "latin").write_bytes(b"a\xe4")
    with pytest.raises(DataError, match=message) as caught:
        make(tmp_path)
    assert "\n" not in str(caught.value)


def test_b27_negative_and_huge_ids_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    for tokens, told in (([0, -1, 2], r"has -1\.\.2"), ([0, 2**31, 1], r"has 0\.\.2147483648")):
        with pytest.raises(DataError, match=told):
            fusion.TokenData(tokens, 2).write(tmp_path, "data", ("input_ids",))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float16", "bfloat16", "float32", "complex64"])
def test_tensor_rows_come_back_exactly(tmp_path: Path, dtype: str) -> None:
    x = (torch.arange(12).reshape(4, 3) % 5).to(getattr(torch, dtype)).t().contiguous().t()
    batch = _read(fusion.TensorData({"x": x, "y": torch.arange(4)}), tmp_path, [3, 1])
    assert torch.equal(batch["x"], x[[3, 1]])
    assert batch["x"].dtype == x.dtype
    assert batch["y"].tolist() == [3, 1]


def test_each_field_has_a_file_of_its_own_and_only_wanted_ones_are_written(tmp_path: Path) -> None:
    data = fusion.TensorData({"x": torch.zeros(3, 2), "unused": torch.zeros(3), "y": torch.arange(3)})
    assert _read(data, tmp_path, [1], ("x", "y"))["y"].tolist() == [1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data-0.safetensors", "data-1.safetensors"]
    assert set(load_file(tmp_path / "data-1.safetensors")) == {"y"}


def test_npy_and_safetensors_files(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(6, dtype=">f4").reshape(3, 2))
    batch = _read(fusion.TensorData({"x": tmp_path / "x.npy", "y": np.arange(3)}), tmp_path, [2])
    assert batch["x"].tolist() == [[4.0, 5.0]]
    save_file({"image": torch.ones(3, 2, dtype=torch.bfloat16), "more": torch.zeros(3)}, tmp_path / "f.safetensors")
    data = fusion.TensorData(tmp_path / "f.safetensors", fields={"x": "image"})
    assert data.write(tmp_path / "nowhere", "data", ("x",)) == (tmp_path / "f.safetensors",)
    assert _read(data, tmp_path, [0])["x"].tolist() == [[1.0, 1.0]]
    train, held_out = data.split(0.34)
    assert (train.samples, held_out.samples) == (2, 1)
    assert _read(held_out, tmp_path, [0])["x"].dtype == torch.bfloat16


def test_splits_of_tensors_are_the_rows_in_order(tmp_path: Path) -> None:
    train, held_out = fusion.TensorData({"y": torch.arange(10)}).split(0.2)
    assert _read(train, tmp_path, [0, 7])["y"].tolist() == [0, 7]
    assert _read(held_out, tmp_path, [0, 1])["y"].tolist() == [8, 9]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: fusion.TensorData({}), "no fields"),
        (lambda d: fusion.TensorData({"x": torch.zeros(0, 2)}), "0 rows"),
        (lambda d: fusion.TensorData({"x": torch.tensor(1)}), "'x' is a single number"),
        (
            lambda d: fusion.TensorData({"x": torch.zeros(2), "y": torch.zeros(3)}),
            "different numbers of rows: x 2, y 3",
        ),
        (lambda d: fusion.TensorData({"x": [1, 2]}), "'x' must be a tensor"),
        (lambda d: fusion.TensorData({1: torch.zeros(2)}), "field names are non-empty strings"),
        (lambda d: fusion.TensorData({"x": np.array(["a"])}), "'x': arrays of <U1"),
        (lambda d: fusion.TensorData({"x": np.array([object()])}), "'x': arrays of object"),
        (lambda d: fusion.TensorData({"x": np.zeros(2, dtype=np.uint64)}), "arrays of uint64"),
        (lambda d: fusion.TensorData({"x": d / "x.csv"}), r"only .npy files"),
        (lambda d: fusion.TensorData({"x": d / "no.npy"}), "cannot read"),
        (lambda d: fusion.TensorData({"x": d / "pickled.npy"}), "cannot read"),
        (lambda d: fusion.TensorData({"x": torch.zeros(2)}, fields=["x"]), "fields is for a .safetensors file"),
        (lambda d: fusion.TensorData(d / "no.safetensors"), "No such file"),
        (lambda d: fusion.TensorData(d / "f", fields=["y"]), "has no tensor 'y'; it has x"),
    ],
)
def test_b27_tensor_data_that_cannot_be_used(tmp_path: Path, make: Any, message: str) -> None:
    save_file({"x": torch.zeros(2)}, tmp_path / "f")
    np.save(tmp_path / "pickled.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match=message) as caught:
        make(tmp_path)
    assert "\n" not in str(caught.value)


def test_data_on_the_nodes_is_described_and_not_read(tmp_path: Path) -> None:
    path = tmp_path / "d.safetensors"
    fields = {
        "x": fusion.Rows("bfloat16", (2, 3)),
        "ids": fusion.Window(4, offset=1, stride=2),
        "y": fusion.Rows("int64", tensor="t"),
    }
    data = fusion.NodePath(str(path), fields=fields, samples=5)
    spec = data.describe(("x", "ids"))
    assert [item.name for item in spec.fields] == ["x", "ids"]
    assert spec.files[0].node_path == str(path)
    assert spec.files[0].blob is None
    assert data.write(tmp_path, "data", ("x",)) == (None,)
    assert {name: tuple(value.shape) for name, value in data.first(2).items()} == {
        "x": (2, 2, 3),
        "ids": (2, 4),
        "y": (2,),
    }
    save_file({"x": torch.ones(5, 2, 3, dtype=torch.bfloat16), "t": torch.arange(5), "tokens": torch.arange(13)}, path)
    batch = _read(data, tmp_path, [4])
    assert batch["ids"].tolist() == [[9, 10, 11, 12]]
    assert batch["y"].tolist() == [4]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": "data.safetensors"}, "must be absolute"),
        ({"samples": 0}, "samples must be a positive integer"),
        ({"fields": {}}, "at least one input"),
        ({"fields": {"x": "float32"}}, r"must be fusion.Rows\(...\) or fusion.Window"),
        ({"fields": {"x": fusion.Rows("float8")}}, "dtype must be one of"),
        ({"fields": {"x": fusion.Window(0)}}, "length must be positive"),
    ],
)
def test_node_paths_that_cannot_be_used(changes: dict[str, Any], message: str) -> None:
    settings: dict[str, Any] = {"path": "/data/f.safetensors", "fields": {"x": fusion.Rows("int64")}, "samples": 3}
    settings |= changes
    with pytest.raises(DataError, match=message):
        fusion.NodePath(settings.pop("path"), **settings)
