"""Jobs that hang, under mpirun: a report says who waits for whom and where the others are, and the job ends with 76."""

import json
import re
import signal
import time

import pytest

SCRIPT = """
import os, signal, sys, threading, time
import torch, hpcfsdp
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.wrap import ModuleWrapPolicy

world = hpcfsdp.init("cpu", run_dir="run")
torch.manual_seed(0)
layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
model = FullyShardedDataParallel(layers, auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}))
stop = hpcfsdp.preemption()

def load_batch(kind):
    os.nice(19)  # tests of other processes run beside this one
    if kind == "loop":
        while True: pass
    elif kind == "sleep":
        time.sleep(1000)
    elif kind == "lock":
        lock = threading.Lock()
        lock.acquire(), lock.acquire()
    elif kind == "C code":
        3 ** 300_000_000  # for minutes
    elif kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "late":
        time.sleep(6)

for step in range(1, 6):
    if step == 3 and 1 <= world.rank < len(sys.argv):
        open("stuck", "w").close()
        load_batch(sys.argv[world.rank])
    model(torch.ones(2, 8)).sum().backward()
    stop.requested(step)
if "all" in sys.argv:
    open("stuck", "w").close()
    time.sleep(1000)
print(f"rank {world.rank} is done", flush=True)
hpcfsdp.finalize()
"""
WHERE = {
    "loop": "it runs in load_batch",
    "sleep": "it sleeps in load_batch",
    "lock": "it sleeps in load_batch",
    "C code": "it runs in load_batch",
    "stopped": "is stopped (SIGSTOP, or a debugger); kill -CONT ",
}


@pytest.fixture
def job(start, tmp_path):
    """Start the script with a rank that gets stuck in a way; waits until it is stuck."""

    def begin(*kinds, ranks=3, hang_s=0):
        (tmp_path / "script.py").write_text(SCRIPT)
        started = start("script.py", *kinds, ranks=ranks, environ={"HPCFSDP_HANG_S": str(hang_s)})
        started.wait_for((tmp_path / "stuck").exists)
        return started

    return begin


def reports(tmp_path):
    return sorted((tmp_path / "run/hang").glob("*.txt")) if (tmp_path / "run/hang").exists() else []


def test_the_report_names_the_ranks_that_are_stuck_and_their_places(job, tmp_path):
    last = len(WHERE) + 1
    started = job(*WHERE, ranks=last + 1, hang_s=12).wait(200)
    assert started.code == 76, started.stderr
    (path,) = reports(tmp_path)
    first, _, rest = path.read_text().partition("\n\nRanks\n")
    begins = rf"Job .*, {last + 1} rank\(s\) on 1 node\(s\), .*Z: rank [0{last}] has waited \d+ s in barrier"
    assert re.match(begins, first)
    assert f'\nRanks 0, {last} wait(s) for ranks 1-{last - 1} in forward of "Sequential" (barrier: ' in first
    for rank, kind in enumerate(WHERE, start=1):
        (line,) = re.findall(rf"^Rank {rank} has not come: (.*)$", first, re.MULTILINE)
        assert WHERE[kind] in line
        assert kind == "stopped" or re.search(r"load_batch \(.*script\.py:\d+\)", line)
    assert first.count("step 2 is done, pass 2 through the model, the backward of 0") == len(WHERE)
    assert rest.count("in load_batch\n") == len(WHERE) - 1
    assert str(path) in started.stderr
    assert f"Ranks 0, {last} wait(s) for ranks 1-{last - 1}" in started.stderr
    assert list((tmp_path / "run/hang").iterdir()) == [path]


@pytest.mark.slow
def test_a_rank_that_comes_before_the_limit_is_no_hang(job, tmp_path):
    started = job("late", hang_s=100).wait(90)
    assert started.code == 0, started.stderr
    assert started.stdout.count("is done") == 3
    assert reports(tmp_path) == []


def test_a_report_on_demand_and_the_job_goes_on(job, hpcfsdp, tmp_path):
    started = job("sleep")
    time.sleep(3)  # a wait of more than a second shows
    asked = hpcfsdp("hang", "run")
    assert asked.code == 0, asked.stderr
    assert "Rank 1 has not come: it sleeps in load_batch" in asked.stdout
    (path,) = reports(tmp_path)
    assert asked.stdout.rstrip().endswith(f"The whole report: run/hang/{path.name}")
    again = json.loads(hpcfsdp("hang", "run", "--json").stdout)
    assert [rank["rank"] for rank in again[0]["nodes"][0]["ranks"]] == [0, 1, 2]
    assert started.process.poll() is None


@pytest.mark.slow
def test_a_report_where_no_rank_waits(job, hpcfsdp):
    job("all")
    asked = hpcfsdp("hang", "run")
    assert asked.code == 0, asked.stderr
    assert "No rank waits in a collective of hpcfsdp:\nrank 0: it sleeps in <module> (" in asked.stdout


def test_a_signal_makes_a_report_and_the_job_goes_on(job, tmp_path):
    started = job("sleep")
    started.ranks()[0].send_signal(signal.SIGQUIT)
    started.wait_for(lambda: reports(tmp_path))
    assert ": rank " in reports(tmp_path)[0].read_text().splitlines()[0]
    assert "got SIGQUIT" in reports(tmp_path)[0].read_text().splitlines()[0]
    assert started.process.poll() is None


def test_the_tool_without_a_job_says_what_it_needs(hpcfsdp, tmp_path):
    (tmp_path / "empty").mkdir()
    asked = hpcfsdp("hang", "empty", "--wait", "0.5")
    assert asked.code == 1
    assert "no job has answered within 0.5 s" in asked.stderr
    assert list((tmp_path / "empty").iterdir()) == []
    assert hpcfsdp("hang", "missing").code == 2


@pytest.mark.parametrize("value", ["soon", *(pytest.param(value, marks=pytest.mark.slow) for value in ("-1", "inf"))])
def test_a_wrong_limit_is_named(start, tmp_path, value):
    (tmp_path / "script.py").write_text("import hpcfsdp\nhpcfsdp.init('cpu')\n")
    started = start("script.py", ranks=2, environ={"HPCFSDP_HANG_S": value}).wait()
    assert started.code == 3
    assert f"HPCFSDP_HANG_S={value}: give a number of seconds" in started.stderr


RECORDED = """
import time, torch
import torch.distributed as dist
import hpcfsdp

world = hpcfsdp.init("cpu", backend="gloo", run_dir="run")
dist.all_reduce(torch.ones(7))
if world.rank == 1:
    time.sleep(1000)
world.host.barrier()
"""


def test_the_report_has_torchs_flight_record(start, tmp_path):
    (tmp_path / "script.py").write_text(RECORDED)
    environ = {"HPCFSDP_HANG_S": "5", "TORCH_FR_BUFFER_SIZE": "100"}
    started = start("script.py", ranks=2, environ=environ).wait(100)
    assert started.code == 76, started.stderr
    (path,) = reports(tmp_path)
    record = json.loads(path.read_text().partition("Collectives of the backend\n")[2].partition("\n")[2])
    assert [entry["input_sizes"] for entry in record["entries"]][-1] == [[7]]
