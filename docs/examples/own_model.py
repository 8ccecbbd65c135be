"""Train a model of your own: resume, learn, save when a signal arrives."""

import os

import torch

import hpcfsdp
from hpcfsdp.fsdp import FullyShardedDataParallel as FSDP
from hpcfsdp.wrap import ModuleWrapPolicy

PATH, STEPS, EVERY = "my_model.h5", int(os.environ.get("STEPS", "20")), 10

with hpcfsdp.preemption() as stop:  # signals USR1, USR2 and TERM, and the end of the job
    world = hpcfsdp.init()  # ranks, node, device and process group, all from MPI
    torch.manual_seed(0)  # the same initial values on every rank
    layer = torch.nn.TransformerEncoderLayer(64, 4, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({torch.nn.TransformerEncoderLayer}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # after wrapping
    torch.manual_seed(1 + world.rank)  # from here on each rank draws its own data

    done = 0
    if world.comm.bcast(os.path.exists(PATH)):  # rank 0 looks, all ranks do the same
        done = hpcfsdp.checkpoint.load(PATH, model=model, optimizer=optimizer).step
    for step in range(done + 1, done + STEPS + 1):
        x = torch.randn(8, 16, 64, device=world.device)  # this rank's part of the batch
        loss = (model(x) - x.roll(1, -1)).square().mean()  # to learn: shift each row by one
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if world.rank == 0 and step % EVERY == 0:
            print(f"step {step} loss {loss.item():.3f}", flush=True)
        stopping = stop.requested(step)  # the same answer on every rank
        if stopping or step % EVERY == 0:
            hpcfsdp.checkpoint.save(PATH, model=model, optimizer=optimizer, step=step)
        if stopping:
            if world.rank == 0:
                print(f"stops after step {step}: {stop.reason}", flush=True)
            hpcfsdp.exit_requeue()  # exit code 75: run me again
hpcfsdp.finalize()
