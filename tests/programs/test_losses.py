"""Trainings of other libraries within ``hpcfsdp.resilient``, in jobs that lose ranks: mpirun --with-ft ulfm.

In each of them three of four processes train, undisturbed, and then again: when process 1 is killed the spare takes its
place, when process 0 is killed later the world gets smaller.
"""

import json
import re

import pytest

from tests.programs.jobs import *  # noqa: F403
from tests.programs.jobs import ROOT, rank_0

STEPS, KEPT = 12, 8
"""Of the undisturbed training; the last step that is in a file when the world gets smaller."""
COMMON = """
import json, os, shutil, signal
import torch
from torch import nn
import hpcfsdp
from hpcfsdp.hang import lost
from mpi4py import MPI

ME = MPI.COMM_WORLD.rank  # of all processes, for ever
losses, sizes, disturbed = {}, [], False

def see(step, loss):
    losses[step] = loss
    plan = {0: (5, 1), 1: (9, 0)}  # by the number of losses so far: after which step which process dies
    if disturbed and plan.get(lost.generation) == (step, ME):
        os.kill(os.getpid(), signal.SIGKILL)

def twice(train_in):
    global disturbed

    def train(world):
        sizes.append(world.size)
        train_in(world)

    hpcfsdp.resilient(train, spares=1, device="cpu")
    undisturbed = dict(losses)
    losses.clear(), sizes.clear()
    if ME == 0:
        shutil.rmtree("run")
    disturbed = True
    hpcfsdp.resilient(train, spares=1, device="cpu")
    print("result", ME, json.dumps([undisturbed, losses, sizes]), flush=True)
"""
LIGHTNING = """
import lightning.pytorch as pl
from torch.utils.data import DataLoader, TensorDataset
from hpcfsdp.integrations.lightning import HpcfsdpStrategy, ModelCheckpoint, Requeue

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 8))

    def training_step(self, batch, index):
        loss = (self.layers(batch[0]) - batch[0].roll(1, -1)).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

class See(pl.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        see(trainer.global_step, float(trainer.callback_metrics["loss"]))
"""
TRAINER = """
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments, set_seed
from hpcfsdp.integrations.transformers import ShardedTrainer

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        row = (index + torch.arange(8)) % 16
        return {"input_ids": row, "labels": row}

class See(TrainerCallback):
    def on_log(self, args, state, control, logs, **_):
        if "loss" in logs:
            see(state.global_step, logs["loss"])

def build():
    sizes = {"vocab_size": 16, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def train(world):
    set_seed(0)
    arguments = TrainingArguments(
        "run",
        use_cpu=True,
        max_steps=12,
        save_steps=2,
        logging_steps=1,
        gradient_accumulation_steps=2,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = ShardedTrainer(build(), arguments, train_dataset=Rows(), callbacks=[See()], preemption=stop)
    trainer.train(resume_from_checkpoint=trainer.newest_checkpoint())

with hpcfsdp.preemption() as stop:
    twice(train)
"""
ACCELERATE = """
from pathlib import Path
from accelerate.utils import set_seed
from hpcfsdp.integrations.accelerate import ShardedAccelerator

def train(world):
    accelerator = ShardedAccelerator(layers=["Linear"], gradient_accumulation_steps=2)
    set_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 8))
    loader = torch.utils.data.DataLoader(torch.randn(48, 8), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader)
    step = 0
    if Path("run", "checkpoint.h5").exists():
        step = accelerator.load_state("run").step
    assert (accelerator.num_processes, accelerator.process_index) == (world.size, world.rank)
    assert not accelerator.gradient_state.in_dataloader
    while step < 12:
        for x in loader:
            with accelerator.accumulate(model):
                loss = (model(x) - x.roll(1, -1)).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step += 1
                see(step, accelerator.reduce(loss.detach(), "mean").item())
        accelerator.save_state("run", step=step)

twice(train)
"""


def trainings():
    """Of each library, by its name. That of Lightning ends with the example of the page, in which steps are seen."""
    page = (ROOT / "docs/how-to/losing-ranks.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    quiet = "enable_progress_bar=False, enable_model_summary=False, max_epochs=6"
    changes = {
        "callbacks=[": "callbacks=[See(), ",
        "max_epochs=6": quiet,
        "hpcfsdp.resilient(train, spares=1)": "twice(train)",
    }
    for old, new in changes.items():
        assert block.count(old) == 1
        block = block.replace(old, new)
    return {"lightning": LIGHTNING + block, "transformers": TRAINER, "accelerate": ACCELERATE}


@rank_0
@pytest.mark.ranks(2)
@pytest.mark.parametrize(("name", "last"), [("lightning", 14), ("transformers", 12), ("accelerate", 14)])
def test_losses_go_on_in_the_same_processes(program, name, last):
    """The losses are those of the undisturbed training up to the file from which a smaller world goes on."""
    job = program("training", COMMON + trainings()[name], ranks=4, launcher=("--with-ft", "ulfm")).wait()
    assert job.code == 0, job.stderr
    found = {int(rank): json.loads(text) for rank, text in re.findall(r"^result (\d) (.*)$", job.stdout, re.MULTILINE)}
    assert set(found) == {2, 3}, job.stderr
    undisturbed, losses, sizes = found[2]
    assert len(undisturbed) == STEPS
    assert {step: losses[step] for step in map(str, range(1, KEPT + 1))} == dict(list(undisturbed.items())[:KEPT])
    assert (sizes, max(map(int, losses))) == ([3, 3, 2], last)
    assert found[3][1:] == [{step: losses[step] for step in losses if int(step) >= 5}, [3, 2]]
    assert job.stderr.count("going on with") == 2
    assert "no caller waited" not in job.stderr
