"""A file has the names of the model, whatever stands around it, and loads into the model in any other wrapping."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from hpcfsdp import checkpoint
from hpcfsdp.errors import CheckpointError
from hpcfsdp.fsdp import FullyShardedDataParallel

pytestmark = pytest.mark.ranks(2)


class Around(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


def make_plain(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.BatchNorm1d(7), nn.Linear(7, 3))


def compiled(module):
    return torch.compile(module, backend="eager")


def fsdp2(model, group, block=lambda module: module):
    mesh = DeviceMesh.from_group(group, "cpu")
    model[0] = block(model[0])
    for part in (model[0], model):
        fully_shard(part, mesh=mesh)
    return model


WRAPPINGS = {
    "plain": lambda model, group: model,
    "DDP": lambda model, group: DistributedDataParallel(model, process_group=group),
    "DDP(compile)": lambda model, group: DistributedDataParallel(compiled(model), process_group=group),
    "compile(DDP)": lambda model, group: compiled(DistributedDataParallel(model, process_group=group)),
    "FSDP2": fsdp2,
    "FSDP2 of compiled blocks": lambda model, group: fsdp2(model, group, compiled),
    "FSDP2 in another": lambda model, group: Around(fsdp2(model, group)),
    "hpcfsdp": FullyShardedDataParallel,
    "hpcfsdp, original": lambda model, group: Around(FullyShardedDataParallel(model, group, use_orig_params=True)),
}


@pytest.fixture(scope="module", params=["hpcmpi", "gloo"])
def group(request, world):
    return dist.new_group(backend="gloo") if request.param == "gloo" else dist.group.WORLD


def build(kind, group, seed):
    model = WRAPPINGS[kind](make_plain(seed), group)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(kind, model, optimizer):
    """Two steps, on what is the same for all ranks; the losses."""
    losses = []
    if kind == "compile(DDP)":  # what dynamo makes of a process group is not looked at here
        model = model._orig_mod
    for step in range(2):
        loss = model(torch.full((4, 5), step / 4) + torch.eye(4, 5)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def expected():
    """Names in the file, and the losses before and after it."""
    model = make_plain(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = [train("plain", model, optimizer) for _ in range(2)]
    return set(model.state_dict()), losses


@pytest.mark.parametrize("kind", WRAPPINGS)
def test_a_file_loads_into_the_model_in_any_wrapping(kind, group, expected, shared_path):
    names, losses = expected
    model, optimizer = build(kind, group, seed=0)
    torch.testing.assert_close(train(kind, model, optimizer), losses[0], rtol=1e-5, atol=0)
    path = checkpoint.save(shared_path / "x.h5", model=model, optimizer=optimizer)
    index = checkpoint.open_index(path)
    assert {name.removeprefix("model/") for name in index.tensors if name.startswith("model/")} == names
    assert set(index.param_groups[0]["params"]) == {name for name in names if name.endswith(("weight", "bias"))}
    for other in dict.fromkeys(("plain", "DDP", "FSDP2", "hpcfsdp", kind)):
        again, again_optimizer = build(other, group, seed=1)
        checkpoint.load(path, model=again, optimizer=again_optimizer)
        torch.testing.assert_close(train(other, again, again_optimizer), losses[1], rtol=1e-5, atol=0)


def test_an_average_is_saved_and_loaded_as_one_and_as_a_model(group, shared_path):
    model = make_plain(0)
    average = AveragedModel(model)
    average.update_parameters(model)
    path = checkpoint.save(shared_path / "x.h5", model=average)
    again = AveragedModel(make_plain(1))
    assert checkpoint.load(path, model=again).unexpected == ()
    assert again.n_averaged == 1
    ours = WRAPPINGS["hpcfsdp"](make_plain(2), group)
    assert checkpoint.load(path, model=ours).unexpected == ("n_averaged",)
    with FullyShardedDataParallel.summon_full_params(ours):
        for one in (again, ours):
            torch.testing.assert_close(one.module[0].weight, model[0].weight, rtol=0, atol=0)


def test_a_model_that_is_whole_after_a_forward_alone(group, shared_path):
    model = fsdp2(make_plain(0), group)
    with torch.no_grad():
        model(torch.ones(4, 5))
    path = checkpoint.save(shared_path / "x.h5", model=model)
    again = fsdp2(make_plain(1), group)
    with torch.no_grad():
        again(torch.ones(4, 5))
    checkpoint.load(path, model=again)
    plain = make_plain(0)
    assert torch.equal(again[3].weight.full_tensor(), plain[3].weight)


def test_a_model_in_a_group_of_its_own_waits_for_no_other_rank(world, several, shared_path):
    ranks = range(1, world.size)
    group = dist.new_group(list(ranks))
    if world.rank in ranks:
        for kind in ("DDP", "FSDP2"):
            model, _ = build(kind, group, seed=0)
            path = checkpoint.save(shared_path / f"{kind}.h5", model=model)
            assert checkpoint.load(path, model=model).world_size == len(ranks)


@pytest.mark.filterwarnings("ignore:FSDP is switching")  # on one rank
def test_what_torchs_fsdp_has_flattened_is_refused(world, shared_path):
    model = Around(TorchFSDP(make_plain(0), device_id=torch.device("cpu")))
    with pytest.raises(CheckpointError, match=r"module is torch's FullyShardedDataParallel"):
        checkpoint.save(shared_path / "x.h5", model=model)
    with contextlib.suppress(FileNotFoundError):
        assert list(shared_path.iterdir()) == []
