"""``WholeTensors``: what it comes to is what the optimizer does with the plain model in one process."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

import hpcfsdp
from hpcfsdp.errors import EngineError, HpcfsdpError, UsageError
from hpcfsdp.fsdp import CPUOffload, FullyShardedDataParallel, ShardedGradScaler, ShardingStrategy
from hpcfsdp.optim import Muon, WholeTensors
from tests.mpi import mesh_cases, models, row_cases
from tests.mpi.whole_cases import OPTIMIZERS, class_and_options

pytestmark = pytest.mark.ranks(2, 1, 3, 4)
TIGHT = {"rtol": 1e-9, "atol": 1e-11}
STRATEGIES = [
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.HYBRID_SHARD,
    ShardingStrategy.NO_SHARD,
]


def whole(model, name, **options):
    kind, kwargs = class_and_options(name)
    return WholeTensors(model, model.parameters(), kind, **kwargs, **options)


def net():
    return models.make_net().double()


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name.lower())
def test_it_steps_as_the_optimizer_of_the_plain_model(comm, strategy):
    for name in OPTIMIZERS:
        plain = net()
        expected = models.train_plain(plain, OPTIMIZERS[name](plain.parameters()), range(4))
        model = models.shard(net(), use_orig_params=True, sharding_strategy=strategy)
        got = models.train_sharded(model, whole(model, name), range(4), comm)
        torch.testing.assert_close(got, expected, msg=lambda text, name=name: f"{name}: {text}", **TIGHT)
        with FullyShardedDataParallel.summon_full_params(model):
            for (key, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(other, one, msg=lambda text, at=(name, key): f"{at}: {text}", **TIGHT)


@pytest.mark.ranks(4, 2, 3)
@pytest.mark.meshes
@pytest.mark.parametrize("replicas", ["divide", "repeat"])
@pytest.mark.parametrize("name", ["muon", "adafactor", "soap"])
@mesh_cases.each_mesh
def test_it_steps_tensor_parallel_models(shape, name, replicas):
    at = mesh_cases.place(shape)
    for kind in (mesh_cases.Gpt, mesh_cases.Primes, mesh_cases.Tied):
        plain = mesh_cases.build(kind)
        expected = mesh_cases.train_plain(plain, optimizer=OPTIMIZERS[name](plain.parameters()))
        model = mesh_cases.shard(mesh_cases.build(kind), at, use_orig_params=True)
        optimizer = whole(model, name, replicas=replicas)
        got = mesh_cases.train(model, at, optimizer=optimizer)
        mesh_cases.close(got, expected)


def rows_net(mesh=None, prepare=None, **options):
    return row_cases.make(hpcfsdp.fsdp2, mesh, prepare=prepare, **options)


def plain_rows(name, steps=3):
    """What a plain model of ``row_cases`` comes to with the data of all ranks."""
    torch.manual_seed(0)
    model = row_cases.Net().double()
    optimizer = OPTIMIZERS[name](model.parameters())
    data = [row_cases.batches(rank, steps) for rank in range(dist.get_world_size())]
    for ids in zip(*data, strict=True):
        model(torch.cat(ids)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def train_rows(model, optimizer, steps=3):
    for ids in row_cases.batches(dist.get_rank(), steps):
        model(ids).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("dim", [0, 1])
def test_it_steps_models_of_fully_shard(world, dim):
    for name in OPTIMIZERS:
        expected = plain_rows(name)
        model = rows_net(shard_placement_fn=lambda param: Shard(dim) if param.dim() > 1 else None)
        train_rows(model, whole(model, name))
        for (key, one), other in zip(expected.named_parameters(), model.parameters(), strict=True):
            got = row_cases.whole(other)
            torch.testing.assert_close(got, one, msg=lambda text, at=(name, key): f"{at}: {text}", **TIGHT)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("replicas", ["divide", "repeat"])
def test_it_steps_hybrid_models_of_fully_shard(world, replicas):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for name in ("muon", "shampoo"):
        expected = plain_rows(name)
        model = rows_net(mesh)
        train_rows(model, whole(model, name, replicas=replicas))
        for one, other in zip(expected.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(row_cases.whole(other), one, **TIGHT)


@pytest.mark.ranks(2, 3)
def test_it_steps_what_no_unit_owns(world, comm):
    for name in ("muon", "adafactor"):
        plain = net()
        models.train_plain(plain, OPTIMIZERS[name](plain.parameters()), range(2), clip=1e9)
        model = nn.parallel.DistributedDataParallel(net())
        optimizer = whole(model, name)
        for step in range(2):
            ids, targets = (part.chunk(comm.size)[comm.rank] for part in models.batch(step))
            models.loss_of(model, ids, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(other, one, **TIGHT)


@pytest.mark.ranks(2, 3)
def test_accumulation_scaling_and_offload_go_on_around_it(comm):
    plain, name = net(), "muon"
    expected = models.train_plain(plain, OPTIMIZERS[name](plain.parameters()), range(2), clip=1e9)
    model = models.shard(net(), use_orig_params=True, cpu_offload=CPUOffload(offload_params=True))
    optimizer, scaler = whole(model, name), ShardedGradScaler(device="cpu", init_scale=64.0)
    losses = []
    for step in range(2):
        ids, targets = (part.chunk(comm.size)[comm.rank] for part in models.batch(step))
        half = len(ids) // 2
        parts = [(ids[:half], targets[:half]), (ids[half:], targets[half:])]
        total = 0.0
        for number, (some, wanted) in enumerate(parts):
            with model.no_sync() if number == 0 else contextlib.nullcontext():
                loss = models.loss_of(model, some, wanted) * len(some) / len(ids)
                scaler.scale(loss).backward()
            total += loss.detach()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        comm.all_reduce(total, "average")
        losses.append(total.item())
    assert losses == pytest.approx(expected, rel=1e-9)
    with FullyShardedDataParallel.summon_full_params(model):
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(other, one, **TIGHT)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("way", ["summoned", "in place", "data", "state dict"])
def test_it_notices_parameters_that_change_between_steps(comm, way):
    @torch.no_grad()
    def change(model):
        if way == "summoned":
            with FullyShardedDataParallel.summon_full_params(model):
                halve(model)
        elif way == "in place":
            halve(model)
        elif way == "data":
            for param in model.parameters():
                param.data.mul_(0.5)
        else:
            model.load_state_dict({key: value * 0.5 for key, value in model.state_dict().items()})

    def halve(model):
        for param in model.parameters():
            param.mul_(0.5)

    plain = net()
    optimizer = OPTIMIZERS["muon"](plain.parameters())
    models.train_plain(plain, optimizer, range(2))
    with torch.no_grad():
        halve(plain)
        if way == "state dict":
            plain.scale.mul_(0.5)
    models.train_plain(plain, optimizer, range(2, 4))
    model = models.shard(net(), use_orig_params=True)
    optimizer = whole(model, "muon")
    models.train_sharded(model, optimizer, range(2), comm)
    change(model)
    models.train_sharded(model, optimizer, range(2, 4), comm)
    with FullyShardedDataParallel.summon_full_params(model):
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(other, one, **TIGHT)


# Bad input


def refused(error, *texts):
    """A context in which all ranks raise an error with these texts."""
    return pytest.raises(error, match=".*".join(texts))


class Global(torch.optim.SGD):
    """Keeps a count that is of no parameter."""

    def step(self, closure=None):
        self.state["count"]["steps"] = 1
        super().step(closure)


class Adapting(torch.optim.SGD):
    """Sets its learning rate by the gradients that it sees, as if they were all."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["d"] = sum(p.grad.square().sum().item() for p in group["params"] if p.grad is not None)
        super().step(closure)


