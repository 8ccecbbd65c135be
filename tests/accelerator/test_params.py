"""Values of parameters on the simulated device: models from the meta device and from the host, whole parameters."""

import copy
from typing import ClassVar

import pytest
import torch
from torch import nn

from hpcfsdp.fsdp import FullyShardedDataParallel
from tests.accelerator.programs import EXACT, SIM, SOME_POLICIES, leave_for_later, shard, train, whole
from tests.mpi import parity
from tests.mpi.parity import WIDTH, Recipe, build, close, inputs, loss_of, reference, train_plain

pytestmark = pytest.mark.ranks(2, 1, 4)

ORIGINAL = pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
OFFLOAD = pytest.mark.parametrize("offload", [False, True], ids=["device", "offload"])
PATIENCE_S = 0.2
"""Where rank 0 alone has whole parameters, others wait for it."""


class Layers(nn.Sequential):
    units: ClassVar = {nn.Linear}
    idle = ()

    def __init__(self):
        super().__init__(*(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(3)))


def on_meta():
    with torch.device("meta"):
        return Layers()


def give_values(module):
    module.to_empty(device=SIM, recurse=False)
    if isinstance(module, nn.Linear):
        module.reset_parameters()


@pytest.mark.parametrize("policy", SOME_POLICIES)
@OFFLOAD
@ORIGINAL
@pytest.mark.parametrize("way", ["reset_parameters", "param_init_fn"])
def test_models_without_values_get_those_of_one_process(world, group, streams, way, original, offload, policy):
    recipe, model = Recipe("sgd"), on_meta()
    torch.manual_seed(3)
    plain = on_meta().apply(give_values)
    torch.manual_seed(3)
    leave_for_later(streams, policy)
    init = {"param_init_fn": give_values} if way == "param_init_fn" else {}
    sharded = shard(model, group, original=original, offload=offload, device_id=SIM, **init)
    assert {param.device.type for param in sharded.parameters()} == {"cpu" if offload else "sim"}
    expected = train_plain(copy.deepcopy(plain).to("cpu"), world.size, recipe)
    close(train(sharded, recipe, SIM), expected, **EXACT)


@pytest.mark.parametrize("policy", SOME_POLICIES)
@OFFLOAD
@ORIGINAL
@pytest.mark.parametrize("device_id", [SIM, 0], ids=["device", "number"])
def test_a_model_in_host_memory_is_moved(world, group, streams, device_id, original, offload, policy):
    recipe, model = Recipe("sgd"), build(parity.Nested)
    if world.rank:
        model.apply(lambda module: [param.data.fill_(-7) for param in module.parameters()])
    leave_for_later(streams, policy)
    options = {"device_id": device_id, "sync_module_states": True}
    sharded = shard(model, group, original=original, offload=offload, **options)
    close(train(sharded, recipe, SIM), reference(parity.Nested, world.size, recipe), **EXACT)


@pytest.mark.filterwarnings("ignore:offload_to_cpu without rank0_only")
@pytest.mark.parametrize(
    ("writeback", "rank0_only", "offload_to_cpu", "strategy", "original", "offload", "policy"),
    [
        (True, False, False, "FULL_SHARD", False, False, "all"),
        (True, False, False, "SHARD_GRAD_OP", True, True, "all"),
        (True, False, True, "FULL_SHARD", True, False, "random"),
        (True, True, False, "FULL_SHARD", True, False, "all"),
        (True, True, True, "FULL_SHARD", False, True, "all"),
        (False, False, True, "FULL_SHARD", False, False, "all"),
        (False, False, False, "FULL_SHARD", True, True, "compute"),
        (False, True, True, "SHARD_GRAD_OP", True, False, "all"),
        (False, True, False, "FULL_SHARD", False, False, "eager"),
    ],
)
def test_whole_parameters_are_shown_and_written_back(
    world, group, streams, writeback, rank0_only, offload_to_cpu, strategy, original, offload, policy
):
    recipe = Recipe("sgd", steps=1)
    model = shard(build(parity.Nested).to(SIM), group, strategy=strategy, original=original, offload=offload)
    optimizer, x = recipe.make_optimizer(model.parameters()), inputs(0, world.rank, recipe.dtype).to(SIM)
    leave_for_later(streams, policy, PATIENCE_S)
    loss_of(model, x).backward()
    optimizer.step()
    arguments = {"writeback": writeback, "rank0_only": rank0_only, "offload_to_cpu": offload_to_cpu}
    expected = reference(parity.Nested, world.size, recipe).parameters
    with FullyShardedDataParallel.summon_full_params(model, **arguments), torch.no_grad():
        if not rank0_only or world.rank == 0:
            for name, param in model.named_parameters():
                assert param.device.type == ("cpu" if offload_to_cpu else "sim")
                torch.testing.assert_close(param.cpu(), expected[parity.plain_name(name)], **EXACT)
                param.mul_(2)
    factor = 2 if writeback else 1
    torch.testing.assert_close(whole(model), {name: factor * value for name, value in expected.items()}, **EXACT)
