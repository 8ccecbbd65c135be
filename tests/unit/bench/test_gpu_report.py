"""The report of a machine with accelerators: parts that fail, end late, are left out, or are there already."""

import contextlib
import json
import sys
import time

import psutil
import pytest

from hpcfsdp import accelerator
from hpcfsdp.errors import UsageError
from tests.bench import gpu_report, runs
from tests.bench.command import parser
from tests.bench.gpu_report import Part


def printing(text, code=0):
    return sys.executable, "-c", f"import sys; print({text!r}); print('noise', file=sys.stderr); sys.exit({code})"


RATIO = {"name": "step / FSDP2", "value": 0.5, "low": 0.4, "high": 0.6, "better": "lower"}
GOOD = Part("good", printing(json.dumps({"text": "| a | b |", "ratios": [RATIO]})), 0, 60)


@pytest.fixture
def report(tmp_path, monkeypatch):
    """A function: run a report of these parts, and return the exit code and what report.json has."""
    monkeypatch.setattr(accelerator, "device_type", lambda: "imagined")
    monkeypatch.setattr(accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(accelerator, "current_device", lambda: None)
    monkeypatch.setattr(accelerator, "describe", lambda device: accelerator.Hardware("imagined", None, 1 << 30))

    def run(*parts, arguments=()):
        monkeypatch.setattr(gpu_report, "parts", lambda *given, **options: list(parts))
        options = parser.parse_args(["gpu-report", "--folder", str(tmp_path / "out"), *arguments])
        code = gpu_report.run_report(options)
        return code, json.loads((tmp_path / "out" / "report.json").read_text())["parts"]

    return run


def test_a_part_that_fails_is_a_row_and_not_the_end(report, tmp_path, capsys):
    code, parts = report(Part("bad", printing("some text", 3), 0, 60), GOOD)
    assert code == 1
    assert "exit code 3\nnoise" in parts["bad"]["error"]["message"]
    assert "some text" in parts["bad"]["text"]
    assert parts["good"]["ratios"] == [RATIO]
    page = (tmp_path / "out" / "report.md").read_text()
    assert "| bad | **failed** |" in page and "| good | passed |" in page
    assert "| good | step / FSDP2 | 0.50 |" in page
    assert "bench: bad has failed: noise" in capsys.readouterr().err


def test_a_part_ends_after_its_limit_with_all_that_it_has_started(report, monkeypatch, tmp_path):
    monkeypatch.setattr(runs, "_GRACE_S", 0.5)
    number = tmp_path / "number"
    text = f"""
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
open({str(number)!r} + ".part", "w").write(str(child.pid))
os.rename({str(number)!r} + ".part", {str(number)!r})
time.sleep(100)
"""
    began = time.monotonic()
    code, parts = report(Part("late", (sys.executable, "-c", text), 0, 3))
    assert code == 1 and time.monotonic() - began < 60
    assert "did not end within 3 s" in parts["late"]["error"]["message"]
    with contextlib.suppress(psutil.NoSuchProcess):
        child = psutil.Process(int(number.read_text()))
        end = time.monotonic() + 30  # SIGKILL is sent when the report goes on; the process ends when it is scheduled
        while child.status() != psutil.STATUS_ZOMBIE:  # a zombie if nobody collects it
            assert time.monotonic() < end, child
            time.sleep(0.01)


def test_parts_that_are_done_are_kept_and_others_run(report):
    _, first = report(GOOD, Part("bad", printing("", 1), 0, 60))
    code, second = report(GOOD, Part("bad", printing("now"), 0, 60))
    assert code == 0
    assert second["good"] == first["good"] and "now" in second["bad"]["text"]
    _, third = report(Part("good", printing("another command"), 0, 60), Part("bad", printing("now"), 0, 60))
    assert "another command" in third["good"]["text"] and third["bad"] == second["bad"]


def test_named_parts_run_again(report):
    _, first = report(GOOD, Part("other", printing("x"), 0, 60))
    _, second = report(GOOD, Part("other", printing("x"), 0, 60), arguments=("--parts", "other"))
    assert second["good"] == first["good"] and list(second) == ["good", "other"]
    with pytest.raises(UsageError, match="--parts step: the parts on this machine are good"):
        report(GOOD, arguments=("--parts", "step"))


def test_a_folder_of_another_machine_is_refused(report, tmp_path):
    report(GOOD)
    path = tmp_path / "out" / "report.json"
    kept = json.loads(path.read_text())
    kept["hardware"]["accelerator"] = "another"
    path.write_text(json.dumps(kept))
    with pytest.raises(UsageError, match="with other accelerator: give another --folder"):
        report(GOOD)
    assert json.loads(path.read_text()) == kept
    kept["hardware"] |= {"accelerator": "imagined", "memory_bytes": 1, "processor": "of another node"}
    path.write_text(json.dumps(kept))
    assert report(GOOD)[0] == 0


def test_a_launcher_that_is_missing_is_named(report):
    with pytest.raises(UsageError, match="cannot start 'no-such-mpirun'"):
        report(Part("step-2", printing("x"), 2, 60), arguments=("--mpirun", "no-such-mpirun"))


def test_parts_follow_the_devices_and_one_takes_ten_minutes():
    def names(devices):
        return [part.name for part in gpu_report.parts(devices, 80 << 30, "x")]

    assert names(1) == ["doctor", "golden", "tests-1", "tests-2", "step-imagined", "checkpoint"]
    assert names(6)[2:] == [
        "tests-1",
        "tests-2",
        "tests-4",
        "step-imagined",
        "step-2",
        "step-4",
        "step-6",
        "checkpoint",
    ]
    assert sum(part.limit_s for part in gpu_report.parts(1, 80 << 30, "x")) <= 600
    (large,) = (part for part in gpu_report.parts(1, 80 << 30, "x") if part.name == "step-imagined")
    (less,) = (part for part in gpu_report.parts(1, 24 << 30, "x") if part.name == "step-imagined")
    assert "--layers" not in large.command and "12" in less.command
