"""Ranks in different public calls: all raise within seconds; a rank that waits long logs the ranks that are missing."""

import itertools
import re

import pytest

SCRIPT = """
import copy, itertools, logging, os, sys, time
import torch, torch.nn as nn
import hpcfsdp
from hpcfsdp import checkpoint
from hpcfsdp.comm.mpi.communicator import MpiCommunicator
from hpcfsdp.hang import waits
from hpcfsdp.launch.topology import Topology
from hpcfsdp.fsdp import FullyShardedDataParallel as FSDP, ShardedGradScaler
from hpcfsdp.wrap import ModuleWrapPolicy

waits.LOOK_AFTER_S, waits._LOOK_EVERY_S = 0.05, (0.05, 0.5)
world = hpcfsdp.init("cpu", timeout_s=600)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.second(self.first(x))

def summon(model, optimizer, loss):
    with FSDP.summon_full_params(model):
        pass

def load_around(model):
    nn.Sequential(model).load_state_dict(nn.Sequential(Net()).state_dict())

def scale(optimizer):
    scaler = ShardedGradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)

CALLS = {
    "checkpoint.save": lambda model, optimizer, loss: checkpoint.save("x.h5", model=model, optimizer=optimizer),
    "checkpoint.load": lambda model, optimizer, loss: checkpoint.load("ok.h5", model=model, optimizer=optimizer),
    "state_dict": lambda model, optimizer, loss: model.state_dict(),
    "optim_state_dict": lambda model, optimizer, loss: FSDP.optim_state_dict(model, optimizer),
    "clip_grad_norm_": lambda model, optimizer, loss: model.clip_grad_norm_(1.0),
    "summon_full_params": summon,
    "forward": lambda model, optimizer, loss: model(torch.ones(2, 8)),
    "backward": lambda model, optimizer, loss: loss.backward(),
    "load_state_dict": lambda model, optimizer, loss: load_around(model),
    "copy.deepcopy": lambda model, optimizer, loss: copy.deepcopy(nn.Sequential(model)),
    "apply": lambda model, optimizer, loss: model.apply(lambda module: None),
    "ShardedGradScaler.unscale_": lambda model, optimizer, loss: scale(optimizer),
    "hpcfsdp.finalize": lambda model, optimizer, loss: hpcfsdp.finalize(),
}

def over_nodes(nodes):
    return MpiCommunicator(world.comm.Dup(), Topology.regular(nodes, world.size // nodes), timeout_s=600)

def made(comm, passes="fb"):
    model = FSDP(Net(), comm, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    optimizer = torch.optim.AdamW(model.parameters())
    for each in passes.split():
        loss = model(torch.ones(2, 8)).sum()
        if each == "fb":
            loss.backward()
    optimizer.step()
    return model, optimizer
"""

TABLE = """
checkpoint.save("ok.h5", **dict(zip(("model", "optimizer"), made(None))))
for one, other, nodes, passes in PAIRS:
    model, optimizer = made(over_nodes(nodes), passes)
    case = model, optimizer, model(torch.ones(2, 8)).sum() if other == "backward" else None
    call = CALLS[one if world.rank == 0 else other]
    world.comm.Barrier()
    try:
        call(*case)
        text = "no error"
    except hpcfsdp.errors.HpcfsdpError as error:
        text = f"{type(error).__name__}: {error}"
    for rank, found in enumerate(world.comm.allgather(text)):
        if world.rank == 0:
            print(f"{one}|{other}|{rank}|{found}", flush=True)
"""

COLLECTIVE = ["checkpoint.save", "checkpoint.load", "state_dict", "optim_state_dict", "clip_grad_norm_"]
OTHERS = ["load_state_dict", "copy.deepcopy", "apply", "ShardedGradScaler.unscale_"]
TRAINED = "fb"
"""Passes so far: forward and backward."""
NEW_END, NEW_BACKWARD = "fb f", "f"
"""Passes after which the next forward, or backward, first confirms in the store that all ranks go a new way."""
WITH_STEPS = [
    (one, other, 1, TRAINED) for one in [*COLLECTIVE, "summon_full_params"] for other in ("forward", "backward")
]
OF_TWO = [
    *WITH_STEPS,
    *((one, other, 1, TRAINED) for one, other in itertools.combinations(COLLECTIVE, 2)),
    *((one, "forward", 1, TRAINED) for one in OTHERS),
    ("checkpoint.save", "forward", 2, TRAINED),
    ("forward", "clip_grad_norm_", 2, TRAINED),
    ("forward", "checkpoint.save", 2, NEW_END),
    ("state_dict", "forward", 2, NEW_END),
    ("optim_state_dict", "backward", 2, NEW_BACKWARD),
]
OF_THREE = [
    *WITH_STEPS[::4],
    ("forward", "checkpoint.save", 3, TRAINED),
    ("forward", "state_dict", 3, NEW_END),
    ("checkpoint.save", "backward", 3, NEW_BACKWARD),
]


def run(start, tmp_path, text, ranks, **options):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + text)
    return start(script, ranks=ranks, **options).wait(250)


@pytest.mark.parametrize(
    ("ranks", "pairs"),
    [(2, OF_TWO), pytest.param(3, OF_THREE, marks=pytest.mark.slow)],
    ids=["two ranks", "three ranks"],
)
def test_ranks_in_different_calls_all_raise_naming_both(start, tmp_path, ranks, pairs):
    job = run(start, tmp_path, f"PAIRS = {pairs}" + TABLE, ranks)
    found = [line.split("|", 3) for line in job.stdout.splitlines()]
    assert len(found) == len(pairs) * ranks, job.stdout + job.stderr
    for one, other, rank, text in found:
        case = (one, other, rank, text)
        assert re.search(r"(Crossed|Different)CallsError", text), case
        named = dict(re.findall(r"rank (\d) (?:is in|in|calls) ([\w.]*\w)", text))
        assert named.items() <= {str(each): other if each else one for each in range(ranks)}.items(), case
        assert named.keys() >= {"0", rank}, case  # itself, and rank 0, which is elsewhere
        assert len(named) >= 2, case  # rank 0 names the ranks that it knows of


def test_a_waiting_rank_logs_the_missing_ranks_and_a_lone_finalize_is_named(start, tmp_path):
    text = """
logging.basicConfig(format="%(message)s")
case = (*made(None), None)
on_nodes = (*made(over_nodes(2), "fb f"), None)
for name, given in (("checkpoint.save", case), ("forward", on_nodes)):
    world.comm.Barrier()
    if world.rank == 1:
        time.sleep(2)
    CALLS[name](*given)
    print("came through", flush=True)
CALLS["forward" if world.rank else "hpcfsdp.finalize"](*case)
print("went on", flush=True)
"""
    job = run(start, tmp_path, text, 2, environ={"HPCFSDP_WAIT_LOG_S": "0.5"})
    assert job.stdout.count("came through") == 4, job.stderr
    for what in (
        r"checkpoint\.save \(.*\)",
        r'forward of "Net" \(the end of a step \(event \d+ of step 2 of model 2\), .*\)',
    ):
        waited = rf"rank 0 has waited \d+ s in {what} for rank\(s\) 1: rank 1 does not wait within hpcfsdp"
        assert re.search(waited, job.stderr), job.stderr
    assert job.code != 0
    assert "went on" not in job.stdout
    assert 'rank 0 is in hpcfsdp.finalize, rank 1 is in forward of "Net"' in job.stderr
