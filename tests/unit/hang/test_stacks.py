"""Python stacks on SIGQUIT, of this process and of others."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from hpcfsdp.hang import stacks

CHILD = """
import sys, threading
from hpcfsdp.hang import stacks
print(stacks.arm(), threading.main_thread().ident, flush=True)
def inner():
    {body}
def outer():
    inner()
outer()
"""
BODIES = {
    "loop": "while True: pass",
    "sleep": "import time; time.sleep(60)",
    "lock": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "in C": "str(3 ** 30_000_000)",  # holds the interpreter lock for minutes
}


@pytest.fixture
def child():
    children = []

    def start(body):
        command = [sys.executable, "-c", CHILD.format(body=body)]
        children.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        fd, thread = map(int, children[-1].stdout.readline().split())
        time.sleep(0.3)
        return children[-1].pid, fd, thread

    yield start
    for each in children:
        each.kill()
        each.communicate()


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_process_that_is_stuck_shows_where(child, body):
    pid, fd, thread = child(body)
    (text,) = stacks.ask_all([(pid, fd)])
    frames = stacks.main_frames(text, thread)
    assert [function for _, _, function in frames] == ["inner", "outer", "<module>"], text


def test_a_second_question_gets_the_new_answer_alone(child):
    pid, fd, _ = child(BODIES["sleep"])
    one, other = (stacks.ask_all([(pid, fd)])[0] for _ in range(2))
    assert one.count("in outer") == other.count("in outer") == 1


def test_who_does_not_answer_is_empty_and_the_others_are_not(child, monkeypatch):
    monkeypatch.setattr(stacks, "ANSWER_S", 0.5)
    (stopped, stopped_fd, _), (running, fd, _) = child(BODIES["sleep"]), child(BODIES["sleep"])
    os.kill(stopped, signal.SIGSTOP)
    texts = stacks.ask_all([(stopped, stopped_fd), (2**22, 3), (running, fd), (running, -1)])
    assert [bool(text) for text in texts] == [False, False, True, False]


def test_states_of_processes(child):
    pid, _, _ = child(BODIES["sleep"])
    started = stacks.start_of(pid)
    assert stacks.process(pid, started).state == "S"
    assert stacks.process(pid, started + 1).state == ""  # another process with the same pid
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.1)
    assert stacks.process(pid, started).state == "T"
    assert stacks.start_of(2**22) == 0


def test_a_handler_of_the_program_stays():
    before = signal.signal(stacks.SIGNAL, lambda *_: None)
    try:
        assert stacks.arm() == -1
        stacks.disarm(-1)
        assert stacks.size(os.getpid(), -1) is None
    finally:
        signal.signal(stacks.SIGNAL, before)


@pytest.mark.parametrize(("before", "code"), [("SIG_DFL", -signal.SIGQUIT), ("SIG_IGN", 0)])
def test_after_disarming_the_signal_does_what_it_did_before(before, code):
    script = (
        f"from hpcfsdp.hang import stacks; import os, signal; signal.signal(3, signal.{before}); fd = stacks.arm(); "
        "assert fd >= 0; os.kill(os.getpid(), 3); assert stacks.size(os.getpid(), fd); stacks.disarm(fd); "
        "os.kill(os.getpid(), 3)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == code


def test_other_threads_are_told_from_the_main_thread():
    text = (
        'Thread 0x00000000000000ab (most recent call first):\n  File "a.py", line 1 in other\n\n'
        'Current thread 0x00000000000000cd (most recent call first):\n  File "b.py", line 22 in work\n'
        '  File "b.py", line 3 in <module>\n'
    )
    assert stacks.main_frames(text, 0xCD) == [("b.py", 22, "work"), ("b.py", 3, "<module>")]
    assert stacks.main_frames(text, 0xAB) == [("a.py", 1, "other")]
    assert stacks.main_frames(text, 0xEF) == stacks.main_frames("", 0xCD) == []
    assert threading.main_thread().ident
