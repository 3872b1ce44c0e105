"""Any float tensor through any codec: within the codec's stated error, in the edge's dtype and layout, or as it was."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import DrawFn

from fusion.base.errors import ConfigError, WireError
from fusion.compress.catalog import TensorRole, largest_frame_bytes, parse_codec, parse_pair
from fusion.compress.codec import Codec
from fusion.compress.frame import Frame, FrameKind, parse
from fusion.compress.noise import Turn
from fusion.compress.raw import layout_of
from fusion.compress.state import EdgeState
from tests.support.compress import TURN, Edge, resealed, spec_of

DENSE = ["none", "fp16", "bf16", "fp8", "int8", "int6", "int5", "int4", "int3", "int2", "hadamard4"]
ROUNDED = ["int8", "int6", "int5", "int4", "int3", "int2", "hadamard4"]
SPARSE = ["topk:8", "topk:30+int4", "topk:5+exact+fp16", "topk:2", "adatopk:4", "mask:1/8", "mask:3/8+exact+fp16"]
CODECS = [
    *DENSE,
    *(f"{name}+stochastic" for name in ROUNDED),
    *(f"{name}+dither" for name in ROUNDED),
    *(f"{name}+zstd" for name in DENSE),
    *SPARSE,
    "lowrank:6",
]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
LAYOUTS = ["contiguous", "transposed", "gaps", "offset", "repeated"]


@st.composite
def tensors(draw: DrawFn) -> torch.Tensor:
    rank = draw(st.integers(0, 4))
    largest = {0: 1, 1: 5000, 2: 90, 3: 20, 4: 9}[rank]
    shape = draw(st.lists(st.integers(0, largest) | st.just(largest), min_size=rank, max_size=rank))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    plain = torch.randn(shape, generator=generator, dtype=torch.float64)
    kind = draw(st.sampled_from(["normal", "zeros", "relu", "outliers", "constant", "steep"]))
    if kind == "zeros":
        plain.zero_()
    elif kind == "relu":
        plain.relu_()
    elif kind == "outliers":
        plain[plain.abs() > 2.5] *= 1000
    elif kind == "constant":
        plain.fill_(float(torch.randn(1, generator=generator)))
    elif kind == "steep":
        plain = plain.pow(5)
    dtype = draw(st.sampled_from(DTYPES))
    tensor = (plain * 10.0 ** draw(st.integers(-3, 1))).to(dtype)
    return _laid_out(tensor, draw(st.sampled_from(LAYOUTS)))


def _laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, -1)
    if layout == "gaps" and tensor.dim():
        return torch.stack((tensor, tensor), -1)[..., 0]
    if layout == "offset":
        return torch.cat((torch.ones(3, dtype=tensor.dtype), tensor.reshape(-1)))[3:].view(tensor.shape)
    if layout == "repeated" and tensor.dim() and tensor.shape[0]:
        return tensor[:1].expand(tensor.shape)
    return tensor


def through(name: str, sent: torch.Tensor, role: TensorRole = TensorRole.WEIGHTS) -> tuple[Frame, torch.Tensor]:
    codec = Codec(parse_codec(name), role)
    frame = codec.encode(sent, EdgeState(), TURN)
    return frame, codec.decode(frame, spec_of(sent), EdgeState(), TURN)


def blocks_of(flat: torch.Tensor) -> torch.Tensor:
    padded = torch.zeros(-(-flat.numel() // 64) * 64, dtype=torch.float64)
    padded[: flat.numel()] = flat
    return padded.view(-1, 64)


def dtype_error(tensor: torch.Tensor) -> torch.Tensor:
    """What rounding to the edge's dtype may add."""
    about = torch.finfo(tensor.dtype)
    return tensor.double().abs() * max(about.eps, 2.0**-23) + about.tiny


def bound(values: str, sent: torch.Tensor, rounding: str) -> torch.Tensor:
    """Return the largest error of each element of a flat double tensor, from the documented steps alone."""
    blocks = blocks_of(sent)
    largest = blocks.abs().amax(1, keepdim=True).expand(blocks.shape).reshape(-1)[: sent.numel()]
    part = 1.0 if rounding == "stochastic" else 0.5  # of a step, which is the largest element over the largest code
    spare = 0.5 if rounding == "dither" else 0.0
    step = largest * (1 + 2**-7)
    tiny = 2.0**-100
    return {
        "none": torch.zeros_like(sent),
        "fp16": sent.abs() * 2**-11 + sent.abs().amax() * 2**-38,
        "bf16": sent.abs() * 2**-8 + 1e-38,
        "fp8": sent.abs() * 2**-4 * 1.01 + step / 448 * 2**-9 + tiny,
        "int8": part * step / (127 + spare) * 1.001 + tiny,
        "int6": part * step / (31 + spare) * 1.001 + tiny,
        "int5": part * step / (15 + spare) * 1.001 + tiny,
        "int4": part * step / (7 + spare) * 1.001 + tiny,
        "int3": part * step / (3 + spare) * 1.001 + tiny,
        "int2": step * (part / 1.5 if rounding else 1.0) * 1.001 + tiny,  # nearest clips what stands out
    }[values]


