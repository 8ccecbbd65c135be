"""The training job: the number of ranks changes its speed and nothing else."""

import json
import math
import random

import pytest
import torch
import torch.nn.functional as F

from hpcfsdp import checkpoint
from hpcfsdp.errors import CheckpointCorruptError, CheckpointMismatchError, DataError, HpcfsdpError, UsageError
from hpcfsdp.launch.signals import StopRequest
from hpcfsdp.train import data, loop
from hpcfsdp.train.config import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    LoopConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
)
from hpcfsdp.train.evaluate import evaluate
from hpcfsdp.train.model import GPT
from hpcfsdp.train.schedule import learning_rate

pytestmark = pytest.mark.transport

MODEL = ModelConfig(layers=2, width=24, heads=3, context=16)
OPTIM = OptimConfig(lr=1e-2, warmup_steps=2)


@pytest.fixture
def make_config(shared_path, world):
    corpus = shared_path / "corpus"
    if world.rank == 0:
        corpus.mkdir()
        numbers = random.Random(0)
        for index in range(30):
            words = numbers.choices([b"alpha ", b"beta ", b"gamma\n"], k=60)
            (corpus / f"{index}.bin").write_bytes(b"".join(words))
    world.comm.Barrier()

    def make(name="run", *, model=MODEL, steps=8, run_steps=0, batch=12, accumulation=1, every=3, resume="auto"):
        return RunConfig(
            run_dir=str(shared_path / name),
            device="cpu",
            seed=3,
            model=model,
            data=DataConfig(paths=[str(corpus)], held_out=0.2),
            optim=OPTIM,
            train=LoopConfig(steps=steps, run_steps=run_steps, batch=batch, accumulation=accumulation, log_every=1),
            eval=EvalConfig(bytes=500),
            checkpoint=CheckpointConfig(every=every, resume=resume),
        )

    return make


def run(config, world):
    return loop.train(config, world, StopRequest())


def records(config, kind="train"):
    with open(f"{config.run_dir}/metrics.jsonl") as file:
        return [record for record in map(json.loads, file) if record["kind"] == kind]


def plain_losses(config):
    """The same training in one process without hpcfsdp's engine."""
    split = data.make_split(config.data.paths, config.data.held_out)
    corpus = data.Corpus(split.train)
    torch.manual_seed(config.seed)
    model = GPT(config.model)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(OPTIM.beta1, OPTIM.beta2), weight_decay=OPTIM.weight_decay)
    losses = []
    for step in range(config.train.steps):
        optimizer.param_groups[0]["lr"] = learning_rate(step, config.train.steps, OPTIM)
        window = config.model.context + 1
        samples = range(step * config.train.batch, (step + 1) * config.train.batch)
        starts = [data.train_window(config.seed, sample, len(corpus), window) for sample in samples]
        ids = torch.stack([torch.from_numpy(corpus.read(start, window)) for start in starts]).long()
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIM.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    corpus.close()
    return losses


@pytest.mark.parametrize(("batch", "accumulation"), [(12, 1), (12, 2), (10, 1)], ids=["even", "accumulated", "uneven"])
def test_losses_are_those_of_one_plain_process(world, make_config, batch, accumulation):
    config = make_config(batch=batch, accumulation=accumulation)
    outcome = run(config, world)
    assert outcome.step == 8
    expected = plain_losses(config)
    torch.testing.assert_close([r["loss"] for r in records(config)], expected, rtol=1e-5, atol=0)


def test_a_run_in_pieces_is_bitwise_the_run_at_once(world, make_config):
    model = ModelConfig(layers=2, width=24, heads=3, context=16, dropout=0.2)
    whole, pieces = make_config("whole", model=model), make_config("pieces", model=model, run_steps=5)
    run(whole, world)
    first = run(pieces, world)
    assert (first.step, first.checkpoint.name) == (5, "step-00000005.h5")
    second = run(pieces, world)
    assert (second.step, second.checkpoint.name) == (8, "step-00000008.h5")
    assert [r["loss"] for r in records(pieces)] == [r["loss"] for r in records(whole)]
    assert [r["step"] for r in records(pieces)] == list(range(1, 9))
    names = [path.name for path in checkpoint.checkpoint_files(f"{whole.run_dir}/checkpoints")]
    assert names == ["step-00000003.h5", "step-00000006.h5", "step-00000008.h5"]


def test_a_finished_training_has_nothing_to_do_and_says_so(world, make_config, caplog):
    config = make_config(steps=2)
    run(config, world)
    with caplog.at_level("WARNING", "hpcfsdp"):
        outcome = run(config, world)
    assert "all 2 steps are done already; raise train.steps to go on" in caplog.text
    assert (outcome.step, len(records(config))) == (2, 2)
    assert outcome.checkpoint.name == "step-00000002.h5"


