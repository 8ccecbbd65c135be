import copy

import pytest
import torch
from torch import nn

from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.errors import CheckpointError, CheckpointMismatchError
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.state.model import DTensorRanks
from hpcfsdp.state.optim import in_file
from hpcfsdp.state.optim.in_file import OptimizerRestore, local_state
from hpcfsdp.state.tensors import TensorInfo


def shard(module, comm=None, *, original=False):
    return FullyShardedDataParallel(module, process_group=comm or FakeCommunicator(), use_orig_params=original)


def trained(model, kind=torch.optim.AdamW, **arguments):
    """An optimizer after one step."""
    optimizer = kind(model.parameters(), **arguments)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer


def saved_of(state):
    return {tensor.name: TensorInfo(tensor.shape, tensor.dtype) for tensor in state.tensors}


def optimizer_state(model, optimizer, elsewhere=None):
    return in_file.optimizer_state(local_state(model, optimizer, optimizer.state), elsewhere or {}, DTensorRanks(model))


def state_elsewhere(comm, model, optimizer):
    _, gathered = in_file.gather_state(comm, model, optimizer, optimizer.state)
    return in_file.state_elsewhere(gathered)


def test_parameters_of_a_plain_model_stand_under_their_names():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
    optimizer = torch.optim.SGD([{"params": [model[1].bias]}, {"params": [model[0].weight, model[0].bias]}], lr=0.1)
    groups = optimizer_state(model, optimizer).groups
    assert [group["params"] for group in groups] == [["1.bias"], ["0.weight", "0.bias"]]


def test_a_parameter_of_another_model_is_refused_by_number_and_shape():
    model = nn.Linear(2, 3)
    groups = [{"params": [model.weight]}, {"params": [nn.Parameter(torch.zeros(4, 5))]}]
    with pytest.raises(
        CheckpointError, match=r"parameter 1 of the optimizer, of shape \(4, 5\), does not belong to the model"
    ):
        optimizer_state(model, torch.optim.SGD(groups, lr=0.1))


def test_an_optimizer_built_before_wrapping_is_refused():
    module = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(CheckpointError, match="build the optimizer from model"):
        optimizer_state(shard(module), optimizer)


@pytest.mark.parametrize("wrapper", [lambda module: module, shard])
def test_state_is_named_by_parameter_and_key_in_the_shape_of_the_parameter(wrapper):
    model = wrapper(nn.Linear(2, 3))
    state = optimizer_state(model, trained(model))
    assert {tensor.name: tensor.shape for tensor in state.tensors} == {
        "weight/step": (),
        "weight/exp_avg": (3, 2),
        "weight/exp_avg_sq": (3, 2),
        "bias/step": (),
        "bias/exp_avg": (3,),
        "bias/exp_avg_sq": (3,),
    }
    assert state.scalars == {}
    assert state.groups[0]["params"] == ["weight", "bias"]
    assert state.groups[0]["betas"] == (0.9, 0.999)


def test_numbers_are_scalars_of_each_parameter_and_none_is_nothing():
    model = shard(nn.Linear(2, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model._unit.sharded_params[0].parameter] = {"count": 3, "rate": 0.5, "done": True, "nothing": None}
    state = optimizer_state(model, optimizer)
    assert state.tensors == []
    assert state.scalars == {
        f"{fqn}/{key}": value
        for fqn in ("weight", "bias")
        for key, value in [("count", 3), ("rate", 0.5), ("done", True)]
    }


def test_a_value_of_another_type_is_refused_by_key_name_and_type():
    model = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.bias]["history"] = [1]
    with pytest.raises(CheckpointError) as caught:
        optimizer_state(model, optimizer)
    assert str(caught.value) == "optimizer state 'history' of 'bias' is a list: tensors and numbers can be saved"


