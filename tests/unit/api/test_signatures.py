"""What torch's FSDP offers, hpcfsdp offers in the same form."""

import inspect

import pytest
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.fsdp import sharded_grad_scaler, wrap as torch_wrap

from hpcfsdp import fsdp, wrap

Theirs, Ours = torch_fsdp.FullyShardedDataParallel, fsdp.FullyShardedDataParallel
FSDP2 = {
    *("CPUOffloadPolicy", "DataParallelMeshDims", "FSDPModule", "MixedPrecisionPolicy", "OffloadPolicy"),
    *("UnshardHandle", "fully_shard", "register_fsdp_forward_method", "share_comm_ctx"),
}
MEMBERS = sorted(name for name in vars(Theirs) if not name.startswith("_"))
WRITTEN_HERE = {"CommOptions", "FullyShardedDataParallel", "ShardedGradScaler"}


def kind(cls, name):
    """Static, class, or instance method, or property."""
    static = inspect.getattr_static(cls, name)
    return type(static).__name__ if isinstance(static, (staticmethod, classmethod, property)) else "method"


def parameters(function):
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def test_the_names_are_those_of_torch():
    assert set(fsdp.__all__) == set(torch_fsdp.__all__) - FSDP2 | {"CommOptions", "ShardedGradScaler"}
    assert set(wrap.__all__) == set(torch_wrap.__all__)


@pytest.mark.parametrize("name", sorted(set(fsdp.__all__) - WRITTEN_HERE))
def test_enums_and_configuration_classes_are_torchs_own(name):
    assert getattr(fsdp, name) is getattr(torch_fsdp, name)


@pytest.mark.parametrize("name", wrap.__all__)
def test_policies_are_torchs_own(name):
    assert getattr(wrap, name) is getattr(torch_wrap, name)


def test_the_scaler_passes_for_torchs():
    assert issubclass(fsdp.ShardedGradScaler, sharded_grad_scaler.ShardedGradScaler)


def test_there_is_something_to_compare():
    assert len(MEMBERS) > 20


def test_the_constructor_takes_what_torchs_takes():
    own, theirs = parameters(Ours.__init__), parameters(Theirs.__init__)
    assert own[: len(theirs)] == theirs
    of_this_package = [name for name, _, _ in own[len(theirs) :]]
    assert of_this_package == ["granularity", "comm_options", "reshard_after_forward"]


@pytest.mark.parametrize("name", MEMBERS)
def test_a_method_takes_what_torchs_takes(name):
    own = inspect.getattr_static(Ours, name, None)
    assert own is not inspect.getattr_static(nn.Module, name, None), f"{name} is missing"
    assert kind(Ours, name) == kind(Theirs, name)
    if kind(Theirs, name) == "property":
        return
    allowed = [parameters(getattr(Theirs, name))]
    if [p[1] for p in allowed[0][1:]] == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]:
        allowed.append(parameters(getattr(nn.Module, name)))  # what torch's passes on, spelled out
    assert parameters(getattr(Ours, name)) in allowed
