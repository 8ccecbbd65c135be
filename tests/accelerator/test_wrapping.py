"""Wrapping for an accelerator: which device a model comes to, how much memory that takes, and what is refused."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hpcfsdp.comm.torch_group import TorchGroupCommunicator
from hpcfsdp.errors import CommunicationError, LaunchError
from hpcfsdp.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision
from hpcfsdp.units.flat_unit import units_in
from hpcfsdp.wrap import ModuleWrapPolicy
from tests.accelerator import simulated

pytestmark = pytest.mark.ranks(2, 1, 4)

SIM = torch.device("sim", 0)
WIDTH, LAYERS = 128, 6
UNIT_BYTES = 4 * (WIDTH + 1) * WIDTH
SLACK_BYTES = 12 * 1024
"""For alignment, and the small values that wrapping makes; less than a fifth of a unit."""


class Layer(nn.Linear):
    pass


def model_of(device="cpu"):
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(WIDTH, WIDTH, device=device) for _ in range(LAYERS)), nn.BatchNorm1d(WIDTH))


def wrapped(model, group, **options):
    return FullyShardedDataParallel(
        model, process_group=group, auto_wrap_policy=ModuleWrapPolicy({Layer}), **{"use_orig_params": True, **options}
    )


def trained(model):
    """The loss after a step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(4, WIDTH).to(SIM)
    model(x).square().mean().backward()
    optimizer.step()
    return model(x).square().mean().item()


def allocated():
    """Bytes in use, of which the peak is counted from now on."""
    gc.collect()
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    return torch.accelerator.memory_allocated()


@pytest.fixture
def mesh(group):
    return DeviceMesh.from_group(group, "sim")


def test_a_model_in_host_memory_comes_to_the_device_of_its_ranks(group, mesh):
    by_group = wrapped(model_of(), group)
    by_mesh = wrapped(model_of(), None, device_mesh=mesh)
    for model in (by_group, by_mesh):
        assert model.compute_device == SIM
        assert {tensor.device for tensor in (*model.parameters(), *model.buffers())} == {SIM}
    expected = trained(wrapped(model_of().to(SIM), group))
    assert trained(by_group) == trained(by_mesh) == expected


def test_parameters_stay_the_same_objects(group):
    model = model_of()
    params = list(model.parameters())
    params[0].of_user = "kept"
    found = list(wrapped(model, group).parameters())
    assert [id(param) for param in found] == [id(param) for param in params]
    assert found[0].of_user == "kept"


@pytest.mark.parametrize(
    "options",
    [{}, {"sync_module_states": True}, {"mixed_precision": MixedPrecision(torch.bfloat16)}, {"param_init_fn": None}],
    ids=["plain", "broadcast", "mixed", "meta"],
)
def test_wrapping_takes_the_memory_of_the_shards_and_one_unit(world, group, options):
    """A model that does not fit the device can be wrapped."""
    device = "meta" if "param_init_fn" in options else "cpu"
    before = allocated()
    model = wrapped(model_of(device), group, **options)
    torch.accelerator.synchronize()
    shards = LAYERS * UNIT_BYTES / world.size
    peak = torch.accelerator.max_memory_allocated() - before
    assert shards <= peak <= shards + UNIT_BYTES + SLACK_BYTES
    assert torch.accelerator.memory_allocated() - before <= shards + SLACK_BYTES
    trained(model)


def test_a_model_that_is_on_the_device_is_never_there_twice(world, group):
    model = model_of(SIM)
    before = allocated()
    model = wrapped(model, group)
    torch.accelerator.synchronize()
    assert torch.accelerator.max_memory_allocated() - before <= UNIT_BYTES + SLACK_BYTES
    trained(model)


def test_under_offload_the_device_holds_nothing_at_rest(group):
    before = allocated()
    model = wrapped(model_of(), group, cpu_offload=CPUOffload(True), use_orig_params=False)
    torch.accelerator.synchronize()
    assert torch.accelerator.memory_allocated() - before <= SLACK_BYTES
    assert all(param.device.type == "cpu" and param.is_pinned() for param in model.parameters() if param.numel())


