"""hpcfsdp train under mpirun: output, exit codes, signals, resume."""

import json
import re
import signal
from pathlib import Path

import pytest

from hpcfsdp.checkpoint import open_index
from tests.unit.observe.traces import spans_of


def run_dir(arguments):
    return Path(arguments[arguments.index("--run_dir") + 1])


def steps(arguments):
    with open(run_dir(arguments) / "metrics.jsonl") as file:
        return [record["step"] for record in map(json.loads, file) if record["kind"] == "train"]


def test_train_then_resume_on_more_ranks(hpcfsdp, tiny):
    first = hpcfsdp("train", *tiny, "--train.steps", 6, "--train.run_steps", 3, ranks=2)
    assert first.code == 0, first.stderr
    assert first.stdout.splitlines()[0].startswith("held-out: ")
    assert "unigram baseline of the same" in first.stdout
    assert "INFO [r000/2 " in first.stderr
    assert "] train: step 3/3 loss " in first.stderr
    assert re.search(r"step 3/3 loss .* \d+ tokens/s, \d+% of peak, \d+% waiting$", first.stderr, re.MULTILINE)
    assert "[r001/2" not in first.stderr
    second = hpcfsdp("train", *tiny, "--train.steps", 6, ranks=3)
    assert second.code == 0, second.stderr
    assert "] checkpoint: loaded " in second.stderr
    assert f"step: 6 of 6\ncheckpoint: {run_dir(tiny)}/checkpoints/step-00000006.h5\n" in second.stdout
    assert steps(tiny) == [1, 2, 3, 4, 5, 6]
    check_figures(tiny)
    check_events(tiny)
    check_series(tiny)
    assert {path.name for path in (run_dir(tiny) / "logs").iterdir()} == {f"rank-000{rank}.jsonl" for rank in range(3)}


def records(arguments, name="metrics.jsonl"):
    return [json.loads(line) for line in (run_dir(arguments) / name).read_text().splitlines()]


def check_figures(arguments):
    for record in records(arguments):
        if record["kind"] == "train":
            assert record["tokens"] == 4 * 16, "bytes of all ranks, each once"
            assert record["tokens_per_s"] == pytest.approx(64 / record["seconds"], rel=0.01)
            assert 0 < record["flop_utilisation"] < 1
            assert 0 <= record["comm_share"] <= record["comm_share_max"] <= 1
            assert {"rank", "host", "behind_s"} == set(record["straggler"])
            assert all(record["memory"][f"{kind}_bytes"] > 0 for kind in ("now", "peak", "parameters", "gradients"))
            assert {"loss", "grad_norm", "lr", "date", "busy_s_mean", "busy_s_max"} <= set(record)


def check_events(arguments):
    """Three steps on 2 ranks, then three on 3."""
    found = records(arguments, "events.jsonl")
    assert [(event["kind"], event["step"]) for event in found] == [
        *(("start", 0), ("checkpoint", 3), ("end", 3)),
        *(("start", 3), ("checkpoint", 6), ("end", 6)),
    ]
    first, saved, ended, again, *_ = found
    folder = run_dir(arguments) / "checkpoints"
    assert (first["world_size"], first["resumed_from"]) == (2, None)
    assert (again["world_size"], again["resumed_from"]) == (3, str(folder / "step-00000003.h5"))
    assert first["command"][1:2] == ["train"] and first["parameters"] > 0
    assert saved["path"] == str(folder / "step-00000003.h5")
    assert saved["bytes"] == (folder / "step-00000003.h5").stat().st_size
    assert saved["seconds"] >= saved["held_s"] > 0 and not saved["asynchronous"]
    assert ended["outcome"] == "complete"


def check_series(arguments):
    metrics = open_index(run_dir(arguments) / "checkpoints/step-00000006.h5").metrics
    names = {"loss", "grad_norm", "lr", "tokens_per_s", "comm_share", "flop_utilisation", "memory_peak_bytes"}
    assert {name: curve[0].tolist() for name, curve in metrics.items()} == {name: [1, 2, 3, 4, 5, 6] for name in names}