def test_state_of_another_shape_than_the_shard_is_refused():
    model = shard(nn.Linear(2, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model._unit.sharded_params[0].parameter]["rows"] = torch.zeros(3)
    with pytest.raises(CheckpointError) as caught:
        optimizer_state(model, optimizer)
    assert str(caught.value) == (
        "optimizer state 'rows' of 'weight' has shape (3,), but must be a scalar or have the shape of the parameter "
        "that the optimizer steps, (12,)"
    )


def restored(model, optimizer, saved=None, scalars=None, groups=None, fill=None):
    """A restore of what `optimizer` holds now, changed as told, into a new optimizer."""
    state = optimizer_state(model, optimizer)
    groups = state.groups if groups is None else groups
    new = type(optimizer)(model.parameters(), lr=9.0)
    restore = OptimizerRestore(model, new, saved_of(state) if saved is None else saved, scalars or {}, groups)
    values = {tensor.name: tensor for tensor in state.tensors}
    for tensor in restore.tensors:
        for piece, source in zip(tensor.pieces, values[tensor.name].pieces, strict=True):
            assert (piece.start, piece.numel) == (source.start, source.numel)
            piece.fill((fill or {}).get(tensor.name, source.flat()))
    return new, restore


@pytest.mark.parametrize("wrapper", [lambda module: module, shard])
def test_restored_state_is_the_saved_one_and_in_place_only_after_apply(wrapper, same):
    model = wrapper(nn.Linear(2, 3))
    optimizer = trained(model, amsgrad=True)
    new, restore = restored(model, optimizer)
    restore.check()
    assert new.state_dict()["state"] == {}
    assert new.param_groups[0]["lr"] == 9.0
    restore.apply()
    assert same(new.state_dict(), optimizer.state_dict())


def test_a_step_count_stays_on_the_cpu_and_in_its_dtype():
    model = nn.Linear(2, 3)
    optimizer = trained(model)
    new, restore = restored(model, optimizer)
    restore.check()
    restore.apply()
    step = new.state[model.weight]["step"]
    assert (step.device.type, step.dtype, step.item()) == ("cpu", torch.float32, 1)


def test_steps_that_differ_within_one_shard_are_refused():
    model = shard(nn.Linear(2, 3))
    _, restore = restored(model, trained(model), fill={"bias/step": torch.tensor([7.0])})
    with pytest.raises(CheckpointMismatchError) as caught:
        restore.check()
    message = str(caught.value)
    assert "'step' is 1.0 (torch.float32) for 'weight' and 7.0 (torch.float32) for 'bias', which share one" in message


def error_of(model, saved, scalars=None, groups=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    groups = groups or [{"params": ["weight", "bias"], "lr": 0.1}]
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(CheckpointMismatchError) as caught:
        OptimizerRestore(model, optimizer, saved, scalars or {}, groups)
    assert optimizer.state_dict() == before
    return str(caught.value)


TWO_BY_THREE, THREE = TensorInfo((3, 2), torch.float32), TensorInfo((3,), torch.float32)


@pytest.mark.parametrize(
    ("saved", "scalars", "text"),
    [
        ({"weight/m": TWO_BY_THREE}, {}, "there is state of 'weight' (m) and none of 'bias', which share"),
        ({"weight/m": TWO_BY_THREE, "bias/v": THREE}, {}, "there is state 'm' of 'weight' and none of 'bias'"),
        (
            {"weight/m": TWO_BY_THREE, "bias/m": TensorInfo((3,), torch.float64)},
            {},
            "is a torch.float32 tensor of shape (3, 2), of 'bias' a torch.float64 tensor of shape (3,), which share",
        ),
        ({"weight/m": THREE, "bias/m": THREE}, {}, "state 'm' of 'weight' has shape (3,), and the parameter (3, 2)"),
        ({}, {"weight/count": 1, "bias/count": 2}, "state 'count' is 1 for 'weight' and 2 for 'bias'"),
        ({"weight/m": TWO_BY_THREE}, {"bias/m": 2}, "tensor of shape (3, 2), of 'bias' a int (2)"),
    ],
)
def test_state_that_does_not_fit_into_one_flat_parameter_is_refused(saved, scalars, text):
    assert text in error_of(shard(nn.Linear(2, 3)), saved, scalars)


def test_a_plain_model_may_have_state_of_any_shape_and_of_some_parameters():
    model = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saved = {"weight/rows": THREE}
    restore = OptimizerRestore(model, optimizer, saved, {"bias/count": 2}, [{"params": ["weight", "bias"], "lr": 0.5}])
    restore.tensors[0].pieces[0].fill(torch.tensor([1.0, 2.0, 3.0]))
    restore.check()
    restore.apply()
    assert optimizer.state[model.weight]["rows"].tolist() == [1, 2, 3]
    assert optimizer.state[model.bias] == {"count": 2}
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        ([{"params": ["weight"]}, {"params": ["bias"]}], "in the optimizer only: bias"),
        ([{"params": ["weight", "scale"]}], "param_groups holds 'scale', which the model does not have"),
        ([{"params": ["weight"]}], "no group of the checkpoint has these; in the optimizer only: bias"),
        ([{"params": ["weight", "bias"]}, {"params": []}], "the checkpoint has 2 parameter groups, the optimizer 1"),
    ],
)
def test_groups_of_other_parameters_are_named(groups, text):
    assert text in error_of(nn.Linear(2, 3), {}, groups=groups)


