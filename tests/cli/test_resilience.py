"""Jobs that go on after ranks are lost: mpirun --with-ft ulfm."""

import json
import os
import re
import signal

import pytest

from hpcfsdp.checkpoint import open_index
from tests.cli.conftest import ROOT, TINY

pytestmark = pytest.mark.fresh  # the launcher reports the death of its own children
FT = ("--with-ft", "ulfm")
PROGRAM = """
import json, os, pathlib, signal, sys, threading, time
import torch
import hpcfsdp
from hpcfsdp.errors import CommunicationError, HangError, RankLostError
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.hang import lost
from mpi4py import MPI

ME = MPI.COMM_WORLD.rank  # of all processes, for ever
STEPS, calls, kept, begun = 12, [], [], []

def model_of():
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8)).double()
    return FullyShardedDataParallel(layers)

def steps(world, strike=lambda step: None, last=STEPS):
    model = model_of()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = {}
    options = {"keep_last": 2, "asynchronous": True, "memory_every": 1, "every": 4}
    with hpcfsdp.checkpoint.CheckpointManager("run", **options) as manager:
        info = manager.load_latest(model=model, optimizer=optimizer)
        done = 0
        if info is not None:
            done, losses = info.step, {int(step): loss for step, loss in info.extra["losses"].items()}
            begun.append((done, info.source))
        for step in range(done + 1, last + 1):
            torch.manual_seed(step)
            whole = torch.randn(12, 8, dtype=torch.float64)
            # The mean over all ranks is that of the whole batch, for any number of ranks.
            loss = model(whole.tensor_split(world.size)[world.rank]).square().sum() * world.size / whole.numel()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach().clone()
            world.communicator.all_reduce(total, "average")
            losses[step] = total.item()
            strike(step)
            extra = lambda: {"losses": {str(step): loss for step, loss in losses.items()}}
            manager.step(step, model=model, optimizer=optimizer, extra=extra)
    return losses
"""


@pytest.fixture
def job(start, tmp_path):
    """Run a script behind the program, where MPI goes on after a loss unless `launcher` is another."""

    def begin(script, ranks, launcher=FT, hang_s=0, **more):
        (tmp_path / "script.py").write_text(PROGRAM + script)
        environ = {"HPCFSDP_HANG_S": str(hang_s), **more}
        started = start("script.py", ranks=ranks, launcher=launcher, environ=environ)
        return started.wait(150)

    return begin


def results(job):
    """What each process prints at the end, by its number."""
    found = re.findall(r"^result (\d+) (.*)$", job.stdout, re.MULTILINE)
    return {int(rank): json.loads(text) for rank, text in found}


LOSSES = """
import shutil
undisturbed = hpcfsdp.resilient(steps, spares=5, device="cpu")
if ME == 0:
    shutil.rmtree("run")
    pathlib.Path("undisturbed").write_text(repr(undisturbed))

def strike(step):
    # By the number of losses so far: what happens after which step to which processes.
    plan = {0: (5, {1: signal.SIGKILL}), 1: (6, {0: signal.SIGSTOP, 2: signal.SIGKILL}), 3: (9, {3: signal.SIGTERM})}
    when, whom = plan.get(lost.generation, (0, {}))
    if step == when and ME in whom:
        os.kill(os.getpid(), whom[ME])

def train(world):
    calls.append(world.size)
    if lost.generation == 2 and ME == 5:  # within the recovery from the second loss
        os.kill(os.getpid(), signal.SIGKILL)
    return steps(world, strike)

disturbed = hpcfsdp.resilient(train, spares=5, device="cpu")
same = repr(disturbed) == pathlib.Path("undisturbed").read_text()
print("result", ME, json.dumps([calls, lost.generation, same, begun]), flush=True)
"""


def test_losses_change_no_loss_where_spares_take_the_places(job, tmp_path):
    """Of eight processes three train. Killed: one; rank 0 (which hangs) and another at once; one in the recovery."""
    ended = job(LOSSES, 8, hang_s=4)
    assert ended.code == 0, ended.stderr
    found = results(ended)
    assert len(found) == 3, ended.stdout + ended.stderr
    assert all(set(sizes) == {3} and losses == 4 and same for sizes, losses, same, _ in found.values()), found
    begun = max((begun for *_, begun in found.values()), key=len)
    assert begun == [[5, "memory"], [8, "memory"]]  # the step before the one in which ranks were lost
    killed = re.findall(r"process (\d+) has hung for 4 s: it is killed", ended.stderr)
    assert len(set(killed)) == 1, killed  # by any of those that wait, perhaps several at once


