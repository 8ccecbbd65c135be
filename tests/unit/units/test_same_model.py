import pytest
import torch

from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.errors import DifferentValuesWarning, DisagreementError
from hpcfsdp.params.layout import FlatLayout
from hpcfsdp.units.same_model import check_same_model, warn_of_values


def layouts(*params, dtype=torch.float32):
    return [FlatLayout.plan([(name, shape, ()) for name, shape in params], dtype, 2)]


def results_of(run_ranks, size, usual, other):
    """What comparing models (layouts, and whether they are trained) gives on each rank; the last has `other`."""

    def check(comm):
        check_same_model(comm, *(other if comm.rank == size - 1 else usual), range(size))

    return run_ranks(size, check)


def test_equal_models_agree(run_ranks):
    usual = layouts(("w", (2, 3))), [True]
    check_same_model(FakeCommunicator(), *usual, [0])
    assert results_of(run_ranks, 3, usual, usual) == [None] * 3


@pytest.mark.parametrize(
    ("other", "trained", "text"),
    [
        (layouts(("w", (2, 3)), ("b", (4,))), True, "1 rank 0 has b (3,) torch.float32 trained, rank 2 has b (4,) "),
        (layouts(("w", (2, 3)), ("c", (3,))), True, "1 rank 0 has b (3,) torch.float32 trained, rank 2 has c (3,) "),
        (layouts(("w", (2, 3))), True, "1 rank 0 has b (3,) torch.float32 trained, rank 2 has nothing"),
        (
            layouts(("w", (2, 3)), ("b", (3,)), dtype=torch.float64),
            True,
            "0 rank 0 has w (2, 3) torch.float32 trained, rank 2 has w (2, 3) torch.float64 trained",
        ),
        (
            layouts(("w", (2, 3)), ("b", (3,))),
            False,
            "0 rank 0 has w (2, 3) torch.float32 trained, rank 2 has w (2, 3) torch.float32 with requires_grad=False",
        ),
    ],
    ids=["shape", "name", "missing", "dtype", "requires_grad"],
)
def test_the_first_difference_between_models_is_named_on_every_rank(run_ranks, other, trained, text):
    usual = layouts(("w", (2, 3)), ("b", (3,))), [True]
    for error in results_of(run_ranks, 3, usual, (other, [trained])):
        assert type(error) is DisagreementError
        assert str(error).startswith(f"ranks wrap different models: as parameter {text}")


def test_models_with_other_tied_names_are_refused(run_ranks):
    tied = [FlatLayout.plan([("w", (2,), ("v",))], torch.float32, 2)]
    for error in results_of(run_ranks, 2, (layouts(("w", (2,))), [True]), (tied, [True])):
        assert type(error) is DisagreementError
        assert str(error) == "ranks wrap different models: rank 0 and rank 1 tie different parameters"


def renamed(names, **options):
    def check(comm):
        fqn, counted = names[comm.rank]
        return check_same_model(comm, layouts((fqn, (2,))), [True], (4, 5, 6), counted_fqns={fqn: counted}, **options)[
            1
        ]

    return check


def test_names_that_ignored_modules_shift_are_a_warning(run_ranks):
    with pytest.warns(UserWarning) as caught:
        results = run_ranks(3, renamed([("0.w", "0.w"), ("0.w", "0.w"), ("1.w", "0.w")]))
    assert results == [None] * 3
    assert {str(warning.message).split(",")[0] for warning in caught} == {
        "parameter 0 is called '0.w' on rank 4 and '1.w' on rank 6"
    }
    assert len(caught) == 3


def test_other_names_are_other_models(run_ranks):
    for error in run_ranks(3, renamed([("0.w", "0.w"), ("1.w", "0.w"), ("2.w", "2.w")])):
        assert type(error) is DisagreementError
        assert "rank 4 has 0.w (2,) torch.float32 trained, rank 6 has 2.w" in str(error)


TENSORS = {
    "float32": torch.arange(6.0),
    "strided": torch.arange(12.0).view(3, 4).t(),
    "bfloat16": torch.arange(6.0).bfloat16(),
    "complex": torch.arange(6.0).to(torch.complex64).conj(),
    "bool": torch.tensor([True, False]),
    "scalar": torch.tensor(3),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_the_first_value_that_differs_is_named_with_the_ranks(run_ranks, tensor):
    other = torch.zeros_like(tensor)

    def check(comm):
        mine = {"parameter 'w'": tensor.clone(), "parameter 'v'": other if comm.rank else tensor}
        mine["buffer 'b'"] = torch.full((2,), comm.rank)
        return check_same_model(comm, layouts(("w", (2,))), [True], (4, 5, 6), values=mine)[1]

    text = "parameter 'v' has other values on ranks 5, 6 than on rank 4"
    assert run_ranks(3, check) == [text] * 3


def test_values_that_some_ranks_do_not_have_are_not_compared(run_ranks):
    here = torch.ones(2)

    def check(comm, values):
        return check_same_model(comm, layouts(("w", (2,))), [True], (0, 1), values=values)[1]

    cases = [(None, {"w": here}), ({}, {"w": here}), ({"w": here}, {"w": here.clone()}), ({"w": here.to("meta")},) * 2]
    for case in cases:
        assert run_ranks(2, lambda comm, case=case: check(comm, case[comm.rank])) == [None, None]


def test_the_warning_says_what_to_do():
    with pytest.warns(DifferentValuesWarning, match=r"^w differs: .*sync_module_states=True.*torch.manual_seed"):
        warn_of_values("w differs", 1)
