"""hpcfsdp train under mpirun: what users see, exit codes, signals, resume."""

import json
import signal
from pathlib import Path

import pytest

from hpcfsdp.checkpoint import open_index


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
    assert "[r001/2" not in first.stderr
    second = hpcfsdp("train", *tiny, "--train.steps", 6, ranks=3)
    assert second.code == 0, second.stderr
    assert "] checkpoint: loaded " in second.stderr
    assert f"step: 6 of 6\ncheckpoint: {run_dir(tiny)}/checkpoints/step-00000006.h5\n" in second.stdout
    assert steps(tiny) == [1, 2, 3, 4, 5, 6]
    assert {path.name for path in (run_dir(tiny) / "logs").iterdir()} == {f"rank-000{rank}.jsonl" for rank in range(3)}


def test_train_with_layers_that_are_cut_then_resume_without_and_again_with(hpcfsdp, tiny):
    arguments = ("train", *tiny, "--train.steps", 6, "--train.run_steps", 2)
    first = hpcfsdp(*arguments, "--mesh.tensor", 2, ranks=4)
    assert first.code == 0, first.stderr
    assert "parameters on 4 rank(s) (shard=2 x tensor=2), cpu" in first.stderr
    second = hpcfsdp(*arguments, ranks=3)
    assert second.code == 0, second.stderr
    third = hpcfsdp(*arguments, "--mesh.tensor", 2, "--mesh.replicate", 2, ranks=4)
    assert third.code == 0, third.stderr
    assert steps(tiny) == [1, 2, 3, 4, 5, 6]
    written = [open_index(path).info.world_size for path in sorted((run_dir(tiny) / "checkpoints").iterdir())]
    assert written == [4, 3, 4]


def test_train_without_a_launcher_is_one_rank(hpcfsdp, tiny):
    done = hpcfsdp("train", *tiny, "--train.steps", 2)
    assert done.code == 0, done.stderr
    assert open_index(run_dir(tiny) / "checkpoints/step-00000002.h5").info.world_size == 1


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_ends_the_run_with_a_checkpoint_and_75(start, tiny, number):
    job = start("-m", "hpcfsdp", "train", *tiny, "--train.steps", 1000000, "--checkpoint.every", 0, ranks=2)
    job.wait_for(lambda: (run_dir(tiny) / "metrics.jsonl").exists() and len(steps_so_far(tiny)) >= 3)
    job.process.send_signal(number)  # mpirun hands it to every rank
    job.wait()
    assert job.code == 75, job.stderr
    (path,) = (run_dir(tiny) / "checkpoints").iterdir()
    assert open_index(path).info.step == steps(tiny)[-1]
    assert f"stopped after step {steps(tiny)[-1]} by signal {int(number)}" in job.stderr


def test_sigterm_to_one_rank_is_enough(start, tiny):
    job = start("-m", "hpcfsdp", "train", *tiny, "--train.steps", 1000000, "--checkpoint.every", 0, ranks=3)
    job.wait_for(lambda: (run_dir(tiny) / "metrics.jsonl").exists() and len(steps_so_far(tiny)) >= 3)
    job.ranks()[-1].send_signal(signal.SIGTERM)
    job.wait()
    assert job.code == 75, job.stderr


def steps_so_far(arguments):
    return (run_dir(arguments) / "metrics.jsonl").read_text().splitlines()


def in_order(done, code, *texts):
    assert done.code == code, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    for text in texts:
        assert done.stderr.count(text) == 1, done.stderr


def test_unknown_keys_suggest_the_nearest_once_for_all_ranks(hpcfsdp, tiny, tmp_path):
    in_order(hpcfsdp("train", *tiny, "--data.pahts", "x", ranks=2), 2, "--data.pahts; did you mean 'data.paths'?")
    (tmp_path / "run.yaml").write_text("train:\n  stpes: 3\n")
    in_order(
        hpcfsdp("train", "run.yaml", ranks=2), 2, "run.yaml: unknown key 'train.stpes'; did you mean 'train.steps'?"
    )


def test_configuration_that_is_missing_or_wrong(hpcfsdp, tiny):
    in_order(hpcfsdp("train", "nowhere.yaml", ranks=2), 2, "configuration file nowhere.yaml: No such file or directory")
    in_order(hpcfsdp("train", *tiny, "--train.batch", "many"), 2, "train.batch")
    in_order(hpcfsdp("train", *tiny, "--model.heads", "3"), 2, "model.width (16) must be a multiple of model.heads (3)")
    done = hpcfsdp("train", *tiny, "--mesh.tensor", 2, ranks=3)
    in_order(done, 2, "mesh.replicate (1) x mesh.tensor (2) = 2 does not divide the 3 rank(s) of this job")


def test_data_that_is_missing_or_empty(hpcfsdp, tiny, tmp_path):
    in_order(hpcfsdp("train", *tiny, "--data.paths", tmp_path / "no", ranks=2), 1, "no: no such file or folder")
    (tmp_path / "empty").mkdir()
    in_order(hpcfsdp("train", *tiny, "--data.paths", tmp_path / "empty"), 1, "no bytes to learn from in")


def test_a_place_where_nothing_can_be_written(hpcfsdp, tiny):
    in_order(hpcfsdp("train", *tiny, "--run_dir", "/proc/run", ranks=2), 1, "run_dir /proc/run: cannot write there")


def test_checkpoints_that_are_missing_damaged_or_of_another_model(hpcfsdp, tiny, saved):
    done = hpcfsdp("train", *tiny, "--checkpoint.resume", "nowhere.h5", ranks=2)
    in_order(done, 1, "nowhere.h5: No such file or directory")
    done = hpcfsdp("train", *tiny, "--checkpoint.resume", saved, ranks=2)
    in_order(done, 1, "of another model", "missing in the file: blocks.0.up.weight [64, 16]")
    folder = run_dir(tiny) / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "step-00000005.h5").write_bytes(saved.read_bytes()[:4000])
    in_order(hpcfsdp("train", *tiny, ranks=2), 4, "step-00000005.h5: damaged", "move the file away")


def test_more_ranks_than_sequences(hpcfsdp, tiny):
    in_order(hpcfsdp("train", *tiny, "--train.batch", "1", ranks=2), 2, "train.batch (1 sequences a step)")
