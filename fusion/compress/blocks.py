"""Blocks of 64 numbers as small integers and one step each.

A step is a bf16, rounded up: step * largest code >= largest element. A block of zeros has the step MIN_STEP, which
decodes to exact zeros.

n numbers, B = ceil(n / 64) blocks; tensors over a chunk have the shape (b, 64)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch

from fusion.base.errors import WireError
from fusion.compress.catalog import BLOCK, PLANES, Values
from fusion.compress.noise import Noise

_CHUNK_BLOCKS = 1 << 12  #: worked on at a time, so that temporaries stay in the cache
MIN_STEP = 2.0**-100
MAX_STEP = 2.0**110  #: a bfloat16; tensors beyond travel as they are; keeps every sum in here finite
_LARGEST_CODE = {
    Values.INT8: 127,
    Values.INT6: 31,
    Values.INT5: 15,
    Values.INT4: 7,
    Values.INT3: 3,
    Values.INT2: 1.5,  # codes 0..3 stand for -1.5, -0.5, 0.5, 1.5
    Values.HADAMARD4: 7,
    Values.FP8: 448,
}
_SIXTEEN = 16
_WITH_PLANES_OF = {Values.HADAMARD4: Values.INT4}
#: Keeps code + noise below the next integer in spite of float32 rounding.
_INWARDS = 1 - 2.0**-20
#: Best step of four equidistant levels for normal numbers, in units of their mean magnitude (Max 1960: 0.9957 sigma).
_INT2_STEP = 0.9957 * math.sqrt(math.pi / 2)


def encode_blocks(
    values: Values, flat: torch.Tensor, noise: Noise | None
) -> tuple[list[torch.Tensor], torch.Tensor] | None:
    """Return (planes of codes, each uint8 (B * 64 * bits / 8), steps bfloat16 (B)) of 1-D floats.

    None if one of them is Inf, NaN or too large. With noise, codes are the true quotients in the mean; with noise that
    the receiver takes away (`Noise.dithers`), an element's error does not depend on it.
    """
    blocks = -(-flat.numel() // BLOCK)
    steps = torch.empty(blocks, dtype=torch.bfloat16, device=flat.device)
    planes = [torch.empty(blocks, BLOCK * bits // 8, dtype=torch.uint8, device=flat.device) for bits in PLANES[values]]
    work = torch.empty(2, min(blocks, _CHUNK_BLOCKS), BLOCK, device=flat.device)
    for first, x in _chunks(flat):
        part, y = slice(first, first + len(x)), work[0, : len(x)]
        turned = hadamard(x, work[1, : len(x)], y) if values is Values.HADAMARD4 else x
        torch.abs(turned, out=y)
        steps[part] = rounded = _steps_up(_exact_steps(values, y, noise))
        torch.mul(turned, (_INWARDS / rounded.float())[:, None], out=y)
        for plane, bits in zip(planes, _packed(values, y, noise, first * BLOCK), strict=True):
            plane[part] = bits
    return ([plane.view(-1) for plane in planes], steps) if _are_steps(steps.float()) else None


def decode_blocks(
    values: Values,
    planes: Sequence[torch.Tensor],
    steps: torch.Tensor,
    out: torch.Tensor,
    dither: Noise | None = None,
) -> None:
    """Write the numbers (B * 64) of codes and steps into float32 `out`; WireError for a step that none can be."""
    scale = steps.float()
    if not _are_steps(scale):
        raise WireError(f"{values}: a step is not a number from {MIN_STEP} to {MAX_STEP}")
    scale = torch.where(scale > MIN_STEP, scale, 0.0)[:, None]
    rows = [plane.view(len(scale), -1) for plane in planes]
    out = out.view(-1, BLOCK)
    for first in range(0, len(scale), _CHUNK_BLOCKS):
        part = slice(first, first + _CHUNK_BLOCKS)
        _decode_chunk(values, [plane[part] for plane in rows], scale[part], out[part], dither, first * BLOCK)


def _are_steps(scale: torch.Tensor) -> bool:
    return bool(((scale >= MIN_STEP) & (scale <= MAX_STEP)).all())


def _chunks(flat: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (number of the first block, float32 blocks (b, 64)); the last block is filled up with zeros."""
    whole = flat.numel() // BLOCK * BLOCK
    size = _CHUNK_BLOCKS * BLOCK
    for start in range(0, whole, size):
        yield start // BLOCK, flat[start : min(start + size, whole)].view(-1, BLOCK).float()
    if whole < flat.numel():
        tail = torch.zeros(1, BLOCK, device=flat.device)
        tail[0, : flat.numel() - whole] = flat[whole:]
        yield whole // BLOCK, tail


