"""The codec "none" brings every tensor back with its bits, its strides and its alignment."""

from __future__ import annotations

import pytest
import torch

from fusion.base.errors import WireError
from fusion.base.layout import TensorLayout
from fusion.compress.raw import decode, encode, payload_bytes


def _tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    base = torch.randn(4, 6, 30, generator=generator)
    return {
        "dense": base,
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 5),
        "transposed": base.transpose(0, 2),
        "permuted": base.permute(1, 2, 0),
        "expanded": torch.randn(1, 6, 1, generator=generator).expand(4, 6, 30),
        "expanded scalar": torch.tensor(1.5).expand(3, 3),
        "slice with gaps": base[:, :, 10:20],
        "offset view": base.view(-1)[7:107],
        "bool": base > 0,
        "int64": torch.arange(10),
        "bfloat16": base.bfloat16(),
        "channels last": torch.randn(2, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last),
        "one element": torch.randn(1, 1, 1, generator=generator),
    }


@pytest.mark.parametrize("name", _tensors())
def test_a_tensor_comes_back_with_its_bits_and_its_place_in_memory(name: str) -> None:
    tensor = _tensors()[name]
    layout, payload = encode(tensor)
    back = decode(layout, bytes(payload))
    assert torch.equal(back, tensor)
    assert back.dtype == tensor.dtype
    assert back.stride() == tensor.stride()
    assert len(payload) == payload_bytes(layout)
    if tensor.numel():
        assert back.data_ptr() % 64 == tensor.data_ptr() % 64


def test_repeated_elements_travel_once() -> None:
    layout, payload = encode(torch.tensor(1.5).expand(1000, 1000))
    assert len(payload) == 4
    assert decode(layout, payload).sum().item() == 1_500_000


def test_a_tensor_with_large_gaps_travels_and_arrives_dense() -> None:
    column = torch.arange(1000.0).view(10, 100)[:, :1]
    layout, payload = encode(column)
    assert layout.strides == (1, 1)
    assert torch.equal(decode(layout, payload), column)


def test_encoding_a_dense_tensor_copies_nothing() -> None:
    tensor = torch.zeros(8)
    _, payload = encode(tensor)
    tensor[0] = 1.0
    assert bytes(payload)[:4] == b"\x00\x00\x80?"


def test_a_tensor_whose_elements_overlap_travels_and_arrives_dense() -> None:
    windows = torch.arange(6.0).unfold(0, 3, 1)
    layout, payload = encode(windows)
    assert layout.strides == (3, 1)
    assert torch.equal(decode(layout, payload), windows)


@pytest.mark.parametrize(
    ("layout", "size"),
    [
        (TensorLayout("float31", (2,), (1,)), 8),
        (TensorLayout("float32", (2,), (1,)), 7),
        (TensorLayout("float32", (2, 2), (1,)), 16),
        (TensorLayout("float32", (-1,), (1,)), 0),
        (TensorLayout("float32", (2,), (2**50,)), 8),
        (TensorLayout("float32", (2**50,), (0,)), 4),
        (TensorLayout("float32", (2,), (100,)), 8),
        (TensorLayout("float32", (1,) * 17, (1,) * 17), 4),
        (TensorLayout("float32", (2,), (1,), 64), 8),
        (TensorLayout("float32", (4, 4), (1, 1)), 64),
        (TensorLayout("float32", (2, 3), (2, 1)), 24),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(layout: TensorLayout, size: int) -> None:
    with pytest.raises(WireError):
        decode(layout, bytes(size))
