"""Random numbers for stochastic rounding: a pure function of the job's seed and the message, the same on every device."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import numpy as np
import torch

from fusion.compress.catalog import TensorRole

CHUNK = 1 << 18  #: elements that kernels work on at a time: their temporaries stay in the cache
_SHIFTS = 1 << 13  #: chunks start at different places of the noise
_STRIDE = 2731  #: odd, so that no feature of a common width meets its own noise in the next chunk


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
        numbers = struct.pack("<4q", self.job_seed, self.step, self.micro_batch, self.edge)
        digest = hashlib.blake2b(role.encode() + numbers, digest_size=8).digest()
        return int.from_bytes(digest, "little")


class Noise:
    """Numbers in (0, 1), of 16 bits each, for up to `count` elements; long tensors use them again, shifted."""

    def __init__(self, seed: int, count: int, device: torch.device) -> None:
        length = min(count, CHUNK) + (_SHIFTS if count > CHUNK else 0)
        words = np.random.SFC64(seed).random_raw(-(-length // 4)).view(np.int16)
        self._numbers = torch.from_numpy(words).to(device).float().add_(32768.5).mul_(1 / 65536)

    def of_chunk(self, start: int, count: int) -> torch.Tensor:
        """Return the numbers (count,) of the chunk that begins at element `start`."""
        shift = start // CHUNK * _STRIDE % _SHIFTS
        return self._numbers[shift : shift + count]
