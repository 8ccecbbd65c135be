"""Failing ranks: their traceback, the exit code of the job, and no process left."""

import re

import pytest

from tests.cli.conftest import survivors

SCRIPT = """
import sys, time
import hpcfsdp
world = hpcfsdp.init("cpu")
world.comm.Barrier()
open(f"ready-{{world.rank}}", "w").close()
if world.rank == 1:
    {action}
world.comm.Barrier()  # the others wait here
"""


WAITING = """
import os, sys, time
import torch
import hpcfsdp
world = hpcfsdp.init("cpu")
places = {places}  # of each rank but the last, which fails
last = len(places)
for rank in range(last):
    if world.rank in (rank, last):
        comm = world.communicator.subgroup([rank, last])
        window = comm.alloc(8 * comm.size, torch.float32, gathered=True)
open(f"ready-{{world.rank}}", "w").close()
if world.rank == last:
    while sum(name.startswith("ready-") for name in os.listdir()) < world.size:
        time.sleep(0.05)
    {action}
while True:
    exec(places[world.rank])
"""

PLACES = {
    "a collective": "comm.all_reduce(torch.ones(4), 'sum')",
    "a window synchronisation": "comm.all_gather_into_tensor(window, window[8 * comm.rank : 8 * (comm.rank + 1)])",
    "a barrier of MPI's own": "world.comm.Barrier()",
    "a file write": "open(f'file-{world.rank}', 'wb').write(bytes(1 << 24))",
}


def started(start, tmp_path, action):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(action=action))
    return start(script, ranks=2)


def test_an_interrupt_of_one_rank_ends_all_with_its_traceback(start, tmp_path):
    job = started(start, tmp_path, "raise KeyboardInterrupt").wait()
    assert job.code != 0
    assert job.stderr.count("\nKeyboardInterrupt\n") == 1
    assert "hpcfsdp: rank 1 of 2 on " in job.stderr


def test_a_rank_in_a_script_that_runs_on_ends_the_job_at_once_with_its_code(start, tmp_path):
    script = tmp_path / "script.py"
    action = "from hpcfsdp.errors import CheckpointCorruptError; raise CheckpointCorruptError('on purpose')"
    script.write_text(SCRIPT.format(action=action))
    wrapper = tmp_path / "wrapper.py"
    wrapper.write_text("import subprocess, sys, time\nsubprocess.run([sys.executable, 'script.py'])\ntime.sleep(60)\n")
    job = start(wrapper, ranks=2)
    job.wait_for(lambda: len(list(tmp_path.glob("ready-*"))) == 2)
    assert job.wait(timeout=20).code == 4, job.stderr
    assert job.stderr.count("CheckpointCorruptError: on purpose") == 1


HOOKED = """
import sys
import rich.traceback
{before}
import hpcfsdp
world = hpcfsdp.init("cpu")
{after}
world.comm.Barrier()
if world.rank == 1:
    value = 1 / 0
world.comm.Barrier()
"""


@pytest.mark.parametrize("place", [pytest.param("before", marks=pytest.mark.slow), "after"])
def test_a_user_s_excepthook_prints_an_uncaught_exception_and_the_job_ends(start, tmp_path, place):
    script = tmp_path / "script.py"
    lines = {"before": "", "after": "", place: "rich.traceback.install(width=80)"}
    script.write_text(HOOKED.format(**lines))
    job = start(script, ranks=2).wait()
    assert job.code == 1
    assert job.stderr.count("ZeroDivisionError") == 1
    assert "Traceback (most recent call last) ─" in job.stderr  # as rich draws it
    assert job.stderr.count("hpcfsdp: rank 1 of 2 on ") == 1


TOGETHER = """
import sys, time
import hpcfsdp
world = hpcfsdp.init("cpu")
world.comm.Barrier()

def fail(rank):
    raise ValueError(f"the file of rank {rank} is missing" if MESSAGES else "no such file")

def fail_elsewhere():
    raise KeyError("another place")

if world.rank < 2:
    time.sleep(0.1 * world.rank)
    fail(world.rank)
if OTHERS:
    time.sleep(0.3)
    fail_elsewhere()
world.comm.Barrier()
"""


