"""State of models sharded by ``fully_shard``: HDF5 checkpoints, torch's functions, and other wrappings of a model."""

import copy

import h5py
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as stock
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import hpcfsdp
import hpcfsdp.fsdp2 as ours
import hpcfsdp.state_dict as our_state_dict
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.wrap import ModuleWrapPolicy
from tests.mpi.row_cases import Block, Net, batches, make, same, train, whole

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")

STYLES = ["rows", "torch's rows", "flat", "original", "plain"]


def wrapped(style, seed=0):
    torch.manual_seed(seed)
    if style in ("rows", "torch's rows"):
        fsdp, model = (ours if style == "rows" else stock), Net()
        for block in model.blocks:
            fsdp.fully_shard(block)
        return fsdp.fully_shard(model)
    if style == "plain":
        return Net()
    policy = ModuleWrapPolicy({Block})
    return FullyShardedDataParallel(Net(), auto_wrap_policy=policy, use_orig_params=style == "original")


def stepped(model, rank=0, steps=2):
    """An optimizer that has taken steps; with the same data on all ranks, so that a plain model does the same."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for ids in batches(rank, steps):
        model(ids).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def values_of(path):
    """The tensors of a file, as any HDF5 tool reads them."""
    found = {}
    with h5py.File(path, "r") as file:

        def note(name, item):
            if isinstance(item, h5py.Dataset) and name.startswith(("model/", "optim/state/")):
                found[name] = torch.from_numpy(np.asarray(item[()]))

        file.visititems(note)
    return found


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("style", STYLES)
def test_a_checkpoint_of_rows_is_that_of_every_other_style(world, shared_path, style):
    first, second = wrapped("rows"), wrapped(style)
    for name, model in (("rows", first), ("other", second)):
        hpcfsdp.checkpoint.save(shared_path / f"{name}.h5", model=model, optimizer=stepped(model), step=2)
    torch.testing.assert_close(values_of(shared_path / "rows.h5"), values_of(shared_path / "other.h5"))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("source", STYLES)
@pytest.mark.parametrize("target", ["rows", "torch's rows", "flat"])
def test_a_checkpoint_is_loaded_by_every_other_style(world, shared_path, source, target):
    if "rows" not in source + target:
        source = "rows"
    saved = wrapped(source)
    optimizer = stepped(saved)
    hpcfsdp.checkpoint.save(shared_path / "file.h5", model=saved, optimizer=optimizer, step=2)
    loaded = wrapped(target, seed=1)
    other = stepped(loaded, steps=1)
    assert hpcfsdp.checkpoint.load(shared_path / "file.h5", model=loaded, optimizer=other).step == 2
    for model, its_optimizer in ((saved, optimizer), (loaded, other)):
        for ids in batches(5, 2):
            model(ids).square().mean().backward()
            its_optimizer.step()
            its_optimizer.zero_grad()
    hpcfsdp.checkpoint.save(shared_path / "a.h5", model=saved, optimizer=optimizer)
    hpcfsdp.checkpoint.save(shared_path / "b.h5", model=loaded, optimizer=other)
    torch.testing.assert_close(values_of(shared_path / "a.h5"), values_of(shared_path / "b.h5"))


@pytest.mark.ranks(3, 2)
def test_the_ranks_write_their_own_rows(world, shared_path):
    """No rank needs memory for a whole tensor."""
    from hpcfsdp.state.model import model_tensors

    model = wrapped("rows")
    tensors = {tensor.name: tensor for tensor in model_tensors(model)}
    found = tensors["embed.weight"]
    assert found.buffer is None and found.runs.ranks.shape == (world.size, 1)
    assert [piece.numel for piece in found.pieces] == [model.embed.weight.to_local().numel()]
    assert tensors["blocks.0.shift"].runs.ranks.tolist() == [[0]]


@pytest.mark.ranks(2)
def test_a_model_of_the_meta_device_is_loaded(world, shared_path):
    saved = wrapped("rows")
    hpcfsdp.checkpoint.save(shared_path / "file.h5", model=saved, step=1)
    with torch.device("meta"):
        model = Net()
    for block in model.blocks:
        ours.fully_shard(block)
    ours.fully_shard(model)
    with pytest.raises(hpcfsdp.errors.EngineError, match=r"on the meta device: call model\.to_empty"):
        model(batches(0, 1)[0])
    hpcfsdp.checkpoint.load(shared_path / "file.h5", model=model)
    ids = batches(0, 1)[0]
    torch.testing.assert_close(model(ids), saved(ids))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("names", [("replicate", "shard"), ("shard", "tensor")])
def test_checkpoints_of_two_dimensions(world, shared_path, names):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)

    def build(seed):
        torch.manual_seed(seed)
        model = Net(width=8)
        data = mesh
        if "tensor" in names:
            data = mesh["shard"]
            for block in model.blocks:
                parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        for block in model.blocks:
            ours.fully_shard(block, mesh=data)
        return ours.fully_shard(model, mesh=data)

    saved, loaded = build(0), build(1)
    optimizer, other = stepped(saved), stepped(loaded, steps=1)
    hpcfsdp.checkpoint.save(shared_path / "file.h5", model=saved, optimizer=optimizer)
    hpcfsdp.checkpoint.load(shared_path / "file.h5", model=loaded, optimizer=other)
    for (name, one), two in zip(saved.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(whole(one), whole(two)), name
        for key, value in optimizer.state[one].items():
            assert torch.equal(whole(value), whole(other.state[two][key])), (name, key)
    plain = Net(width=8)
    hpcfsdp.checkpoint.load(shared_path / "file.h5", model=plain)
    for (name, one), two in zip(saved.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(whole(one), two), name


@pytest.mark.parametrize("functions", ["torch's", "hpcfsdp's"])
@pytest.mark.parametrize("full", [False, True])
def test_functions_of_state_dicts(world, functions, full):
    module = our_state_dict if functions == "hpcfsdp's" else None
    get_model = module.get_model_state_dict if module else get_model_state_dict
    get_optim = module.get_optimizer_state_dict if module else get_optimizer_state_dict
    set_model = module.set_model_state_dict if module else set_model_state_dict
    set_optim = module.set_optimizer_state_dict if module else set_optimizer_state_dict

    def program(fsdp, mesh):
        options = StateDictOptions(full_state_dict=full)
        model = make(fsdp, mesh)
        optimizer = stepped(model, world.rank)
        states = get_model(model, options=options), get_optim(model, optimizer, options=options)
        states = copy.deepcopy(states)
        other = make(fsdp, mesh, prepare=lambda m: [p.data.mul_(2) for p in m.parameters()])
        its = stepped(other, world.rank, steps=1)
        set_model(other, states[0], options=options)
        set_optim(other, its, states[1], options=options)
        return train(other, world.rank, optimizer=its)

    if functions == "torch's":
        same(program, init_device_mesh("cpu", (world.size,)))
    else:
        program(ours, init_device_mesh("cpu", (world.size,)))


def test_torch_distributed_checkpoint(world, shared_path):
    model = wrapped("rows")
    stepped(model, world.rank)
    before = {name: whole(value) for name, value in model.state_dict().items()}
    dcp.save({"model": model.state_dict()}, checkpoint_id=shared_path / "dcp")
    other = wrapped("rows", seed=1)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=shared_path / "dcp")
    assert not other.load_state_dict(state["model"]).missing_keys
    after = {name: whole(value) for name, value in other.state_dict().items()}
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.parametrize("first", ["as built", "to_empty", "cast", "assigned"])
def test_a_state_dict_that_is_kept_follows_the_model(world, first):
    """As programs that ask for it once."""

    def program(fsdp, mesh):
        torch.manual_seed(0)
        source = [param.detach().double() for param in Net().parameters()]
        with torch.device("meta" if first == "to_empty" else "cpu"):
            model = Net().double() if first != "cast" else Net()
        for block in model.blocks:
            fsdp.fully_shard(block)
        fsdp.fully_shard(model)
        if first == "to_empty":
            model.to_empty(device="cpu")
        elif first == "cast":
            model.double()
        elif first == "assigned":
            state = {name: value.clone() for name, value in model.state_dict().items()}
            model.load_state_dict(state, assign=True)
        with torch.no_grad():
            for param, value in zip(model.parameters(), source, strict=True):
                param.copy_(distribute_tensor(value, param.device_mesh, param.placements))
            for block in model.blocks:
                block.shift.zero_()
        kept = model.state_dict()
        train(model, world.rank)
        for name, value in model.state_dict().items():
            assert torch.equal(whole(kept[name]), whole(value)), name
        return {name: whole(value) for name, value in kept.items()}

    same(program, None)


def test_a_saved_shard_holds_this_rank_s_rows_alone(world, shared_path):
    """A view of the ranks' memory would be saved with all of it."""
    model = wrapped("rows")
    model(batches(0, 1)[0])
    model.reshard()
    locals_ = {name: param.to_local() for name, param in model.named_parameters()}
    path = shared_path / f"{world.rank}.pt"
    torch.save(locals_, path)
    assert path.stat().st_size < 4096 + 1.5 * sum(value.nbytes for value in locals_.values()) + 300 * len(locals_)


