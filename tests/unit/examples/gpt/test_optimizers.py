import pytest
from hypothesis import given, strategies as st

from hpcfsdp.examples.gpt.optimizers import learning_rate
from hpcfsdp.examples.gpt.run_config import OptimConfig

CONFIG = OptimConfig(lr=0.8, min_lr=0.2, warmup_steps=4)


def test_the_warm_up_is_linear_and_ends_at_the_full_rate():
    assert [learning_rate(step, 25, CONFIG) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8])


def test_the_last_step_has_the_lowest_rate():
    assert learning_rate(24, 25, CONFIG) == pytest.approx(0.2)
    assert learning_rate(14, 25, CONFIG) == pytest.approx(0.5)


def test_without_a_warm_up_the_first_step_has_the_full_rate():
    assert learning_rate(0, 10, OptimConfig(lr=0.8, warmup_steps=0)) == 0.8


def test_steps_beyond_the_last_stay_at_the_lowest_rate():
    assert learning_rate(40, 25, CONFIG) == pytest.approx(0.2)


@given(st.integers(1, 50), st.integers(0, 60))
def test_rates_rise_then_fall_and_stay_between_zero_and_the_full_rate(steps, warmup):
    config = OptimConfig(lr=0.8, min_lr=0.2, warmup_steps=warmup)
    rates = [learning_rate(step, steps, config) for step in range(steps)]
    assert all(0 < rate <= 0.8 + 1e-12 for rate in rates)
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
