import os
import signal
import sys

import pytest

from hpcfsdp.doctor.child import Child, command_output, how_it_ended, innermost_frames, last_lines

HEAD = """
import faulthandler, json, os, signal, sys, time
pipe = os.fdopen(int(sys.argv[-1]), "w", buffering=1)
def report(**facts): print(json.dumps(facts), file=pipe)
faulthandler.register(signal.SIGUSR2, all_threads=False)
"""


@pytest.fixture
def child(tmp_path, monkeypatch):
    """``child(code, **options)``: a child that runs this code."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def start(code, *, limit_s=30.0, **options):
        (tmp_path / "child_program.py").write_text(HEAD + code)
        return Child("child_program", limit_s=limit_s, **options)

    return start


def test_a_child_reports_facts_and_takes_an_answer(child):
    with child("report(a=1); report(a=2, b=[3]); assert sys.stdin.readline() == '7\\n'; report(end=True)") as process:
        assert process.wait_for("b")
        assert process.facts == {"a": 2, "b": [3]}
        process.answer(7)
        assert process.wait_for("end")
        assert process.ended_well()
        assert (process.failure, process.output()) == (None, [])


def test_reports_larger_than_a_pipe_arrive(child):
    with child("report(text='x' * 1_000_000); report(end=True)") as process:
        assert process.wait_for("end")
        assert len(process.facts["text"]) == 1_000_000


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("os.abort()", "ended the process (signal 6, SIGABRT)"),
        ("os._exit(5)", "ended the process (exit code 5)"),
        ("", "ended the process (exit code 0)"),
    ],
)
def test_facts_of_a_child_that_dies_are_kept(child, code, failure):
    with child(f"print('last words', file=sys.stderr, flush=True); report(stage='begun'); {code}") as process:
        assert not process.wait_for("end")
        assert process.facts == {"stage": "begun"}
        assert (process.failure, process.output()) == (failure, ["last words"])


def test_a_child_that_takes_too_long_prints_its_stack_and_is_killed(child):
    code = "def lost(): time.sleep(1000)\nprint('before', flush=True); report(here=True)\nlost()"
    with child(code, limit_s=4) as process:
        assert process.wait_for("here")
        assert not process.wait_for("end")
    assert process.failure == "gave no answer within 4 s"
    first, second, *_ = process.output()
    assert first == "before"
    assert second.startswith("in File")
    assert second.endswith("in lost")


def test_a_child_that_ignores_sigterm_is_killed(child, monkeypatch):
    monkeypatch.setattr("hpcfsdp.doctor.child._LEAVE_S", 1.0)
    with child("report(end=True); signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100)") as process:
        assert process.wait_for("end")
        assert not process.ended_well()
        assert process.failure.startswith("did not end")


def test_sigterm_ends_the_wait_and_its_handler_is_restored(child):
    previous = signal.getsignal(signal.SIGTERM)
    with child("report(begun=True); os.kill(os.getppid(), signal.SIGTERM); time.sleep(100)") as process:
        assert not process.wait_for("end")
        assert process.ended_from_outside
        assert process.failure == "was ended from outside (signal 15, SIGTERM came)"
    assert signal.getsignal(signal.SIGTERM) is previous


def test_forwarded_output_is_not_repeated(child, capsys):
    with child("print('spoken', flush=True); os._exit(1)", forward=True) as process:
        assert not process.wait_for("end")
        assert capsys.readouterr().err == "spoken\n"
        assert (process.output(), process.output(unseen=True)) == (["spoken"], [])


def test_no_file_descriptor_is_left_open(child):
    before = len(os.listdir("/proc/self/fd"))
    with child("report(end=True)") as process:
        process.wait_for("end")
    assert len(os.listdir("/proc/self/fd")) == before


def test_return_codes_in_words():
    assert how_it_ended(-11) == "ended the process (signal 11, SIGSEGV)"
    assert how_it_ended(-63) == "ended the process (signal 63)"
    assert how_it_ended(9) == "ended the process (exit code 9)"


def test_last_lines_leave_out_rules_and_native_frames():
    text = "-----\n\nit broke\0\n[vm:15] [ 3] /lib/libc.so(+0x1)[0x7f]\n  details\n=====\n"
    assert last_lines(text) == ["it broke", "  details"]
    assert last_lines("\n".join(map(str, range(100))))[-2:] == ["98", "99"]
    assert len(last_lines("x\n" * 100)) == 12


def test_innermost_frames_are_those_in_files():
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