@pytest.mark.fresh
@pytest.mark.parametrize(
    ("messages", "others", "ranks"),
    [(False, False, 2), pytest.param(True, False, 3, marks=pytest.mark.slow), (True, True, 3)],
)
def test_ranks_that_fail_together_print_each_traceback_once(start, tmp_path, messages, others, ranks):
    script = tmp_path / "script.py"
    script.write_text(f"MESSAGES, OTHERS = {messages}, {others}\n{TOGETHER}")
    job = start(script, ranks=ranks).wait()
    assert job.code == 1
    assert job.stderr.count("Traceback (most recent call last)") == 1 + others, job.stderr
    assert f"hpcfsdp: ranks 0-1 of {ranks} on " in job.stderr
    if messages:
        assert (
            "\nValueError: the file of rank 0 is missing\nrank 1: ValueError: the file of rank 1 is missing\n"
            in job.stderr
        )
    if others:
        assert f"hpcfsdp: rank 2 of {ranks} on " in job.stderr
        last = [line for line in job.stderr.splitlines() if line.startswith("hpcfsdp: ")][-1]
        assert re.fullmatch(r"hpcfsdp: first: rank 0 of 3 on \S+: ValueError: the file of rank 0 is missing", last)
    assert "MPI_ABORT" not in job.stderr  # a box that would be the last thing to see


def test_an_error_of_all_ranks_is_printed_once(start, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import hpcfsdp\nfrom hpcfsdp import checkpoint\nimport torch\nhpcfsdp.init('cpu')\n"
        "checkpoint.load('missing.h5', model=torch.nn.Linear(1, 1))\n"
    )
    job = start(script, ranks=2).wait()
    assert job.code == 1
    assert job.stderr.count("Traceback") == 1, job.stderr
    assert "hpcfsdp: rank 0 of 2 on " in job.stderr


@pytest.mark.parametrize(
    ("places", "action", "text", "code"),
    [
        (list(PLACES), "raise ZeroDivisionError('on purpose')", "ZeroDivisionError: on purpose", 1),
        (list(PLACES)[1:3], "sys.exit(7)", "left the program with exit code 7", 7),
        (list(PLACES)[:1], "sys.exit('no more')", "no more", 1),
    ],
    ids=["raises", "exits", "exits with a text"],
)
def test_a_failing_rank_ends_ranks_that_wait_or_compute(start, tmp_path, places, action, text, code):
    """The others wait for the failing rank in collectives of two, or are busy."""
    script = tmp_path / "script.py"
    script.write_text(WAITING.format(action=action, places=[PLACES[place] for place in places]))
    ranks = len(places) + 1
    job = start(script, ranks=ranks).wait()
    assert job.code == code
    assert job.stderr.count(text) == 1
    assert f"hpcfsdp: rank {ranks - 1} of {ranks} on " in job.stderr


@pytest.mark.parametrize("action", ["raise SystemExit(3)", pytest.param("sys.exit()", marks=pytest.mark.slow)])
def test_a_rank_that_exits_early_is_named_by_ranks_that_wait_for_it(start, tmp_path, action):
    script = tmp_path / "script.py"
    script.write_text(WAITING.format(action=action, places=["comm.barrier()"]))
    job = start(script, ranks=2).wait()
    assert job.code != 0
    assert "barrier on rank" in job.stderr
    assert "rank(s) 1 left the program without taking part" in job.stderr


TOLD_IN_TURN = """
import sys
import hpcfsdp
from hpcfsdp.hang import departure
departure.TOLD_BY_ONE = 1
world = hpcfsdp.init("cpu")
others = {0: [0, 1], 1: [1, 2], 2: [1, 2]}[world.rank]
if world.rank == 1:
    world.communicator.subgroup([0, 1])
comm = world.communicator.subgroup(others)
if world.rank == 2:
    sys.exit()
comm.barrier()
"""