def test_an_optimizer_that_was_built_from_names_keeps_its_own():
    model = shard(nn.Linear(2, 3), original=True)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    names = list(optimizer.param_groups[0]["param_names"])
    saved = optimizer_state(model, optimizer).groups
    assert saved[0]["param_names"] == saved[0]["params"] == ["weight", "bias"]
    optimizer.param_groups[0]["lr"] = 0.5
    restore = OptimizerRestore(model, optimizer, {}, {}, saved)
    restore.check()
    restore.apply()
    assert (optimizer.param_groups[0]["param_names"], optimizer.param_groups[0]["lr"]) == (names, 0.1)


def test_groups_may_be_in_another_order():
    model = nn.Linear(2, 3)
    optimizer = torch.optim.SGD([{"params": [model.bias]}, {"params": [model.weight]}], lr=0.1)
    groups = [{"params": ["weight"], "lr": 0.5}, {"params": ["bias"], "lr": 0.25}]
    restore = OptimizerRestore(model, optimizer, {}, {}, groups)
    restore.check()
    restore.apply()
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.5]


# What ranks remember that do not hold the same parameters


def stepped(comm, change=None):
    """Collective over `comm`. A model of original parameters, of which the last is on all ranks, and its optimizer.

    Args:
        change: what the last rank alone makes of the state of a parameter.
    """
    model = shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 5, bias=False)), comm, original=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for param in filter(torch.Tensor.numel, model.parameters()):
        state = {"step": torch.tensor(2.0), "sum": torch.ones(param.shape), "count": 3}
        optimizer.state[param] = change(state) if change is not None and comm.rank == comm.size - 1 else state
    return model, optimizer


@pytest.mark.parametrize("size", [2, 3, 5])
def test_each_rank_knows_what_others_remember(run_ranks, size):
    def body(comm):
        model, optimizer = stepped(comm)
        found = state_elsewhere(comm, model, optimizer)
        return found, [tensor.name for tensor in optimizer_state(model, optimizer, found).tensors]

    for found, names in run_ranks(size, body):
        assert list(found) == ["0.weight", "0.bias", "1.weight"]
        for info in found.values():
            assert {name: tensor.dtype for name, tensor in info.tensors.items()} == {"sum": torch.float32}
            assert (info.scalar_tensors, info.non_tensors) == ({"step": torch.tensor(2.0)}, {"count": 3})
        assert sorted(names) == sorted(f"{fqn}/{key}" for fqn in found for key in ("step", "sum"))


def test_one_rank_has_all_parameters_itself():
    model, optimizer = stepped(FakeCommunicator())
    assert state_elsewhere(FakeCommunicator(), model, optimizer) == {}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: {**state, "count": 4}, "'count' of '1.weight' differs between ranks"),
        (lambda state: {**state, "sum": state["sum"].double()}, "'sum' of '1.weight' differs between ranks"),
        (lambda state: {}, "rank 1 has no optimizer state of '1.weight', and rank 0 has"),
    ],
    ids=["value", "dtype", "none"],
)
def test_ranks_that_hold_parts_of_a_parameter_remember_the_same_of_it(run_ranks, change, said):
    def body(comm):
        return state_elsewhere(comm, *stepped(comm, change))

    for error in run_ranks(2, body):
        assert type(error) is CheckpointError
        assert said in str(error)


def test_an_optimizer_that_does_not_step_what_its_rank_holds_nothing_of(run_ranks):
    def body(comm):
        model, optimizer = stepped(comm)
        if comm.rank == 1:
            state = optimizer.state
            optimizer = torch.optim.SGD([param for param in model.parameters() if param.numel()], lr=0.1)
            optimizer.state.update(state)
        return state_elsewhere(comm, model, optimizer)

    for error in run_ranks(2, body):
        assert type(error) is CheckpointError
        assert "'0.bias' is in parameter group 0 of rank 0's optimizer, but not of rank 1's" in str(error)


def test_what_one_rank_cannot_describe_is_an_error_on_all(run_ranks):
    def body(comm):
        return state_elsewhere(comm, *stepped(comm, lambda state: {**state, "mask": [torch.eye(2).to_sparse()]}))

    for error in run_ranks(2, body):
        assert type(error) is CheckpointError
        assert "'mask' of '1.weight' differs between ranks: rank 0 has none, rank 1 has a list" in str(error)
