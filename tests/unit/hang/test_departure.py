import contextlib
import io
import os
import subprocess
import sys
import time
from array import array
from collections import defaultdict, deque
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from hpcfsdp import env
from hpcfsdp.errors import CheckpointCorruptError
from hpcfsdp.hang import departure, tracebacks
from hpcfsdp.hang.departure import Departures


@pytest.fixture
def hook(monkeypatch):
    """The exception hook before, and the exit codes with which MPI was aborted."""
    codes = []
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(departure, "OUTPUT_GRACE_S", 0)
    world = SimpleNamespace(rank=2, size=3, Abort=codes.append)
    monkeypatch.setitem(
        sys.modules, "mpi4py", SimpleNamespace(MPI=SimpleNamespace(COMM_WORLD=world, Is_finalized=lambda: False))
    )
    return sys.__excepthook__, codes


@pytest.mark.parametrize(
    ("error", "code"), [(ValueError("x"), 1), (CheckpointCorruptError("x"), 4), (KeyboardInterrupt(), 130)]
)
def test_an_uncaught_error_is_printed_with_its_rank_and_ends_the_job_with_its_exit_code(hook, capsys, error, code):
    departure.catch_errors(SimpleNamespace(rank=2, size=3))
    sys.excepthook(type(error), error, None)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"hpcfsdp: rank 2 of 3 on {env.host_name()}: ")
    assert type(error).__name__ in lines[-1]
    assert hook[1] == [code]


def test_an_exit_code_is_never_zero(hook):
    for code in (0, 256, 3):
        departure.abort("x", code)
    assert hook[1] == [1, 1, 3]


def test_only_errors_of_this_project_choose_their_exit_code(hook):
    class Foreign(Exception):
        exit_code = 0

    departure.catch_errors(SimpleNamespace(rank=2, size=3))
    sys.excepthook(Foreign, Foreign(), None)
    assert hook[1] == [1]


def test_the_job_ends_though_nothing_can_be_printed(hook, monkeypatch):
    departure.catch_errors(SimpleNamespace(rank=2, size=3))
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    sys.excepthook(ValueError, ValueError("x"), None)
    assert hook[1] == [1]


@pytest.mark.parametrize("raised", [KeyboardInterrupt, MemoryError])
def test_the_job_ends_though_the_hook_itself_fails(hook, capsys, monkeypatch, raised):
    def broken(*_):
        raise raised

    monkeypatch.setattr(tracebacks, "error_of", broken)
    departure.catch_errors(SimpleNamespace(rank=2, size=3))
    sys.excepthook(CheckpointCorruptError, CheckpointCorruptError("x"), None)
    text = capsys.readouterr().err
    assert text.startswith(f"hpcfsdp: rank 2 of 3 on {env.host_name()}: ended the job")
    assert text.endswith("CheckpointCorruptError: x\n")
    assert hook[1] == [4]


