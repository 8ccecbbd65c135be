import pytest

from hpcfsdp.comm.agree import assert_same, raise_together, raise_together_over
from hpcfsdp.errors import CheckpointCorruptError, CrossedCallsError, DisagreementError, HpcfsdpError, UsageError


def failing(errors):
    """A body in which rank r raises ``errors[r]``, if there is one."""

    def body(comm):
        with raise_together(comm):
            if comm.rank in errors:
                raise errors[comm.rank]
        return "went on"

    return body


def test_nothing_is_raised_where_no_rank_fails(run_ranks):
    assert run_ranks(3, failing({})) == ["went on"] * 3


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_every_rank_raises_the_class_of_the_rank_that_failed_and_names_it(run_ranks, culprit):
    mine = CheckpointCorruptError("bad file")
    results = run_ranks(3, failing({culprit: mine}))
    assert [type(error) for error in results] == [CheckpointCorruptError] * 3
    assert [error.exit_code for error in results] == [4, 4, 4]
    assert [error.raised_on_all_ranks for error in results] == [True, True, True]
    assert results[culprit] is mine
    assert str(mine) == "bad file"
    assert {str(error) for error in results if error is not mine} == {f"rank {culprit}: bad file"}


def test_ranks_that_failed_raise_their_own_and_the_others_that_of_the_lowest(run_ranks):
    first, second = UsageError("one"), CheckpointCorruptError("two")
    results = run_ranks(3, failing({1: first, 2: second}))
    assert results[1:] == [first, second]
    assert type(results[0]) is UsageError
    assert str(results[0]) == "rank 1: one"


def test_a_rank_whose_peers_are_in_another_call_does_not_ask_them():
    crossed = CrossedCallsError("rank 0 is in one call, rank 1 in another")
    with pytest.raises(CrossedCallsError) as caught, raise_together(None):  # which has no methods
        raise crossed
    assert caught.value is crossed


def test_a_foreign_error_reaches_the_others_by_class_and_message(run_ranks):
    mine = FileNotFoundError("no such file")
    results = run_ranks(3, failing({1: mine}))
    assert results[1] is mine
    for error in (results[0], results[2]):
        assert type(error) is HpcfsdpError
        assert str(error) == "rank 1: FileNotFoundError: no such file"
        assert error.exit_code == 1
    assert [error.raised_on_all_ranks for error in results] == [True, True, True]


def test_a_subclass_that_others_do_not_know_reaches_them_as_the_base_class(run_ranks):
    class OwnError(HpcfsdpError):
        pass

    results = run_ranks(2, failing({0: OwnError("x")}))
    assert [type(error) for error in results] == [OwnError, HpcfsdpError]
    assert str(results[1]) == "rank 0: OwnError: x"


def test_assert_same_is_silent_about_equal_values(run_ranks):
    assert run_ranks(3, lambda comm: assert_same(comm, ("a", 1), "the plan")) == [None] * 3


def test_assert_same_names_what_differs_and_the_first_rank_where_it_does(run_ranks):
    results = run_ranks(3, lambda comm: assert_same(comm, "b" if comm.rank else "a", "the plan"))
    for error in results:
        assert type(error) is DisagreementError
        assert str(error) == "the plan differs between ranks: rank 0 has a, rank 1 has b"
        assert error.raised_on_all_ranks


def test_an_error_reaches_all_ranks_of_a_grid(run_ranks):
    """Two lines, (0, 1) and (2, 3): rank 3 alone fails, which its line hears first and the other then."""
    across = {0: {}, 1: {}}

    def line(comm):
        def body(inner):
            with raise_together_over([inner]):
                if comm == 1 and inner.rank == 1:
                    raise UsageError("no")
            return "went on"

        return body

    for number in across:
        across[number] = run_ranks(2, line(number))
    assert across[0] == ["went on"] * 2
    first, second = across[1]
    assert str(first) == "rank 1: no"
    assert str(second) == "no"

    def column(comm):
        with raise_together_over([comm]):
            if comm.rank == 1:
                raise first  # which has been raised together, and says who it was
        return "went on"

    assert [str(error) for error in run_ranks(2, column)] == ["rank 1: no"] * 2
