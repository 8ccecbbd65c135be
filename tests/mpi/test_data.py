"""The place in the data is in checkpoints, of files and of memory, and other numbers of ranks go on from it."""

from itertools import chain

import h5py
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hpcfsdp import checkpoint
from hpcfsdp.data import HDF5Dataset, ResumableSampler, ThreadedLoader
from hpcfsdp.errors import CheckpointCorruptError, CheckpointMismatchError, DataError, DisagreementError, UsageError
from hpcfsdp.fsdp2 import fully_shard


class Numbers(Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, index):
        return torch.tensor([index])


def make():
    model = fully_shard(nn.Linear(5, 3))
    return model, torch.optim.Adam(model.parameters())


def sampler(**options):
    return ResumableSampler(Numbers(), **{"global_batch": 12, **options})


def train(world, model, optim, loader, steps):
    """What all ranks have read, by step."""
    seen, batches = [], iter(loader)
    for _ in range(steps):
        batch = next(batches, None)
        if batch is None:
            batches = iter(loader)
            batch = next(batches)
        seen.append(sorted(chain(*world.comm.allgather(batch.flatten().tolist()))))
        optim.zero_grad()
        model(batch.float().expand(-1, 5)).sum().backward()
        optim.step()
    return seen


def loaders(kind, own):
    return (
        ThreadedLoader(Numbers(), batch_sampler=own) if kind == "threads" else DataLoader(Numbers(), batch_sampler=own)
    )


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("kind", ["threads", "plain"])
@pytest.mark.parametrize("writer", ["save", "manager", "asynchronous", "memory"])
def test_a_run_that_goes_on_reads_the_next_sample(world, shared_path, writer, kind):
    model, optim = make()
    whole = train(world, model, optim, loaders(kind, sampler()), 9)
    model, optim = make()
    loader = loaders(kind, sampler())
    options = {"asynchronous": writer == "asynchronous", "memory_every": 1 if writer == "memory" else None}
    given = {"model": model, "optimizer": optim}
    with checkpoint.CheckpointManager(shared_path, **options) as manager:
        seen = train(world, model, optim, loader, 3)
        if writer == "save":
            checkpoint.save(shared_path / "step-3.h5", step=3, data=loader, **given)
        else:
            (manager.step if writer == "memory" else manager.save)(3, data=loader, **given)
        manager.wait()
        train(world, model, optim, loader, 2)  # is lost
        model, optim = make()
        own = sampler()
        info = manager.load_latest(model=model, optimizer=optim, data=own)
        assert info.source == ("memory" if writer == "memory" else "file")
        assert {name: info.data[name] for name in ("epoch", "samples")} == {"epoch": 0, "samples": 36}
        assert seen + train(world, model, optim, loaders(kind, own), 6) == whole


def test_other_numbers_of_ranks_go_on(world, shared_path):
    model, optim = make()
    own = sampler()
    train(world, model, optim, DataLoader(Numbers(), batch_sampler=own), 2)
    path = checkpoint.save(shared_path / "a.h5", model=model, data=own)
    one, three = sampler(rank=0, ranks=1), [sampler(rank=rank, ranks=3) for rank in range(3)]
    for each in (one, *three):
        checkpoint.load(path, model=nn.Linear(5, 3), data=each)
        assert each.samples == 24
    rest = list(one)
    assert len(rest) == 3
    assert rest == [list(chain(*batches)) for batches in zip(*three, strict=True)]


def test_nothing_changes_if_a_file_does_not_fit(world, shared_path):
    model, _ = make()
    own = sampler()
    next(iter(own))
    path = checkpoint.save(shared_path / "a.h5", model=model, data=own)
    without = checkpoint.save(shared_path / "b.h5", model=model)
    assert checkpoint.load(without, model=model).data is None
    before = {name: param.full_tensor() for name, param in model.named_parameters()}
    other = ResumableSampler(55, global_batch=12)
    with pytest.raises(DataError, match=r"after 12 of 60 samples, and the set has 55 now"):
        checkpoint.load(path, model=model, data=other)
    with pytest.raises(CheckpointMismatchError, match=r"b.h5: holds no place in the data; load it with data=None"):
        checkpoint.load(without, model=model, data=own)
    with pytest.raises(CheckpointMismatchError, match="weight"):
        checkpoint.load(path, model=fully_shard(nn.Linear(7, 3)), data=(fresh := sampler()))
    with path.open("r+b") as file:
        file.seek(checkpoint.open_index(path).rows_of("model/weight")["byte_offset"][0])
        file.write(b"damage")
    with pytest.raises(CheckpointCorruptError):
        checkpoint.load(path, model=model, data=fresh, fresh=False)
    assert (own.samples, other.samples, fresh.samples) == (12, 0, 0)
    assert all(torch.equal(before[name], param.full_tensor()) for name, param in model.named_parameters())


def test_what_has_no_place_and_ranks_that_differ(world, several, shared_path):
    model, _ = make()
    with pytest.raises(UsageError, match=r"data must be a sampler or loader that has a state_dict, not a DataLoader"):
        checkpoint.save(shared_path / "a.h5", model=model, data=DataLoader(Numbers()))
    with pytest.raises(UsageError, match="not a list"):
        checkpoint.load(shared_path / "a.h5", model=model, data=[1])
    own = sampler()
    for _ in zip(range(1 + (world.rank == 1)), own, strict=False):
        pass
    with pytest.raises(DisagreementError, match=r"data\['samples'\]"):
        checkpoint.save(shared_path / "a.h5", model=model, data=own)
    with pytest.raises(DisagreementError, match="data"):
        checkpoint.save(shared_path / "a.h5", model=model, data=own if world.rank else None)


@pytest.mark.ranks(2, 3)
def test_ranks_divide_the_files_and_raise_the_first_problem(world, several, shared_path):
    if world.rank == 0:
        for number in range(7):
            with h5py.File(shared_path / f"{number}.h5", "w") as file:
                file["x"] = np.full((number + 1, 3), number, np.float32)
    world.comm.Barrier()
    found = HDF5Dataset(shared_path, "x")
    assert found.batch(range(len(found)))[:, 0].tolist() == [n for n in range(7) for _ in range(n + 1)]
    found.close()
    world.comm.Barrier()
    if world.rank == 0:
        (shared_path / "6.h5").write_bytes(b"no HDF5")
        with h5py.File(shared_path / "5.h5", "w") as file:
            file["x"] = np.zeros((5, 4), np.float32)
    world.comm.Barrier()
    with pytest.raises(DataError, match=r"5.h5: field 'x' has numbers .* shape \(4,\)") as caught:
        HDF5Dataset(shared_path, "x")
    assert caught.value.raised_on_all_ranks
    if world.rank == 0:
        assert len(HDF5Dataset(shared_path / "1.h5", "x", together=False)) == 2


def test_ranks_are_those_of_the_job(world):
    own = sampler()
    assert (own.rank, own.ranks) == (world.rank, world.size)
    batches = world.comm.allgather(next(iter(own)))
    assert len({sample for batch in batches for sample in batch}) == 12
