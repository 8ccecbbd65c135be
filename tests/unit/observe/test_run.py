import json
import math
import sys

import pytest
import torch
from torch import nn

import hpcfsdp
from hpcfsdp import checkpoint, observe, timeline
from hpcfsdp.errors import HpcfsdpError, UsageError
from tests.unit.observe.traces import spans_of


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    left, timeline.recorder = timeline.recorder, None
    assert left is None


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def train(run, model, optimizer, steps, **values):
    for _ in range(steps):
        x = torch.ones(8, 4)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss=loss, tokens=len(x), **values)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Linear(4, 4)


@pytest.fixture
def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)


def test_three_lines_in_a_loop_of_one_process(tmp_path, model, optimizer):
    with hpcfsdp.observe.Run(tmp_path / "run", model=model, optimizer=optimizer, peak_flops=1e9) as run:
        train(run, model, optimizer, 3, epoch=0)
    records = lines(tmp_path / "run/metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3]
    losses = [record["loss"] for record in records]
    assert losses[0] > losses[1] > losses[2]
    for record in records:
        assert (record["kind"], record["lr"], record["tokens"], record["epoch"]) == ("train", 0.25, 8, 0)
        assert 0 < record["flop_utilisation"] == pytest.approx(record["tokens_per_s"] * 6 * 20 / 1e9, rel=1e-3)
        assert record["comm_share"] == 0 and "straggler" not in record
        assert record["memory"]["peak_bytes"] >= record["memory"]["now_bytes"] > 0
    assert records[-1]["memory"]["optimizer_bytes"] == records[-1]["memory"]["gradients_bytes"] == 80
    start, end = lines(tmp_path / "run/events.jsonl")
    assert (start["kind"], start["step"], start["world_size"], start["parameters"]) == ("start", 0, 1, 20)
    assert (start["flops_per_token"], start["peak_flops"], start["resumed_from"]) == (120, 1e9, None)
    assert start["command"] == sys.argv and start["versions"]["torch"] == torch.__version__
    assert (end["kind"], end["step"], end["outcome"], end["message"]) == ("end", 3, "complete", "")


def test_no_model_no_memory_and_numbers_of_the_program(tmp_path):
    with observe.Run(tmp_path, memory=False, peak_flops=1.0) as run:
        run.step(loss=2, lr=0.5, step=10)
        run.step(loss=3, accuracy=torch.tensor(0.5))
    first, second = lines(tmp_path / "metrics.jsonl")
    assert (first["step"], first["loss"], first["lr"]) == (10, 2.0, 0.5)
    assert (second["step"], second["loss"], second["accuracy"]) == (11, 3.0, 0.5)
    assert "memory" not in first and "lr" not in second and "tokens" not in first


def test_every_so_many_steps_and_the_rest_at_the_end(tmp_path):
    with observe.Run(tmp_path, every=2, peak_flops=1.0) as run:
        for loss in (1.0, 2.0, 3.0, 4.0, 9.0):
            run.step(loss=loss)
    found = [(record["step"], record.get("steps", 1), record["loss"]) for record in lines(tmp_path / "metrics.jsonl")]
    assert found == [(2, 2, 1.5), (4, 2, 3.5), (5, 1, 9.0)]


def test_a_pause_is_part_of_no_step(tmp_path):
    import time

    with observe.Run(tmp_path, peak_flops=1.0) as run:
        with run.paused():
            time.sleep(0.2)
            with run.paused():
                time.sleep(0.1)
        run.step(loss=1)
        time.sleep(0.05)
        run.step(loss=1)
    first, second = lines(tmp_path / "metrics.jsonl")
    assert first["seconds"] < 0.2
    assert second["seconds"] >= 0.05


def test_a_loss_that_is_not_finite_is_valid_json(tmp_path):
    with observe.Run(tmp_path, peak_flops=1.0) as run:
        run.step(loss=math.nan)
        run.record("held_out", bits=math.inf)
        run.event("note", value=math.inf)
        series = run.series()
    first, second = sorted(lines(tmp_path / "metrics.jsonl"), key=lambda record: record["kind"])
    assert (first["kind"], first["bits"], first["not_finite"]) == ("held_out", None, {"bits": "inf"})
    assert (second["loss"], second["not_finite"]) == (None, {"loss": "nan"})
    assert lines(tmp_path / "events.jsonl")[1]["value"] is None
    assert math.isnan(series["loss"][1][0])


def test_resuming_drops_later_records_and_continues_the_series(tmp_path):
    for resume_step, losses in ((0, (4.0, 3.0, 2.0)), (2, (1.5, 1.0))):
        with observe.Run(tmp_path, resume_step=resume_step, peak_flops=1.0) as run:
            for loss in losses:
                run.step(loss=loss)
            series = run.series()
    assert series["loss"] == ([1, 2, 3, 4], [4.0, 3.0, 1.5, 1.0])
    assert [record["step"] for record in lines(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    kinds = [(event["kind"], event["step"]) for event in lines(tmp_path / "events.jsonl")]
    assert kinds == [("start", 0), ("end", 3), ("start", 2), ("end", 4)]


def test_a_run_in_a_folder_with_records_drops_none_of_them(tmp_path):
    for _ in range(2):
        with observe.Run(tmp_path, peak_flops=1.0) as run:
            run.step(loss=1.0)
            run.step(loss=2.0)
    assert [record["step"] for record in lines(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    refused = pytest.raises(UsageError, match=r"step 1 is not after 4, .* resume_step=0 to drop the records")
    with observe.Run(tmp_path, peak_flops=1.0) as run, refused:
        run.step(loss=1.0, step=1)
    assert [record["step"] for record in lines(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


@pytest.mark.parametrize("wrong", [{"tokens": -3}, {"tokens": "many"}, {"mine": "text"}, {"lr": object()}])
def test_a_step_that_is_refused_adds_nothing(tmp_path, wrong):
    with observe.Run(tmp_path, peak_flops=1.0) as run:
        with pytest.raises(UsageError):
            run.step(**{"loss": 8.0, "tokens": 2, **wrong})
        run.step(loss=4.0, tokens=2)
    (record,) = lines(tmp_path / "metrics.jsonl")
    assert (record["loss"], record["tokens"], record.get("steps")) == (4.0, 2, None)


def test_resuming_from_a_checkpoint_in_another_folder(tmp_path, model, optimizer):
    with observe.Run(tmp_path / "a", model=model, optimizer=optimizer, peak_flops=1.0) as run:
        train(run, model, optimizer, 2)
        path = tmp_path / "a.h5"
        with run.saving(path):
            checkpoint.save(path, model=model, optimizer=optimizer, step=2, metrics=run.series())
        train(run, model, optimizer, 1)
    saved = lines(tmp_path / "a/events.jsonl")[1]
    assert (saved["kind"], saved["step"], saved["path"]) == ("checkpoint", 2, str(path))
    assert saved["bytes"] == path.stat().st_size and saved["seconds"] == saved["held_s"] > 0
    with observe.Run(tmp_path / "b", model=model, resumed_from=path, peak_flops=1.0) as run:
        run.step(loss=0.5)
        series = run.series()
    assert series["loss"][0] == [1, 2, 3] and series["loss"][1][-1] == 0.5
    assert series["lr"] == ([1, 2], [0.25, 0.25])
    assert lines(tmp_path / "b/events.jsonl")[0]["resumed_from"] == str(path)
    assert [record["step"] for record in lines(tmp_path / "b/metrics.jsonl")] == [3]


def test_the_series_in_a_checkpoint_are_nexus_plots(tmp_path, model, optimizer):
    import h5py

    with observe.Run(tmp_path / "run", model=model, optimizer=optimizer, peak_flops=1e9) as run:
        train(run, model, optimizer, 3, grad_norm=1.5)
        path = checkpoint.save(tmp_path / "a.h5", model=model, step=3, metrics=run.series())
    names = {"loss", "grad_norm", "lr", "tokens_per_s", "comm_share", "flop_utilisation", "memory_peak_bytes"}
    with h5py.File(path) as file:
        assert set(file["metrics"]) == names
        for name in names:
            group = file["metrics"][name]
            texts = {key: group.attrs[key].decode() for key in ("NX_class", "signal", "axes")}
            assert texts["NX_class"] == "NXdata"
            assert group[texts["axes"]][:].tolist() == [1, 2, 3]
            assert group[texts["signal"]].shape == (3,) and group[texts["signal"]].dtype == "float64"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_checkpoints_of_a_manager_become_events(tmp_path, model, optimizer, asynchronous):
    with observe.Run(tmp_path, model=model, optimizer=optimizer, peak_flops=1.0) as run:
        manager = checkpoint.CheckpointManager(tmp_path / "c", asynchronous=asynchronous, on_saved=run.checkpoint)
        with manager:
            train(run, model, optimizer, 1)
            path = manager.save(1, model=model, optimizer=optimizer, metrics=run.series())
            train(run, model, optimizer, 1)
            manager.step()
    (saved,) = (event for event in lines(tmp_path / "events.jsonl") if event["kind"] == "checkpoint")
    assert (saved["step"], saved["path"], saved["asynchronous"]) == (1, str(path), asynchronous)
    assert saved["bytes"] == path.stat().st_size
    assert 0 < saved["held_s"] <= saved["seconds"] or not asynchronous


def test_a_failing_on_saved_does_not_fail_the_save(tmp_path, model, caplog):
    def fail(saved):
        raise ValueError("no")

    manager = checkpoint.CheckpointManager(tmp_path, on_saved=fail)
    assert manager.save(1, model=model).exists()
    assert "on_saved has failed: ValueError: no" in caplog.text


def test_what_ends_a_run_is_in_the_events(tmp_path):
    with pytest.raises(ValueError), observe.Run(tmp_path / "a", peak_flops=1.0) as run:
        run.step(loss=1)
        raise ValueError("broken")
    with pytest.raises(SystemExit), observe.Run(tmp_path / "b", peak_flops=1.0):
        raise SystemExit(75)
    error = HpcfsdpError("all")
    error.raised_on_all_ranks = True
    with pytest.raises(HpcfsdpError), observe.Run(tmp_path / "c", peak_flops=1.0) as run:
        run.step(loss=1)
        raise error
    with observe.Run(tmp_path / "d", peak_flops=1.0) as run:
        run.close("stopped", "signal 12")
        run.close()
    ends = [lines(tmp_path / name / "events.jsonl")[-1] for name in "abcd"]
    found = [(end["kind"], end["outcome"], end["message"]) for end in ends]
    assert found == [
        ("end", "error", "ValueError: broken"),
        ("end", "stopped", ""),
        ("end", "error", "HpcfsdpError: all"),
        ("end", "stopped", "signal 12"),
    ]
    assert len(lines(tmp_path / "c/metrics.jsonl")) == 1, "all ranks have come to the end"


def test_wrong_calls_are_refused(tmp_path, model):
    for wrong, text in (
        ({"every": 0}, "every must be a number of steps, at least 1, not 0"),
        ({"resume_step": -1}, "resume_step must be a step"),
        ({"peak_flops": -1.0}, "peak_flops must be positive, not -1.0"),
        ({"flops_per_token": 0}, "flops_per_token must be positive, not 0"),
        ({"trackers": ["tensorbord"]}, "did you mean 'tensorboard'"),
        ({"trace": 3}, "trace must be True"),
    ):
        with pytest.raises(UsageError, match=text):
            observe.Run(tmp_path, **wrong)
    with observe.Run(tmp_path, model=model, peak_flops=1.0) as run:
        with pytest.raises(UsageError, match="observes a run already"):
            observe.Run(tmp_path, peak_flops=1.0)
        run.step(loss=1)
        for values, text in (
            ({"step": 1}, "step 1 is not after 1"),
            ({"seconds": 1}, "'seconds' is a figure of every record"),
            ({"loss": "high"}, "loss must be a number, not str"),
        ):
            with pytest.raises(UsageError, match=text):
                run.step(**values)
    with pytest.raises(UsageError, match="this run is closed"):
        run.step(loss=1)


def test_a_folder_that_cannot_be_written_is_an_error_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        observe.Run(tmp_path / "file" / "run", peak_flops=1.0)


class Tracker:
    def __init__(self):
        self.seen, self.closed = [], False

    def log(self, step, values):
        self.seen.append((step, values))

    def close(self):
        self.closed = True


class Broken(Tracker):
    def log(self, step, values):
        raise OSError("disk full")


def test_trackers_get_the_numbers_and_a_broken_one_is_dropped(tmp_path, caplog):
    tracker, records = Tracker(), []
    with observe.Run(tmp_path, peak_flops=1.0, trackers=[Broken(), tracker], on_record=records.append) as run:
        run.step(loss=1.5)
        run.step(loss=math.nan)
        run.flush()
        run.record("held_out", bits=2.0)
        with pytest.raises(UsageError, match='"train" are those of step'):
            run.record("train", loss=1.0)
        assert run.latest["step"] == 2
    assert [(step, values.get("loss")) for step, values in tracker.seen] == [(1, 1.5), (2, None), (2, None)]
    assert tracker.seen[0][1]["memory/peak_bytes"] > 0
    assert tracker.seen[-1][1] == {"held_out/bits": 2.0}
    assert tracker.closed
    assert caplog.text.count("the tracker Broken has failed") == 1
    assert [record["kind"] for record in records] == ["train", "train", "held_out"]


def test_a_trace_of_a_plain_model(tmp_path, model, optimizer):
    with observe.Run(tmp_path, model=model, optimizer=optimizer, peak_flops=1.0, trace=range(2, 4)) as run:
        train(run, model, optimizer, 5)
    found, processes = spans_of(tmp_path / "trace.json")
    assert list(processes) == [0]
    assert {name for _, track, name in found if track == "steps"} == {"step 2", "step 3"}
    assert len(found[0, "units", "optimizer step"]) == 2
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_trace_that_ends_with_the_run(tmp_path):
    with observe.Run(tmp_path, peak_flops=1.0, trace=True) as run:
        for _ in range(4):
            run.step(loss=1)
    found, _ = spans_of(tmp_path / "trace.json")
    assert {name for _, _, name in found} == {"step 3", "step 4"}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["a killed run's", "a link", "another's"])
def test_what_lies_in_the_way_of_a_trace_is_removed_or_refused(tmp_path, give_away, caplog, kind):
    elsewhere, parts = tmp_path / "elsewhere", tmp_path / "run" / ".trace.json.parts"
    parts.parent.mkdir()
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("")
    (parts.parent / ".trace.json.partial").symlink_to(elsewhere / "precious")
    if kind == "a link":
        parts.symlink_to(elsewhere)
    else:
        parts.mkdir()
        (parts / "rank-000001.json").write_text("old")
    with observe.Run(parts.parent, peak_flops=1.0, trace=True) as run:
        if kind == "another's":
            parts.mkdir()
            give_away(parts)
        for _ in range(5):
            run.step(loss=1)
    assert [(path.name, path.read_text()) for path in elsewhere.iterdir()] == [("precious", "")]
    refused = "rank 0 cannot write its part of the trace" in caplog.text
    assert refused == (kind != "a killed run's")
    assert refused or not list(parts.parent.glob(".*"))


UNCLOSED = """
import hpcfsdp
hpcfsdp.init("cpu")
run = hpcfsdp.observe.Run("run", peak_flops=1.0)
for loss in (2.0, 1.0):
    run.step(loss=loss)
hpcfsdp.finalize()
print(run.latest["step"])
run.close()
"""


def test_finalize_writes_what_an_open_run_has_left(run_python, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_python(UNCLOSED).split() == ["2"]
    assert [record["step"] for record in lines(tmp_path / "run/metrics.jsonl")] == [1, 2]
    assert [event["kind"] for event in lines(tmp_path / "run/events.jsonl")] == ["start", "end"]
