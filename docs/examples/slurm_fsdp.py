"""After: the same training with hpcfsdp, started by srun or mpirun. It resumes, and stops in time."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import hpcfsdp
from hpcfsdp.data import ResumableSampler, ThreadedLoader
from hpcfsdp.fsdp import FullyShardedDataParallel as FSDP
from hpcfsdp.wrap import ModuleWrapPolicy

EPOCHS, BATCH = 2, 16  # over all ranks
run_dir = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/slurm_fsdp")

with hpcfsdp.preemption() as stop:  # first: a signal may arrive while the program starts
    world = hpcfsdp.init(run_dir=run_dir)  # ranks, device and process group, all from MPI

    x = torch.randn(256, 16, 32, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(x, x.roll(1, -1))

    torch.manual_seed(0)  # the same initial values on every rank
    layer = nn.TransformerEncoderLayer(32, 4, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.TransformerEncoderLayer}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler = ResumableSampler(dataset, global_batch=BATCH)
    loader = ThreadedLoader(dataset, batch_sampler=sampler, device=world.device)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS * len(loader))
    torch.manual_seed(1 + world.rank)  # from here on each rank draws its own numbers, as for dropout

    checkpoints = hpcfsdp.checkpoint.CheckpointManager(run_dir / "checkpoints", keep_last=2, asynchronous=True)
    steps, losses = [], []
    found = checkpoints.load_latest(model=model, optimizer=optimizer, data=sampler)
    if found:  # rank 0's `extra` and metrics come back on every rank
        scheduler.load_state_dict(found.extra["scheduler"])
        steps, losses = found.extra["steps"], found.extra["losses"]
    step = found.step if found else 0

    for epoch in range(sampler.epoch, EPOCHS):
        for inputs, targets in loader:  # after a resume: the samples that are left
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            step += 1
            mean = loss.detach() / world.size
            world.communicator.all_reduce(mean, "sum")
            steps, losses = [*steps, step], [*losses, mean.item()]
            stopping = stop.requested(step)  # the same answer on every rank
            if stopping or step % len(loader) == 0:
                extra = {"scheduler": scheduler.state_dict(), "steps": steps, "losses": losses}
                given = {"model": model, "optimizer": optimizer, "data": sampler, "extra": extra}
                checkpoints.save(step, **given, metrics={"loss": (steps, losses)})
            if stopping:
                if world.rank == 0:
                    print(f"stops after step {step}: {stop.reason}", flush=True)
                hpcfsdp.exit_requeue()  # waits for the checkpoint; exit code 75: the job script requeues the job
        if world.rank == 0:
            print(f"epoch {epoch} loss {losses[-1]:.6f}", flush=True)
    checkpoints.close()
hpcfsdp.finalize()