def test_a_second_interrupt_does_not_keep_the_job_from_ending(hook, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(departure.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):  # here, where the false MPI returns
        departure.abort("x", 3)
    assert hook[1] == [3]


@pytest.mark.parametrize(
    ("parent", "variables", "ends"),
    [
        ("prterun\n", {"OMPI_COMM_WORLD_RANK": "1"}, "exit"),
        ("orted\n", {"OMPI_COMM_WORLD_RANK": "1"}, "exit"),
        ("bash\n", {"OMPI_COMM_WORLD_RANK": "1"}, "abort"),  # it may run on, or end without an error
        ("mpirun\n", {}, "abort"),
        (None, {"OMPI_COMM_WORLD_RANK": "1"}, "abort"),
    ],
)
def test_only_a_child_of_open_mpi_s_launcher_ends_without_mpi_abort(hook, monkeypatch, parent, variables, ends):
    def read(path):
        assert str(path) == f"/proc/{os.getppid()}/comm"
        if parent is None:
            raise FileNotFoundError
        return parent

    monkeypatch.delenv("OMPI_COMM_WORLD_RANK", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(departure.Path, "read_text", read)
    exits = []
    monkeypatch.setattr(os, "_exit", lambda code: exits.append(code) or sys.exit())
    with pytest.raises(SystemExit) if ends == "exit" else contextlib.nullcontext():
        departure.abort("x", 4)
    assert (exits, hook[1]) == (([4], []) if ends == "exit" else ([], [4]))


def test_a_single_process_keeps_its_hook(hook):
    departure.catch_errors(SimpleNamespace(rank=0, size=1))
    assert sys.excepthook is hook[0]


def test_the_traceback_is_not_lost_in_another_hook_that_collects_output(hook, capsys, monkeypatch):
    departure.catch_errors(SimpleNamespace(rank=2, size=3))
    monkeypatch.setattr(sys, "__stderr__", sys.stderr)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    sys.excepthook(ValueError, ValueError("x"), None)
    assert "ValueError: x" in capsys.readouterr().err


def test_a_forked_child_prints_its_traceback_and_leaves_the_job_alone(hook, capsys, monkeypatch):
    departure.catch_errors(SimpleNamespace(rank=2, size=3))
    monkeypatch.setattr(os, "getpid", lambda: -1)
    sys.excepthook(ValueError, ValueError("x"), None)
    assert "ValueError: x" in capsys.readouterr().err
    assert hook[1] == []


def test_a_hook_of_the_user_prints_in_place_of_the_traceback_and_then_the_job_ends(hook, capsys, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: print(f"mine: {error}", file=sys.stderr))
    for _ in range(2):  # torch's hook comes in between
        departure.catch_errors(SimpleNamespace(rank=2, size=3))
    sys.excepthook(ValueError, ValueError("x"), None)
    header, *lines = capsys.readouterr().err.splitlines()
    assert header == f"hpcfsdp: rank 2 of 3 on {env.host_name()}: ended the job after an uncaught error"
    assert lines == ["mine: x"]
    assert hook[1] == [1]


@pytest.mark.parametrize("raised", [ZeroDivisionError, SystemExit])
def test_a_hook_that_fails_does_not_keep_the_job_from_ending(hook, monkeypatch, raised):
    def broken(*_):
        raise raised

    monkeypatch.setattr(sys, "excepthook", broken)
    departure.catch_errors(SimpleNamespace(rank=2, size=3))
    sys.excepthook(ValueError, ValueError("x"), None)
    assert hook[1] == [1]


def test_a_hook_that_was_set_later_and_calls_the_one_before_ends_the_job_once(hook, capsys):
    departure.catch_errors(SimpleNamespace(rank=2, size=3))
    before = sys.excepthook

    def later(*args):
        print("later", file=sys.stderr)
        before(*args)

    sys.excepthook = later
    departure.catch_errors(SimpleNamespace(rank=2, size=3))
    sys.excepthook(ValueError, ValueError("x"), None)
    text = capsys.readouterr().err
    assert (text.count("later"), text.count("ValueError: x"), text.count("ended the job")) == (1, 1, 1)
    assert hook[1] == [1]


def test_the_hook_of_torch_is_looked_through(hook, capsys, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: print(f"mine: {error}", file=sys.stderr))
    departure.catch_errors(SimpleNamespace(rank=2, size=3))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        assert not isinstance(sys.excepthook, departure._EndOfJob)
        departure.catch_errors(SimpleNamespace(rank=2, size=3))
        sys.excepthook(ValueError, ValueError("x"), None)
    finally:
        dist.destroy_process_group()
    assert capsys.readouterr().err.splitlines()[1:] == ["mine: x"]


def test_what_all_ranks_raise_is_left_to_rank_0(hook, monkeypatch):
    slept = []
    monkeypatch.setattr(departure.time, "sleep", slept.append)
    error = CheckpointCorruptError("x")
    error.raised_on_all_ranks = True
    for rank in (2, 0):
        departure.catch_errors(SimpleNamespace(rank=rank, size=3))
        sys.excepthook(CheckpointCorruptError, error, None)
    assert slept == [tracebacks.TOGETHER_S, departure.OUTPUT_GRACE_S, departure.OUTPUT_GRACE_S]


def test_an_error_that_a_hook_set_later_has_printed_is_known(hook, monkeypatch):
    error = ValueError("x")
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    assert departure.uncaught() is error
    departure.catch_errors(SimpleNamespace(rank=2, size=3))
    assert departure.uncaught() is None


class Rank:
    """The mpi4py communicator of one of many imagined ranks. `mail` holds the messages to each."""

    def __init__(self, mail, rank, size):
        self.mail, self.rank, self.size, self.num_sent = mail, rank, size, 0

    def Isend(self, buffer, peer, _tag):
        self.num_sent += 1
        self.mail[peer].append(array("i", buffer))

    def Improbe(self, tag):
        return SimpleNamespace(Recv=self.receive) if self.mail[self.rank] else None

    def receive(self, buffer):
        buffer[:] = self.mail[self.rank].popleft()


def test_a_rank_that_leaves_early_is_known_to_all_of_any_number_of_ranks():
    for size, gone, rounds in [(2, 1, 1), (128, 5, 1), (129, 0, 1), (130, 129, 2), (700, 300, 2), (20_000, 9, 3)]:
        mail = defaultdict(deque)
        everyone = [Departures(Rank(mail, rank, size)) for rank in range(size)]
        everyone[gone].notify(gone)
        for _ in range(rounds):
            for rank in [rank for rank in range(size) if mail[rank]]:
                assert everyone[rank].receive() == {gone}, f"{size} ranks: rank {rank}"
        assert all(each.gone == {gone} for rank, each in enumerate(everyone) if rank != gone), f"{size} ranks"
        assert not any(mail.values()) and sum(each.comm.num_sent for each in everyone) == size - 1, f"{size} ranks"
        assert max(each.comm.num_sent for each in everyone) <= departure.TOLD_BY_ONE, f"{size} ranks"


# The child writes its number, then waits for the signal. It has to be no child of pytest, but of a process that dies.
CHILD = """
import os, signal, sys, time
from hpcfsdp.hang import departure

departure.LOOK_EVERY_S = 0.05
got = []
signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
departure.watch_launcher()
departure.watch_launcher()
assert not departure.is_orphan()
print(os.getpid(), flush=True)
until = time.monotonic() + 60
while not got and time.monotonic() < until:
    time.sleep(0.01)
time.sleep(0.3)  # no second signal comes
print("stopped", got, departure.is_orphan(), flush=True)
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


@pytest.mark.timeout(120)
def test_a_process_whose_parent_is_killed_gets_sigterm_once():
    command = [sys.executable, "-c", PARENT, CHILD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as parent:
        child = int(parent.stdout.readline())
        assert os.getpgid(child) == os.getpgid(0)
        time.sleep(0.2)
        assert parent.poll() is None
        parent.kill()
        assert parent.stdout.readline() == "stopped [15] True\n"


def test_a_forked_child_is_no_orphan_of_the_launcher():
    code = (
        "import os; from hpcfsdp.hang import departure; departure.watch_launcher(); "
        "pid = os.fork(); ok = not departure.is_orphan(); "
        "os._exit(not ok) if pid == 0 else None; "
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
