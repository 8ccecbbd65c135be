"""``hpcfsdp watch`` as users start it: with and without a terminal."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.cli.conftest import ROOT
from tests.example_runs import start_event, train_record, write_lines, write_run


def test_once_prints_one_line(command, tmp_path):
    run = write_run(tmp_path / "run", 60, every=20)
    done = command("watch", run, "--once")
    assert done.code == 0
    (line,) = done.stdout.splitlines()
    assert line.startswith("complete, step 60/60, loss ") and "checkpoint 60" in line


def test_once_as_json(command, tmp_path):
    run = write_run(tmp_path / "run", 60, every=20, end=None, total=100)
    found = json.loads(command("watch", run, "--once", "--json").stdout)
    assert (found["step"], found["total_steps"], found["last_checkpoint_step"]) == (60, 100, 60)
    assert found["straggler"].startswith("rank ") and len(found["warnings"]) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--json"], "--json is for --once"), (["--interval", "0"], "0 is not a number of seconds from 0.1 to 86400")],
)
def test_wrong_arguments(command, tmp_path, arguments, message):
    done = command("watch", tmp_path, *arguments)
    assert done.code == 2 and message in done.stderr


def grown(folder, step):
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({**train_record(step, step), "loss": float(step)}) + "\n")


def lines_until(process, text):
    """The lines that a command prints until one has this text."""
    lines = []
    while not lines or text not in lines[-1]:
        line = process.stdout.readline()
        assert line, f"it ended after {lines}"
        lines.append(line)
    return lines


@pytest.fixture
def watching(tmp_path):
    """A command that watches a folder which does not exist yet."""
    command = [sys.executable, "-m", "hpcfsdp", "watch", tmp_path / "run", "--interval", "0.1"]
    # A shell ignores SIGINT in what it starts in the background, and children inherit that.
    command = ["env", "--default-signal=INT", *command]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


def test_it_waits_follows_and_ends_with_the_run(watching, tmp_path):
    run = tmp_path / "run"
    lines_until(watching, "there is no such folder yet")
    run.mkdir()
    lines_until(watching, "nothing is recorded in")
    write_lines(run / "events.jsonl", [start_event(0)])
    for step in (1, 2, 3):
        grown(run, step)
        assert f"loss {step}.0000" in lines_until(watching, f"step {step}, ")[-1]
    write_lines(run / "draft", [train_record(1, 1)])
    os.replace(run / "draft", run / "metrics.jsonl")  # as a run that resumes after step 1
    lines_until(watching, "step 1, ")
    with open(run / "events.jsonl", "a") as file:
        file.write(json.dumps({"kind": "end", "step": 1, "outcome": "error", "message": "no memory"}) + "\n")
    assert lines_until(watching, "failed")[-1].endswith(", no memory\n")
    out, err = watching.communicate(timeout=30)
    assert (watching.returncode, out, err) == (0, "", "")


def test_it_ends_when_the_training_that_it_saw_is_gone(watching, tmp_path):
    from hpcfsdp.launch.lock import RunLock

    run, lock = tmp_path / "run", RunLock(tmp_path / "run")
    lock.acquire()
    (run / "config.yaml").write_text("train:\n  steps: 10\n")
    try:
        grown(run, 1)
        lines_until(watching, "running, step 1/10")
    finally:
        lock.release()
    lines_until(watching, "not running")
    watching.communicate(timeout=30)
    assert watching.returncode == 0


def test_a_run_that_does_not_run_is_shown_once(command, tmp_path):
    """Also one that was killed, and has recorded no end."""
    for name, end in (("ended", "complete"), ("killed", None)):
        run = write_run(tmp_path / name, 20, every=10, end=end, total=40)
        done = command("watch", run)
        assert done.code == 0 and len(done.stdout.splitlines()) == 1


def test_it_waits_for_a_run_that_begins_again(command, tmp_path):
    from hpcfsdp.launch.lock import RunLock

    run = write_run(tmp_path / "run", 20, every=10, end="stopped", total=40)
    watch = [sys.executable, "-m", "hpcfsdp", "watch", run, "--wait", "--interval", "0.1"]
    process = subprocess.Popen(watch, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        lines_until(process, "stopped, step 20/40")
        lock = RunLock(run)
        lock.acquire()
        lines_until(process, "running, step 20/40")
        lock.release()
        lines_until(process, "stopped, step 20/40")
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()
    refused = command("watch", run, "--wait", "--once")
    assert refused.code == 2 and "--wait and --once exclude each other" in refused.stderr


def test_an_interrupt_ends_it_without_a_traceback(watching):
    lines_until(watching, "no such folder")
    watching.send_signal(signal.SIGINT)
    _, err = watching.communicate(timeout=30)
    assert (watching.returncode, err) == (130, "")


def on_terminal(command, **environ):
    """What a command writes to a terminal of 80 columns."""
    import fcntl
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 80, 0, 0))
    values = {**os.environ, "TERM": "xterm-256color", "PYTHONUTF8": "1", **environ}
    process = subprocess.Popen(command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, env=values)
    os.close(theirs)
    parts, until = [], time.monotonic() + 60
    while time.monotonic() < until:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        parts.append(part)
    os.close(ours)
    return process.wait(30), b"".join(parts).decode()


@pytest.mark.parametrize("colours", [True, False])
def test_a_terminal_shows_a_view_of_80_columns_that_is_drawn_over(tmp_path, colours):
    run = write_run(tmp_path / "run", 300, every=50)
    with open(run / "logs" / "rank-0000.jsonl", "a") as file:
        log = {"level": "WARNING", "rank": 0, "date": "2026-04-01", "message": "\x1b[2Jevil " + "long " * 40}
        file.write(json.dumps(log) + "\n")
    environ = {} if colours else {"NO_COLOR": "1"}
    code, text = on_terminal([sys.executable, "-m", "hpcfsdp", "watch", run, "--interval", "0.1"], **environ)
    assert code == 0
    assert "\x1b[2J" not in text and "\\x1b[2Jevil" in text
    assert text.endswith("\x1b[?25h"), "the cursor is shown again"
    assert bool(re.search(r"\x1b\[[0-9;]*3[0-9]m", text)) == colours
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", line).rstrip() for line in re.split(r"\n|\x1b\[2K", text)]
    assert all(len(line) <= 80 for line in lines)
    for start in ("status complete, 8 ranks on 2 nodes", "step 300 of 300 ████", "checkpoint step 300"):
        assert any(" ".join(line.split()).startswith(start) for line in lines), text
    loss = next(line for line in lines if line.startswith("loss"))
    assert set("▁▂▃▄▅▆▇█") & set(loss)


def test_a_terminal_that_knows_ascii_alone(tmp_path):
    run = write_run(tmp_path / "run", 300, every=50)
    command = [sys.executable, "-m", "hpcfsdp", "watch", run, "--once"]
    code, text = on_terminal(command, PYTHONUTF8="0", PYTHONIOENCODING="ascii", LC_ALL="C")
    assert code == 0
    assert "#####" in text and text.isascii() and "\\u" not in text
