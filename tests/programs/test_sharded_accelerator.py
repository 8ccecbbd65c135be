"""A loop for accelerate with ShardedAccelerator, next to the same loop with accelerate's own replicated model."""

import pytest
import torch
import transformers as hf
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import GeneralTracker
from accelerate.utils import ProjectConfiguration
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from hpcfsdp import checkpoint
from hpcfsdp.errors import CheckpointError, CheckpointMismatchError, EngineError, UsageError
from hpcfsdp.fsdp import FullyShardedDataParallel, ShardingStrategy
from hpcfsdp.integrations.accelerate import ShardedAccelerator
from tests.programs.loops import copied
from tests.programs.test_accelerate import BATCH, Texts, adam, build, close
from tests.programs.test_transformers import gpt2


@pytest.fixture(autouse=True)
def fresh_state():
    """accelerate keeps the settings of a process's first Accelerator for all later ones."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


class Loop:
    """A user's program: only how the accelerator is made differs."""

    def __init__(self, world, accelerator, model=None):
        self.accelerator, model = accelerator, model or build()
        optimizer = adam(model)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        rows = BATCH // world.size
        self.model, self.optimizer, self.scheduler, self.loader, self.held_out = accelerator.prepare(
            model, optimizer, scheduler, DataLoader(Texts(), rows), DataLoader(Texts(7), rows)
        )

    def train(self, seed=None):
        """One epoch: losses of the batches, norms, and held-out losses of all ranks."""
        found, accelerator, model = [], self.accelerator, self.model.train()
        if seed is not None:
            torch.manual_seed(seed)
        for batch in self.loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    found.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            found.append(accelerator.reduce(loss.detach(), "mean").item())
        model.eval()
        with torch.no_grad():
            logits = [accelerator.gather_for_metrics(model(**batch).logits) for batch in self.held_out]
        found.append(torch.cat(logits).square().mean().item())
        assert sum(map(len, logits)) == 7
        return found

    @property
    def state(self):
        return copied(self.accelerator.get_state_dict(self.model))


@pytest.mark.parametrize("steps", [1, 2], ids=["each step", "accumulation"])
def test_trains_as_accelerate_does(world, steps):
    plain = Loop(world, Accelerator(cpu=True, gradient_accumulation_steps=steps))
    sharded = Loop(world, ShardedAccelerator(gradient_accumulation_steps=steps))
    assert isinstance(sharded.model, FullyShardedDataParallel)
    assert len(sharded.model.fsdp_modules(sharded.model)) == 3
    close(sharded.train(), plain.train())
    close(sharded.state, plain.state if world.rank == 0 else {})


