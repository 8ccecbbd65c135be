"""Learn an operator between fields from HDF5 files: the heat equation, from a field at one time to a later one."""

import sys
from pathlib import Path

import h5py
import numpy as np
import torch
from torch import nn

import hpcfsdp
from hpcfsdp.data import HDF5Dataset, ResumableSampler, ThreadedLoader

FILES, SAMPLES, POINTS, MODES, WIDTH, EPOCHS = 4, 200, 64, 12, 16, 4
run_dir = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/fields")


def write(path: Path, seed: int) -> None:
    """Write fields of one simulation: waves of random heights, which fade the faster the shorter they are."""
    waves = np.arange(1, 8)
    heights = np.random.default_rng(seed).normal(size=(SAMPLES, 2, len(waves)))
    angles = np.outer(waves, np.linspace(0, 2 * np.pi, POINTS, endpoint=False))
    basis, fading = np.stack([np.sin(angles), np.cos(angles)]), np.exp(-0.05 * waves**2)
    with h5py.File(path, "w") as file:
        for name, of_time in (("before", heights), ("after", heights * fading)):
            values = np.einsum("sbw,bwp->sp", of_time, basis).astype(np.float32)
            file.create_dataset(name, data=values, chunks=(20, POINTS), compression="gzip")


class Layer(nn.Module):
    """Mixes channels of each wave (a spectral convolution), and of each point."""

    def __init__(self) -> None:
        super().__init__()
        self.waves = nn.Parameter(torch.randn(MODES, WIDTH, WIDTH, dtype=torch.cfloat) / WIDTH)
        self.points = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        waves = torch.fft.rfft(x, dim=1)[:, :MODES]
        mixed = torch.fft.irfft(torch.einsum("bmi,mio->bmo", waves, self.waves), n=x.shape[1], dim=1)
        return x + nn.functional.gelu(mixed + self.points(x))


world = hpcfsdp.init(run_dir=run_dir)
paths = [run_dir / f"simulation-{number}.h5" for number in range(FILES)]
if world.rank == 0:
    for number, path in enumerate(paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            write(path, number)
world.comm.Barrier()
dataset = HDF5Dataset(paths, ["before", "after"])  # ranks look at different files; a wrong one is named now
sampler = ResumableSampler(dataset, global_batch=16)
loader = ThreadedLoader(dataset, batch_sampler=sampler, device=world.device)

torch.manual_seed(0)  # the same initial values on every rank
model = nn.Sequential(nn.Linear(1, WIDTH), Layer(), Layer(), nn.Linear(WIDTH, 1)).to(world.device)
for layer in model[1:3]:
    hpcfsdp.fully_shard(layer)
hpcfsdp.fully_shard(model)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

with hpcfsdp.checkpoint.CheckpointManager(run_dir / "checkpoints", keep_last=2) as checkpoints:
    found = checkpoints.load_latest(model=model, optimizer=optimizer, data=sampler)
    step = found.step if found else 0
    for epoch in range(sampler.epoch, EPOCHS):
        for batch in loader:
            predicted = model(batch["before"][..., None])[..., 0]
            loss = (predicted - batch["after"]).square().mean() / batch["after"].square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 20 == 0:
                checkpoints.save(step, model=model, optimizer=optimizer, data=sampler)
        if world.rank == 0:
            print(f"epoch {epoch} relative error {loss.item() ** 0.5:.3f}", flush=True)
hpcfsdp.finalize()