@settings(deadline=None, max_examples=150)
@given(st.sampled_from([name for name in CODECS if name.split("+")[0] in DENSE]), tensors())
def test_dense_codecs_keep_every_element_within_their_bound(name: str, sent: torch.Tensor) -> None:
    frame, arrived = through(name, sent)
    order = sorted(range(sent.dim()), key=lambda dim: (-layout_of(sent).strides[dim], dim))
    flat = sent.permute(order)  # as it lies in memory: the order of the blocks
    for dim in range(flat.dim()):
        if flat.shape[dim] > 1 and layout_of(sent).strides[order[dim]] == 0:
            flat = flat.narrow(dim, 0, 1)
    back = arrived.permute(order).as_strided(flat.shape, arrived.permute(order).stride()).reshape(-1).double()
    flat = flat.reshape(-1)
    error = (back - flat.double()).abs()
    values, *options = name.split("+")
    rounding = next((option for option in options if option in ("stochastic", "dither")), "")
    if parse(frame.payload)[0].kind is FrameKind.RAW:
        assert not error.any()
    elif values == "hadamard4":
        part = 2.0 if rounding == "stochastic" else 1.0
        limit = part * 0.5 * 8 * 1.01 / 7 * blocks_of(flat.double()).norm(dim=1)
        assert (blocks_of(error).norm(dim=1) <= limit + blocks_of(dtype_error(flat)).norm(dim=1)).all()
    else:
        assert (error <= bound(values, flat.double(), rounding) + dtype_error(flat)).all()


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(SPARSE), tensors())
def test_sparse_codecs_keep_the_largest_within_their_bound_and_drop_the_rest(name: str, sent: torch.Tensor) -> None:
    frame, arrived = through(name, sent)
    header = parse(frame.payload)[0]
    error = (arrived.double() - sent.double()).abs().reshape(-1)
    if header.kind is FrameKind.RAW:
        assert not error.any()
        return
    flat = sent.reshape(-1).double()
    if header.kind is not FrameKind.DENSE:
        kept_least = float(flat.abs().sort(descending=True).values[header.kept - 1])
        dropped = flat.abs() < kept_least
        assert torch.equal(arrived.reshape(-1)[dropped], torch.zeros(int(dropped.sum()), dtype=sent.dtype))
        assert (error <= torch.where(flat.abs() <= kept_least, kept_least, flat.abs().amax() / 7) + 1e-300).all()
    else:
        assert (error <= flat.abs().amax() / 127 + dtype_error(sent.reshape(-1))).all()


@settings(deadline=None, max_examples=60)
@given(tensors())
def test_lowrank_loses_no_more_than_there_is(sent: torch.Tensor) -> None:
    _, arrived = through("lowrank:6", sent)
    assert (arrived.double() - sent.double()).norm() <= 1.05 * sent.double().norm() + dtype_error(sent).norm()


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(CODECS), tensors(), st.sampled_from([role for role in TensorRole if role != "gradient"]))
def test_every_codec_gives_back_dtype_and_shape_and_never_more_bytes_than_there_were(name, sent, role) -> None:
    frame, arrived = through(name, sent, role)
    assert (arrived.dtype, arrived.shape) == (sent.dtype, sent.shape)
    assert len(frame.payload) <= largest_frame_bytes(spec_of(sent))
    assert arrived.stride() == frame.layout.strides
    if 0 not in sent.stride() or "topk" not in name + "lowrank mask":
        assert torch.isfinite(arrived).all()
    again, _ = through(name, sent, role)
    assert again.payload == frame.payload


@settings(deadline=None, max_examples=80)
@given(
    st.sampled_from(["mask:1/8", "mask:3/8/int2", "mask:1/4+fp16/fp16", "mask:1/8/none", "mask:1/1"]),
    tensors(),
    st.integers(0, 2**32),
)
def test_a_masks_gradient_is_zero_off_the_mask(name: str, sent: torch.Tensor, seed: int) -> None:
    edge = Edge(name)
    frame, _ = edge.forward(sent)
    assert len(edge.producer.masks) == len(edge.consumer.masks) == 1
    places = edge.consumer.masks[TURN.step, TURN.micro_batch].places
    gradient = torch.randn(sent.shape, generator=torch.Generator().manual_seed(seed)).to(sent.dtype)
    _, returned = edge.backward(gradient)
    assert not edge.producer.masks
    assert not edge.consumer.masks
    if parse(frame.payload)[0].kind is FrameKind.SPARSE:
        off = torch.ones(sent.numel(), dtype=torch.bool)
        off[torch.from_numpy(places).long()] = False
        assert not returned.reshape(-1)[off].any()
        if name.endswith("none"):
            assert torch.equal(returned.reshape(-1)[~off], gradient.reshape(-1)[~off])


