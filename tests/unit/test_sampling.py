"""The sampler is a pure function: every pass a permutation, the same one for whoever asks, in whatever pieces."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fusion.runtime.sampling import micro_batch_ids, sample_ids

# From another implementation of the same definition, in plain Python integers.
FIXED_1000 = [97, 61, 822, 152, 283, 5, 255, 183]
FIXED_LARGE = [989022588237, 819286919706, 522190414968]


@pytest.mark.parametrize("samples", [1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 1000, 4097])
def test_every_pass_holds_each_id_once(samples: int) -> None:
    for passed in range(3):
        ids = sample_ids(11, samples, True, passed * samples, samples)
        assert sorted(ids.tolist()) == list(range(samples))


def test_without_shuffling_the_ids_count_up_and_start_again() -> None:
    assert sample_ids(3, 5, False, 3, 7).tolist() == [3, 4, 0, 1, 2, 3, 4]


def test_any_piece_equals_the_same_piece_of_the_whole() -> None:
    whole = sample_ids(7, 100, True, 0, 350).tolist()
    pieces = [sample_ids(7, 100, True, first, 7).tolist() for first in range(0, 350, 7)]
    assert list(itertools.chain(*pieces)) == whole


def test_order_depends_on_seed_and_on_pass() -> None:
    first = sample_ids(1, 1000, True, 0, 1000).tolist()
    assert first != sample_ids(2, 1000, True, 0, 1000).tolist()
    assert first != sample_ids(1, 1000, True, 1000, 1000).tolist()
    assert first != list(range(1000))


def test_p15_order_is_fixed_for_ever() -> None:
    """A resumed job, on other nodes or after an update of this package, must meet the samples it left off at."""
    assert sample_ids(5, 1000, True, 0, 8).tolist() == FIXED_1000
    assert sample_ids(2**63 - 1, 2**40 + 1, True, 2**42, 3).tolist() == FIXED_LARGE


def test_every_place_is_as_likely_for_every_id() -> None:
    samples, seeds = 7, 1400
    counts = np.zeros((samples, samples))
    for seed in range(seeds):
        counts[np.arange(samples), sample_ids(seed, samples, True, 0, samples)] += 1
    expected = seeds / samples
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    # 36 degrees of freedom: a fair shuffle exceeds 80 about once in 30,000 such tests, and the seeds are fixed
    assert chi_squared < 80


def test_neighbours_do_not_stay_together() -> None:
    ids = sample_ids(9, 4096, True, 0, 4096)
    # of a random order, about 2 of 4095 neighbouring pairs differ by exactly one
    assert int((np.abs(np.diff(ids)) == 1).sum()) < 15


def test_huge_data_sets_need_no_memory() -> None:
    ids = sample_ids(1, 2**61 + 12345, True, 10**18, 1000)
    assert len(set(ids.tolist())) == 1000
    assert ids.min() >= 0
    assert ids.max() < 2**61 + 12345


def test_micro_batches_are_the_steps_samples_in_order() -> None:
    sizes = (3, 3, 2)
    ids = [micro_batch_ids(4, 50, True, sizes, step=6, micro_batch=number).tolist() for number in range(3)]
    assert [len(part) for part in ids] == [3, 3, 2]
    assert ids[0] + ids[1] + ids[2] == sample_ids(4, 50, True, 5 * 8, 8).tolist()


def test_p14_samples_of_a_step_do_not_depend_on_the_number_of_micro_batches() -> None:
    one = micro_batch_ids(4, 50, True, (8,), step=9, micro_batch=0).tolist()
    four = [micro_batch_ids(4, 50, True, (2, 2, 2, 2), step=9, micro_batch=number).tolist() for number in range(4)]
    assert list(itertools.chain(*four)) == one


@pytest.mark.parametrize(("samples", "first", "count"), [(0, 0, 1), (5, -1, 1), (5, 0, -1)])
def test_numbers_without_meaning_are_refused(samples: int, first: int, count: int) -> None:
    with pytest.raises(ValueError, match="no such samples"):
        sample_ids(0, samples, True, first, count)