class Counting(torch.optim.SGD):
    """Counts its steps in its groups."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        super().step(closure)


@pytest.mark.ranks(2)
def test_what_it_cannot_step_is_refused(world):
    flat, model = models.shard(net()), models.shard(net(), use_orig_params=True)
    params = list(model.parameters())
    before = net()
    early = list(before.parameters())
    wrapped = models.shard(before)
    for given, kind, texts in (
        (flat.parameters(), Muon, ["group 0 has a flat parameter", "use_orig_params=True"]),
        ([params[0], params[1], params[0]], Muon, ["'embed.weight' is in two groups"]),
        ([{"params": params[:2]}, {"params": params[1:]}], Muon, ["blocks.0.norm.weight' is in two groups"]),
        ([nn.Parameter(torch.ones(2, 3))], Muon, [r"shape \(2, 3\) that is none of the model's"]),
        (params, torch.optim.LBFGS, ["LBFGS steps with a closure"]),
        (params, "Muon", ["optimizer_class is 'Muon'"]),
    ):
        owner = flat if given is not params and kind is Muon and not isinstance(given, list) else model
        with refused(UsageError, *texts):
            WholeTensors(owner, given, kind)
    with refused(UsageError, "as it was before the model was sharded"):
        WholeTensors(wrapped, early, Muon)
    with refused(UsageError, "replicas is 'some'"):
        WholeTensors(model, params, Muon, replicas="some")
    with refused(UsageError, "tensor_parallel is 'both'"):
        WholeTensors(model, params, Muon, tensor_parallel="both")
    with refused(ValueError, "params is empty"):
        WholeTensors(model, [], Muon)
    with refused(TypeError, "set"):
        WholeTensors(model, [{"params": set(params)}], Muon)
    with refused(TypeError, "unexpected keyword"):
        WholeTensors(model, params, Muon, speed=3)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("kind", "text"), [(Global, "keeps state 'count' that is of no parameter"), (Adapting, "changes its groups by")]
)
def test_optimizers_that_see_all_parameters_are_refused_before_anything_changes(comm, kind, text):
    model = models.shard(net(), use_orig_params=True)
    optimizer = WholeTensors(model, model.parameters(), kind, lr=0.1)
    ids, targets = (part.chunk(comm.size)[comm.rank] for part in models.batch(0))
    models.loss_of(model, ids, targets).backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with refused(UsageError, text):
        optimizer.step()
    after = model.state_dict()
    moved = [name for name in before if not torch.equal(after[name], before[name])]
    assert not moved


@pytest.mark.ranks(2)
def test_an_optimizer_may_count_in_its_groups(comm):
    plain = net()
    expected = models.train_plain(plain, Counting(plain.parameters(), lr=0.1, momentum=0.9), range(3))
    model = models.shard(net(), use_orig_params=True)
    optimizer = WholeTensors(model, model.parameters(), Counting, lr=0.1, momentum=0.9)
    assert models.train_sharded(model, optimizer, range(3), comm) == pytest.approx(expected, rel=1e-9)
    assert [group["steps"] for group in optimizer.param_groups] == [3]


@pytest.mark.ranks(2)
def test_a_gradient_on_some_ranks_only_is_an_error_on_all(comm):
    model = models.shard(net(), use_orig_params=True)
    optimizer = whole(model, "muon")
    models.loss_of(model, *models.batch(0)).backward()
    cut = next(
        p
        for name, p in model.named_parameters()
        if 0 < p.numel() < dict(net().named_parameters())[mesh_cases.plain_name(name)].numel()
    )
    if comm.rank == 0:
        cut.grad = None
    with refused(UsageError, "has a gradient on some of its ranks and none on others"):
        optimizer.step()


@pytest.mark.ranks(2, 3)
def test_groups_schedulers_and_added_parameters(comm):
    def groups(named):
        named = {mesh_cases.plain_name(name): param for name, param in named}
        first = [param for name, param in named.items() if "blocks.0" in name]
        rest = [param for name, param in named.items() if "blocks.0" not in name]
        return first, rest

    losses = []
    for model in (net(), models.shard(net(), use_orig_params=True)):
        first, rest = groups(model.named_parameters())
        options = {"lr": 0.02, "adamw_lr": 0.03, "ns_dtype": "float64"}
        given = [{"params": first, "lr": 0.01}]
        optimizer = WholeTensors(model, given, Muon, **options) if losses else Muon(given, **options)
        optimizer.add_param_group({"params": rest, "weight_decay": 0.3})
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.1, 0.2, 0.3, 0.4], total_steps=5)
        losses.append([])
        for step in range(4):
            data = (
                models.batch(step)
                if len(losses) == 1
                else [part.chunk(comm.size)[comm.rank] for part in models.batch(step)]
            )
            loss = models.loss_of(model, *data)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            mean = loss.detach().clone()
            comm.all_reduce(mean, "average")
            losses[-1].append(mean.item())
        losses[-1].append([group["lr"] for group in optimizer.param_groups])
    assert losses[1][:-1] == pytest.approx(losses[0][:-1], rel=1e-9)
    assert losses[1][-1] == losses[0][-1]


@pytest.mark.ranks(2)
def test_a_closure_is_called_once(comm):
    model = models.shard(net(), use_orig_params=True)
    optimizer, calls = whole(model, "muon"), []

    def closure():
        optimizer.zero_grad()
        loss = models.loss_of(model, *models.batch(0))
        loss.backward()
        calls.append(loss.item())
        return loss

    assert optimizer.step(closure).item() == calls[0]
    assert len(calls) == 1


@pytest.mark.ranks(2)
def test_it_steps_outside_of_summoned_parameters_alone(comm):
    model = models.shard(net(), use_orig_params=True)
    optimizer = whole(model, "muon")
    models.loss_of(model, *models.batch(0)).backward()
    with (
        FullyShardedDataParallel.summon_full_params(model, with_grads=True),
        refused(EngineError, "step outside of summon_full_params"),
    ):
        optimizer.step()
    with refused(TypeError, "cannot be copied"):
        copy.deepcopy(optimizer)


@pytest.mark.ranks(4)
def test_blocks_are_stepped_for_themselves_where_asked(world):
    at = mesh_cases.place((1, 2, 2))
    model = mesh_cases.shard(mesh_cases.build(mesh_cases.Mlp), at, use_orig_params=True)
    optimizer = whole(model, "muon", tensor_parallel="blocks")
    plain = mesh_cases.build(mesh_cases.Mlp)
    its = OPTIMIZERS["muon"](plain.parameters())
    mesh_cases.train(model, at, mesh_cases.Recipe(steps=1), optimizer)
    mesh_cases.train_plain(plain, mesh_cases.Recipe(steps=1), its)
    whole_params = mesh_cases.whole(model)
    for name, param in plain.named_parameters():
        is_cut = "blocks" in name and param.dim() == 2
        is_same = torch.allclose(whole_params[name], param, **TIGHT)
        assert is_same is not is_cut, name


@pytest.mark.ranks(3, 2)
def test_a_step_that_overlaps_comes_to_the_same(comm):
    for name in OPTIMIZERS:
        plain = net()
        expected = models.train_plain(plain, OPTIMIZERS[name](plain.parameters()), range(4))
        model = models.shard(net(), use_orig_params=True)
        optimizer = whole(model, name, overlap=True)
        assert models.train_sharded(model, optimizer, range(4), comm) == pytest.approx(expected, rel=1e-9)
        with FullyShardedDataParallel.summon_full_params(model):
            for one, other in zip(plain.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(other, one, **TIGHT)


@pytest.mark.ranks(2)
def test_an_optimizer_that_counts_in_its_groups_is_called_once(comm):
    model = models.shard(net(), use_orig_params=True)
    optimizer = WholeTensors(model, model.parameters(), Counting, lr=0.1, overlap=True)
    models.train_sharded(model, optimizer, range(3), comm)
    assert [group["steps"] for group in optimizer.param_groups] == [3]


class Nosy(torch.optim.SGD):
    """Reads a value of each parameter, whether it has a gradient or not."""

    @torch.no_grad()
    def step(self, closure=None):
        self.largest = max(param.abs().max().item() for group in self.param_groups for param in group["params"])
        super().step(closure)


@pytest.mark.ranks(2)
def test_an_optimizer_that_reads_what_other_ranks_own_is_refused(comm):
    model = models.shard(net(), use_orig_params=True)
    optimizer = WholeTensors(model, model.parameters(), Nosy, lr=0.1)
    models.loss_of(model, *models.batch(0)).backward()
    with refused(UsageError, "Nosy looks at parameters without gradients, which other ranks own"):
        optimizer.step()


# Found by readers


@pytest.mark.ranks(2)
def test_gradients_that_are_pending_sums_are_added_up(world):
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    norm = nn.LayerNorm(6).double()
    plain = copy.deepcopy(norm)
    parallelize_module(norm, mesh, SequenceParallel())
    its, optimizer = (
        torch.optim.SGD(plain.parameters(), lr=0.1),
        WholeTensors(norm, norm.parameters(), torch.optim.SGD, lr=0.1),
    )
    x = torch.randn(4, 8, 6, dtype=torch.float64)
    for _ in range(2):
        plain(x).pow(3).sum().backward()
        norm(DTensor.from_local(x.chunk(2, 1)[world.rank], mesh, [Shard(1)])).full_tensor().pow(3).sum().backward()
        assert any(placement.is_partial() for placement in norm.weight.grad.placements)
        for each in (its, optimizer):
            each.step()
            each.zero_grad()
    for one, other in zip(plain.parameters(), norm.parameters(), strict=True):
        torch.testing.assert_close(row_cases.whole(other), one, **TIGHT)


@pytest.mark.ranks(2)
def test_parameters_that_are_added_after_a_load_leave_the_loaded_state(comm):
    model = models.shard(net(), use_orig_params=True)
    *most, last = model.parameters()
    optimizer = WholeTensors(model, most, torch.optim.Adagrad, lr=0.1)
    models.train_sharded(model, optimizer, range(1), comm)
    early = copy.deepcopy(optimizer.state_dict())
    models.train_sharded(model, optimizer, range(1, 3), comm)
    optimizer.load_state_dict(early)
    optimizer.add_param_group({"params": [last]})
    steps = {state["step"].item() for param, state in optimizer.state.items() if param is not last}
    assert steps <= {1.0}


@pytest.mark.ranks(2)
def test_it_notices_that_signs_change_in_a_few_elements(world):
    torch.manual_seed(0)
    model = nn.Linear(4, 2, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -1, -1, 1], [1, -1, -1, 1]]))
    hpcfsdp.fully_shard(model)
    optimizer = WholeTensors(model, model.parameters(), torch.optim.SGD, lr=0.0)
    for _ in range(2):
        model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.weight.neg_()
    expected = torch.tensor([[1.0, -1, -1, 1]] * 2, dtype=torch.float64)
    torch.testing.assert_close(row_cases.whole(model.weight), expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", ["groups", "parameters", "class"])
def test_ranks_that_differ_are_refused_on_all(comm, what):
    model = models.shard(net(), use_orig_params=True)
    params, kind = list(model.parameters()), Muon
    groups = [{"params": params[:2], "weight_decay": 0.5}, {"params": params[2:]}]
    if comm.rank:
        if what == "groups":
            groups = [{"params": params[:3], "weight_decay": 0.5}, {"params": params[3:]}]
        elif what == "parameters":
            groups = [{"params": [nn.Parameter(torch.ones(2))]}]
        else:
            kind = torch.optim.AdamW
    with refused(HpcfsdpError, "its groups|none of the model's"):
        WholeTensors(model, groups, kind)


class Failing(torch.optim.SGD):
    """Fails on one rank, after it has stepped."""

    fails = False

    def step(self, closure=None):
        super().step(closure)
        if type(self).fails and dist.get_rank() == 1:
            raise RuntimeError("out of memory")


@pytest.mark.ranks(2)
def test_a_first_step_that_fails_leaves_values_and_loaded_state(comm):
    model = models.shard(net(), use_orig_params=True)
    optimizer = WholeTensors(model, model.parameters(), Failing, lr=0.1, momentum=0.9)
    models.train_sharded(model, optimizer, range(2), comm)
    new = WholeTensors(model, model.parameters(), Failing, lr=0.1, momentum=0.9)
    new.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    ids, targets = (part.chunk(comm.size)[comm.rank] for part in models.batch(2))
    models.loss_of(model, ids, targets).backward()
    before = copy.deepcopy((model.state_dict(), new.state_dict()["state"]))
    Failing.fails = True
    try:
        with refused(HpcfsdpError if comm.rank == 0 else RuntimeError, "out of memory"):
            new.step()
    finally:
        Failing.fails = False
    torch.testing.assert_close((model.state_dict(), new.state_dict()["state"]), before, rtol=0, atol=0)


@pytest.mark.ranks(2)
def test_whole_copies_are_made_of_trained_parameters_alone(comm):
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)).double()
    model[0].weight.requires_grad_(False)
    for layer in model:
        hpcfsdp.fully_shard(layer)
    hpcfsdp.fully_shard(model)
    optimizer = whole(model, "muon")
    for _ in range(2):
        model(torch.ones(1, 32, dtype=torch.float64)).sum().backward()
        optimizer.step()
    [owned] = optimizer._owned
    sizes = {each.name: param.untyped_storage().nbytes() for each, param in zip(owned.params, owned.whole, strict=True)}
    assert sizes["0.weight"] <= 8
