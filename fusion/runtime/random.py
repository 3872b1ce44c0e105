"""Randomness is a function of (job seed, step, micro-batch, operator), never of who runs it or when."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RandomKey:
    """Names the random numbers of one micro-batch."""

    seed: int
    step: int
    micro_batch: int

    def for_operator(self, position: int) -> int:
        """Return a 63-bit seed for the operator at `position` of the graph."""
        packed = struct.pack("<QQQQ", self.seed, self.step, self.micro_batch, position)
        return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1
