"""Models whose shards end between blocks of parameters train, save and load as all others do."""

import pytest
import torch
from torch import nn

import hpcfsdp
from hpcfsdp.errors import ShardingError
from hpcfsdp.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType
from hpcfsdp.optim import WholeTensors
from tests.mpi import mesh_cases, models
from tests.mpi.whole_cases import OPTIMIZERS, class_and_options

pytestmark = pytest.mark.ranks(3, 2, 4)
TIGHT = {"rtol": 1e-9, "atol": 1e-11}


def by_name(name, shape):
    """Matrices whole, of other parameters any element."""
    return "whole" if len(shape) == 2 and "up" in name else "row" if "down" in name else 1


def shard(granularity, seed=0, **options):
    return models.shard(models.make_net(seed=seed).double(), granularity=granularity, **options)


def check_blocks(model):
    """Whether each shard of the model's units ends between blocks."""
    for unit in models.units(model):
        for flat in unit.sharded_params:
            for rank in range(flat.layout.num_shards):
                for run in flat.layout.runs(rank):
                    slot = flat.layout.slots[run.index]
                    block = {"row": torch.Size(slot.shape[1:]).numel(), "whole": slot.numel}.get(slot.granularity, 1)
                    assert run.start % block == 0
                    assert run.numel % block == 0


@models.ORIGINAL
@pytest.mark.parametrize("granularity", ["row", "whole", by_name], ids=["row", "whole", "by name"])
def test_training_is_that_of_the_plain_model(comm, granularity, original):
    plain = models.make_net().double()
    expected = models.train_plain(plain, models.adamw(plain), range(3))
    model = shard(granularity, use_orig_params=original)
    check_blocks(model)
    assert models.train_sharded(model, models.adamw(model), range(3), comm) == pytest.approx(expected, rel=1e-9)
    with FullyShardedDataParallel.summon_full_params(model):
        for (name, one), other in zip(plain.named_parameters(), model.named_parameters(), strict=True):
            torch.testing.assert_close(other[1], one, msg=lambda text, at=name: f"{at}: {text}", **TIGHT)


@models.ORIGINAL
def test_checkpoints_do_not_depend_on_it(comm, shared_path, original):
    first = shard("row", use_orig_params=original)
    optimizer = models.adamw(first)
    models.train_sharded(first, optimizer, range(2), comm)
    hpcfsdp.checkpoint.save(shared_path / "row.h5", model=first, optimizer=optimizer, step=2)
    expected = models.train_sharded(first, optimizer, range(2, 4), comm)
    for granularity in (1, "whole", by_name):
        other = shard(granularity, seed=3, use_orig_params=original)
        new = models.adamw(other)
        hpcfsdp.checkpoint.load(shared_path / "row.h5", model=other, optimizer=new)
        assert models.train_sharded(other, new, range(2, 4), comm) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("kind", [StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT])
def test_state_dicts_do_not_depend_on_it(comm, kind):
    first, other = shard("row"), shard(by_name, seed=3)
    optimizer, new = models.adamw(first), models.adamw(other)
    models.train_sharded(first, optimizer, range(2), comm)
    with FullyShardedDataParallel.state_dict_type(first, kind):
        weights, state = first.state_dict(), FullyShardedDataParallel.optim_state_dict(first, optimizer)
    with FullyShardedDataParallel.state_dict_type(other, kind):
        other.load_state_dict(weights)
        new.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(other, new, state))
    expected = models.train_sharded(first, optimizer, range(2, 4), comm)
    assert models.train_sharded(other, new, range(2, 4), comm) == pytest.approx(expected, rel=1e-9)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("granularity", ["row", "whole"])
def test_with_tensor_parallelism_and_replicas(granularity):
    for shape in ((1, 2, 2), (2, 2, 1)):
        at = mesh_cases.place(shape)
        for kind in (mesh_cases.Gpt, mesh_cases.Primes):
            model = mesh_cases.shard(mesh_cases.build(kind), at, use_orig_params=True, granularity=granularity)
            mesh_cases.close(mesh_cases.train(model, at), mesh_cases.expected(kind))


class Blocks(nn.Module):
    """Matrices of one shape, which ranks can have whole without padding."""

    def __init__(self, count):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(count))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def test_whole_parameters_are_stepped_without_communication(comm, monkeypatch):
    torch.manual_seed(0)
    plain = Blocks(2 * comm.size).double()
    torch.manual_seed(0)
    model = FullyShardedDataParallel(Blocks(2 * comm.size).double(), granularity="whole", use_orig_params=True)
    [flat] = models.units(model)[0].sharded_params
    assert flat.layout.padded_numel == sum(slot.numel for slot in flat.layout.slots)
    kind, options = class_and_options("muon")
    optimizer = WholeTensors(model, model.parameters(), kind, **options)
    its = OPTIMIZERS["muon"](plain.parameters())
    assert sorted(optimizer.owners.values()) == sorted(2 * list(range(comm.size)))
    data = torch.randn(comm.size, 4, 8, dtype=torch.float64)

    def refuse(*_, **__):
        raise AssertionError("a tensor moves")

    monkeypatch.setattr(type(comm), "all_to_all", refuse)
    for _ in range(3):
        plain(data.flatten(0, 1)).square().mean().backward()
        model(data[comm.rank]).square().mean().backward()
        for each in (its, optimizer):
            each.step()
            each.zero_grad()
    monkeypatch.undo()
    with FullyShardedDataParallel.summon_full_params(model):
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(other, one, **TIGHT)


def test_it_has_no_effect_without_shards(comm):
    model = shard("whole", sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=True)
    plain = models.make_net().double()
    expected = models.train_plain(plain, models.adamw(plain), range(2))
    assert models.train_sharded(model, models.adamw(model), range(2), comm) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("granularity", "text"),
    [(4, "which do not divide"), ("column", "give a positive number"), (lambda name, shape: 0, "give a positive")],
)
def test_what_does_not_divide_is_refused(comm, granularity, text):
    model = models.make_net().double()
    before = {name: param.clone() for name, param in model.named_parameters()}
    with pytest.raises(ShardingError, match=text):
        FullyShardedDataParallel(model, granularity=granularity)
    assert {name: param.shape for name, param in model.named_parameters()} == {n: p.shape for n, p in before.items()}
    assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())
