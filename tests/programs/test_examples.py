"""The programs in docs/examples for Lightning, transformers, accelerate and peft, as jobs of their own."""

import json
import re
import shutil
import signal

import pytest

from hpcfsdp.checkpoint import open_index
from tests.programs.jobs import *  # noqa: F403
from tests.programs.jobs import ROOT, rank_0


@pytest.fixture
def example(program):
    """Start a program of docs/examples."""

    def start(name, *arguments, ranks=2, change=None):
        source = (ROOT / "docs/examples" / f"{name}.py").read_text()
        return program(name, change(source) if change else source, *arguments, ranks=ranks)

    return start


def logged(job, name):
    """The values of a name that the trainer has printed, in order."""
    return [float(value) for value in re.findall(rf"'{name}': '([\d.e+-]+)'", job.stdout)]


@rank_0
def test_transformers_trainer_and_lora(example, tmp_path):
    """On two ranks; then it goes on on one and on three, and gets adapters."""
    job = example("transformers_trainer").wait()
    assert job.code == 0, job.stderr
    assert logged(job, "eval_loss")[-1] < 1.5
    again = example("transformers_trainer", "--steps", 80, ranks=1).wait()
    assert again.code == 0, again.stderr
    third = example("transformers_trainer", "--steps", 100, ranks=3).wait()
    assert third.code == 0, third.stderr
    assert [len(logged(one, "eval_loss")) for one in (again, third)] == [1, 1]
    assert logged(third, "eval_loss")[-1] < logged(again, "eval_loss")[-1] < logged(job, "eval_loss")[-1]
    assert {path.name for path in (tmp_path / "counting").iterdir()} == {"checkpoint-80", "checkpoint-100", "model"}
    assert open_index(tmp_path / "counting" / "checkpoint-100" / "checkpoint.h5").info.world_size == 3

    lora = example("lora").wait()
    assert lora.code == 0, lora.stderr
    assert float(re.search(r"loss of the loaded adapter: ([\d.]+)", lora.stdout)[1]) < 1.5


@rank_0
@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_a_signal_ends_the_trainer_with_a_checkpoint_and_75(example, tmp_path, number):
    def endless(source):
        source = source.replace("eval_steps=20", "eval_steps=1000000").replace("save_steps=20", "save_steps=1000000")
        return source.replace("    trainer.train(", "    open('begun', 'w').close()\n    trainer.train(")

    job = example("transformers_trainer", "--steps", 9_000_000, change=endless)
    job.wait_for((tmp_path / "begun").exists)
    (job.process if number == signal.SIGUSR2 else job.ranks()[0]).send_signal(number)
    job.wait()
    assert job.code == 75, job.stderr
    assert len(re.findall(rf"stopped after step \d+: signal {number:d} \({number.name}\)", job.stderr)) == 1
    (folder,) = (tmp_path / "counting").glob("checkpoint-*")
    step = open_index(folder / "checkpoint.h5").info.step
    assert folder.name == f"checkpoint-{step}"
    assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == step
    again = example("transformers_trainer", "--steps", step + 5).wait()
    assert again.code == 0, again.stderr
    assert (tmp_path / "counting" / f"checkpoint-{step + 5}").exists()


@rank_0
def test_accelerate_loop(example, tmp_path):
    """The second job goes on where a first, shorter one has ended."""
    whole = example("accelerate_loop").wait()
    assert whole.code == 0, whole.stderr
    found = re.findall(r"epoch (\d) loss ([\d.]+)", whole.stdout)
    assert [int(epoch) for epoch, _ in found] == [0, 1, 2]
    assert float(found[-1][1]) < float(found[0][1]) / 2
    shutil.rmtree(tmp_path / "accelerate_state")
    shorter = example("accelerate_loop", change=lambda s: s.replace("range(first, EPOCHS)", "range(first, 2)")).wait()
    assert shorter.code == 0, shorter.stderr
    again = example("accelerate_loop").wait()
    assert again.code == 0, again.stderr
    assert re.findall(r"epoch (\d) loss ([\d.]+)", shorter.stdout + again.stdout) == found
    assert (tmp_path / "accelerate_model" / "model.safetensors").exists()


@pytest.mark.parametrize("name", ["transformers_trainer", "accelerate_loop", "lora"])
def test_examples_are_short(name):
    assert len((ROOT / "docs/examples" / f"{name}.py").read_text().splitlines()) < 60


PAGES = ["how-to/transformers", "how-to/accelerate", "how-to/peft", "tutorials/lora"]


@pytest.mark.parametrize("page", PAGES)
def test_pages_quote_the_examples(page):
    """Each block of a page is a part of an example, or is marked as not tested."""
    sources = [path.read_text() for path in sorted((ROOT / "docs/examples").glob("*.py"))]
    found = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / f"{page}.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(found) >= 2
    for block in found:
        assert any(block in source for source in sources), block


@rank_0
def test_lightning_is_stopped_and_goes_on_with_any_number_of_ranks(example, tmp_path):
    job = example("lightning_fit", 50).wait()
    assert job.code == 0, job.stderr
    assert re.search(r"^step 50 \{'loss': [01]\.", job.stdout, re.MULTILINE), job.stdout
    last = tmp_path / "runs/lightning/last.h5"
    assert open_index(last).info.step == 50
    job = example("lightning_fit", 100_000_000)
    job.wait_for(lambda: open_index(last).info.step > 60)
    one = next(rank for rank in job.ranks() if str(tmp_path / "lightning_fit.py") in rank.cmdline())
    one.send_signal(signal.SIGTERM)
    job.wait()
    assert job.code == 75, job.stderr
    (step,) = map(int, re.findall(r"stopped after step (\d+): signal 15 \(SIGTERM\)", job.stderr))
    stopped = open_index(tmp_path / "runs/lightning/requeue.h5").info
    assert (stopped.step, stopped.world_size) == (step, 2)
    again = example("lightning_fit", step + 40, ranks=3).wait()
    assert again.code == 0, again.stderr
    assert "Restored all states from the checkpoint at runs/lightning/requeue.h5" in again.stderr
    info = open_index(last).info
    assert (info.step, info.world_size) == (step + 40, 3)
