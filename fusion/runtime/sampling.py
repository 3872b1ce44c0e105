"""Which samples a micro-batch holds: a pure function of the job's seed and the numbers, with no iterator to lose.

Consumed samples are numbered from 0 over the whole job: step s (from 1) consumes the `batch_size` numbers from
(s - 1) * batch_size. Pass k over the data set is the numbers k * samples .. (k + 1) * samples - 1, in an order of its
own. So resuming at a step, or on other nodes, needs nothing but the step's number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_ROUNDS = 8
_LEAST_HALF_BITS = 2  #: below 4 bits a Feistel network has too few different permutations
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)  # of the splitmix64 finaliser
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)


def sample_ids(seed: int, samples: int, shuffle: bool, first: int, count: int) -> Ids:
    """Return the ids (in 0..samples-1) of the consumed samples `first` .. `first + count - 1`.

    Every pass over the data holds each id once. With `shuffle` pass k has the order of permutation k of `seed`, else
    the order of the data. Memory is proportional to `count` alone. ValueError for numbers that make no sense.
    """
    if samples < 1 or first < 0 or count < 0:
        raise ValueError(f"no such samples: samples={samples}, first={first}, count={count}")
    ids = np.empty(count, dtype=np.int64)
    done = 0
    while done < count:
        passed, start = divmod(first + done, samples)
        length = min(count - done, samples - start)
        places = np.arange(start, start + length, dtype=np.uint64)
        ids[done : done + length] = _permuted(places, seed, passed, samples) if shuffle else places
        done += length
    return ids


def micro_batch_ids(
    seed: int, samples: int, shuffle: bool, sizes: Sequence[int], *, step: int, micro_batch: int
) -> Ids:
    """Return the ids of one micro-batch of `step` (from 1); `sizes` are the samples of each micro-batch of a step."""
    first = (step - 1) * sum(sizes) + sum(sizes[:micro_batch])
    return sample_ids(seed, samples, shuffle, first, sizes[micro_batch])


def _permuted(places: _Words, seed: int, passed: int, samples: int) -> _Words:
    """Apply pass `passed`'s permutation of 0..samples-1 to `places`.

    A Feistel network permutes the next power of four; results outside the range are put through it again (cycle
    walking), which ends inside the range because the network is a bijection.
    """
    half_bits = max(_LEAST_HALF_BITS, (max(1, samples - 1).bit_length() + 1) // 2)
    keys = _round_keys(seed, passed)
    result = _feistel(places, keys, half_bits)
    outside = np.flatnonzero(result >= samples)
    while outside.size:
        result[outside] = _feistel(result[outside], keys, half_bits)
        outside = outside[result[outside] >= samples]
    return result


def _round_keys(seed: int, passed: int) -> _Words:
    digest = hashlib.blake2b(f"fusion samples|{seed}|{passed}".encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _feistel(words: _Words, keys: _Words, half_bits: int) -> _Words:
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = words >> bits, words & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << bits) | right


def _mixed(words: _Words) -> _Words:
    words = (words ^ (words >> _SHIFT_1)) * _MIX_1
    words = (words ^ (words >> _SHIFT_2)) * _MIX_2
    mixed: _Words = words ^ (words >> _SHIFT_3)
    return mixed
