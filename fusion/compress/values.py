"""A dense run of numbers as the sections of a frame, in every way that `catalog.Values` names."""

from __future__ import annotations

import math
import struct

import torch

from fusion.base.errors import WireError
from fusion.compress import blocks
from fusion.compress.catalog import BLOCK, PLANES, Values, value_sections
from fusion.compress.frame import Buffer
from fusion.compress.noise import Noise
from fusion.compress.raw import memory_of

_SCALE = struct.Struct("<f")
_HALF_EXPONENT = 15  #: fp16: the largest magnitude is scaled to 2^14 .. 2^15, half of what it can hold


def encode_values(values: Values, flat: torch.Tensor, noise: Noise | None = None) -> list[Buffer] | None:
    """Return the sections of 1-D floats of any dtype and device.

    None where a number is Inf or NaN, or too large for these values. "none" and bf16 carry Inf and NaN, and bf16 makes
    Inf of what rounds to beyond 3.39e38.
    """
    if values is Values.NONE:
        return [memory_of(flat.to("cpu"))]
    if values is Values.BF16:
        return [memory_of(flat.to(torch.bfloat16).to("cpu"))]
    if values is Values.FP16:
        return _encode_half(flat)
    encoded = blocks.encode_blocks(values, flat, noise)
    if encoded is None:
        return None
    planes, steps = encoded
    return [memory_of(part.to("cpu")) for part in (*planes, steps)]


def decode_values(
    values: Values,
    sections: list[Buffer],
    count: int,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    out: torch.Tensor | None = None,
    dither: Noise | None = None,
) -> torch.Tensor:
    """Return the `count` numbers (1-D) that sections of the sizes `value_sections` hold; WireError if they cannot be.

    They have the dtype that the kernel works in; `as_dtype` makes another. Float32 `out` is used if it is given and has
    room for whole blocks. `dither`: what was added before rounding and shall be taken away.
    """
    if values is Values.NONE:
        return _over(sections[0], dtype, device)
    if values is Values.BF16:
        return _over(sections[0], torch.bfloat16, device)
    if values is Values.FP16:
        (scale,) = _SCALE.unpack(sections[1])
        if not (math.isfinite(scale) and scale > 0.0 and math.frexp(scale)[0] == 0.5):
            raise WireError(f"fp16: scale {scale} is not a power of two")
        return _over(sections[0], torch.float16, device).float().mul_(scale)
    padded = -(-count // BLOCK) * BLOCK
    if out is None or out.numel() < padded:
        out = torch.empty(padded, device=device)
    *planes, steps = sections
    codes = [_over(plane, torch.uint8, device) for plane in planes]
    blocks.decode_blocks(values, codes, _over(steps, torch.bfloat16, device), out[:padded], dither)
    return out[:count]


def as_dtype(flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers in the edge's dtype; what rounding has carried beyond its largest number becomes that number."""
    if flat.dtype == dtype:
        return flat
    if dtype in (torch.float16, torch.bfloat16):
        largest = torch.finfo(dtype).max
        flat = flat.clamp(-largest, largest)
    return flat.to(dtype)


def sizes(values: Values, count: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Return the bytes of each section of `count` numbers."""
    return value_sections(values, count, dtype.itemsize)


def is_blocked(values: Values) -> bool:
    """Whether `values` writes whole blocks of 64, so that decoding wants room for them."""
    return values in PLANES


def _encode_half(flat: torch.Tensor) -> list[Buffer] | None:
    """Scale by a power of two, which costs no precision, so that small gradients do not vanish."""
    x = flat.float()
    largest = float(torch.maximum(x.amax(), -x.amin())) if x.numel() else 0.0
    if not largest <= blocks.MAX_STEP:
        return None
    exponent = min(126, max(-126, _HALF_EXPONENT - math.frexp(largest)[1])) if largest else 0
    scaled = (x * 2.0**exponent).to(torch.float16)
    return [memory_of(scaled.to("cpu")), _SCALE.pack(2.0**-exponent)]


def _over(section: Buffer, dtype: torch.dtype, device: str | torch.device) -> torch.Tensor:
    """Return a tensor over a section's memory, or its copy on the device."""
    if not len(section):
        return torch.empty(0, dtype=dtype, device=device)
    return torch.frombuffer(section, dtype=dtype).to(device)
