import contextlib
import difflib

import pytest
import torch
from torch.distributed import utils as stock

from hpcfsdp import _compat, errors
from hpcfsdp.errors import HpcfsdpError, nearest, needs_extra, p_assert, rebuild

EXIT_CODES = {
    "HpcfsdpError": 1,
    "UsageError": 2,
    "LaunchError": 3,
    "CommunicationError": 1,
    "DifferentCallsError": 1,
    "CrossedCallsError": 1,
    "HangError": 76,
    "RankLostError": 75,
    "DataError": 1,
    "EngineError": 1,
    "StateDictError": 1,
    "ShardingError": 1,
    "CheckpointError": 1,
    "CheckpointMismatchError": 1,
    "CheckpointCorruptError": 4,
    "CheckpointReplacedError": 1,
    "DisagreementError": 1,
}


def test_every_error_is_one_of_these():
    kinds = {name: value for name, value in vars(errors).items() if isinstance(value, type)}
    found = {name for name, kind in kinds.items() if issubclass(kind, Exception) and not issubclass(kind, Warning)}
    assert found == set(EXIT_CODES)


@pytest.mark.parametrize(("name", "code"), EXIT_CODES.items())
def test_each_error_has_its_exit_code_and_the_common_base(name, code):
    error = getattr(errors, name)("text")
    assert isinstance(error, HpcfsdpError)
    assert isinstance(error, RuntimeError)  # what torch raises for misuse, and what programs catch
    assert (error.exit_code, error.raised_on_all_ranks, str(error)) == (code, False, "text")


def test_errors_of_checkpoints_are_checkpoint_errors():
    assert issubclass(errors.CheckpointMismatchError, errors.CheckpointError)
    assert issubclass(errors.CheckpointCorruptError, errors.CheckpointError)
    assert not issubclass(errors.CheckpointMismatchError, errors.CheckpointCorruptError)


@pytest.mark.parametrize("name", ["StateDictError", "ShardingError"])
def test_what_torch_raises_a_value_error_for_is_one_here(name):
    assert issubclass(getattr(errors, name), ValueError)


@pytest.mark.parametrize("name", EXIT_CODES)
def test_an_error_is_rebuilt_from_its_name_and_message(name):
    error = rebuild(name, "rank 1: text")
    assert type(error) is getattr(errors, name)
    assert str(error) == "rank 1: text"


@pytest.mark.parametrize("name", ["OSError", "KeyError", "rebuild", "Unheard", "__name__"])
def test_a_foreign_name_is_rebuilt_as_the_base(name):
    assert type(rebuild(name, "text")) is HpcfsdpError


def test_marking_one_error_as_collective_leaves_the_others():
    error = HpcfsdpError("text")
    error.raised_on_all_ranks = True
    assert not HpcfsdpError("other").raised_on_all_ranks


def test_what_holds_is_not_spoken_of(capsys):
    assert p_assert([0], "text") is None
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("condition", [False, None, [], 0, torch.tensor(False)])
def test_what_does_not_hold_is_printed_with_the_stack_and_raised(capsys, condition):
    def where_it_went_wrong():
        p_assert(condition, "the text")

    with pytest.raises(AssertionError, match=r"^the text$"):
        where_it_went_wrong()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("AssertionError: the text\n")
    assert "where_it_went_wrong" in err.splitlines()[-2]
    assert "p_assert(condition" in err.splitlines()[-1]


@pytest.mark.parametrize("place", ["hook", "end of backward"])
def test_it_is_printed_inside_of_callbacks_of_autograd(capsys, place):
    def check(*_grads):
        p_assert(False, "the text")

    x = torch.ones(1, requires_grad=True)
    x.register_hook(check if place == "hook" else lambda _grad: _compat.call_after_backward(check))
    with contextlib.suppress(AssertionError):  # as the program might
        x.sum().backward()
    err = capsys.readouterr().err
    assert err.startswith("AssertionError: the text\n")
    assert "in check" in err


def test_torch_splits_message_and_stack_between_stdout_and_stderr(capsys):
    """The message is lost where stdout is that of a program, or is buffered when the process is ended."""
    with pytest.raises(AssertionError):
        stock._p_assert(False, "the text")
    out, err = capsys.readouterr()
    assert "the text" in out
    assert not err.startswith("the text")


def test_of_many_names_the_nearest_is_looked_for_among_a_few(monkeypatch):
    known = [f"model/layers.{layer}.block.{block}.q_proj.weight" for layer in range(100) for block in range(100)]
    compared = []
    matches = difflib.get_close_matches

    def counted(name, candidates, **options):
        compared.append(len(candidates))
        return matches(name, candidates, **options)

    monkeypatch.setattr(difflib, "get_close_matches", counted)
    for wrong in ("model/layers.51.blck.77.q_proj.weight", "model/layers.51.block.77.q_porj.weight"):
        assert nearest(wrong, known) == "; did you mean 'model/layers.51.block.77.q_proj.weight'?"
    assert nearest("nothing like it", known) == ""
    assert nearest("", known) == ""
    assert nearest("lr", [f"x{place}" for place in range(1000)] + ["train.optimizer.lr"]) == (
        "; did you mean 'train.optimizer.lr'?"
    )
    assert max(compared) <= 100


def test_a_package_of_an_extra_that_is_missing_is_named_with_the_remedy():
    match = r"^a page needs .*no_such_package.*pip install 'hpcfsdp\[cli\]'$"
    with pytest.raises(HpcfsdpError, match=match), needs_extra("cli", "a page"):
        import no_such_package  # noqa: F401