def test_parameters_and_ranks_on_different_devices_are_refused(world, group):
    with pytest.raises(ValueError, match=r"are on sim:0, and its ranks communicate on cpu: pass device_id='cpu'"):
        wrapped(model_of(), None, device_id=SIM)
    with pytest.raises(ValueError, match=r"are on cpu, and its ranks communicate on sim"):
        wrapped(model_of(), group, device_id=torch.device("cpu"))
    gloo = dist.new_group(backend="gloo")
    for options in ({}, {"device_id": SIM}):
        with pytest.raises(ValueError, match=r"are on sim:0, and its ranks communicate on cpu"):
            wrapped(model_of(SIM), gloo, **options)


@pytest.mark.ranks(2, 4)
def test_the_root_is_gathered_once_in_a_step_and_others_as_the_user_chooses(group):
    model = FullyShardedDataParallel(
        nn.Sequential(Layer(8, 8), Layer(8, 8), nn.Linear(8, 8)),
        process_group=group,
        auto_wrap_policy=ModuleWrapPolicy({Layer}),
    )

    def gathers():
        group.called.clear()
        model(torch.ones(2, 8).to(SIM)).sum().backward()
        return sum(call.startswith("all_gather") for call in group.called)

    gathers()
    assert gathers() == 1 + 2 * 2
    model.set_reshard_after_forward(False)
    assert gathers() == 3
    model.set_reshard_after_forward(True, recurse=False)
    assert gathers() == 4
    model.set_reshard_after_forward(True)
    assert gathers() == 6
    model.set_reshard_after_forward(1)  # rank holds all
    assert gathers() == 3
    if group.size() == 4:
        model.set_reshard_after_forward(2)
        (two,) = {flat.keepers for unit in units_in(model) for flat in unit.sharded_params}
        two.group.called.clear()
        assert (gathers(), sum(call.startswith("all_gather") for call in two.group.called)) == (3, 3)
    with pytest.raises(ValueError, match=r"reshard_after_forward=3 must divide"):
        model.set_reshard_after_forward(3)


def test_a_device_without_a_backend_of_its_own_is_refused(world):
    from hpcfsdp.world import _backend_of

    with pytest.raises(LaunchError, match="torch has no backend for process groups on 'maia'"):
        _backend_of(torch.device("maia"))
    assert _backend_of(SIM) == simulated.BACKEND


def test_groups_are_made_by_their_members_alone_also_where_torch_would_split(world, monkeypatch):
    """With a bound device NCCL would split the default group, in which ranks outside of the new one would take part."""
    from torch.distributed import distributed_c10d

    from hpcfsdp import _compat

    everyone, seen = dist.group.WORLD, []
    make = distributed_c10d._new_process_group_helper

    def noted(*args, device_id, **options):
        seen.append((everyone.bound_device_id, device_id))
        return make(*args, device_id=None, **options)

    monkeypatch.setattr(distributed_c10d, "_new_process_group_helper", noted)
    everyone.bound_device_id = SIM
    try:
        made = _compat.new_group_of([world.rank], simulated.BACKEND)
        assert everyone.bound_device_id == SIM
    finally:
        everyone.bound_device_id = None
    assert seen == [(None, SIM)]
    dist.destroy_process_group(made)


def test_tensors_in_host_memory_are_refused_by_ranks_on_a_device(world, group):
    comm = TorchGroupCommunicator(group)
    with pytest.raises(CommunicationError, match=r"the tensor is on cpu, this communicator works on sim; move it with"):
        comm.all_reduce(torch.ones(2), "sum")


def test_frozen_and_mixed_parameters_cost_no_wait_of_the_host(world, group):
    model = nn.Sequential(Layer(8, 8), Layer(8, 8), nn.Linear(8, 8))
    model[1].weight.requires_grad_(False)
    wrapped_model = wrapped(model, group)
    optimizer = torch.optim.SGD(wrapped_model.parameters(), lr=0.1)
    x = torch.ones(2, 8).to(SIM)
    for step in range(4):
        if step == 2:
            simulated.reset_counts()
        # Not every parameter gets a gradient: the head has none every other time.
        (wrapped_model(x) if step % 2 else wrapped_model(x) + x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert simulated.waits() == {}
