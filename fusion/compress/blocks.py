"""Blocks of 64 numbers as small integers and one step each.

A step is a bf16, rounded up: step * largest code >= largest element. A block of zeros has the step MIN_STEP, which
decodes to exact zeros.

n numbers, B = ceil(n / 64) blocks; tensors over a chunk have the shape (b, 64)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

import torch

from fusion.base.errors import WireError
from fusion.compress.catalog import BITS, BLOCK, Values
from fusion.compress.noise import Noise

_CHUNK_BLOCKS = 1 << 12  #: worked on at a time, so that temporaries stay in the cache
MIN_STEP = 2.0**-100
MAX_STEP = 2.0**110  #: a bfloat16; tensors beyond travel as they are; keeps every sum in here finite
_LARGEST_CODE = {Values.INT8: 127, Values.INT4: 7, Values.HADAMARD4: 7, Values.FP8: 448}
#: Keeps code + noise below the next integer in spite of float32 rounding.
_INWARDS = 1 - 2.0**-20
#: Best step of four equidistant levels for normal numbers, in units of their mean magnitude (Max 1960: 0.9957 sigma).
_INT2_STEP = 0.9957 * math.sqrt(math.pi / 2)


def encode_blocks(values: Values, flat: torch.Tensor, noise: Noise | None) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return (codes uint8 (B * 64 * bits / 8), steps bfloat16 (B)) of 1-D floats.

    None if one of them is Inf, NaN or too large. With noise, codes are the true quotients in the mean.
    """
    blocks = -(-flat.numel() // BLOCK)
    steps = torch.empty(blocks, dtype=torch.bfloat16, device=flat.device)
    codes = torch.empty(blocks, BLOCK * BITS[values] // 8, dtype=torch.uint8, device=flat.device)
    work = torch.empty(2, min(blocks, _CHUNK_BLOCKS), BLOCK, device=flat.device)
    for first, x in _chunks(flat):
        part, y = slice(first, first + len(x)), work[0, : len(x)]
        turned = _turned(values, x, work[1, : len(x)])
        torch.abs(turned, out=y)
        steps[part] = rounded = _steps_up(_exact_steps(values, y, noise is not None))
        torch.mul(turned, (_INWARDS / rounded.float())[:, None], out=y)
        codes[part] = _codes(values, y, noise, first * BLOCK)
    return (codes.view(-1), steps) if _are_steps(steps.float()) else None


def decode_blocks(values: Values, codes: torch.Tensor, steps: torch.Tensor, out: torch.Tensor) -> None:
    """Write the numbers (B * 64) of `codes` and `steps` into float32 `out`; WireError for a step that none can be."""
    scale = steps.float()
    if not _are_steps(scale):
        raise WireError(f"{values}: a step is not a number from {MIN_STEP} to {MAX_STEP}")
    scale = torch.where(scale > MIN_STEP, scale, 0.0)[:, None]
    codes = codes.view(len(scale), -1)
    out = out.view(-1, BLOCK)
    for first in range(0, len(scale), _CHUNK_BLOCKS):
        part = slice(first, first + _CHUNK_BLOCKS)
        _decode_chunk(values, codes[part], scale[part], out[part])


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


def _turned(values: Values, x: torch.Tensor, work: torch.Tensor) -> torch.Tensor:
    return torch.matmul(x, hadamard(x.device), out=work) if values is Values.HADAMARD4 else x


def _decode_chunk(values: Values, codes: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    if values is Values.FP8:
        torch.mul(_half_of_e4m3(codes), scale * 256, out=out)
    elif values is Values.INT2:
        out.copy_(_unpack_2(codes))
        out.sub_(1.5).mul_(scale)
    elif values is Values.INT8:
        out.copy_(codes.view(torch.int8)).mul_(scale)
    elif values is Values.INT4:
        out.copy_(_unpack_4(codes)).mul_(scale)
    else:
        x = _unpack_4(codes).float().mul_(scale)
        torch.matmul(x, hadamard(out.device), out=out)


def _exact_steps(values: Values, magnitudes: torch.Tensor, stochastic: bool) -> torch.Tensor:
    """Return the step (b,) of each block of magnitudes (b, 64)."""
    if values is Values.INT2:
        return magnitudes.amax(1).div_(1.5) if stochastic else magnitudes.mean(1).mul_(_INT2_STEP)
    return magnitudes.amax(1).div_(_LARGEST_CODE[values])


def _steps_up(steps: torch.Tensor) -> torch.Tensor:
    """Return positive float32 numbers (overwritten) as bfloat16, rounded up; of Inf and NaN what is no step."""
    bits = steps.clamp_min_(MIN_STEP).view(torch.int32)
    return bits.add_(0xFFFF).bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16)


def _codes(values: Values, y: torch.Tensor, noise: Noise | None, start: int) -> torch.Tensor:
    """Return the packed codes (b, bytes) of quotients `y` (b, 64), which is overwritten; `start`: its first element."""
    if values is Values.FP8:
        return y.to(torch.float8_e4m3fn).view(torch.uint8)
    if values is Values.INT2:
        if noise is None:
            y.add_(2).floor_().clamp_(0, 3)
        else:
            y.add_(1.5)
            noise.add_to(y.view(-1), start)
            y.floor_()
        return _pack_2(y.to(torch.int8))
    if noise is None:
        y.round_()
    else:
        noise.add_to(y.view(-1), start)
        y.floor_()
    codes = y.to(torch.int8)
    return codes.view(torch.uint8) if values is Values.INT8 else _pack_4(codes)


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


@lru_cache(maxsize=8)
def hadamard(device: torch.device) -> torch.Tensor:
    """Return the orthonormal, symmetric Hadamard matrix (64, 64)."""
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    matrix = torch.ones(1, 1)
    while len(matrix) < BLOCK:
        matrix = torch.kron(two, matrix)
    return (matrix / math.sqrt(BLOCK)).to(device)
