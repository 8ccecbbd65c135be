import random

import numpy as np
import pytest
import torch

from hpcfsdp.checkpoint.saving import rng
from hpcfsdp.comm.fake import FakeCommunicator

CPU = torch.device("cpu")


def draw():
    """Numbers of every generator; an odd count of normal ones, so that a second half stays behind."""
    return [
        torch.rand(3).tolist(),
        torch.randn(5).tolist(),
        np.random.rand(3).tolist(),
        [np.random.randn() for _ in range(3)],
        [random.random() for _ in range(3)],
        [random.gauss(0, 1) for _ in range(3)],
    ]


@pytest.fixture(autouse=True)
def keep_generators():
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def test_every_generator_goes_on_where_it_was():
    rng.reseed(5)
    draw()
    states = rng.capture(CPU)
    expected = draw()
    rng.reseed(6)
    rng.restore(states, CPU)
    assert draw() == expected


def test_the_kept_half_of_a_pair_of_normal_numbers_is_restored():
    rng.reseed(7)
    random.gauss(0, 1)
    np.random.randn()
    states = rng.capture(CPU)
    expected = random.gauss(0, 1), np.random.randn()
    random.random()
    np.random.rand()
    rng.restore(states, CPU)
    assert (random.gauss(0, 1), np.random.randn()) == expected


def test_states_are_arrays_of_numbers_and_a_copy():
    states = rng.capture(CPU)
    assert sorted(states) == ["numpy", "python", "torch_cpu"]
    assert [states[kind].dtype.kind for kind in sorted(states)] == ["f", "f", "u"]
    before = {kind: array.copy() for kind, array in states.items()}
    draw()
    assert all(np.array_equal(states[kind], before[kind]) for kind in states)


def test_a_generator_without_a_state_stays_as_it_is():
    rng.reseed(8)
    expected = draw()
    rng.reseed(8)
    rng.restore({}, CPU)
    assert draw() == expected


def test_reseeding_sets_all_generators_from_one_number_of_any_size():
    rng.reseed(2**64 - 1)
    first = draw()
    rng.reseed(2**64 - 1)
    assert draw() == first
    rng.reseed(2**64 - 2)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


def rows(count):
    """States of so many ranks, of different lengths and dtypes."""
    words = np.arange(count * 5, dtype=np.uint8).reshape(count, 5)
    return {"torch_cpu": words, "numpy": np.arange(count * 2, dtype=np.float64).reshape(count, 2) / 7}


def test_one_rank_gathers_the_states_of_all():
    mine = {kind: value[0] for kind, value in rows(1).items()}
    found = rng.gather(FakeCommunicator(0, 3), mine)
    assert found["torch_cpu"].tolist() == [mine["torch_cpu"].tolist()] * 3
    assert found["numpy"].dtype == np.float64 and found["numpy"].tolist() == [mine["numpy"].tolist()] * 3


@pytest.mark.parametrize(("rank", "row"), [(0, 0), (1, 1), (2, 2), (3, 2)])
def test_each_rank_gets_its_own_states_and_further_ones_the_last(rank, row):
    given = rows(3)

    class OfRank(FakeCommunicator):
        """Rank 0, which hands out what it would send to another one."""

        def _exchange(self, label, outputs, inputs, async_op):
            outputs[0].copy_(inputs[rank])

    found = rng.scatter(OfRank(0, 4), {kind: value[:0] for kind, value in given.items()}, given)
    assert {kind: value.tolist() for kind, value in found.items()} == {k: v[row].tolist() for k, v in given.items()}
