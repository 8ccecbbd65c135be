"""What ranks compare when a model is wrapped, and modules that are odd to wrap."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpcfsdp import checkpoint
from hpcfsdp.errors import DifferentValuesWarning, DisagreementError, EngineError
from hpcfsdp.fsdp import FullyShardedDataParallel, ShardingStrategy
from tests.mpi.models import ORIGINAL, make_net, shard

pytestmark = pytest.mark.ranks(2)


def warned(wrap):
    """The warnings of values that differ, their texts."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrap()
    return [str(warning.message) for warning in caught if issubclass(warning.category, DifferentValuesWarning)]


def different_net(rank, change):
    net = make_net()
    if rank:
        with torch.no_grad():
            change(net)
    return net


CHANGES = {
    "parameter": (lambda net: net.blocks[1].up.weight.add_(1), "in the unit 'blocks.1', parameter 'up.weight' has"),
    "buffer": (lambda net: net.scratch.add_(1), "buffer 'scratch' has"),
    "all": (lambda net: [param.add_(1) for param in net.parameters()], "parameter 'embed.weight' has"),
}


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("case", CHANGES)
def test_other_values_on_some_ranks_are_one_warning_on_all(several, case, strategy):
    change, text = CHANGES[case]
    net, strategy = different_net(several.rank, change), ShardingStrategy[strategy]
    (message,) = warned(lambda: shard(net, sharding_strategy=strategy))
    ranks = "rank 1" if several.size == 2 else f"ranks {', '.join(map(str, range(1, several.size)))}"
    assert message.startswith(f"{text} other values on {ranks} than on rank 0")


def test_values_that_need_not_be_the_same_are_no_warning(several):
    def drawn_anew():
        with torch.device("meta"):
            net = nn.Linear(8, 8)
        torch.manual_seed(several.rank)
        return net

    def change(net):
        net.blocks[0].up.weight.add_(1)
        net.scale.add_(1)

    assert not warned(lambda: shard(different_net(several.rank, change), sync_module_states=True))
    net = different_net(several.rank, lambda net: net.blocks[0].up.weight.add_(1))
    assert not warned(lambda: shard(net, ignored_modules=[net.blocks[0]]))
    assert not warned(lambda: FullyShardedDataParallel(drawn_anew()))
    assert warned(lambda: FullyShardedDataParallel(drawn_anew(), sharding_strategy=ShardingStrategy.NO_SHARD))


def test_units_made_by_hand_warn_once(several):
    net = different_net(several.rank, lambda net: [param.add_(1) for param in net.parameters()])

    def wrap():
        net.blocks[0] = FullyShardedDataParallel(net.blocks[0])
        FullyShardedDataParallel(net)

    assert len(warned(wrap)) == 1


@ORIGINAL
def test_units_without_parameters_train_beside_others(comm, original):
    def nested():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    plain, net = nested(), nested()
    net[1] = FullyShardedDataParallel(net[1], use_orig_params=original)
    model = FullyShardedDataParallel(net, use_orig_params=original)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    for each in (plain, model):
        each(x).sum().backward()
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    whole = model.state_dict()
    assert list(whole) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(whole[name], value)


class Variable(nn.Module):
    """More ignored modules on each further rank, before one that is not."""

    def __init__(self, num_ignored):
        super().__init__()
        torch.manual_seed(0)
        first, last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.layers = nn.Sequential(first, *(nn.Identity() for _ in range(num_ignored)), last)

    def forward(self, x):
        return self.layers(x)


def test_ranks_may_ignore_other_numbers_of_modules(several, shared_path):
    class Ignored(nn.Linear):
        pass

    torch.manual_seed(1)
    net = Variable(several.rank + 1)
    for index in range(several.rank + 1):
        net.layers[index + 1] = Ignored(4, 4)
    ignored = [module for module in net.modules() if isinstance(module, Ignored)]
    with pytest.warns(UserWarning, match="'2.weight' on rank 0 and '3.weight' on rank 1"):
        net.layers = FullyShardedDataParallel(net.layers, ignored_modules=ignored)
    model = FullyShardedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert list(model.state_dict())[-1] == f"layers.{several.rank + 2}.bias"
    with pytest.raises(DisagreementError, match="plan of the checkpoint"):
        checkpoint.save(shared_path / "model.h5", model=model)


@ORIGINAL
def test_inner_units_are_called_while_the_parameters_of_the_root_are_whole(comm, original):
    plain = make_net()
    model = shard(make_net(), use_orig_params=original)
    ids = torch.arange(6).view(2, 3)
    with torch.no_grad():
        for _ in range(2):
            with model.summon_full_params(model, recurse=False, writeback=False):
                torch.testing.assert_close(model.module(ids), plain(ids))
            torch.testing.assert_close(model(ids), plain(ids))


def test_the_process_group_is_one_that_torch_takes(comm):
    model = FullyShardedDataParallel(nn.Linear(4, 4))
    assert model.process_group is dist.group.WORLD
    assert (model.rank, model.world_size) == (dist.get_rank(), dist.get_world_size())
    group = dist.new_group()
    model = FullyShardedDataParallel(nn.Linear(4, 4), group)
    assert model.process_group is group
    total = torch.ones(())
    dist.all_reduce(total, group=model.process_group)
    assert total == comm.size
    hybrid = FullyShardedDataParallel(nn.Linear(4, 4), sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    assert hybrid.process_group.size() == hybrid.world_size
    if comm.rank == 0:  # not collective any more
        assert hybrid.process_group.rank() == hybrid.rank


@ORIGINAL
def test_a_sharded_model_is_no_module_of_ddp(comm, original):
    model = shard(make_net(), use_orig_params=original)
    with pytest.raises(EngineError, match=r"DistributedDataParallel, or Accelerator.prepare, was .*HYBRID_SHARD"):
        DistributedDataParallel(model)


def around(inner):
    torch.manual_seed(1)
    return nn.Sequential(inner, nn.Linear(4, 2))


@ORIGINAL
def test_a_module_of_ddp_has_no_sharded_model_inside(comm, original):
    model = around(shard(nn.Linear(4, 4), use_orig_params=original))
    before = [param.clone() for param in model.parameters()]
    with pytest.raises(EngineError, match=r"a Sequential in which .* has wrapped '0': .* shard of '0\._f"):
        DistributedDataParallel(model)
    assert all(map(torch.equal, before, model.parameters()))


@ORIGINAL
def test_ddp_may_leave_the_sharded_model_inside_alone(comm, original):
    def train(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            torch.manual_seed(10 * step + comm.rank)
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.module.state_dict()

    torch.manual_seed(0)
    plain = nn.Linear(4, 4)
    model = around(shard(copy.deepcopy(plain), use_orig_params=original))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, [name for name, _ in model.named_parameters() if name.startswith("0.")]
    )
    expected = train(DistributedDataParallel(around(plain)))
    torch.testing.assert_close(train(DistributedDataParallel(model)), expected)
