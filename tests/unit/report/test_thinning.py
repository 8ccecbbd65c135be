"""Curves with fewer points."""

import numpy as np
from hypothesis import given, strategies

from hpcfsdp.report.thinning import averaged, spaced, thinned

curves = strategies.lists(strategies.floats(-1e6, 1e6), min_size=1, max_size=400)


@given(curves, strategies.integers(1, 30))
def test_extremes_stay_and_steps_increase(values, bins):
    steps, values = np.arange(10, 10 + len(values)), np.array(values)
    kept, found = thinned(steps, values, bins)
    assert len(kept) <= max(2 * bins, 1)
    assert (np.diff(kept) > 0).all()
    assert found.min() == values.min() and found.max() == values.max()
    assert np.array_equal(values[kept - 10], found)


def test_means_end_at_the_last_step():
    steps, values = np.arange(1000), np.stack([np.arange(1000.0), np.ones(1000)], axis=1)
    at, means = averaged(steps, values, 10)
    assert at.tolist() == [*range(99, 1000, 100)]
    assert means[0].tolist() == [49.5, 1.0]


def test_marks_on_top_of_each_other_are_one():
    assert len(spaced(np.arange(100_000), 50)) == 51
    assert spaced(np.array([5])).tolist() == [5]
    assert spaced(np.array([5, 5, 9])).tolist() == [5, 9]
