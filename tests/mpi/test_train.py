"""The training job: the number of ranks and their mesh change its speed and nothing else."""

import dataclasses
import json
import math
import os
import random
import re
import shutil
import signal
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

import hpcfsdp
from hpcfsdp import checkpoint
from hpcfsdp.cli import train as command
from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.comm.mpi.communicator import MpiCommunicator
from hpcfsdp.data import ResumableSampler
from hpcfsdp.errors import CheckpointCorruptError, CheckpointMismatchError, DataError, HpcfsdpError, UsageError
from hpcfsdp.examples.gpt import data, loop
from hpcfsdp.examples.gpt.callbacks import Callbacks
from hpcfsdp.examples.gpt.evaluate import evaluate
from hpcfsdp.examples.gpt.optimizers import learning_rate
from hpcfsdp.examples.gpt.parallel import Share, make_mesh, parallelize, shard
from hpcfsdp.examples.gpt.run_config import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    LoopConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
)
from hpcfsdp.examples.gpt.transformer import GPT, count_elements
from hpcfsdp.fsdp import FullyShardedDataParallel as FSDP
from hpcfsdp.launch.lock import RunLock
from tests.signals import own_handlers

pytestmark = pytest.mark.ranks(2)

MODEL = ModelConfig(layers=2, width=24, heads=3, context=16)
MANY_HEADS = ModelConfig(layers=2, width=24, heads=12, context=16)
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

    def make(name="run", *, model=MODEL, mesh=(1, 1), every=3, resume="auto", **loop_values):
        replicate, tensor = mesh
        return RunConfig(
            run_dir=str(shared_path / name),
            device="cpu",
            seed=3,
            model=model,
            data=DataConfig(paths=[str(corpus)], held_out=0.2),
            optim=OPTIM,
            train=LoopConfig(**{"steps": 8, "batch": 12, "log_every": 1, **loop_values}),
            mesh=MeshConfig(replicate=replicate, tensor=tensor),
            eval=EvalConfig(bytes=500),
            checkpoint=CheckpointConfig(every=every, resume=resume),
        )

    return make


def run(config, world):
    return command.run(config, world, hpcfsdp.preemption())


def records(config, kind="train"):
    with open(f"{config.run_dir}/metrics.jsonl") as file:
        return [record for record in map(json.loads, file) if record["kind"] == kind]


def meshes(world, but=()):
    """All pairs of (replicate, tensor) that divide the ranks and twelve heads."""
    extents = [extent for extent in range(1, world.size + 1) if world.size % extent == 0 and 12 % extent == 0]
    pairs = [(replicate, tensor) for replicate in extents for tensor in extents]
    return [pair for pair in pairs if world.size % (pair[0] * pair[1]) == 0 and pair not in but]


def largest(world):
    """The mesh (replicate, tensor) with the largest dimensions."""
    return max(meshes(world), key=lambda pair: (min(pair), pair[1]))


def plain_run(config):
    """Losses and gradient norms of the same training in one process without hpcfsdp's engine."""
    split = data.make_split(config.data.paths, config.data.held_out)
    corpus = data.Corpus(split.train)
    torch.manual_seed(config.seed)
    model = GPT(config.model)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(OPTIM.beta1, OPTIM.beta2), weight_decay=OPTIM.weight_decay)
    length = data.num_windows(len(corpus), config.model.context)
    sampler = ResumableSampler(length, global_batch=config.train.batch, seed=config.seed, tail="pad", rank=0, ranks=1)
    losses, norms, batches = [], [], iter(sampler)
    for step in range(config.train.steps):
        optimizer.param_groups[0]["lr"] = learning_rate(step, config.train.steps, OPTIM)
        context = config.model.context
        if not (samples := next(batches, None)):
            samples = next(batches := iter(sampler))
        windows = [corpus.read(sample * context, context + 1) for sample in samples]
        ids = torch.stack([torch.from_numpy(window) for window in windows]).long()
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIM.clip_norm).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    corpus.close()
    return losses, norms


