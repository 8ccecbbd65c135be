"""Parameters that say themselves how they are gathered train with ``fully_shard`` as with torch's."""

import contextlib
import functools
import types

import h5py
import pytest
import torch
import torch.distributed.fsdp as stock
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint as recompute

import hpcfsdp.fsdp2 as ours
from hpcfsdp import _compat, checkpoint
from hpcfsdp.errors import CheckpointError, DisagreementError, EngineError
from tests.mpi.gathered_tensors import Codes, InHalves, Noted, Wrapped, inner
from tests.mpi.row_cases import batches, make, same, train, whole

pytestmark = pytest.mark.ranks(2, 3)
KINDS = {"halves": InHalves, "noted": Noted, "codes": Codes.of}


def in_blocks(kind):
    """Make weights of the blocks of that kind, before they are sharded."""

    def prepare(model):
        for block in model.blocks:
            for module in (block.up, block.down):
                values = KINDS[kind](module.weight.detach())
                module.weight = nn.Parameter(values, requires_grad=kind != "codes")

    return prepare


def width_of(world, kind):
    """The class of notes alone fills up rows that ranks do not have, as torch wants it."""
    return 7 if kind == "noted" else 4 * world.size


def result(found):
    """With the calls of each hook in their order, which a gather ahead of its use keeps."""
    found["state"] = {name: inner(value) for name, value in found["state"].items()}
    calls = [[str(call) for call in Noted.calls if call[0] == hook] for hook in ("before", "after")]
    Noted.calls.clear()
    return {**found, "calls": calls}


@pytest.fixture(autouse=True)
def no_calls():
    Noted.calls.clear()


