import re

import pytest
import torch

from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.errors import HpcfsdpError
from tests.bench.optim_state import SHARDED, WAYS, Digest, Way, _times, analytic_bytes, check_same, digests

TO_RANK_0, _, _, FROM_FULL, FROM_SHARDED, *_ = WAYS


def test_names_of_calls():
    assert [str(way) for way in WAYS] == [
        "optim_state_dict, full on rank 0",
        "optim_state_dict, full",
        "optim_state_dict, sharded",
        "optim_state_dict_to_load, full",
        "optim_state_dict_to_load, sharded",
        "state_dict, full on rank 0",
        "state_dict, sharded",
    ]


def test_the_analytic_peak_of_gathering_is_the_result_on_rank_0_and_a_unit_everywhere():
    unit = 16 * 16 + 16
    shape = {"layers": 3, "width": 16, "ranks": 2, "itemsize": 1}
    assert analytic_bytes(TO_RANK_0, **shape, is_first=True) == 2 * 3 * unit + unit
    assert analytic_bytes(TO_RANK_0, **shape, is_first=False) == unit


@pytest.mark.parametrize("way", [FROM_FULL, FROM_SHARDED])
def test_the_analytic_peak_of_loading_is_a_shard_and_the_two_largest_parameters(way):
    unit = 16 * 16 + 16
    shape = {"width": 16, "ranks": 2, "is_first": False}
    assert analytic_bytes(way, layers=3, **shape, itemsize=1) == 3 * unit + 2 * 16 * 16
    assert analytic_bytes(way, layers=1, **shape) == 4 * (unit + 16 * 16 + 16)


TENSOR = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))


def test_digests_of_values_that_differ_by_rounding_agree():
    assert Digest.of(TENSOR).agrees_with(Digest.of(TENSOR * (1 + 1e-7)))


@pytest.mark.parametrize(
    "other", [TENSOR.flip(0), TENSOR * 1.001, TENSOR.T, TENSOR.double(), TENSOR + 1e-3], ids=lambda _: ""
)
def test_digests_of_other_values_shapes_and_dtypes_do_not_agree(other):
    assert not Digest.of(TENSOR).agrees_with(Digest.of(other))
    assert not Digest.of(TENSOR).agrees_with(None)


def test_every_value_of_a_state_dict_has_a_digest():
    found = dict(digests({"state": {0: {"moment": TENSOR, "step": 3}}, "param_groups": [{"params": [0, 1]}]}))
    assert found == {
        "/state/0/moment": Digest.of(TENSOR),
        "/state/0/step": 3,
        "/param_groups/0/params/0": 0,
        "/param_groups/0/params/1": 1,
    }


@pytest.mark.parametrize(
    ("mine", "its", "text"),
    [
        ({"a": 1, "b": 2}, {"a": 1, "b": 3}, "at b x has 2, y 3"),
        ({"a": 1}, {"a": 1, "b": 3}, "at b x has nothing, y 3"),
        ({"a": 1, "b": 2}, {"a": 1}, "at b x has 2, y nothing"),
        ({"a": Digest.of(TENSOR)}, {"a": None}, "at a x has Digest(shape=(5, 7)"),
        ({"a": None}, {"a": Digest.of(TENSOR)}, "at a x has None, y Digest(shape=(5, 7)"),
    ],
)
def test_the_first_difference_is_named(mine, its, text):
    check_same(TO_RANK_0, "x", mine, "y", dict(mine))
    with pytest.raises(HpcfsdpError, match=re.escape(f"optim_state_dict, full on rank 0: {text}")):
        check_same(TO_RANK_0, "x", mine, "y", its)


class Echoing(Way):
    """Returns the model as its state."""

    def __call__(self, trained, given):
        return {"state": trained}


@pytest.mark.slow
def test_engines_are_timed_if_their_results_agree():
    way = Echoing("state_dict", SHARDED)
    times = _times(FakeCommunicator(), way, {"a": {"x": TENSOR}, "b": {"x": TENSOR.clone()}}, repeats=3)
    assert {engine: len(one.seconds) for engine, one in times.items()} == {"a": 3, "b": 3}
    with pytest.raises(HpcfsdpError, match=r"state_dict, sharded: at /state/x a has .* b .* did not do the same work"):
        _times(FakeCommunicator(), way, {"a": {"x": TENSOR}, "b": {"x": TENSOR + 1}}, repeats=3)


class Loading(Way):
    """Returns the state of an optimizer with one key more."""

    def given(self, trained):
        return {"lost": 1}

    def __call__(self, trained, given):
        return {**trained.optimizer.state_dict(), **given}


def test_loaded_state_must_equal_the_state_of_the_optimizer():
    class Trained:
        optimizer = torch.optim.SGD([torch.nn.Parameter(TENSOR)])

    way = Loading("optim_state_dict_to_load", SHARDED)
    with pytest.raises(HpcfsdpError, match="at /lost a has 1, its optimizer nothing"):
        _times(FakeCommunicator(), way, {"a": Trained()}, repeats=1)