def test_state_dicts_are_made_of_rows_whatever_the_modules_hold(world):
    model = wrapped("rows")
    model.set_reshard_after_forward(False)
    model(batches(0, 1)[0])
    assert not isinstance(model.blocks[0].up.weight, DTensor)
    assert all(isinstance(value, DTensor) for name, value in model.state_dict().items() if "shift" not in name)
    model.blocks[0].unshard()
    model.load_state_dict(model.state_dict())
    assert isinstance(model.blocks[0].up.weight, DTensor)


@pytest.mark.ranks(4)
def test_a_model_on_some_ranks_is_saved_by_them_whatever_its_modules_hold(world, shared_path):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))["shard"]
    torch.manual_seed(0)
    model = ours.fully_shard(nn.Linear(3, 5), mesh=mesh)
    model(torch.ones(1, 3))  # whole until its backward
    assert not isinstance(model.weight, DTensor)
    path = shared_path / f"stage{world.rank // 2}.h5"
    hpcfsdp.checkpoint.save(path, model=model)
    assert torch.equal(values_of(path)["model/weight"], whole(model.weight))


@pytest.mark.parametrize("dim", [0, 1])
def test_chunks_of_other_dimensions_in_a_file(world, shared_path, dim):
    def build(seed):
        torch.manual_seed(seed)
        layer = nn.Linear(6 * world.size, 5)
        return ours.fully_shard(layer, shard_placement_fn=lambda p: Shard(dim) if p.dim() > 1 else None)

    saved, loaded = build(0), build(1)
    hpcfsdp.checkpoint.save(shared_path / "file.h5", model=saved)
    hpcfsdp.checkpoint.load(shared_path / "file.h5", model=loaded)
    assert torch.equal(whole(saved.weight), whole(loaded.weight))
    assert torch.equal(values_of(shared_path / "file.h5")["model/weight"], whole(saved.weight))