def test_a_signal_to_one_rank_stops_all_after_a_step_with_a_checkpoint(world, make_config):
    config = make_config(every=0)
    stop = StopRequest()
    if world.rank == world.size - 1:
        stop.received = 10
    outcome = loop.train(config, world, stop)
    assert (outcome.step, outcome.signal, outcome.held_out) == (1, 10, None)
    assert checkpoint.open_index(outcome.checkpoint).info.step == 1
    assert run(config, world).step == 8


def test_held_out_bits_do_not_depend_on_the_number_of_ranks(world, comm, make_config):
    config = make_config()
    split = data.make_split(config.data.paths, config.data.held_out)
    corpus = data.Corpus(split.held_out)
    torch.manual_seed(0)
    result = evaluate(GPT(config.model), comm, corpus, 16, 500, torch.device("cpu"))
    from hpcfsdp.comm.fake import FakeCommunicator

    torch.manual_seed(0)
    alone = evaluate(GPT(config.model), FakeCommunicator(), corpus, 16, 500, torch.device("cpu"))
    assert result.predicted_bytes == alone.predicted_bytes == 31 * 16
    assert result.bits_per_byte == pytest.approx(alone.bits_per_byte, rel=1e-6)
    assert result.unigram_bits_per_byte == pytest.approx(alone.unigram_bits_per_byte, rel=1e-12)
    assert result.bits_per_byte == pytest.approx(8, abs=0.5)  # nothing learnt yet: all bytes equally likely
    corpus.close()


def test_training_beats_the_unigram_baseline(world, make_config):
    outcome = run(make_config(steps=60, every=0), world)
    assert outcome.held_out.bits_per_byte < 0.6 * outcome.held_out.unigram_bits_per_byte


@pytest.mark.parametrize(
    ("every", "text"),
    [
        (0, r"the loss is nan .* at step 3: training has diverged"),
        (1, r"parameters are not finite after step 2: training"),
    ],
    ids=["seen in the loss", "seen before a save"],
)
def test_divergence_is_an_error_on_every_rank_and_is_never_saved(world, make_config, monkeypatch, every, text):
    config = make_config(every=every)
    rates = iter([1e-3, math.inf, math.inf])
    monkeypatch.setattr(loop, "learning_rate", lambda *_: next(rates))
    with pytest.raises(HpcfsdpError, match=text) as caught:
        run(config, world)
    assert caught.value.collective
    saved = [path.name for path in checkpoint.checkpoint_files(f"{config.run_dir}/checkpoints")]
    assert saved == ["step-00000001.h5"][:every]


def test_a_damaged_newest_checkpoint_stops_the_run_and_names_the_file(world, make_config):
    config = make_config(steps=4)
    newest = run(config, world).checkpoint
    if world.rank == 0:
        newest.write_bytes(newest.read_bytes()[:5000])
    world.comm.Barrier()
    with pytest.raises(CheckpointCorruptError, match=r"step-00000004\.h5.*\n.*move the file away"):
        run(config, world)


def test_too_little_data_is_named_on_every_rank(world, make_config, shared_path):
    config = make_config()
    (shared_path / f"tiny-{world.rank}").write_bytes(b"abc")
    tiny = RunConfig(**{**vars(config), "data": DataConfig(paths=str(shared_path / "tiny-0"), held_out=0.4)})
    with pytest.raises(DataError, match=r"2 bytes to learn from and 1 held out; at least 17"):
        run(tiny, world)


def test_a_batch_smaller_than_the_number_of_ranks_is_refused(world, make_config):
    with pytest.raises(UsageError, match=rf"train\.batch \({world.size} .*train\.accumulation=2"):
        run(make_config(batch=world.size, accumulation=2), world)


def test_a_second_training_in_the_folder_of_another_is_refused(world, make_config):
    run(make_config(steps=2), world)
    with pytest.raises(UsageError, match=r"never.*step-00000002\.h5.*another run_dir"):
        run(make_config(steps=2, resume="never"), world)
    assert run(make_config("fresh", steps=2, resume="never"), world).step == 2


def test_a_run_that_started_from_a_file_goes_on_from_its_own_checkpoints(world, make_config, shared_path):
    first = run(make_config("first", steps=8, run_steps=2), world)
    branch = make_config("branch", steps=8, run_steps=2, resume=str(first.checkpoint))
    assert run(branch, world).step == 4
    assert run(branch, world).step == 6  # a job that is requeued has the same arguments


def test_a_run_that_cannot_start_leaves_the_configuration_of_the_folder(world, make_config):
    config = make_config(steps=2)
    run(config, world)
    with open(f"{config.run_dir}/config.yaml") as file:
        before = file.read()
    with pytest.raises(CheckpointMismatchError):
        run(make_config(steps=2, model=ModelConfig(layers=1, width=24, heads=3, context=16)), world)
    with open(f"{config.run_dir}/config.yaml") as file:
        assert file.read() == before
