"""A training of your own: on any number of ranks, resumed from its newest checkpoint, stopped in good order.

    srun python jobs/train.py --run_dir runs/mine        # or mpirun -n 4 python jobs/train.py

EDIT marks what is yours: the data, the model, the loss. The rest can stay.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import hpcfsdp
from hpcfsdp.fsdp import FullyShardedDataParallel, ShardingStrategy
from hpcfsdp.wrap import ModuleWrapPolicy


class Samples(Dataset):  # EDIT: sample number n is the same on every rank and after every restart
    def __getitem__(self, number):
        return torch.randn(16, 64, generator=torch.Generator().manual_seed(number))


def make_model():  # EDIT: and the class of its layers, which are gathered one at a time
    layer = nn.TransformerEncoderLayer(64, 4, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.TransformerEncoderLayer


def loss_of(model, rows):  # EDIT: the mean over the rows of this rank
    return (model(rows) - rows.roll(1, 1)).square().mean()


parser = argparse.ArgumentParser()
parser.add_argument("--run_dir", type=Path, default="runs/train", help="folder of metrics.jsonl and checkpoints/")
parser.add_argument("--steps", type=int, default=2000, help="of the whole training")
parser.add_argument("--batch", type=int, default=64, help="samples in a step, over all ranks")
parser.add_argument("--every", type=int, default=200, help="steps between checkpoints")
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--by_node", action="store_true", help="a copy of the model on each node, sharded within it")
given = parser.parse_args()

with hpcfsdp.preemption() as stop:  # before all that takes time: a signal is not lost
    world = hpcfsdp.init(run_dir=given.run_dir)  # which makes the folder
    if given.batch % world.size:
        raise SystemExit(f"--batch {given.batch} is not a multiple of the {world.size} ranks")
    torch.manual_seed(0)  # the same initial values on every rank
    model, layer = make_model()
    options = {"auto_wrap_policy": ModuleWrapPolicy({layer})}
    if given.by_node:
        options["device_mesh"] = world.mesh(replicate="nodes", shard="node")
        options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
    model = FullyShardedDataParallel(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr)
    with hpcfsdp.checkpoint.CheckpointManager(given.run_dir / "checkpoints", keep_last=3) as manager:
        found = manager.load_latest(model=model, optimizer=optimizer)
        done = found.step if found else 0
        # In each step the ranks take every sample once, however many ranks there are.
        step_of = lambda n: range(n * given.batch + world.rank, (n + 1) * given.batch, world.size)  # noqa: E731
        order = map(step_of, range(done, given.steps))
        loader = DataLoader(Samples(), batch_sampler=order, generator=torch.Generator())
        began = time.perf_counter()
        for step, rows in enumerate(loader, done + 1):
            loss = loss_of(model, rows.to(world.device))
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            world.communicator.all_reduce(mean := loss.detach() / world.size, "sum")
            stopping = stop.requested(step)
            if stopping or step == given.steps or step % given.every == 0:
                manager.save(step, model=model, optimizer=optimizer)
            if world.rank == 0:
                record = {"step": step, "loss": mean.item(), "seconds": time.perf_counter() - began}
                with open(given.run_dir / "metrics.jsonl", "a") as file:
                    print(json.dumps(record), file=file)
            began = time.perf_counter()
            if stopping:
                hpcfsdp.exit_requeue()  # ends with 75: the job script puts the job back into the queue
    hpcfsdp.finalize()
