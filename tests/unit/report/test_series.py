"""Records of steps as columns, and curves with fewer points."""

import math

import numpy as np
from hypothesis import given, strategies

from hpcfsdp.report.series import MOST_OTHERS, SeriesBuilder, averaged, spaced, thinned


def series_of(*records):
    builder = SeriesBuilder()
    added = [builder.add(record) for record in records]
    return builder.build(), added


def test_columns_have_a_value_for_each_step_and_gaps_where_a_record_has_none():
    series, added = series_of(
        {"step": 1, "loss": 3.0},
        {"step": 2, "lr": 0.5, "memory": {"peak_bytes": 7}},
        {"loss": 1.0},
        {"step": 3, "loss": 2.0, "note": "text", "ok": True},
    )
    assert added == [True, True, False, True]
    assert series.steps.tolist() == [1, 2, 3]
    assert np.array_equal(series.column("loss"), [3.0, math.nan, 2.0], equal_nan=True)
    assert np.array_equal(series.column("memory.peak_bytes"), [math.nan, 7, math.nan], equal_nan=True)
    assert np.array_equal(series.column("unknown"), [math.nan] * 3, equal_nan=True)
    assert [points.tolist() for points in series.points("loss")] == [[1, 3], [3.0, 2.0]]
    assert set(series.columns) == {"loss", "lr", "memory.peak_bytes"}
    assert series.last("loss") == 2.0 and series.last("unknown") is None


def test_the_later_record_of_a_step_counts():
    series, _ = series_of({"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}, {"step": 3}, {"step": 2, "loss": 5.0})
    assert series.steps.tolist() == [1, 2, 3]
    assert series.column("loss")[1] == 5.0
    assert series.replaced == 1


def test_a_loss_that_is_null_or_nan_is_not_finite_and_a_missing_one_is_only_missing():
    series, _ = series_of({"step": 1, "loss": None}, {"step": 2}, {"step": 3, "loss": math.nan}, {"step": 4, "loss": 1})
    assert series.not_finite.tolist() == [1, 3]


def test_a_name_that_a_record_gives_twice_does_not_shift_the_column():
    series, _ = series_of(
        {"step": 1, "memory": {"peak_bytes": 1}, "memory.peak_bytes": 9}, {"step": 2, "memory": {"peak_bytes": 2}}
    )
    assert series.column("memory.peak_bytes").tolist() == [1, 2]


def test_names_of_the_program_are_kept_up_to_a_number():
    series, _ = series_of(*({"step": step, f"own_{step}": 1.0} for step in range(MOST_OTHERS + 10)))
    assert len(series.others) == MOST_OTHERS


def test_hosts_of_stragglers_are_kept_by_rank():
    series, _ = series_of({"step": 1, "straggler": {"rank": 3, "host": "n1", "behind_s": 0.5}})
    assert series.hosts == {3: "n1"}
    assert series.column("straggler.behind_s").tolist() == [0.5]


def test_no_records_are_an_empty_series():
    series, _ = series_of()
    assert len(series) == 0 and not series.has("loss")


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