def _decode_chunk(
    values: Values,
    planes: list[torch.Tensor],
    scale: torch.Tensor,
    out: torch.Tensor,
    dither: Noise | None,
    start: int,
) -> None:
    if values is Values.FP8:
        torch.mul(_half_of_e4m3(planes[0]), scale * 256, out=out)
        return
    out.copy_(_unpacked(values, planes))
    if dither is not None:
        out.add_(1.0 if values is not Values.INT2 else -1.0)
        dither.take_from(out.view(-1), start)
    elif values is Values.INT2:
        out.sub_(1.5)
    if values is Values.HADAMARD4:
        torch.mul(hadamard(out, torch.empty_like(out), out), scale, out=out)
    else:
        out.mul_(scale)


def _exact_steps(values: Values, magnitudes: torch.Tensor, noise: Noise | None) -> torch.Tensor:
    """Return the step (b,) of each block of magnitudes (b, 64)."""
    if values is Values.INT2 and noise is None:
        return magnitudes.mean(1).mul_(_INT2_STEP)
    largest = _LARGEST_CODE[values]
    if noise is not None and noise.dithers:
        largest = math.floor(largest) + 0.5
    return magnitudes.amax(1).div_(largest)


def _steps_up(steps: torch.Tensor) -> torch.Tensor:
    """Return positive float32 numbers (overwritten) as bfloat16, rounded up; of Inf and NaN what is no step."""
    bits = steps.clamp_min_(MIN_STEP).view(torch.int32)
    return bits.add_(0xFFFF).bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16)


def _packed(values: Values, y: torch.Tensor, noise: Noise | None, start: int) -> tuple[torch.Tensor, ...]:
    """Return the planes (b, bytes) of quotients `y` (b, 64), which is overwritten; `start`: its first element."""
    if values is Values.FP8:
        return (y.to(torch.float8_e4m3fn).view(torch.uint8),)
    codes = _codes(values, y, noise, start)
    match _WITH_PLANES_OF.get(values, values):
        case Values.INT8:
            return (codes.view(torch.uint8),)
        case Values.INT6:
            return _pack_4(codes >> 2), _pack_2(codes & 3)
        case Values.INT5:
            return _pack_4(codes >> 1), _pack_1(codes & 1)
        case Values.INT3:
            return _pack_2((codes >> 1) & 3), _pack_1(codes & 1)
        case Values.INT2:
            return (_pack_2(codes),)
    return (_pack_4(codes),)


def _unpacked(values: Values, planes: list[torch.Tensor]) -> torch.Tensor:
    """Return the codes (b, 64) as int8."""
    match _WITH_PLANES_OF.get(values, values):
        case Values.INT8:
            return planes[0].view(torch.int8)
        case Values.INT6:
            return (_unpack_4(planes[0]) << 2).bitwise_or_(_unpack_2(planes[1]))
        case Values.INT5:
            return (_unpack_4(planes[0]) << 1).bitwise_or_(_unpack_1(planes[1]))
        case Values.INT3:
            return (_unpack_2(planes[0]).bitwise_xor_(2).sub_(2) << 1).bitwise_or_(_unpack_1(planes[1]))
        case Values.INT2:
            return _unpack_2(planes[0])
    return _unpack_4(planes[0])


def _codes(values: Values, y: torch.Tensor, noise: Noise | None, start: int) -> torch.Tensor:
    """Return the codes (b, 64) of quotients as int8, of int2 from 0; `y` is overwritten."""
    lowest = 2 if values is Values.INT2 else 0
    if noise is not None:
        y.add_(lowest - 0.5 if noise.dithers or values is Values.INT2 else 0.0)
        noise.add_to(y.view(-1), start)
        y.floor_()
    elif values is Values.INT2:
        y.add_(lowest).floor_().clamp_(0, 3)
    else:
        y.round_()
    return y.to(torch.int8)


