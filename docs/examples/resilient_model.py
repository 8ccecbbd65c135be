"""Train a model of your own, and go on when ranks are lost."""

import os

import torch

import hpcfsdp
from hpcfsdp.fsdp import FullyShardedDataParallel as FSDP
from hpcfsdp.wrap import ModuleWrapPolicy

FOLDER, STEPS, EVERY = "my_model", int(os.environ.get("STEPS", "20")), 10


def train(world):  # again when ranks are lost: all that belongs to a world is made here
    torch.manual_seed(0)  # the same initial values on every rank
    layer = torch.nn.TransformerEncoderLayer(64, 4, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({torch.nn.TransformerEncoderLayer}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # after wrapping
    torch.manual_seed(1 + world.rank)  # from here on each rank draws its own data

    with hpcfsdp.checkpoint.CheckpointManager(FOLDER, memory_every=1, every=EVERY) as manager:
        info = manager.load_latest(model=model, optimizer=optimizer)  # the newest, in memory or a file
        done = 0 if info is None else info.step
        for step in range(done + 1, STEPS + 1):
            x = torch.randn(8, 16, 64, device=world.device)  # this rank's part of the batch
            loss = (model(x) - x.roll(1, -1)).square().mean()  # to learn: shift each row by one
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            if world.rank == 0 and step % EVERY == 0:
                print(f"step {step} loss {loss.item():.3f}", flush=True)
            stopping = stop.requested(step)  # the same answer on every rank
            manager.step(step, model=model, optimizer=optimizer)  # a version in memory, every tenth as a file
            if stopping:
                manager.save(step, model=model, optimizer=optimizer)
                if world.rank == 0:
                    print(f"stops after step {step}: {stop.reason}", flush=True)
                return True
    return False


with hpcfsdp.preemption() as stop:  # signals USR1, USR2 and TERM, and the end of the job
    if hpcfsdp.resilient(train, spares=int(os.environ.get("SPARES", "0"))):
        hpcfsdp.exit_requeue()  # exit code 75: run me again