MOVES = """
import shutil
from hpcfsdp.launch import job
from hpcfsdp.launch.topology import Topology

job.replace(job.Job(job.current_job().comm, Topology.regular(3, 2)))  # nodes that are imagined
shapes, given = [], {"spares": 2, "device": "cpu"}
undisturbed = hpcfsdp.resilient(steps, **given)
if ME == 0:
    shutil.rmtree("run")
    pathlib.Path("undisturbed").write_text(repr(undisturbed))

def strike(step):
    if lost.generation == 0 and step == 5 and ME == 1:
        os.kill(os.getpid(), signal.SIGKILL)

def train(world):
    shapes.append([len(node) for node in world.topology.nodes])
    return steps(world, strike)

disturbed = hpcfsdp.resilient(train, **given)
same = repr(disturbed) == pathlib.Path("undisturbed").read_text()
print("result", ME, json.dumps([shapes, same, begun]), flush=True)
"""


@pytest.mark.slow
def test_a_node_that_has_lost_a_rank_moves_to_one_of_spares(job):
    """Three nodes of two processes: rank 1 dies, 0 becomes a spare, and what both had is on the second node."""
    ended = job(MOVES, 6)
    assert ended.code == 0, ended.stderr
    found = results(ended)
    went_on = {rank: [[[2, 2]] * calls, True, [[4, "memory"]]] for rank, calls in {2: 2, 3: 2, 4: 1, 5: 1}.items()}
    assert found == went_on | {0: [[[2, 2]], False, []]}, ended.stderr


AT_RANDOM = """
import logging, random, shutil
from hpcfsdp.resilience import run

seed, spares, stops = int(os.environ["SEED"]), int(os.environ["SPARES"]), os.environ["STOPS"] == "1"
nodes, most = int(os.environ["NODES"]), int(os.environ["MOST"])

def strike(number, delay):
    time.sleep(delay)
    pathlib.Path(f"victim-{ME}").touch()
    if len(list(pathlib.Path().glob("victim-*"))) <= (spares or 5):  # others of an earlier plan may be late
        os.kill(os.getpid(), number)

def plan(where):
    # The same on all that live: who dies now, how and when.
    if lost.generation >= most:
        return
    chance, alive = random.Random(f"{seed} {lost.generation} {where}"), run._survivors
    world, left = list(alive.world), len(alive.spares) if spares else len(alive.world) - 2
    count = chance.choice([1, 1, 1, 2, 2] if where == "training" else [0, 0, 1])
    count = max(0, min(count, left if where == "training" else left - 2))
    victims = chance.sample(world, count)
    if nodes > 1 and where == "training" and chance.random() < 0.3 and left >= len(world) // nodes:
        victims = world[: len(world) // nodes]  # a node with all of its ranks
    number = signal.SIGSTOP if stops and chance.random() < 0.2 else signal.SIGKILL
    if ME in victims:
        threading.Thread(target=strike, args=(number, chance.uniform(0.0, 0.8)), daemon=True).start()

class Recovery(logging.Handler):
    def emit(self, record):
        if record.getMessage().startswith("left the training"):
            plan("recovery")

logging.getLogger("hpcfsdp.job").addHandler(Recovery(logging.INFO))
logging.getLogger("hpcfsdp.job").setLevel(logging.INFO)

def train(world):
    calls.append(world.size)
    plan("training")
    return steps(world, lambda step: time.sleep(0.005), last=100)

given = {"spares": spares, "device": "cpu", "split_nodes": nodes}
undisturbed = hpcfsdp.resilient(lambda world: steps(world, last=100), **given)
if ME == 0:
    shutil.rmtree("run")
    pathlib.Path("undisturbed").write_text(json.dumps(undisturbed))
disturbed = hpcfsdp.resilient(train, **given)
if disturbed is not None:
    same = pathlib.Path("undisturbed").read_text()
    apart = max(abs(loss / json.loads(same)[step] - 1) for step, loss in json.loads(json.dumps(disturbed)).items())
    print("result", ME, json.dumps([lost.generation, json.dumps(disturbed) == same, apart, begun]), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_random_losses(job, seed):
    """60 jobs with three to five losses each: of ranks, of two, of a node; in steps, saves, recoveries; some hang."""
    spares, nodes = (0, 4, 5)[seed % 3], 1 + (seed // 3) % 2
    environ = {"SEED": seed, "SPARES": spares, "STOPS": int(seed % 5 == 0), "NODES": nodes, "MOST": 5}
    ended = job(AT_RANDOM, 8, hang_s=6, **{name: str(value) for name, value in environ.items()})
    assert ended.code == 0, ended.stderr
    found = results(ended)
    assert found, ended.stderr
    for losses, same, apart, _ in found.values():
        assert losses > 0
        assert same if spares else apart < 1e-9


MISUSE = """
import torch.distributed as dist
from hpcfsdp.comm.mpi import staged
from torch.nn.parallel import DistributedDataParallel
from torch.distributed.fsdp import fully_shard