def _pack_1(codes: torch.Tensor) -> torch.Tensor:
    """Pack int8 codes of 0 and 1, eight to a byte, the first lowest."""
    eight = codes.view(torch.int64)  # code i is bit 8 i; times 2^(56 - 7 i) it is bit 56 + i, and nothing collides
    return (eight * 0x0102040810204080 >> 56).to(torch.uint8)


def _unpack_1(codes: torch.Tensor) -> torch.Tensor:
    """Return int8 codes of 0 and 1, eight times as many as bytes."""
    copies = codes.to(torch.int64) * 0x0101010101010101
    return (copies.bitwise_and_(_DIAGONAL).view(torch.uint8) != 0).view(torch.int8)


_DIAGONAL = 0x8040201008040201 - 2**64  #: bit i of byte i


def _pack_4(codes: torch.Tensor) -> torch.Tensor:
    """Pack int8 codes of -8..7 in pairs: the first in the low half of a byte."""
    pair = codes.view(torch.int16)  # second << 8 | first
    return (pair & 0x0F).bitwise_or_((pair >> 4) & 0xF0).to(torch.uint8)


def _unpack_4(codes: torch.Tensor) -> torch.Tensor:
    """Return int8 codes, twice as many as bytes."""
    wide = codes.view(torch.int8).to(torch.int16)  # sign-extended: the second code is wide >> 4
    low = ((wide << 12) >> 12).bitwise_and_(0xFF)
    return low.bitwise_or_((wide >> 4) << 8).view(torch.int8)


def _pack_2(codes: torch.Tensor) -> torch.Tensor:
    """Pack int8 codes of 0..3, four to a byte, the first lowest."""
    pair = codes.view(torch.int16)
    nibbles = (pair | (pair >> 6)).to(torch.int8).bitwise_and_(0x0F).view(torch.int16)
    return (nibbles | (nibbles >> 4)).to(torch.uint8)


def _unpack_2(codes: torch.Tensor) -> torch.Tensor:
    """Return int8 codes of 0..3, four times as many as bytes."""
    wide = codes.to(torch.int16)
    nibbles = ((wide & 0x0F) | ((wide & 0xF0) << 4)).view(torch.int8).to(torch.int16)
    return ((nibbles & 0x03) | ((nibbles & 0x0C) << 6)).view(torch.int8)


def _half_of_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """Return e4m3 numbers / 256 as float16: the same bits at another exponent bias (7 against 15).

    Done on the bits because torch's own conversion is many times slower on a CPU.
    """
    wide = codes.view(torch.int8).to(torch.int16)
    return (wide << 7).bitwise_and_(-0x4001).view(torch.float16)


def hadamard(x: torch.Tensor, out: torch.Tensor, work: torch.Tensor) -> torch.Tensor:
    """Return `out`, the orthonormal, symmetric Hadamard transform of blocks (b, 64); `work` may be `x`, and is lost.

    The matrix is the Kronecker product of one of four rows and one of sixteen: a small product and two rounds of sums
    take half the time of the whole one.
    """
    torch.mm(x.view(-1, _SIXTEEN), _hadamard_sixteen(x.device), out=out.view(-1, _SIXTEEN))
    one, other = out.view(-1, 4, _SIXTEEN), work.view(-1, 4, _SIXTEEN)
    torch.add(one[:, 0::2], one[:, 1::2], out=other[:, 0::2])
    torch.sub(one[:, 0::2], one[:, 1::2], out=other[:, 1::2])
    torch.add(other[:, :2], other[:, 2:], out=one[:, :2])
    torch.sub(other[:, :2], other[:, 2:], out=one[:, 2:])
    return out


@lru_cache(maxsize=8)
def _hadamard_sixteen(device: torch.device) -> torch.Tensor:
    """Return the symmetric Hadamard matrix (16, 16), scaled so that the transform of 64 is orthonormal."""
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    matrix = torch.ones(1, 1)
    while len(matrix) < _SIXTEEN:
        matrix = torch.kron(two, matrix)
    return (matrix / math.sqrt(BLOCK)).to(device)