def test_a_trace_and_tensorboard(hpcfsdp, tiny):
    pytest.importorskip("tensorboard")
    steps = ("--train.steps", 4, "--observe.trace_from", 2, "--observe.trace_steps", 2, "--observe.every", 2)
    done = hpcfsdp("train", *tiny, *steps, "--track", "tensorboard", "--trace", ranks=2)
    assert done.code == 0, done.stderr
    assert f"wrote {run_dir(tiny)}/trace.json: open it in https://ui.perfetto.dev" in done.stderr
    found, processes = spans_of(run_dir(tiny) / "trace.json")
    assert sorted(processes) == [0, 1]
    for rank in processes:
        assert {name for pid, track, name in found if (pid, track) == (rank, "steps")} == {"step 2", "step 3"}
    assert list((run_dir(tiny) / "tensorboard").iterdir())
    written = [(record["step"], record["steps"]) for record in records(tiny) if record["kind"] == "train"]
    assert written == [(2, 2), (4, 2)]


@pytest.mark.slow
def test_train_with_tensor_parallelism_then_resume_without(hpcfsdp, tiny):
    arguments = ("train", *tiny, "--train.steps", 4, "--train.run_steps", 2)
    first = hpcfsdp(*arguments, "--mesh.tensor", 2, ranks=4)
    assert first.code == 0, first.stderr
    assert "parameters on 4 rank(s) (shard=2 x tensor=2), cpu" in first.stderr
    second = hpcfsdp(*arguments, ranks=3)
    assert second.code == 0, second.stderr
    assert steps(tiny) == [1, 2, 3, 4]
    written = [open_index(path).info.world_size for path in sorted((run_dir(tiny) / "checkpoints").iterdir())]
    assert written == [4, 3]


def test_train_without_a_launcher_is_one_rank(hpcfsdp, tiny):
    done = hpcfsdp("train", *tiny, "--train.steps", 2)
    assert done.code == 0, done.stderr
    assert open_index(run_dir(tiny) / "checkpoints/step-00000002.h5").info.world_size == 1


def test_a_signal_ends_the_run_with_a_checkpoint_and_75(start, tiny):
    job = start("-m", "hpcfsdp", "train", *tiny, "--train.steps", 1000000, "--checkpoint.every", 0, ranks=2)
    job.wait_for(lambda: (run_dir(tiny) / "metrics.jsonl").exists() and len(steps_so_far(tiny)) >= 3)
    job.process.send_signal(signal.SIGUSR2)  # mpirun forwards it to every rank
    job.wait()
    assert job.code == 75, job.stderr
    (path,) = (run_dir(tiny) / "checkpoints").iterdir()
    assert open_index(path).info.step == steps(tiny)[-1]
    assert f"stopped after step {steps(tiny)[-1]}: signal {int(signal.SIGUSR2)}" in job.stderr
    *_, saved, stopped, ended = records(tiny, "events.jsonl")
    reason = f"signal {int(signal.SIGUSR2)} (SIGUSR2)"
    assert (saved["kind"], stopped["kind"], stopped["reason"]) == ("checkpoint", "signal", reason)
    assert (ended["kind"], ended["outcome"], ended["message"]) == ("end", "stopped", reason)
    assert saved["step"] == stopped["step"] == ended["step"] == steps(tiny)[-1]


def test_sigterm_to_one_rank_is_enough(start, tiny):
    job = start("-m", "hpcfsdp", "train", *tiny, "--train.steps", 1000000, "--checkpoint.every", 0, ranks=2)
    job.wait_for(lambda: (run_dir(tiny) / "metrics.jsonl").exists() and len(steps_so_far(tiny)) >= 3)
    job.ranks()[-1].send_signal(signal.SIGTERM)
    job.wait()
    assert job.code == 75, job.stderr


def steps_so_far(arguments):
    return (run_dir(arguments) / "metrics.jsonl").read_text().splitlines()