def dies(world):
    if world.rank == world.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)

def everywhere(wait):
    # Calls `wait` until the loss is noticed there; again, the next call notices it, too.
    first = lost.generation
    def train(world):
        if lost.generation > first:
            return len(calls)
        call = wait(world)
        call()
        dies(world)
        for _ in range(2):
            try:
                while True:
                    call()
            except Exception as error:
                calls.append((type(error).__name__, str(error)))
    calls.clear()
    try:
        hpcfsdp.resilient(train, device="cpu")
    finally:
        print("noticed", wait.__name__, json.dumps(calls), flush=True)

def step_of(model, world):
    x = torch.ones(2, 8)
    return lambda: model(x).sum().backward()

def barrier(world):
    return dist.barrier

def all_reduce(world):
    return lambda: dist.all_reduce(torch.ones(1000))

def shared_memory(world):
    memory = world.communicator.alloc(64, torch.float32)
    return lambda: world.communicator.all_reduce(memory, "sum")

def ddp(world):
    return step_of(DistributedDataParallel(torch.nn.Linear(8, 8)), world)

def fsdp2(world):
    model = torch.nn.Linear(8, 8)
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (world.size,)))
    return step_of(model, world)

def store(world):
    found, asked = dist.distributed_c10d._get_default_store(), []
    def call():
        found.set(f"{len(asked)}/{world.rank}", "")
        found.get(f"{len(asked)}/{(world.rank + 1) % world.size}")
        asked.append(1)
    return call

def objects(world):
    return lambda: world.comm.allreduce(1)

def save(world):
    model = model_of()
    return lambda: hpcfsdp.checkpoint.save("saved.h5", model=model, step=1)

for name in os.environ["WAITS"].split():
    everywhere(globals()[name])

def old_model(world):
    if not kept:
        kept.append(model_of())
        kept[0](torch.ones(2, 8, dtype=torch.float64))
        world.communicator.barrier()
        dies(world)
        while True:
            world.communicator.barrier()
    try:
        kept[0](torch.ones(2, 8, dtype=torch.float64))
    except CommunicationError as error:
        print("old model:", error, flush=True)
    world.communicator.barrier()

hpcfsdp.resilient(old_model, device="cpu")

def among_parts(world):
    if among_parts not in kept:
        kept.append(among_parts)
        if world.rank == world.size - 1:
            staged.reduce_into = lambda *_, **__: dies(world)
        dist.all_reduce(torch.ones(1 << 20))
    return lost.generation

print("among parts:", hpcfsdp.resilient(among_parts, device="cpu"), flush=True)

def last(world):
    dies(world)
    while True:
        world.communicator.barrier()

hpcfsdp.resilient(last, device="cpu", max_losses=0)
"""


@pytest.mark.parametrize(
    "waits", ["ddp store save", pytest.param("barrier all_reduce shared_memory fsdp2 objects", marks=pytest.mark.slow)]
)
def test_every_wait_notices_a_loss_and_the_next_one_again(job, waits):
    names = waits.split()
    ended = job(MISUSE, len(names) + 4, WAITS=waits)
    assert ended.code == 75, ended.stderr
    found = re.findall(r"^noticed (\w+) (.*)$", ended.stdout, re.MULTILINE)
    for last, name in zip(range(len(names) + 3, 0, -1), names, strict=False):
        mine = [json.loads(text) for of, text in found if of == name]
        assert len(mine) == last, (name, ended.stderr)
        for (first, text), (second, _) in mine:
            assert (first, f"lost rank(s) {last} on " in text) == ("RankLostError", True), (name, text)
            assert second == "RankLostError" or name == "ddp"  # whose own state is broken by the first
    refused = "is of the world before ranks were lost; make the model, the optimizer and all groups within the function"
    assert ended.stdout.count("old model: ") == ended.stdout.count(refused) == 3
    assert ended.stdout.count(f"among parts: {len(names) + 2}\n") == 2
    assert "the job has gone on after max_losses=0 losses already" in ended.stderr


def test_where_mpi_cannot_go_on_one_line_says_so_and_all_ranks_train(job):
    script = 'print(hpcfsdp.resilient(lambda world: world.size, spares=1, device="cpu"), flush=True)'
    ended = job(script, 3, launcher=())
    assert ended.code == 0, ended.stderr
    assert ended.stdout.split() == ["3"] * 3
    (line,) = [line for line in ended.stderr.splitlines() if "a lost rank ends this job" in line]
    assert "mpirun --with-ft ulfm" in line


ENDS = """
def train(world):
    for step in range(40):
        if step == 20 and world.rank == 1:
            {}
        world.communicator.barrier()