def frames_of(name: str, sent: torch.Tensor) -> tuple[Codec, bytearray]:
    codec = Codec(parse_codec(name), TensorRole.WEIGHTS)
    return codec, bytearray(codec.encode(sent, EdgeState(), TURN).payload)


edits = st.lists(
    st.tuples(st.sampled_from(["set", "insert", "delete", "cut"]), st.floats(0, 1), st.integers(0, 255)),
    min_size=1,
    max_size=4,
)


def edited(payload: bytearray, changes: list[tuple[str, float, int]]) -> bytearray:
    payload = bytearray(payload)
    for what, where, value in changes:
        # Half of the edits hit the header and the table: that is where the numbers are.
        place = int(where * 2 * 100) if where < 0.5 else int((where * 2 - 1) * len(payload))
        place = min(place, len(payload) - 1)
        if place < 0:
            break
        if what == "set":
            payload[place] = value
        elif what == "insert":
            payload.insert(place, value)
        elif what == "delete":
            del payload[place]
        else:
            del payload[place:]
    return payload


SENT = torch.relu(torch.randn(24, 40, generator=torch.Generator().manual_seed(1)))


@settings(deadline=None, max_examples=150)
@given(st.sampled_from([*CODECS, "int4+zstd"]), edits)
def test_damaged_bytes_are_always_noticed(name: str, changes) -> None:
    codec, payload = frames_of(name, SENT)
    damaged = edited(payload, changes)
    if damaged == payload:
        return
    with pytest.raises(WireError):
        codec.decode(Frame(layout_of(SENT), damaged), spec_of(SENT), EdgeState(), TURN)


@settings(deadline=None, max_examples=300)
@given(st.sampled_from([*CODECS, "int4+zstd"]), edits)
def test_forged_bytes_with_a_right_checksum_are_a_tensor_of_the_expected_kind_or_a_wire_error(name, changes) -> None:
    codec, payload = frames_of(name, SENT)
    damaged = edited(payload, changes)
    if len(damaged) < 16:
        return
    try:
        arrived = codec.decode(Frame(layout_of(SENT), resealed(damaged)), spec_of(SENT), EdgeState(), TURN)
    except WireError:
        return
    assert (arrived.dtype, arrived.shape) == (SENT.dtype, SENT.shape)


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=300), st.sampled_from(CODECS))
def test_any_bytes_are_a_frame_or_a_wire_error(data: bytes, name: str) -> None:
    codec = Codec(parse_codec(name), TensorRole.WEIGHTS)
    with pytest.raises(WireError):
        codec.decode(Frame(layout_of(SENT), data), spec_of(SENT), EdgeState(), TURN)


@settings(deadline=None, max_examples=100)
@given(st.text(alphabet="abdefhiklmnopstxz0123456789:/+.", max_size=30))
def test_any_text_is_a_pair_of_codecs_that_reads_back_or_a_config_error(text: str) -> None:
    try:
        pair = parse_pair(text)
    except ConfigError:
        return
    assert parse_pair(pair.name) == pair


@settings(deadline=None, max_examples=60)
@given(st.lists(tensors(), min_size=1, max_size=4), st.sampled_from(["int4+ef", "topk:8+ef", "lowrank:6+ef", "fp8+ef"]))
def test_error_feedback_loses_nothing_it_only_delays(sent: list[torch.Tensor], name: str) -> None:
    """With tensors of one shape: what was sent is what arrived plus the residual."""
    shape, dtype = sent[0].shape, torch.float32
    tensors_ = [tensor.to(dtype) for tensor in sent if tensor.shape == shape]
    codec, state = Codec(parse_codec(name), TensorRole.GRADIENT), EdgeState()
    total, arrived_total = torch.zeros(shape), torch.zeros(shape)
    for step, tensor in enumerate(tensors_):
        turn = Turn(1, step, 0, 0)
        total += tensor
        arrived_total += codec.decode(codec.encode(tensor, state, turn), spec_of(tensor), EdgeState(), turn)
    residual = state.residuals.get(TensorRole.GRADIENT, torch.zeros(shape))
    scale = max([1e-30] + [float(tensor.abs().amax()) for tensor in tensors_ if tensor.numel()])
    assert ((arrived_total + residual - total).abs() <= 1e-4 * scale).all()
