import os
import signal
import sys

import pytest

from hpcfsdp.doctor.child import Child, command_output, how_it_ended, innermost_frames, last_lines

HEAD = """
import faulthandler, json, os, signal, sys, time
pipe = os.fdopen(int(sys.argv[-1]), "w", buffering=1)
def say(**facts): print(json.dumps(facts), file=pipe)
faulthandler.register(signal.SIGUSR2, all_threads=False)
"""


@pytest.fixture
def child(tmp_path, monkeypatch):
    """``child(code, **options)``: a child that runs so."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def start(code, *, limit_s=30.0, **options):
        (tmp_path / "told.py").write_text(HEAD + code)
        return Child("told", limit_s=limit_s, **options)

    return start


def test_a_child_talks_and_ends(child):
    with child("say(a=1); say(a=2, b=[3]); assert sys.stdin.readline() == '7\\n'; say(end=True)") as process:
        assert process.wait_for("b")
        assert process.said == {"a": 2, "b": [3]}
        process.answer(7)
        assert process.wait_for("end")
        assert process.ended_well()
        assert (process.failure, process.output()) == (None, [])


def test_reports_larger_than_a_pipe_arrive(child):
    with child("say(text='x' * 1_000_000); say(end=True)") as process:
        assert process.wait_for("end")
        assert len(process.said["text"]) == 1_000_000


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("os.abort()", "ended the process (signal 6, SIGABRT)"),
        ("os._exit(5)", "ended the process (exit code 5)"),
        ("", "ended the process (exit code 0)"),
    ],
)
def test_a_child_that_dies_keeps_what_it_has_said(child, code, failure):
    with child(f"print('last words', file=sys.stderr, flush=True); say(stage='begun'); {code}") as process:
        assert not process.wait_for("end")
        assert process.said == {"stage": "begun"}
        assert (process.failure, process.output()) == (failure, ["last words"])


def test_a_child_that_takes_too_long_tells_where_it_is_and_is_ended(child):
    code = "def lost(): time.sleep(1000)\nprint('before', flush=True); say(here=True)\nlost()"
    with child(code, limit_s=4) as process:
        assert process.wait_for("here")
        assert not process.wait_for("end")
    assert process.failure == "gave no answer within 4 s"
    first, second, *_ = process.output()
    assert first == "before"
    assert second.startswith("in File")
    assert second.endswith("in lost")


def test_a_child_that_does_not_end(child, monkeypatch):
    monkeypatch.setattr("hpcfsdp.doctor.child._LEAVE_S", 1.0)
    with child("say(end=True); signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100)") as process:
        assert process.wait_for("end")
        assert not process.ended_well()
        assert process.failure.startswith("did not end")


def test_sigterm_is_noted_while_waiting_and_then_as_before(child):
    previous = signal.getsignal(signal.SIGTERM)
    with child("say(begun=True); os.kill(os.getppid(), signal.SIGTERM); time.sleep(100)") as process:
        assert not process.wait_for("end")
        assert process.ended_from_outside
        assert process.failure == "was ended from outside (signal 15, SIGTERM came)"
    assert signal.getsignal(signal.SIGTERM) is previous


def test_output_is_forwarded_at_once_and_then_not_repeated(child, capsys):
    with child("print('spoken', flush=True); os._exit(1)", forward=True) as process:
        assert not process.wait_for("end")
        assert capsys.readouterr().err == "spoken\n"
        assert (process.output(), process.output(unseen=True)) == (["spoken"], [])


def test_nothing_is_left_open(child):
    before = len(os.listdir("/proc/self/fd"))
    with child("say(end=True)") as process:
        process.wait_for("end")
    assert len(os.listdir("/proc/self/fd")) == before


def test_ends_in_words():
    assert how_it_ended(-11) == "ended the process (signal 11, SIGSEGV)"
    assert how_it_ended(-63) == "ended the process (signal 63)"
    assert how_it_ended(9) == "ended the process (exit code 9)"


def test_the_last_lines_are_without_rules_and_native_frames():
    text = "-----\n\nit broke\0\n[vm:15] [ 3] /lib/libc.so(+0x1)[0x7f]\n  details\n=====\n"
    assert last_lines(text) == ["it broke", "  details"]
    assert last_lines("\n".join(map(str, range(100))))[-2:] == ["98", "99"]
    assert len(last_lines("x\n" * 100)) == 12


def test_the_innermost_frames_are_those_of_files():
    dump = 'Stack (most recent call first):\n  File "a.py", line 1 in f\n  File "<frozen x>", line 2 in g\n' + "".join(
        f'  File "b.py", line {n} in h\n' for n in range(9)
    )
    assert innermost_frames(dump) == [
        f'in File "{where}' for where in ('a.py", line 1 in f', 'b.py", line 0 in h', 'b.py", line 1 in h')
    ]


def test_output_of_commands():
    assert command_output([sys.executable, "-c", "print('out')"], 30) == "out\n"
    assert command_output([sys.executable, "-c", "import time; time.sleep(60)"], 0.2) is None
    assert command_output(["/nowhere/mpirun"], 5) is None