@pytest.mark.parametrize(("batch", "accumulation"), [(12, 1), (12, 2), (10, 1)], ids=["even", "accumulated", "uneven"])
@pytest.mark.ranks(3, 1, 4)
@pytest.mark.transport
def test_losses_are_those_of_one_plain_process(world, make_config, batch, accumulation):
    config = make_config(batch=batch, accumulation=accumulation)
    outcome = run(config, world)
    assert outcome.step == 8
    losses, norms = plain_run(config)
    torch.testing.assert_close([r["loss"] for r in records(config)], losses, rtol=1e-5, atol=0)
    torch.testing.assert_close([r["grad_norm"] for r in records(config)], norms, rtol=1e-5, atol=0)


@pytest.fixture
def in_float64():
    """Then differences by the order of sums are far below all others."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def agree(config, losses, norms):
    """Whether a run equals the plain one but for the order of sums. The longest sum is the norm, of 21,024 elements:
    each addition is off by at most 2^-53 of the sum, in either run, so the two differ by at most 4.7e-12 of it."""
    torch.testing.assert_close([r["loss"] for r in records(config)], losses, rtol=1e-11, atol=0)
    torch.testing.assert_close([r["grad_norm"] for r in records(config)], norms, rtol=1e-11, atol=0)


@pytest.mark.parametrize(
    ("batch", "accumulation"),
    [pytest.param(12, 1, marks=pytest.mark.slow), (10, 2)],
    ids=["even", "uneven, accumulated"],
)
@pytest.mark.ranks(4)
def test_every_mesh_trains_as_one_plain_process_does(world, make_config, in_float64, batch, accumulation, thorough):
    batch = max(batch, accumulation * world.size)
    held_out = []
    for mesh in meshes(world):
        values = {"steps": 4 if thorough else 2, "batch": batch, "accumulation": accumulation}
        config = make_config(f"{mesh}", model=MANY_HEADS, mesh=mesh, every=0, **values)
        held_out.append(run(config, world).held_out)
        if mesh == (1, 1):
            losses, norms = plain_run(config)
        agree(config, losses, norms)
    for result in held_out:
        assert result.bits_per_byte == pytest.approx(held_out[0].bits_per_byte, rel=1e-6)  # logits in float32
        assert result.unigram_bits_per_byte == pytest.approx(held_out[0].unigram_bits_per_byte, rel=1e-12)
        assert result.predicted_bytes == held_out[0].predicted_bytes == 31 * 16


@pytest.mark.ranks(2, 4)
@pytest.mark.transport
def test_one_replica_on_each_node_is_a_mesh(world, make_config, in_float64):
    config = make_config(model=MANY_HEADS, mesh=("nodes", 1), steps=2)
    run(config, world)
    agree(config, *plain_run(config))


@pytest.mark.ranks(4)
def test_a_run_resumes_on_any_other_mesh(world, make_config, in_float64, thorough):
    turns = meshes(world) + (meshes(world)[::-1] if thorough else meshes(world)[:1])
    values = {"model": MANY_HEADS, "steps": len(turns), "run_steps": 1}
    for step, mesh in enumerate(turns, start=1):
        config = make_config(mesh=mesh, **values)
        assert run(config, world).step == step
    agree(config, *plain_run(config))


def cut_and_whole(config):
    """Elements that are divided over tensor-parallel ranks, and elements that all of them store."""
    names = ("qkv.weight", "qkv.bias", "merge.weight", "up.weight", "up.bias", "down.weight")
    cut = sum(param.numel() for name, param in GPT(config).named_parameters() if name.endswith(names))
    return cut, count_elements(config) - cut


@pytest.mark.ranks(4)
def test_messages_of_a_step_are_those_on_the_page_about_meshes(world, monkeypatch):
    config = ModelConfig(layers=2, width=192, heads=12, context=16)  # parameters that need no padding
    sequences, length = 3, config.context
    ids = torch.randint(256, (sequences, length + 1))
    cut, whole = cut_and_whole(config)
    elements = Counter()

    def watch(method, full):
        original = getattr(MpiCommunicator, method)

        def call(self, *args, **options):
            if args[full].dtype == torch.float32:  # not a comparison between ranks
                elements[self, method] += args[full].numel()
            return original(self, *args, **options)

        monkeypatch.setattr(MpiCommunicator, method, call)

    watch("all_reduce", 0)
    watch("reduce_scatter_tensor", 1)
    for replicate, tensor in meshes(world):
        model = shard(GPT(config), make_mesh(MeshConfig(replicate, tensor), world), world)
        groups = model._unit.mesh
        elements.clear()
        F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        expected = Counter()
        if tensor > 1:
            expected[groups.tensor, "all_reduce"] = 4 * config.layers * sequences * length * config.width
        if groups.shard.size > 1:
            expected[groups.shard, "reduce_scatter_tensor"] = cut // tensor + whole
        if replicate > 1:
            expected[groups.replicate, "all_reduce"] = (cut // tensor + whole) // groups.shard.size
        assert elements == expected, (replicate, tensor)


@pytest.mark.ranks(4)
def test_activations_are_those_on_the_page_about_meshes(world):
    tokens, width, layers = 4 * MANY_HEADS.context, 384, 3

    def kept(layers, mesh):
        """Bytes that autograd keeps, without parameters."""
        torch.manual_seed(0)
        model = GPT(ModelConfig(layers=layers, width=width, heads=12, context=MANY_HEADS.context))
        if mesh is not None:
            parallelize(model, mesh["tensor"])
        own = {as_local(param).untyped_storage().data_ptr() for param in model.parameters()}
        storages = {}

        def keep(tensor):
            storage = as_local(tensor).untyped_storage()
            if storage.data_ptr() not in own:
                storages[storage.data_ptr()] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(torch.zeros(4, MANY_HEADS.context, dtype=torch.int64))
        return sum(storage.nbytes() for storage in storages.values())

    for replicate, tensor in meshes(world):
        if replicate == 1:
            mesh = make_mesh(MeshConfig(1, tensor), world)
            for_a_layer = (kept(1 + layers, mesh) - kept(1, mesh)) / layers
            exact = (4 + 12 / tensor) * width * tokens * 4
            statistics = (2 * 2 + 12 / tensor) * tokens * 4  # mean and variance of two norms, a number for each head
            assert exact <= for_a_layer <= exact + statistics


def as_local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.ranks(3)
def test_tensor_parallel_ranks_drop_the_same_elements_of_equal_activations(world, make_config):
    model = ModelConfig(layers=2, width=24, heads=12, context=16, dropout=0.3)
    config = make_config(model=model, mesh=(1, world.size), steps=4, every=0)
    trainer = loop.Trainer(config, world, hpcfsdp.preemption(), Callbacks())
    trainer.run()
    with FSDP.summon_full_params(trainer.model, writeback=False):
        norm = trainer.model.blocks[0].norm_feed.weight
        common = [trainer.model.embed.weight, trainer.model.position.weight, norm]
        values = [param.detach().clone() for param in common]
    everyone = world.comm.allgather(values)
    for mine, first in zip(values, everyone[0], strict=True):
        assert torch.equal(mine, first)


@pytest.mark.parametrize("cut", [pytest.param(False, marks=pytest.mark.slow), True], ids=["sharded", "on a mesh"])
@pytest.mark.ranks(4, 1)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(world, make_config, cut):
    model = ModelConfig(layers=2, width=24, heads=12, context=16, dropout=0.2)
    mesh = largest(world) if cut else (1, 1)
    whole, pieces = (make_config(n, model=model, mesh=mesh, run_steps=r) for n, r in (("whole", 0), ("pieces", 5)))
    run(whole, world)
    first = run(pieces, world)
    assert (first.step, first.checkpoint.name) == (5, "step-00000005.h5")
    second = run(pieces, world)
    assert (second.step, second.checkpoint.name) == (8, "step-00000008.h5")
    assert [r["loss"] for r in records(pieces)] == [r["loss"] for r in records(whole)]
    assert [r["step"] for r in records(pieces)] == list(range(1, 9))
    names = [path.name for path in checkpoint.checkpoint_files(f"{whole.run_dir}/checkpoints")]
    assert names == ["step-00000003.h5", "step-00000006.h5", "step-00000008.h5"]


def test_a_finished_training_logs_that_no_steps_are_left(world, make_config, caplog):
    config = make_config(steps=2)
    run(config, world)
    with caplog.at_level("WARNING", "hpcfsdp"):
        outcome = run(config, world)
    assert "all 2 steps are done already; raise train.steps to go on" in caplog.text
    assert (outcome.step, len(records(config))) == (2, 2)
    assert outcome.checkpoint.name == "step-00000002.h5"


@pytest.mark.parametrize("cut", [False, True], ids=["sharded", "on a mesh"])
@pytest.mark.ranks(3)
@pytest.mark.transport
def test_a_signal_to_one_rank_stops_all_after_a_step_with_a_checkpoint(world, make_config, cut):
    config = make_config(every=0, model=MANY_HEADS, mesh=largest(world) if cut else (1, 1))
    with own_handlers(), hpcfsdp.preemption() as stop:
        if world.rank == world.size - 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        outcome = command.run(config, world, stop)
    assert (outcome.step, outcome.stopped, outcome.held_out) == (2, "signal 10 (SIGUSR1)", None)
    assert checkpoint.open_index(outcome.checkpoint).info.step == 2
    assert run(config, world).step == 8


@pytest.mark.ranks(3, 1, 4)
def test_held_out_bits_do_not_depend_on_the_number_of_ranks(world, make_config):
    config = make_config()
    split = data.make_split(config.data.paths, config.data.held_out)
    corpus = data.Corpus(split.held_out)
    torch.manual_seed(0)
    result = evaluate(GPT(config.model), world, Share(world.rank, world.size), corpus, 16, 500)
    torch.manual_seed(0)
    one_rank = SimpleNamespace(communicator=FakeCommunicator(), device=world.device)
    alone = evaluate(GPT(config.model), one_rank, Share(0, 1), corpus, 16, 500)
    assert result.predicted_bytes == alone.predicted_bytes == 31 * 16
    assert result.bits_per_byte == pytest.approx(alone.bits_per_byte, rel=1e-6)
    assert result.unigram_bits_per_byte == pytest.approx(alone.unigram_bits_per_byte, rel=1e-12)
    assert result.bits_per_byte == pytest.approx(8, abs=0.5)  # nothing learnt yet: all bytes equally likely
    corpus.close()


def test_training_beats_the_unigram_baseline(world, make_config):
    outcome = run(make_config(steps=60, every=0), world)
    assert outcome.held_out.bits_per_byte < 0.6 * outcome.held_out.unigram_bits_per_byte


@pytest.mark.parametrize("cut", [False, True], ids=["sharded", "on a mesh"])
@pytest.mark.parametrize(
    ("every", "text"),
    [
        (0, r"the loss is nan .* at step 3: training has diverged"),
        (1, r"parameters are not finite after step 2 on {size} of {size} rank\(s\): training"),
    ],
    ids=["seen in the loss", "seen before a save"],
)
def test_divergence_is_an_error_on_every_rank_and_is_never_saved(world, make_config, monkeypatch, every, text, cut):
    config = make_config(every=every, model=MANY_HEADS, mesh=largest(world) if cut else (1, 1))
    text = text.format(size=world.size)
    rates = iter([1e-3, math.inf, math.inf])
    monkeypatch.setattr(loop, "learning_rate", lambda *_: next(rates))
    with pytest.raises(HpcfsdpError, match=text) as caught:
        run(config, world)
    assert caught.value.raised_on_all_ranks
    saved = [path.name for path in checkpoint.checkpoint_files(f"{config.run_dir}/checkpoints")]
    assert saved == ["step-00000001.h5"][:every]


def truncate(path, world):
    world.comm.Barrier()
    if world.rank == 0:
        path.write_bytes(path.read_bytes()[:5000])
    world.comm.Barrier()


def test_a_damaged_newest_checkpoint_is_skipped_and_its_steps_are_repeated(world, make_config, caplog):
    whole, harmed = make_config("whole"), make_config("harmed", run_steps=4)
    run(whole, world)
    truncate(run(harmed, world).checkpoint, world)
    with caplog.at_level("WARNING", "hpcfsdp"):
        outcome = run(make_config("harmed"), world)
    assert outcome.step == 8
    if world.rank == 0:
        assert re.search(r"step-00000004\.h5 cannot be loaded, trying the one before it: ", caplog.text)
        assert re.search(r"using the older checkpoint .*step-00000003\.h5 step=3", caplog.text)
    assert [r["loss"] for r in records(harmed)] == [r["loss"] for r in records(whole)]
    steps, losses = checkpoint.open_index(outcome.checkpoint).metrics["loss"]
    assert (steps.tolist(), losses.tolist()) == (list(range(1, 9)), [r["loss"] for r in records(whole)])


def test_a_run_with_damaged_checkpoints_only_fails_and_names_them(world, make_config):
    config = make_config(steps=4)
    truncate(run(config, world).checkpoint, world)
    truncate(checkpoint.checkpoint_files(f"{config.run_dir}/checkpoints")[0], world)
    with pytest.raises(CheckpointCorruptError, match=r"step-00000004\.h5.*\n.*step-0+3\.h5.*\n.*move the file away"):
        run(config, world)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_old_checkpoints_are_removed_as_configured(world, make_config, asynchronous):
    config = make_config(every=1)
    wanted = CheckpointConfig(every=1, keep_last=2, keep_every=3, asynchronous=asynchronous)
    outcome = run(dataclasses.replace(config, checkpoint=wanted), world)
    world.comm.Barrier()
    kept = checkpoint.checkpoint_files(f"{config.run_dir}/checkpoints")
    assert [path.name for path in kept] == [f"step-0000000{step}.h5" for step in (3, 6, 7, 8)]
    assert outcome.checkpoint == kept[-1]


def test_asynchronous_saves_do_not_change_the_run(world, make_config):
    plain, config = make_config("plain", every=2), make_config("asynchronous", every=2)
    run(plain, world)
    config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, asynchronous=True))
    run(dataclasses.replace(config, train=dataclasses.replace(config.train, run_steps=5)), world)
    run(config, world)
    assert [r["loss"] for r in records(config)] == [r["loss"] for r in records(plain)]
    one, other = (checkpoint.open_index(f"{c.run_dir}/checkpoints/step-00000008.h5") for c in (plain, config))
    assert one.extents["checksum"].tolist() == other.extents["checksum"].tolist()


def test_a_signal_waits_for_the_checkpoint_that_is_being_written(world, make_config):
    config = make_config(every=0)
    with own_handlers(), hpcfsdp.preemption() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        outcome = command.run(
            dataclasses.replace(config, checkpoint=CheckpointConfig(every=0, asynchronous=True)), world, stop
        )
    assert (outcome.step, outcome.stopped) == (1, "signal 10 (SIGUSR1)")
    assert checkpoint.open_index(outcome.checkpoint).info.step == 1


def test_too_little_data_is_named_on_every_rank(world, make_config, shared_path):
    config = make_config()
    (shared_path / f"tiny-{world.rank}").write_bytes(b"abc")
    tiny = RunConfig(**{**vars(config), "data": DataConfig(paths=str(shared_path / "tiny-0"), held_out=0.4)})
    with pytest.raises(DataError, match=r"2 bytes to learn from and 1 held out; at least 17"):
        run(tiny, world)


@pytest.mark.ranks(3)
def test_a_batch_smaller_than_the_number_of_ranks_is_refused(world, make_config):
    with pytest.raises(UsageError, match=rf"train\.batch \({world.size} .*train\.accumulation=2"):
        run(make_config(batch=world.size, accumulation=2), world)


@pytest.mark.ranks(3)
def test_a_mesh_that_does_not_fit_is_refused_on_every_rank(world, make_config):
    for values, text in (
        ({"mesh": (world.size, 2)}, rf"mesh\.replicate \({world.size}\) x mesh\.tensor \(2\) = {2 * world.size}"),
        ({"mesh": (1, 0)}, r"mesh\.tensor must be positive, not 0"),
        ({"mesh": (-1, 1)}, r"mesh\.replicate must be positive, not -1"),
        ({"mesh": ("nodes", world.size + 1)}, rf"mesh\.replicate \(nodes, {world.num_nodes} here\) x mesh\.tensor"),
    ):
        with pytest.raises(UsageError, match=text) as caught:
            run(make_config(**values), world)
        assert caught.value.raised_on_all_ranks
        assert caught.value.exit_code == 2


def test_a_tensor_dimension_that_does_not_divide_the_heads_is_refused(world, make_config):
    one = ModelConfig(layers=1, width=24, heads=1, context=16)
    if world.size == 1:
        pytest.skip("one rank cuts nothing")
    with pytest.raises(UsageError, match=rf"model\.heads \(1\) must be a multiple of mesh\.tensor \({world.size}\)"):
        run(make_config(model=one, mesh=(1, world.size)), world)


def test_tensor_parallel_ranks_need_one_sequence_together(world, make_config):
    config = make_config(model=MANY_HEADS, mesh=(1, world.size), batch=1, steps=2)
    assert run(config, world).step == 2
    with pytest.raises(UsageError, match=r"train\.batch \(1 .*train\.accumulation=2"):
        run(make_config("two", model=MANY_HEADS, mesh=(1, world.size), batch=1, accumulation=2), world)


def test_a_second_training_in_the_folder_of_another_is_refused(world, make_config):
    run(make_config(steps=2), world)
    with pytest.raises(UsageError, match=r"never.*step-00000002\.h5.*another run_dir"):
        run(make_config(steps=2, resume="never"), world)
    assert run(make_config("fresh", steps=2, resume="never"), world).step == 2


def test_a_run_that_started_from_a_file_resumes_from_its_own_checkpoints(world, make_config, shared_path):
    first = run(make_config("first", steps=8, run_steps=2), world)
    branch = make_config("branch", steps=8, run_steps=2, resume=str(first.checkpoint))
    assert run(branch, world).step == 4
    assert run(branch, world).step == 6  # a job that is requeued has the same arguments


def test_a_refused_run_does_not_change_the_configuration_of_the_folder(world, make_config):
    config = make_config(steps=2)
    run(config, world)
    with open(f"{config.run_dir}/config.yaml") as file:
        before = file.read()
    with pytest.raises(CheckpointMismatchError):
        run(make_config(steps=2, model=ModelConfig(layers=1, width=24, heads=3, context=16)), world)
    with open(f"{config.run_dir}/config.yaml") as file:
        assert file.read() == before


@pytest.fixture
def unsharded(monkeypatch):
    """A training that is refused after it has made its model fails the test."""

    def refuse():
        monkeypatch.setattr(loop, "shard", lambda *_, **_options: pytest.fail("a model was made"))

    return refuse


def test_a_checkpoint_of_another_model_is_refused_with_what_differs(world, make_config, unsharded):
    run(make_config(steps=2), world)
    unsharded()
    other = make_config(steps=2, model=ModelConfig(layers=3, width=48, heads=3, context=16))
    text = r"step-00000002\.h5 belongs to another model: model\.layers was 2, now 3; model\.width was 24, now 48\. "
    for config in (other, resume_changed(other)):
        with pytest.raises(CheckpointMismatchError, match=text) as caught:
            run(config, world)
        assert caught.value.raised_on_all_ranks


def resume_changed(config):
    return dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, resume_changed=True))


def test_another_training_is_resumed_only_if_that_is_wanted(
    world, make_config, unsharded, shared_path, caplog, monkeypatch
):
    run(make_config(steps=4, run_steps=2), world)
    text = f"{shared_path}/text.bin"
    if world.rank == 0:
        Path(text).write_bytes(b"gamma delta " * 100)
    world.comm.Barrier()
    other = dataclasses.replace(
        make_config(steps=4, batch=6),
        seed=4,
        data=DataConfig(paths=text, held_out=0.2),
        optim=OptimConfig(lr=1e-2, warmup_steps=2, weight_decay=0.3, beta2=0.9),
    )
    expected = (
        "step-00000002.h5 belongs to another training: seed was 3, now 4; train.batch was 12, now 6; "
        "optim.weight_decay was 0.1, now 0.3; optim.beta2 was 0.95, now 0.9; the data is not what "
        f"it was trained on (data.paths was ['{shared_path}/corpus'], now {text}). "
    )
    unsharded()
    with pytest.raises(UsageError, match=re.escape(expected)) as caught:
        run(other, world)
    assert caught.value.raised_on_all_ranks
    monkeypatch.undo()
    with caplog.at_level("INFO", "hpcfsdp"):
        trainer = loop.Trainer(resume_changed(other), world, hpcfsdp.preemption(), Callbacks())
    (group,) = trainer.optimizer.param_groups
    assert (trainer.step, group["weight_decay"], group["betas"]) == (2, 0.3, (0.9, 0.9))
    assert trainer.run().step == 4
    if world.rank == 0:
        assert "resuming step-00000002.h5 with changes: seed was 3, now 4; " in caplog.text


def test_length_learning_rate_and_checkpoints_may_change_and_are_logged(world, make_config, caplog):
    run(make_config(steps=4, run_steps=2), world)
    config = dataclasses.replace(make_config(steps=5, every=1), optim=OptimConfig(lr=2e-2, warmup_steps=2))
    with caplog.at_level("INFO", "hpcfsdp"):
        assert run(config, world).step == 5
    changes = "optim.lr was 0.01, now 0.02; train.steps was 4, now 5; checkpoint.every was 3, now 1"
    expected = f"resuming step-00000002.h5 with changes: {changes}"
    assert [m for m in caplog.messages if m.startswith("resuming")] == [expected][: world.rank == 0]


def test_a_folder_that_takes_no_checkpoints_is_an_error_at_the_start(world, make_config, unsharded):
    config = make_config()
    if world.rank == 0:
        Path(config.run_dir).mkdir()
        Path(config.run_dir, "checkpoints").write_text("in the way")
    world.comm.Barrier()
    unsharded()
    with pytest.raises(HpcfsdpError, match=r"run/checkpoints: cannot write checkpoints there: File exists") as caught:
        run(config, world)
    assert caught.value.raised_on_all_ranks


def test_a_second_training_in_a_folder_is_refused_on_all_ranks(world, make_config):
    config = make_config(steps=2)
    held = RunLock(Path(config.run_dir))
    if world.rank == 0:
        held.acquire()
    world.comm.Barrier()
    with pytest.raises(UsageError, match=r"another training uses .*: (job \S+, )?process .* choose another run_dir"):
        run(config, world)
    assert not list(Path(config.run_dir).glob("checkpoints"))
    world.comm.Barrier()
    held.release()
    world.comm.Barrier()
    assert run(config, world).step == 2
    world.comm.Barrier()  # rank 0 gives it back
    assert not Path(config.run_dir, "running.json").exists()


def test_a_folder_that_is_removed_in_a_training_is_reported_and_made_again(world, make_config, caplog, monkeypatch):
    config = make_config(steps=4, every=2)
    train_step = loop.Trainer._train_step

    def remove_after_two(trainer):
        if trainer.step == 2 and world.rank == 0:
            shutil.rmtree(config.run_dir)
        world.comm.Barrier()
        return train_step(trainer)

    monkeypatch.setattr(loop.Trainer, "_train_step", remove_after_two)
    with caplog.at_level("ERROR", "hpcfsdp"):
        run(config, world)
    if world.rank == 0:
        assert [message for message in caplog.messages if "was removed during the training" in message]
    world.comm.Barrier()
    folder = Path(config.run_dir)
    assert [path.name for path in checkpoint.checkpoint_files(folder / "checkpoints")] == ["step-00000004.h5"]
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert (folder / "config.yaml").exists() and steps[0] == 3


@pytest.mark.ranks(4, 2)
def test_muon_trains_the_same_on_every_mesh_and_goes_on_on_any_other(world, make_config, in_float64, thorough):
    def configured(name, mesh, **values):
        made = make_config(name, model=MANY_HEADS, mesh=mesh, steps=4, **values)
        return dataclasses.replace(made, optimizer="muon")

    found, chosen = [], meshes(world) if thorough else [meshes(world)[0], largest(world)]
    for number, mesh in enumerate(chosen):
        config = configured(f"run {number}", mesh)
        run(config, world)
        found.append([record["loss"] for record in records(config)])
    for mesh in chosen:
        config = configured("turns", mesh, run_steps=1)
        run(config, world)
    steps = len(chosen)
    found.append([record["loss"] for record in records(config)] + found[0][steps:])
    for losses in found[1:]:
        # The iteration is in float32, whatever the parameters are.
        assert losses == pytest.approx(found[0], rel=1e-4)
    adamw = make_config("adamw", model=MANY_HEADS, steps=4)
    run(adamw, world)
    assert [record["loss"] for record in records(adamw)][-1] != found[0][-1]


@pytest.mark.ranks(2)
def test_another_optimizer_does_not_go_on_with_a_run(world, make_config):
    run(make_config(steps=2), world)
    with pytest.raises(UsageError, match="optimizer was adamw, now muon"):
        run(dataclasses.replace(make_config(steps=4), optimizer="muon"), world)


def test_a_training_that_is_called_again_goes_on_from_memory(world, make_config, monkeypatch, caplog):
    class Lost(Exception):
        pass

    plain, config = make_config("plain", every=0), make_config("memory", every=0)
    run(plain, world)
    config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, memory_every=2))
    step = loop.Trainer._train_step

    def lose(trainer):
        if trainer.step == 5:
            raise Lost
        return step(trainer)

    with monkeypatch.context() as patch, pytest.raises(Lost):
        patch.setattr(loop.Trainer, "_train_step", lose)
        run(config, world)
    with caplog.at_level("INFO", "hpcfsdp"):
        outcome = run(config, world)
    assert (outcome.step, outcome.checkpoint.name) == (8, "step-00000008.h5")
    assert f"loaded memory step=4 ranks={world.size}" in caplog.text or world.rank
    found = records(config)
    assert [r["loss"] for r in found] == [r["loss"] for r in records(plain)]
    assert all(r["memory"]["checkpoints_bytes"] > 0 for r in found[2:])
    steps, _ = checkpoint.open_index(outcome.checkpoint).metrics["loss"]
    assert steps.tolist() == list(range(1, 9))