@pytest.mark.parametrize("ranks", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_wrong_key_is_printed_once_and_ends_all_ranks_with_2(hpcfsdp, tiny, ranks):
    done = hpcfsdp("train", *tiny, "--data.pahts", "x", ranks=ranks)
    assert (done.code, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert done.stderr.count("--data.pahts; did you mean 'data.paths'?") == 1, done.stderr


REFUSALS = """
import contextlib, io, json, sys
from hpcfsdp.cli.main import main

ends = []
for arguments in json.load(open("cases.json")):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(["train", *arguments])
    ends.append([code, out.getvalue(), err.getvalue()])
from mpi4py import MPI
everyone = MPI.COMM_WORLD.gather(ends)
if MPI.COMM_WORLD.rank == 0:
    print(json.dumps(everyone))
"""


def refused(start, folder, cases):
    """Two ranks refuse one training after the other. Cases: arguments, exit code, texts that appear once."""
    (folder / "cases.json").write_text(json.dumps([list(map(str, arguments)) for arguments, *_ in cases]))
    job = start("-c", REFUSALS, ranks=2).wait()
    assert job.code == 0, job.stderr
    for (arguments, code, *texts), *ends in zip(cases, *json.loads(job.stdout), strict=True):
        assert [(end[0], end[1]) for end in ends] == [(code, "")] * 2, (arguments, ends)
        output = "".join(end[2] for end in ends)
        assert "Traceback" not in output
        for text in texts:
            assert output.count(text) == 1, (arguments, output)


def test_impossible_trainings_are_refused_once_for_all_ranks(start, tiny, tmp_path):
    (tmp_path / "run.yaml").write_text("train:\n  stpes: 3\n")
    (tmp_path / "empty").mkdir()
    cases = [
        (["run.yaml"], 2, "run.yaml: unknown key 'train.stpes'; did you mean 'train.steps'?"),
        (["nowhere.yaml"], 2, "configuration file nowhere.yaml: No such file or directory"),
        ([*tiny, "--train.batch", "many"], 2, "train.batch"),
        ([*tiny, "--model.heads", "3"], 2, "model.width (16) must be a multiple of model.heads (3)"),
        (
            [*tiny, "--mesh.tensor", 3],
            2,
            "(1) x mesh.tensor (3) = 3 does not divide the 2 rank(s) of this job",
        ),
        ([*tiny, "--data.paths", tmp_path / "no"], 1, "no: no such file or folder"),
        ([*tiny, "--data.paths", tmp_path / "empty"], 1, "no bytes to learn from in"),
        ([*tiny, "--run_dir", "/proc/run"], 1, "run_dir /proc/run: cannot write there"),
        ([*tiny, "--run_dir", tmp_path / "run.yaml"], 1, "run.yaml: cannot write there: Not a directory"),
        ([*tiny, "--train.batch", "1"], 2, "train.batch (1 sequences a step)"),
        ([*tiny, "--track", "tensorbord"], 2, "no tracker 'tensorbord'", "did you mean 'tensorboard'"),
        ([*tiny, "--observe.every", "0"], 2, "observe.every must be positive, not 0"),
    ]
    refused(start, tmp_path, cases)


def test_missing_damaged_and_foreign_checkpoints_are_refused(start, tiny, tmp_path, saved):
    folder = tmp_path / "damaged" / "checkpoints"
    folder.mkdir(parents=True)
    (folder / "step-00000005.h5").write_bytes(saved.read_bytes()[:4000])
    resume = [*tiny, "--checkpoint.resume"]
    cases = [
        ([*resume, "nowhere.h5"], 1, "nowhere.h5: No such file or directory"),
        ([*resume, saved], 1, "belongs to another model", "missing in the file: blocks.0.up.weight [64, 16]"),
        ([*tiny, "--run_dir", folder.parent], 4, "step-00000005.h5: truncated", "move the file away"),
    ]
    refused(start, tmp_path, cases)