@pytest.mark.parametrize("reshard", [None, False, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_training(world, row_meshes, ours_on, kind, reshard):
    def program(fsdp, mesh):
        choice = None if fsdp is stock and reshard == 1 else reshard  # torch refuses numbers for such parameters
        options = {"prepare": in_blocks(kind), "width": width_of(world, kind), "reshard_after_forward": choice}
        found = result(train(make(fsdp, mesh, **options), world.rank))
        return {**found, "calls": []} if reshard == 1 else found  # ranks that keep parts make no new ones

    found = same(program, row_meshes["torch"], ours_on)
    assert kind != "noted" or reshard == 1 or len(found["calls"][0]) >= 18


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", KINDS)
def test_training_with_replicas(world, kind):
    mesh = init_device_mesh("cpu", (2, world.size // 2), mesh_dim_names=("replicate", "shard"))

    def program(fsdp, mesh):
        options = {"prepare": in_blocks(kind), "width": width_of(world, kind)}
        return result(train(make(fsdp, mesh, **options), world.rank))

    same(program, mesh)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", ["halves", "noted"])
def test_tensor_parallel(world, kind):
    mesh = init_device_mesh("cpu", (world.size // 2, 2), mesh_dim_names=("shard", "tensor"))

    def program(fsdp, mesh):
        def prepare(model):
            in_blocks(kind)(model)
            for block in model.blocks:
                parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})

        torch.manual_seed(0)
        model = make(fsdp, mesh["shard"], prepare=prepare, width=8)
        optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        for ids in batches(mesh["shard"].get_local_rank(), 3):
            loss = model(ids).square().mean()
            loss.backward()
            found += [loss.detach(), *(whole(param.grad) for param in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
        placed = {name: (str(p.placements), str(p.to_local().shape)) for name, p in model.named_parameters()}
        state = {name: inner(_compat.local_of(value)) for name, value in model.state_dict().items()}
        return {"found": found, "placed": str(placed), **result({"state": state})}

    same(program, mesh)


def test_rows_that_ranks_do_not_have_are_filled_up(world, row_meshes, ours_on):
    """The halves have 48 bits of 53: training is that of plain parameters. torch wants hooks to add the rows."""
    prepares = {stock: None, ours: in_blocks("halves")}

    def program(fsdp, mesh):
        return train(make(fsdp, mesh, prepare=prepares[fsdp]), world.rank)

    found = same(program, row_meshes["torch"], ours_on, rtol=1e-8, atol=1e-9)
    assert found["losses"][0] != found["losses"][-1]


@pytest.mark.parametrize("how", ["precision", "offload", "micro", "reentrant", "not reentrant", "column", "evaluation"])
@pytest.mark.parametrize("kind", ["halves", "noted"])
def test_with_other_options(world, row_meshes, kind, how):
    def program(fsdp, mesh):
        options = {"prepare": in_blocks(kind), "width": 4 * world.size}
        if how == "precision":
            options |= {"mp_policy": fsdp.MixedPrecisionPolicy(torch.float32, torch.float64), "dtype": torch.float64}
        if how == "offload":
            options |= {"offload_policy": fsdp.CPUOffloadPolicy(pin_memory=False)}
        if how == "column":
            options |= {"shard_placement_fn": lambda param: fsdp_shard(1) if param.dim() == 2 else None}
        model = make(fsdp, mesh, **options)
        if how == "micro":
            return result(train(model, world.rank, micro=3, around=functools.partial(synchronize, model)))
        if how.endswith("reentrant"):
            for block in model.blocks:
                block.forward = functools.partial(recompute, block.forward, use_reentrant=how == "reentrant")
        if how == "evaluation":
            found = []
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for ids in batches(world.rank, 3):
                with torch.no_grad():
                    found.append(model(ids).sum())
                model.unshard()
                found += [whole(model.blocks[0].norm.bias), model(ids).sum().detach()]
                model(ids).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return result({"state": model.state_dict(), "found": found})
        return result(train(model, world.rank))

    coarse = {"rtol": 1e-5, "atol": 1e-6} if how == "precision" else {}
    same(program, row_meshes["torch"], **coarse)


def fsdp_shard(dim):
    from torch.distributed.tensor import Shard

    return Shard(dim)


def synchronize(model, number):
    model.set_requires_gradient_sync(number == 2)
    return contextlib.nullcontext()


def test_hooks_of_the_rows_alone(world, row_meshes, ours_on):
    """A program may give hooks to the local tensors of what has been sharded, before the first forward."""

    def before(self, mesh):
        return (self.float(),), None

    def after(self, outputs, metadata, dtype, *, out=None):
        (whole,) = outputs
        if out is None:
            made = whole.to(dtype)
            return made, (made,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(whole[tuple(slice(size) for size in out.shape)])

    def program(fsdp, mesh):
        model = make(fsdp, mesh, width=4 * world.size)
        rows = [block.up.weight._local_tensor for block in model.blocks]
        for each in rows:
            each.fsdp_pre_all_gather = types.MethodType(before, each)
            each.fsdp_post_all_gather = types.MethodType(after, each)
        found = train(model, world.rank)
        assert all(each is block.up.weight._local_tensor for each, block in zip(rows, model.blocks, strict=True))
        return found

    same(program, row_meshes["torch"], ours_on)


def test_state_dicts_have_the_class_and_load_it(world, row_meshes):
    def program(fsdp, mesh):
        models = []
        for seed in (0, 1):
            model = make(fsdp, mesh, prepare=in_blocks("halves"), width=4 * world.size)
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(seed + 1)
            models.append(model)
        state = models[0].state_dict()
        kinds = {name: type(_compat.local_of(value)).__name__ for name, value in state.items()}
        models[1].load_state_dict(state)
        outputs = [model(batches(0, 1)[0]) for model in models]
        assert torch.equal(*outputs)
        return {"kinds": str(kinds), "output": outputs[1].detach()}

    same(program, row_meshes["torch"])


class Ragged(Wrapped):
    """Sends other shapes on other ranks."""

    def fsdp_pre_all_gather(self, mesh):
        return (self.values.new_zeros(3 + mesh.get_local_rank()),), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        raise AssertionError("nothing was gathered")


class Failing(Ragged):
    def fsdp_pre_all_gather(self, mesh):
        if mesh.get_local_rank() == 1:
            raise RuntimeError("no scale")
        return (self.values,), None


@pytest.mark.parametrize("kind", [Ragged, Failing])
def test_what_ranks_cannot_gather_is_an_error_on_all_of_them(world, kind):
    model = nn.Linear(4 * world.size, 4 * world.size)
    model.weight = nn.Parameter(kind(model.weight.detach()))
    ours.fully_shard(model)
    if kind is Ragged:
        with pytest.raises(
            EngineError, match=r"of 'weight' returns \[3\] of torch.float32 on rank 0.*\[4\].*on rank 1"
        ):
            model(torch.zeros(1, 4 * world.size))
    else:
        with pytest.raises(Exception, match="no scale"):
            model(torch.zeros(1, 4 * world.size))


def test_half_of_a_pair_of_hooks_and_none(world):
    class Half(Wrapped):
        fsdp_pre_all_gather = InHalves.fsdp_pre_all_gather

    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(Half(model.weight.detach()))
    with pytest.raises(ValueError, match="has fsdp_pre_all_gather and no fsdp_post_all_gather"):
        ours.fully_shard(model)
    model.weight = nn.Parameter(Wrapped(model.weight.values.detach()))
    ours.fully_shard(model)  # the rows may still get hooks
    with pytest.raises(NotImplementedError, match=r"'weight' is a .*Wrapped, a subclass.*fsdp_pre_all_gather"):
        model(torch.zeros(1, 4))


@pytest.mark.ranks(2)
def test_files_have_what_the_tensors_hold_at_any_number_of_ranks(world, shared_path):
    """Written by all ranks with uneven rows, read by each alone, and by all again."""

    def build(seed, mesh=None):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 11)).double()
        model[0].weight = nn.Parameter(InHalves(model[0].weight.detach()))
        model[1].weight = nn.Parameter(Codes.of(model[1].weight.detach()), requires_grad=False)
        for each in model:
            ours.fully_shard(each, mesh=mesh)
        return ours.fully_shard(model, mesh=mesh)

    x, path = torch.linspace(-1, 1, 7).double()[None], shared_path / "subclasses.h5"
    model = build(0)
    optimizer = torch.optim.AdamW(model[0].parameters())
    model(x).sum().backward()
    optimizer.step()
    expected = model(x).detach()
    checkpoint.save(path, model=model, optimizer=optimizer, step=1)
    with h5py.File(path, "r") as file:
        shapes = {name: (values.shape, values.dtype.name) for name, values in file["model"].items()}
    assert shapes["0.weight"] == ((9, 7), "float64") and shapes["1.weight.codes"] == ((11, 9), "int8")
    assert shapes["1.weight.scales"] == ((11,), "float64") and "1.weight" not in shapes
    replicas = init_device_mesh("cpu", (world.size, 1), mesh_dim_names=("replicate", "shard"))
    for mesh in (None, replicas):
        other = build(1, mesh)
        checkpoint.load(path, model=other, optimizer=torch.optim.AdamW(other[0].parameters()))
        assert torch.equal(other(x), expected)
        assert isinstance(other[1].weight.to_local(), Codes)


@pytest.mark.parametrize("start", ["meta", "values"])
def test_a_subclass_gets_its_hooks_after_it_was_sharded(world, row_meshes, start):
    """As torch's own tests have it: of the class without hooks, in the first forward with those of each tensor."""

    def before(self, mesh):
        return (self.values.float(),), None

    def after(self, outputs, metadata, dtype, *, out=None):
        (whole,) = outputs
        if out is None:
            made = whole.to(dtype)
            return made, (made,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(whole.as_strided(out.shape, out.stride()))

    def program(fsdp, mesh):
        torch.manual_seed(0)
        with torch.device("meta" if start == "meta" else "cpu"):
            model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 6)).double()
            for each in model:
                each.weight = nn.Parameter(Wrapped(each.weight.detach()))
        for each in model:
            fsdp.fully_shard(each, mesh=mesh)
        fsdp.fully_shard(model, mesh=mesh)
        if start == "meta":
            model.to_empty(device="cpu")
            for param in model.parameters():
                local = _compat.local_of(param.detach())
                values = local.values if isinstance(local, Wrapped) else local
                values.copy_(torch.linspace(-1, 1, local.numel()).view(local.shape))
        for each in model:
            local = each.weight._local_tensor
            local.fsdp_pre_all_gather = types.MethodType(before, local)
            local.fsdp_post_all_gather = types.MethodType(after, local)
        optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        for _ in range(3):
            loss = model(torch.linspace(-1, 1, 16).double().view(2, 8) + world.rank).square().mean()
            loss.backward()
            found.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        return found

    same(program, row_meshes["torch"])


class Squares(Codes):
    """Holds something that does not grow with the rows: of n of them n x n."""

    def __init__(self, codes, scales):
        super().__init__(codes, scales)
        self.table = torch.zeros(len(codes), len(codes))

    def __tensor_flatten__(self):
        return ["codes", "scales", "table"], None


def test_a_file_is_refused_what_has_no_place_in_the_whole(world, shared_path):
    model = nn.Linear(4, 4 * world.size).double()
    codes = Codes.of(model.weight.detach())
    model.weight = nn.Parameter(Squares(codes.codes, codes.scales), requires_grad=False)
    ours.fully_shard(model)
    with pytest.raises(CheckpointError, match=r"'weight\.table': .* have no place in"):
        checkpoint.save(shared_path / "squares.h5", model=model)


class Scaled(Codes):
    """Holds a scale for the whole."""

    number = 1.0

    def __init__(self, codes, scales):
        super().__init__(codes, scales)
        self.scale = torch.full((1,), self.number)

    def __tensor_flatten__(self):
        return ["codes", "scales", "scale"], None


def test_what_ranks_must_hold_alike_is_compared(world, several, shared_path, monkeypatch):
    def build():
        model = nn.Linear(4, 4 * world.size).double()
        codes = Codes.of(model.weight.detach())
        model.weight = nn.Parameter(Scaled(codes.codes, codes.scales), requires_grad=False)
        return ours.fully_shard(model)

    checkpoint.save(shared_path / "same.h5", model=build())
    assert checkpoint.open_index(shared_path / "same.h5").tensors["model/weight.scale"].shape == (1,)
    monkeypatch.setattr(Scaled, "number", float(world.rank))
    with pytest.raises(DisagreementError, match=r"weight\.scale"):
        checkpoint.save(shared_path / "other.h5", model=build())