def test_a_rank_that_exits_early_is_named_by_a_rank_that_another_one_has_told(start, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(TOLD_IN_TURN)
    job = start(script, ranks=3).wait()
    assert job.code != 0
    assert "rank 1 of 3 on" in job.stderr
    assert "rank(s) 1 left the program without taking part" in job.stderr  # of the communicator of ranks 1 and 2


def test_ranks_that_exit_together_end_without_a_message(start, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys\nimport hpcfsdp\nworld = hpcfsdp.init('cpu')\nsys.exit(5)\n")
    job = start(script, ranks=2).wait()
    assert job.code == 5
    assert "hpcfsdp:" not in job.stderr


def test_a_rank_that_returns_early_waits_for_the_others(start, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, time\nimport hpcfsdp\nworld = hpcfsdp.init('cpu')\n"
        "try: sys.exit(5)\nexcept SystemExit: pass\n"
        "if world.rank == 0: time.sleep(5); print('done')\n"
    )
    job = start(script, ranks=2).wait()
    assert (job.code, job.stdout) == (0, "done\n"), job.stderr
    assert "hpcfsdp:" not in job.stderr


@pytest.mark.fresh
def test_a_killed_rank_ends_the_job_and_leaves_no_process(start, tmp_path):
    job = started(start, tmp_path, "time.sleep(60)")
    job.wait_for(lambda: len(list(tmp_path.glob("ready-*"))) == 2)
    family = job.family()
    job.ranks()[0].kill()
    job.wait()
    assert job.code != 0
    assert not survivors(family)


def test_a_plain_python_process_leaves_no_shared_memory(start, tmp_path):
    script = tmp_path / "alone.py"
    script.write_text("import hpcfsdp; print(hpcfsdp.init('cpu').size); hpcfsdp.finalize()")
    job = start(script).wait()  # the fixture checks /dev/shm
    assert (job.code, job.stdout) == (0, "1\n"), job.stderr


def test_an_undetected_launcher_is_explained(start, tmp_path):
    script = tmp_path / "unheard.py"
    script.write_text("import hpcfsdp; hpcfsdp.init('cpu')")
    job = start(script, environ={"SLURM_STEP_NUM_TASKS": "4"}).wait()
    assert job.code != 0
    assert "SLURM_STEP_NUM_TASKS=4" in job.stderr
    assert "--mpi=pmix" in job.stderr


INIT = """
import hpcfsdp
from hpcfsdp.errors import LaunchError
rank = int(__import__("mpi4py.MPI").MPI.COMM_WORLD.rank)
for options in CASES:
    try:
        hpcfsdp.init("cpu", **(options if rank == 1 else {}))
    except LaunchError as error:
        print(error, flush=True)
print(hpcfsdp.init("cpu").size)
"""
DIFFERENT = [
    ({"split_nodes": 2}, "has (None, 1800.0, 1, 'cpu', False), rank 1 on .* has (None, 1800.0, 2, 'cpu', False)"),
    ({"backend": "gloo"}, "rank 1 on .* has ('gloo', 1800.0, 1, 'cpu', False)"),
    ({"backend": "glue"}, "rank 1 on .*: there is no backend 'glue': use one of .*; did you mean 'gloo'"),
    ({"split_nodes": 9}, "rank 1 on .*: a node of 2 rank(s) cannot be split into 9 nodes"),
]


def test_different_arguments_of_init_are_an_error_on_all_ranks_which_may_try_again(start, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"CASES = {[options for options, _ in DIFFERENT]}" + INIT)
    job = start(script, ranks=2).wait()
    for _, text in DIFFERENT:
        pattern = re.escape(text).replace(re.escape(".*"), ".*")
        assert len(re.findall(pattern, job.stdout)) == 2, job.stdout + job.stderr
    assert (job.code, job.stdout.splitlines().count("2")) == (0, 2)


def test_after_finalize_a_rank_may_exit_long_before_the_others(start, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, time\nimport hpcfsdp\nworld = hpcfsdp.init('cpu')\nhpcfsdp.finalize()\n"
        "if world.rank == 0: time.sleep(6); print('done')\nsys.exit(75)\n"
    )
    job = start(script, ranks=2).wait()
    assert (job.code, job.stdout) == (75, "done\n"), job.stderr


FORKS = """
import multiprocessing, subprocess, sys

def nothing():
    pass

if __name__ == "__main__":
    import hpcfsdp
    world = hpcfsdp.init("cpu")
    from torch.utils.data import DataLoader
    subprocess.run([sys.executable, "-c", ""], check=True)
    for method in ("spawn", "forkserver"):
        other = multiprocessing.get_context(method).Process(target=nothing)
        other.start()
        other.join()
    sys.stderr.write("now\\n")
    for _ in range(2):
        assert sum(DataLoader(range(4), num_workers=1, multiprocessing_context="fork")) == 6
    hpcfsdp.finalize()
"""


def test_a_fork_after_mpi_has_started_warns_once_and_new_programs_do_not(start, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(FORKS)
    job = start(script, ranks=2).wait()
    assert job.code == 0, job.stderr
    assert job.stderr.count("forks after MPI has started") == 2  # once on each rank
    assert "forks after" not in job.stderr.partition("now")[0]


def test_torchrun_instead_of_mpirun_is_refused(start, tmp_path):
    (tmp_path / "program.py").write_text("import hpcfsdp\nhpcfsdp.init()\nprint('alone')\n")
    job = start("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "program.py").wait()
    assert job.code != 0
    assert "torchrun started 2 processes, and MPI does not know of it" in job.stderr
    assert "alone" not in job.stdout
    one = start("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 1, "program.py").wait()
    assert (one.code, one.stdout) == (0, "alone\n"), one.stderr
