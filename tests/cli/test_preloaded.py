"""The processes that most tests of commands start are as those that Python starts."""

import json
import os
import signal
import socket
import sys
import time

import psutil
import pytest

SHOW = """
import json, os, sys
import __main__
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "file": getattr(__main__, "__file__", None), "name": __name__,
    "cwd": os.getcwd(), "mine": os.environ.get("MINE"), "home": os.environ.get("HOME"),
    "cores": sorted(os.sched_getaffinity(0)), "streams": [stream.name for stream in (sys.stdout, sys.stderr)],
    "open": sorted(int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")),
}))
"""


def shown(start, *arguments, **options):
    job = start(*arguments, environ={"MINE": "here"}, **options).wait()
    assert job.code == 0, job.stderr
    return json.loads(job.stdout)


@pytest.fixture
def both(start, tmp_path):
    """What a process finds around itself, once preloaded and once started."""
    (tmp_path / "show.py").write_text(SHOW)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "shown.py").write_text(SHOW)

    def find(*arguments, **options):
        found = shown(start, *arguments, **options), shown(start, "-X", "utf8", *arguments, **options)
        return found

    return find


@pytest.mark.parametrize(
    "arguments", [("show.py", "a b", "-c"), ("folder/shown.py",), ("-c", SHOW, "x", "-m"), ("-m", "show", "x")]
)
def test_a_process_finds_what_it_would_find(both, arguments):
    preloaded, started = both(*arguments)
    assert preloaded == started


@pytest.mark.parametrize(
    "program", ["raise SystemExit(3)", "raise SystemExit('why')", "raise ValueError('why')", "import os; os._exit(7)"]
)
def test_it_ends_with_the_same_code_and_message(start, program):
    mine, other = start("-c", program).wait(), start("-X", "utf8", "-c", program).wait()
    assert mine.code == other.code != 0
    assert mine.stderr.splitlines()[-1:] == other.stderr.splitlines()[-1:]


def test_a_signal_that_ends_it_ends_the_client(start):
    job = start("-c", "import os; os.kill(os.getpid(), 11)").wait()
    assert job.code == -signal.SIGSEGV


def beginning(start, tmp_path, handler=""):
    job = start("-c", f"import os, signal, time\n{handler}\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(60)")
    job.wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    return job, psutil.Process(int((tmp_path / "pid").read_text()))


def test_signals_are_passed_on(start, tmp_path):
    job, _ = beginning(start, tmp_path, "signal.signal(signal.SIGUSR1, lambda *_: os._exit(5))")
    job.process.send_signal(signal.SIGUSR1)
    assert job.wait().code == 5


def test_a_client_that_is_killed_takes_the_process_with_it(start, tmp_path):
    job, process = beginning(start, tmp_path)
    job.process.kill()
    job.wait()
    until = time.monotonic() + 30
    while process.is_running() and time.monotonic() < until:
        time.sleep(0.02)
    assert not process.is_running()


def test_the_server_outlives_clients_that_end_while_they_ask(start, preloaded):
    for begun in (b"", b"\0\0", (1000).to_bytes(4, "big") + b"[["):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(preloaded.path)
            client.sendall(begun)
    assert start("-c", "print(7)").wait().stdout == "7\n"


def test_other_options_of_python_start_a_process(start, monkeypatch):
    assert "preloaded.py" in " ".join(start("-c", "").wait().command)
    assert start("-I", "-c", "").wait().command == [sys.executable, "-I", "-c", ""]
    monkeypatch.setenv("PYTHONPATH", os.getcwd() + "/elsewhere")
    assert start("-c", "").wait().command == [sys.executable, "-c", ""]


def test_random_numbers_are_no_others(start):
    program = "import random, numpy, uuid; print(random.random(), numpy.random.rand(), uuid.uuid4())"
    first, second = (start("-c", program).wait().stdout.split() for _ in range(2))
    assert not set(first) & set(second)
