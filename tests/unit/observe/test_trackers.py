import json
import sys
import time
from pathlib import Path

import pytest

from hpcfsdp.errors import UsageError
from hpcfsdp.observe import trackers
from hpcfsdp.observe.trackers import TensorBoard, WandB, check_trackers, make_trackers


class Own:
    def log(self, step, values):
        pass

    def close(self):
        pass


def test_known_names_and_objects_with_the_methods_pass(monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: name)
    check_trackers(["tensorboard", "wandb", Own()])


@pytest.mark.parametrize(
    ("wrong", "text"),
    [("tensorbord", "did you mean 'tensorboard'"), (3, "int is no tracker: it needs the methods log and close")],
)
def test_others_are_refused(wrong, text):
    with pytest.raises(UsageError, match=text):
        check_trackers([wrong])


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_library_that_is_missing_is_named_with_the_remedy(name, monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=rf"needs {name}: pip install 'hpcfsdp\[{name}\]'"):
        check_trackers([name])


def test_objects_are_used_as_they_are(tmp_path):
    own = Own()
    assert make_trackers([own], tmp_path, resume_step=0) == [own]


def points(folder, name):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder / "tensorboard"))
    read.Reload()
    return [(event.step, event.value) for event in read.Scalars(name)]


def test_tensorboard_reads_the_figures_and_hides_steps_that_are_done_again(tmp_path):
    pytest.importorskip("tensorboard")
    first = TensorBoard(tmp_path)
    for step in (1, 2, 3):
        first.log(step, {"loss": step / 2, "memory/peak_bytes": 4.0})
    first.close()
    assert points(tmp_path, "loss") == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert points(tmp_path, "memory/peak_bytes") == [(1, 4.0), (2, 4.0), (3, 4.0)]
    time.sleep(1.1)  # files are in the order of their seconds
    again = TensorBoard(tmp_path, resume_step=2)
    again.log(3, {"loss": 9.0})
    again.close()
    assert points(tmp_path, "loss") == [(1, 0.5), (2, 1.0), (3, 9.0)]


class Wandb:
    """What the tracker uses of wandb."""

    def __init__(self):
        self.run, self.calls = None, []

    def init(self, **options):
        self.calls.append(("init", options))
        return self

    def log(self, values, step):
        self.calls.append(("log", step, values))

    def finish(self):
        self.calls.append(("finish",))


def test_wandb_has_the_name_of_the_folder_and_goes_on(tmp_path, monkeypatch):
    library = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", library)
    tracker = WandB(tmp_path / "my run")
    tracker.log(3, {"loss": 1.0})
    tracker.close()
    options = {"dir": str(tmp_path / "my run"), "id": "my run", "name": "my run", "resume": "allow"}
    assert library.calls == [("init", options), ("log", 3, {"loss": 1.0}), ("finish",)]


def test_a_run_of_wandb_that_the_program_has_begun_is_used_and_left_open(tmp_path, monkeypatch):
    library, run = Wandb(), Wandb()
    library.run = run
    monkeypatch.setitem(sys.modules, "wandb", library)
    tracker = WandB(tmp_path)
    tracker.log(1, {"loss": 2.0})
    tracker.close()
    assert (library.calls, run.calls) == ([], [("log", 1, {"loss": 2.0})])


OFFLINE = """
import json, pathlib
from hpcfsdp.observe.trackers import WandB
folder = pathlib.Path("run-a")
folder.mkdir()
tracker = WandB(folder)
for step in (1, 2, 3):
    tracker.log(step, {"loss": 1 / step})
summary = dict(tracker._run.summary)  # of the last step that another has followed
tracker.close()
print("summary", json.dumps({"loss": summary["loss"], "step": summary["_step"]}))
print("files", [path.suffix for path in folder.rglob("run-*.wandb")])
"""


@pytest.mark.timeout(120)
def test_wandb_without_a_network(run_python, tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed: pip install 'hpcfsdp[wandb]'")
    monkeypatch.chdir(tmp_path)
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    printed = run_python(OFFLINE).splitlines()
    lines = dict(line.split(" ", 1) for line in printed if line.startswith(("summary", "files")))
    assert json.loads(lines["summary"]) == {"loss": 0.5, "step": 2}
    assert lines["files"] == "['.wandb']"
    assert Path(tmp_path, "run-a/wandb").is_dir()
