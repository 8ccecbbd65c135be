"""Permutations are permutations, with inverses, and look shuffled."""

import numpy as np
import pytest

from hpcfsdp.data.permutation import Permutation, keys_of


@pytest.mark.parametrize("length", [1, 2, 3, 5, 17, 1000, 65_536, 65_537, 100_003])
def test_each_number_once(length):
    permutation, numbers = Permutation(length, keys_of(0, length)[0]), np.arange(length)
    found = permutation(numbers)
    assert np.array_equal(np.sort(found), numbers)
    assert np.array_equal(permutation.inverse(found), numbers)


def test_keys_differ_by_seed_epoch_and_use():
    keys = {int(keys_of(*facts)[0]) for facts in [(0, 0), (0, 1), (1, 0), (0, 0, "blocks"), (-1, 0), (1 << 80, 0)]}
    assert len(keys) == 6


@pytest.mark.parametrize("length", [50_000, 500_000])
def test_places_and_numbers_do_not_follow_each_other(length):
    found = Permutation(length, keys_of(3, 1)[0])(np.arange(20_000))
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.03
    assert abs(np.corrcoef(np.arange(len(found)), found)[0, 1]) < 0.03
    counts = np.histogram(found, bins=20, range=(0, length))[0]
    assert counts.min() > 850
    assert counts.max() < 1150


def test_memory_does_not_grow_with_the_length():
    found = Permutation(10**12, keys_of(0, 0)[0])(np.arange(1000))
    assert len(set(found.tolist())) == 1000
    assert 0 <= found.min() < found.max() < 10**12
