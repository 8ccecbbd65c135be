import pytest

from hpcfsdp import errors
from hpcfsdp.errors import HpcfsdpError, rebuild

EXIT_CODES = {
    "HpcfsdpError": 1,
    "UsageError": 2,
    "LaunchError": 3,
    "CommunicationError": 1,
    "DataError": 1,
    "EngineError": 1,
    "CheckpointError": 1,
    "CheckpointMismatchError": 1,
    "CheckpointCorruptError": 4,
    "DisagreementError": 1,
}


def test_every_error_is_one_of_these():
    found = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert found == set(EXIT_CODES)


@pytest.mark.parametrize(("name", "code"), EXIT_CODES.items())
def test_each_error_has_its_exit_code_and_the_common_base(name, code):
    error = getattr(errors, name)("text")
    assert isinstance(error, HpcfsdpError)
    assert (error.exit_code, error.collective, str(error)) == (code, False, "text")


def test_errors_of_checkpoints_are_checkpoint_errors():
    assert issubclass(errors.CheckpointMismatchError, errors.CheckpointError)
    assert issubclass(errors.CheckpointCorruptError, errors.CheckpointError)
    assert not issubclass(errors.CheckpointMismatchError, errors.CheckpointCorruptError)


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
    error.collective = True
    assert not HpcfsdpError("other").collective