def test_options(world):
    options = {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
    accelerator = ShardedAccelerator(
        fsdp_options=options, layers=["GPT2MLP", "GPT2Attention"], activation_checkpointing=True, mixed_precision="bf16"
    )
    loop = Loop(world, accelerator)
    loop.train()
    units = loop.model.fsdp_modules(loop.model)
    assert len(units) == 5
    assert {unit.sharding_strategy for unit in units} == {ShardingStrategy.SHARD_GRAD_OP}
    assert {unit.mixed_precision.param_dtype for unit in units} == {torch.bfloat16}


class Counter:
    def __init__(self, count):
        self.count, self.table = count, torch.arange(count)

    def state_dict(self):
        return {"count": self.count, "pair": (self.count, "x"), "table": self.table}

    def load_state_dict(self, state):
        assert state["pair"] == (state["count"], "x")
        self.count, self.table = state["count"], state["table"]


def with_dropout(seed=0):
    torch.manual_seed(seed)
    return gpt2()


def test_saves_and_resumes(world, shared_path):
    """With dropout: bit by bit, into another model, with another schedule and counter."""
    first = Loop(world, ShardedAccelerator(), with_dropout())
    first.accelerator.register_for_checkpointing(Counter(5))
    first.train(seed=world.rank)
    assert first.accelerator.save_state(shared_path / "state", step=7) == shared_path / "state"
    assert [path.name for path in (shared_path / "state").iterdir()] == ["checkpoint.h5"]
    expected = first.train()

    second, counter = Loop(world, ShardedAccelerator(), with_dropout(seed=1)), Counter(1)
    second.accelerator.register_for_checkpointing(counter)
    assert second.accelerator.load_state(shared_path / "state").step == 7
    assert counter.count == 5
    assert torch.equal(counter.table, torch.arange(5))
    assert second.train() == expected
    torch.testing.assert_close(second.state, first.state, rtol=0, atol=0)


def test_hooks_may_empty_their_list_of_models(world, shared_path):
    """As accelerate's own hooks for models that save and load themselves do."""
    loop = Loop(world, ShardedAccelerator())
    loop.accelerator.register_save_state_pre_hook(lambda models, weights, folder: models.clear())
    loop.accelerator.register_load_state_pre_hook(lambda models, folder: models.clear())
    loop.accelerator.save_state(shared_path, step=3)
    assert loop.accelerator.load_state(shared_path).step == 3
    loop.train()
    loop.accelerator.save_state(shared_path, step=4)
    assert loop.accelerator.load_state(shared_path).step == 4


class Tracker(GeneralTracker):
    name, requires_logging_directory, finished = "tests", False, False

    tracker = property(lambda self: self)

    def finish(self):
        self.finished = True


def test_the_process_group_outlives_the_end_of_training(world):
    tracker = Tracker()
    accelerator = ShardedAccelerator(log_with=tracker)
    accelerator.init_trackers("project")
    accelerator.end_training()
    assert tracker.finished == (world.rank == 0)
    assert accelerator.reduce(torch.ones(()), "sum").item() == world.size


def test_names_checkpoints_by_itself(world, shared_path):
    naming = ProjectConfiguration(project_dir=str(shared_path), automatic_checkpoint_naming=True, total_limit=2)
    loop = Loop(world, ShardedAccelerator(project_config=naming))
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        loop.accelerator.load_state()
    for step in range(3):
        loop.accelerator.save_state(step=step)
    world.comm.Barrier()
    assert {path.name for path in (shared_path / "checkpoints").iterdir()} == {"checkpoint_1", "checkpoint_2"}
    assert loop.accelerator.load_state().step == 2
    naming.iteration = 2
    with pytest.raises(CheckpointError, match=r"checkpoint_2 exists already"):
        loop.accelerator.save_state()


class Unsaved:
    """Its state is none that a file can hold."""

    def state_dict(self):
        return {"lock": object()}

    def load_state_dict(self, state):
        pass


def test_the_last_checkpoint_stays_until_the_next_one_is_complete(world, shared_path):
    naming = ProjectConfiguration(project_dir=str(shared_path), automatic_checkpoint_naming=True, total_limit=1)
    loop = Loop(world, ShardedAccelerator(project_config=naming))
    loop.accelerator.save_state(step=1)
    loop.accelerator.register_for_checkpointing(Unsaved())
    with pytest.raises(CheckpointError, match="custom_0"):
        loop.accelerator.save_state(step=2)
    world.comm.Barrier()
    assert checkpoint.open_index(shared_path / "checkpoints/checkpoint_0/checkpoint.h5").info.step == 1


def test_several_models(world, shared_path):
    accelerator = ShardedAccelerator()
    one, two = torch.nn.Linear(3, 4), torch.nn.Linear(4, 5)
    one, _, two = accelerator.prepare(one, torch.optim.SGD(two.parameters(), lr=0.1), two)
    accelerator.save_state(shared_path)
    found = {path.name: checkpoint.open_index(path) for path in sorted(shared_path.iterdir())}
    assert list(found) == ["checkpoint.h5", "checkpoint_1.h5"]
    assert [next(iter(index.tensors)) for index in found.values()] == ["model/weight"] * 2
    assert [index.param_groups is None for index in found.values()] == [True, False]
    before = accelerator.get_state_dict(two)
    with torch.no_grad():
        for parameter in two.parameters():
            parameter.zero_()
    accelerator.load_state(shared_path)
    torch.testing.assert_close(accelerator.get_state_dict(two), before)


def test_from_pretrained_loads_what_is_saved(world, shared_path):
    loop = Loop(world, ShardedAccelerator())
    loop.train()
    accelerator, expected = loop.accelerator, loop.state
    inner = accelerator.unwrap_model(loop.model)
    assert type(inner) is hf.GPT2LMHeadModel
    inner.save_pretrained(
        shared_path / "model",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(loop.model),
    )
    accelerator.save_model(loop.model, shared_path / "weights")
    accelerator.wait_for_everyone()
    if world.rank == 0:
        found = hf.AutoModelForCausalLM.from_pretrained(shared_path / "model")
        torch.testing.assert_close(copied(found.state_dict()), expected, rtol=0, atol=0)
        other = gpt2()
        missing = other.load_state_dict(load_file(shared_path / "weights" / "model.safetensors"), strict=False)[0]
        assert missing == ["lm_head.weight"]  # tied to another
        torch.testing.assert_close(copied(other.state_dict()), expected, rtol=0, atol=0)


def test_mistakes(world, shared_path):
    for name, value in (("fsdp_plugin", object()), ("deepspeed_plugin", object()), ("dynamo_backend", "inductor")):
        with pytest.raises(UsageError, match=rf"ShardedAccelerator\({name}="):
            ShardedAccelerator(**{name: value})
    with pytest.raises(UsageError, match="the ranks compute on cpu"):
        ShardedAccelerator(cpu=False)
    with pytest.raises(UsageError, match="use_orig_params=False"):
        ShardedAccelerator(fsdp_options={"use_orig_params": False})
    with pytest.raises(UsageError, match="the classes of layers of a Linear are not known"):
        ShardedAccelerator(activation_checkpointing=True).prepare(torch.nn.Linear(2, 2))
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(UsageError, match="fp16 needs a GPU"):
        ShardedAccelerator(mixed_precision="fp16")
    AcceleratorState._reset_state(reset_partial_state=True)
    loop = Loop(world, ShardedAccelerator())
    with pytest.raises(EngineError, match="these are not all parameters of one model"):
        loop.accelerator.clip_grad_norm_(list(loop.model.parameters())[:3], 1.0)
    with pytest.raises(CheckpointError, match="give a folder"):
        loop.accelerator.save_state()
    loop.accelerator.save_state(shared_path)
    loop.accelerator.register_for_checkpointing(Counter(1))
    with pytest.raises(CheckpointMismatchError, match="was saved with scheduler_0, and here are custom_0, scheduler_0"):
        loop.accelerator.load_state(shared_path)
    with pytest.raises(CheckpointError, match="there is none of the models"):
        ShardedAccelerator().save_state(shared_path)
