"""Headers of safetensors files (B23): good ones are read as the library reads them, every other one is refused."""

from __future__ import annotations

import json

import numpy
import pytest
from safetensors.numpy import save

from fusion.base.errors import DataError
from fusion.protocol.tensorheader import read_header_from


def read(content):
    return read_header_from("weights", len(content), lambda offset, count: content[offset : offset + count])


def made(header, data=b"", length=None):
    body = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(body) if length is None else length).to_bytes(8, "little") + body + data


def entry(dtype="F32", shape=(2,), begin=0, end=8):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def test_what_the_library_writes_is_read():
    tensors = {
        "a": numpy.zeros((2, 3), numpy.float32),
        "b": numpy.zeros((), numpy.int64),
        "c": numpy.zeros((0, 5), bool),
    }
    found = read(save(tensors, {"format": "pt"}))
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in found.items()} == {
        "a": ("float32", (2, 3)),
        "b": ("int64", ()),
        "c": ("bool", (0, 5)),
    }


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 9,
        b"\x80\x04\x95" + b"x" * 100,
        made({}, length=2**63),
        made({}, length=1),
        made(b"[]"),
        made(b"{"),
        made(b"\xff\xfe{}"),
        made(b'{"a":' + b"[" * 2000 + b"]" * 2000 + b"}"),
        made({"a": 5}),
        made({"a": entry(dtype="F8")}, bytes(8)),
        made({"a": entry(dtype=["F32"])}, bytes(8)),
        made({"a": entry(shape=(-2,))}, bytes(8)),
        made({"a": entry(shape=(True, 2))}, bytes(8)),
        made({"a": entry(shape=(1,) * 17)}, bytes(4)),
        made({"a": entry(shape=(3,))}, bytes(8)),
        made({"a": entry(begin=4, end=12)}, bytes(12)),
        made({"a": entry(), "b": entry()}, bytes(8)),
        made({"a": entry(), "b": entry(begin=4, end=12)}, bytes(12)),
        made({"a": entry()}, bytes(7)),
        made({"a": entry()}, bytes(9)),
        made({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}, bytes(8)),
        made(
            b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
            bytes(8),
        ),
    ],
)
def test_b23_everything_else_is_refused_with_one_line(content):
    with pytest.raises(DataError, match=r"^weights") as caught:
        read(content)
    assert "\n" not in str(caught.value)


def test_nothing_but_the_header_is_read():
    content = save({"a": numpy.zeros(100_000, numpy.float32)})
    asked = []
    read_header_from("w", len(content), lambda offset, count: asked.append(count) or content[offset : offset + count])
    assert sum(asked) < 200
