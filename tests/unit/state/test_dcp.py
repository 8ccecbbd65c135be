"""Torch's own functions for the state dicts of models, given models with units of this package."""

import pytest
import torch
import torch.distributed.checkpoint.state_dict as stock
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from hpcfsdp import state_dict as ours
from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.errors import StateDictError
from hpcfsdp.fsdp import FullyShardedDataParallel

FULL = StateDictOptions(full_state_dict=True)
FROM_RANK0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
TRAINED = StateDictOptions(ignore_frozen_params=True)


def make(*, around, original, frozen=False):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    plain[0].requires_grad_(not frozen)
    model = FullyShardedDataParallel(plain, FakeCommunicator(), use_orig_params=original)
    root = nn.ModuleDict({"model": model}) if around else model
    return root, torch.optim.AdamW(model.parameters())


OF_OPTIMIZERS = {
    "get_optimizer_state_dict": lambda m, o, options: stock.get_optimizer_state_dict(m, o, options=options),
    "set_optimizer_state_dict": lambda m, o, options: stock.set_optimizer_state_dict(m, o, {}, options=options),
    "get_state_dict": lambda m, o, options: stock.get_state_dict(m, o, options=options),
    "set_state_dict": lambda m, o, options: stock.set_state_dict(
        m, [o], model_state_dict={}, optim_state_dict={}, options=options
    ),
}


@pytest.mark.parametrize("around", [False, True], ids=["unit", "plain module"])
@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
@pytest.mark.parametrize("options", [None, FULL, FROM_RANK0], ids=["none", "full", "from rank 0"])
@pytest.mark.parametrize("name", OF_OPTIMIZERS)
def test_shards_that_an_optimizer_steps_are_not_taken_for_parameters(name, options, original, around):
    model, optimizer = make(around=around, original=original)
    with pytest.raises(
        StateDictError, match=rf"the shards that .* as whole parameters: call hpcfsdp\.state_dict\.{name},"
    ):
        OF_OPTIMIZERS[name](model, optimizer, options)
    assert callable(getattr(ours, name))
    assert not optimizer.state


@pytest.mark.parametrize("around", [False, True], ids=["unit", "plain module"])
@pytest.mark.parametrize("options", [FULL, FROM_RANK0], ids=["full", "from rank 0"])
def test_flat_parameters_are_not_taken_for_the_models_own(options, around):
    model, _ = make(around=around, original=False)
    with pytest.raises(
        StateDictError, match=r"would treat flat parameters .*hpcfsdp\.state_dict\.set_model_state_dict,"
    ):
        stock.set_model_state_dict(model, dict(model.state_dict()), options=options)


@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
@pytest.mark.filterwarnings("ignore:Getting submodules only")
def test_names_of_wrappers_are_not_taken_for_those_of_state_dicts(original):
    model, _ = make(around=False, original=original, frozen=True)
    for arguments in ({"options": TRAINED}, {"submodules": {model.module[1]}}):
        with pytest.raises(StateDictError, match=r"names of wrappers .* hpcfsdp\.state_dict\.get_model_state_dict,"):
            stock.get_model_state_dict(model, **arguments)
    trained, _ = make(around=True, original=original)
    assert list(stock.get_model_state_dict(trained, options=TRAINED)) == list(trained.state_dict())
    assert stock.set_model_state_dict(trained, trained.state_dict()) == ([], [])
    assert list(stock.get_state_dict(trained, [])[0]) == list(trained.state_dict())
