"""Random numbers for stochastic rounding: a pure function of job and message, the same on every device."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from fusion.compress.catalog import BLOCK, TensorRole

_PERIOD = 1 << 15  #: elements after which a long tensor meets the same noise again, shifted
_STRIDE = 2731  #: by how far; odd, so that it is another feature whatever the tensor's width
_SHIFTS = 1 << 13


@dataclass(frozen=True, slots=True)
class Turn:
    """Which message a tensor belongs to. Encoding it again gives the same bytes."""

    job_seed: int
    step: int
    micro_batch: int
    edge: int
    expects_gradient: bool = True  #: False in evaluations: no mask is kept for a way back

    def seed(self, role: TensorRole) -> int:
        """Return the seed of this message's random numbers."""
        numbers = struct.pack("<Q3q", self.job_seed % 2**64, self.step, self.micro_batch, self.edge)
        digest = hashlib.blake2b(role.encode() + numbers, digest_size=8).digest()
        return int.from_bytes(digest, "little")


class Noise:
    """Numbers in (0, 1), of 16 bits each, for whole blocks of elements.

    The second half mirrors the first, so that their mean is 1/2 exactly and a tensor's errors add up to less.
    """

    def __init__(self, seed: int, count: int, device: torch.device, *, dithers: bool = False) -> None:
        self.dithers = dithers  #: whether the receiver takes the same numbers away again
        half = min(-(-count // BLOCK) * BLOCK, _PERIOD) // 2
        words = np.random.SFC64(seed).random_raw(half // 4).view(np.int16)
        numbers = torch.from_numpy(words).to(device).float().add_(32768.5).mul_(1 / 65536)
        again = numbers[: _SHIFTS if count > _PERIOD else 0]
        self._numbers = torch.cat((numbers, 1 - numbers, again))

    def add_to(self, flat: torch.Tensor, start: int) -> None:
        """Add the numbers of elements `start` and on to `flat`, 1-D."""
        for part, numbers in self._parts(flat, start):
            part.add_(numbers)

    def take_from(self, flat: torch.Tensor, start: int) -> None:
        """Subtract the same numbers."""
        for part, numbers in self._parts(flat, start):
            part.sub_(numbers)

    def _parts(self, flat: torch.Tensor, start: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        place = start
        while place < start + flat.numel():
            period, within = divmod(place, _PERIOD)
            part = flat[place - start : place - start + _PERIOD - within]
            first = period * _STRIDE % _SHIFTS + within
            yield part, self._numbers[first : first + part.numel()]
            place += part.numel()