hpcfsdp.resilient(train, spares=1, device="cpu")
"""


@pytest.mark.parametrize(
    ("what", "code", "message"),
    [
        ("raise ValueError('mine')", 1, "ValueError: mine"),
        pytest.param("sys.exit(3)", 3, "left the program with exit code 3", marks=pytest.mark.slow),
        pytest.param("os._exit(7)", 1, "have ended with an exit code of their own", marks=pytest.mark.slow),
    ],
)
def test_the_end_of_the_program_ends_the_job(job, what, code, message):
    ended = job(ENDS.format(what), 4)
    assert (ended.code, message in ended.stderr) == (code, True), ended.stderr


def test_the_example_of_the_page_goes_on(start, tmp_path):
    (tmp_path / "my_model.py").write_text((ROOT / "docs/examples/resilient_model.py").read_text())
    job = start("my_model.py", ranks=3, launcher=FT, environ={"STEPS": "60", "SPARES": "1"})
    job.wait_for((tmp_path / "my_model/step-00000010.h5").exists)
    (one,) = (each for each in job.ranks() if each.environ().get("OMPI_COMM_WORLD_RANK") == "1")
    one.kill()
    job.wait()
    assert job.code == 0, job.stderr
    assert [line.split()[1] for line in job.stdout.splitlines()] == ["10", "20", "30", "40", "50", "60"]
    assert "lost rank(s) 1 on " in job.stderr


def test_a_command_goes_on_with_another_rank_0(start, tmp_path):
    arguments = ["-m", "hpcfsdp", "train", *TINY, "--run_dir", "run"]
    arguments += ["--data.paths", __file__, "--data.held_out", "0.3"]
    arguments += ["--resilience.spares", "1", "--train.steps", "40", "--train.run_steps", "30"]
    arguments += ["--checkpoint.every", "10", "--checkpoint.memory_every", "1", "--checkpoint.resume", "never"]
    whole = start(*arguments, "--run_dir", "whole", ranks=3, launcher=FT).wait()
    assert whole.code == 0, whole.stderr
    killed = start(*arguments, ranks=3, launcher=FT)
    killed.wait_for(lambda: list((tmp_path / "run").glob("checkpoints/step-*")))
    os.kill(json.loads((tmp_path / "run/running.json").read_text())["pid"], signal.SIGKILL)
    killed.wait()
    assert killed.code == 0, killed.stderr
    assert "going on with 2 rank(s) after loss 1 of this job" in killed.stderr
    assert killed.stdout.splitlines()[:2] == whole.stdout.splitlines()[:2]  # held-out, and step: 30 of 40
    assert not (tmp_path / "run/running.json").exists()
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert [event["outcome"] for event in events if event["kind"] == "end"] == ["lost", "complete"]
    assert [event["resumed_from"] for event in events if event["kind"] == "start"] == [None, "memory"]
    files = [tmp_path / folder / "checkpoints/step-00000030.h5" for folder in ("run", "whole")]
    one, other = (dict(zip(*open_index(path).metrics["loss"], strict=True)) for path in files)
    assert one.items() <= other.items() and len(one) >= len(other) - 1  # rank 0 may die before it writes a record


STARTING = """
import os, signal, sys, time
dies = os.environ["OMPI_COMM_WORLD_RANK"] == "1"
if sys.argv[1] == "before" and dies:
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
import hpcfsdp
from hpcfsdp.launch.job import load_mpi
load_mpi()
if dies:
    os.kill(os.getpid(), signal.SIGKILL)
hpcfsdp.resilient(lambda world: world.size, device="cpu")
"""


@pytest.mark.parametrize(("when", "code"), [("after", 75), pytest.param("before", 1, marks=pytest.mark.slow)])
def test_a_loss_while_mpi_starts_ends_the_job(start, tmp_path, when, code):
    (tmp_path / "script.py").write_text(STARTING)
    environ = {"HPCFSDP_HANG_S": "5"}
    ended = start("script.py", when, ranks=3, launcher=FT, environ=environ).wait(60)
    assert ended.code == code, ended.stderr
    assert ("died while it started" if when == "after" else "in load_mpi") in ended.stderr
