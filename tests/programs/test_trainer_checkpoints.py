"""Checkpoints of ShardedTrainer: resuming, the best model, PEFT's adapters, and what from_pretrained loads."""

import types

import peft
import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from hpcfsdp import checkpoint
from hpcfsdp.cli.main import main
from hpcfsdp.errors import CheckpointError, HpcfsdpError, UsageError
from hpcfsdp.integrations.transformers import ShardedTrainer
from tests.programs.loops import copied
from tests.programs.test_accelerate import Texts, close
from tests.programs.test_trainer import arguments
from tests.programs.test_transformers import gpt2

EVERY_STEP = {"save_strategy": "steps", "save_steps": 1, "train_sampling_strategy": "random", "num_train_epochs": 2}


def with_dropout():
    torch.manual_seed(0)
    return gpt2().train()


def adapted(**options):
    model = peft.get_peft_model(with_dropout(), lora(**options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zero at the start, so that half of the gradients would be
                parameter.normal_(std=0.1)
    return model


def lora(**options):
    return peft.LoraConfig(task_type="CAUSAL_LM", r=4, fan_in_fan_out=True, lora_dropout=0.1, **options)


def make(folder, world, model=None, rows=24, **changes):
    args = arguments(folder, world, **{**EVERY_STEP, "lr_scheduler_type": "linear", **changes})
    return ShardedTrainer(model or with_dropout(), args, train_dataset=Texts(rows), eval_dataset=Texts(6))


def state_of(trainer):
    return copied(trainer.model_wrapped.state_dict())


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("step", [2, 4, 7], ids=["in the first epoch", "between epochs", "in the second epoch"])
@pytest.mark.parametrize("kind", ["whole", "adapters"])
def test_resumes_as_if_never_interrupted(world, shared_path, kind, step):
    """With dropout and shuffled data: bit by bit."""
    model = with_dropout if kind == "whole" else lambda: adapted(modules_to_save=["ln_f"])
    whole = make(shared_path, world, model())
    whole.train()
    again = make(shared_path, world, model())
    again.train(resume_from_checkpoint=str(shared_path / f"checkpoint-{step}"))
    assert again.state.global_step == 8
    assert losses(again) == losses(whole)
    assert [entry["learning_rate"] for entry in again.state.log_history if "loss" in entry][-1] < 1e-3 / 4
    torch.testing.assert_close(state_of(again), state_of(whole), rtol=0, atol=0)


def test_a_checkpoint_is_one_file(world, shared_path):
    model = with_dropout()
    model.generation_config.max_new_tokens = 7
    trainer = make(shared_path, world, model, max_steps=2)
    trainer.train()
    folder = shared_path / "checkpoint-2"
    described = {"config.json", "generation_config.json", "trainer_state.json"}
    assert {path.name for path in folder.iterdir()} == {"checkpoint.h5", *described}
    config = hf.AutoConfig.from_pretrained(folder)
    assert (config.architectures, config.dtype) == (["GPT2LMHeadModel"], torch.float32)
    found = checkpoint.open_index(folder / "checkpoint.h5")
    assert found.info.step == 2
    assert "model/transformer.h.0.attn.c_attn.weight" in found.tensors
    assert "optim/state/transformer.h.0.attn.c_attn.weight/exp_avg" in found.tensors
    assert found.info.config["training_arguments"]["max_steps"] == 2
    steps, values = checkpoint.open(folder / "checkpoint.h5").metrics["loss"]
    assert (list(steps), list(values)) == ([1, 2], losses(trainer))
    expected = state_of(trainer)
    if world.rank == 0:
        assert main(["export", str(folder / "checkpoint.h5"), str(folder / "model.safetensors")]) == 0
        found = hf.AutoModelForCausalLM.from_pretrained(folder)
        torch.testing.assert_close(copied(found.state_dict()), expected, rtol=0, atol=0)
        assert found.generation_config.max_new_tokens == 7


class Collate(hf.DefaultDataCollator):
    """With a tokenizer, as collators that pad have one."""

    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")))


class Other(torch.nn.Module):
    """None of transformers', with settings of its own kind."""

    def __init__(self):
        super().__init__()
        self.config, self.inner = types.SimpleNamespace(), with_dropout()

    def forward(self, input_ids, labels):
        return {"loss": self.inner(input_ids=input_ids, labels=labels).loss}


@pytest.mark.parametrize("kind", [with_dropout, adapted, Other])
def test_the_tokenizer_of_the_collator_is_saved(world, shared_path, kind):
    args = arguments(shared_path, world, **{**EVERY_STEP, "max_steps": 1})
    ShardedTrainer(kind(), args, data_collator=Collate(), train_dataset=Texts()).train()
    assert {"checkpoint.h5", "tokenizer.json"} < {path.name for path in (shared_path / "checkpoint-1").iterdir()}


def test_the_newest_complete_checkpoint(world, shared_path):
    trainer = make(shared_path, world, max_steps=3)
    assert trainer.newest_checkpoint() is None
    with pytest.raises(CheckpointError, match="no complete checkpoint to resume from"):
        trainer.train(resume_from_checkpoint=True)
    trainer.train()
    if world.rank == 0:  # as if the job had been killed while these were written
        (shared_path / "checkpoint-3" / "trainer_state.json").write_text('{"epoch": 1')
        (shared_path / "checkpoint-4").mkdir()
    world.comm.Barrier()
    assert trainer.newest_checkpoint() == str(shared_path / "checkpoint-2")
    again = make(shared_path, world, max_steps=3)
    again.train(resume_from_checkpoint=True)
    assert (again.state.global_step, len(losses(again))) == (3, 3)
    torch.testing.assert_close(state_of(again), state_of(trainer), rtol=0, atol=0)


def test_other_folders_are_refused(world, shared_path):
    if world.rank == 0:
        (shared_path / "checkpoint-1").mkdir()
    world.comm.Barrier()
    with pytest.raises(CheckpointError, match=r"has no checkpoint.h5: it was saved by another Trainer"):
        make(shared_path, world).train(resume_from_checkpoint=str(shared_path / "checkpoint-1"))
    with pytest.raises(UsageError, match="leave save_only_model=True out"):
        best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1}
        make(shared_path, world, save_only_model=True, **best)


@pytest.mark.parametrize("kind", ["whole", "adapters"])
def test_the_best_model_is_loaded_at_the_end_and_few_checkpoints_stay(world, shared_path, kind):
    model = with_dropout() if kind == "whole" else adapted()
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "save_total_limit": 2}
    rate = 1.0 if kind == "whole" else 5.0  # so large that the loss goes up again
    trainer = make(shared_path, world, model, learning_rate=rate, lr_scheduler_type="constant", max_steps=6, **best)
    trainer.train()
    scores = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
    chosen = min(scores, key=scores.get)
    assert chosen < 6
    assert {path.name for path in shared_path.glob("checkpoint-*")} == {f"checkpoint-{chosen}", "checkpoint-6"}
    assert trainer.state.best_model_checkpoint == str(shared_path / f"checkpoint-{chosen}")
    assert trainer.evaluate()["eval_loss"] == scores[chosen]


def test_save_model_is_what_from_pretrained_loads(world, shared_path):
    trainer = make(shared_path, world, max_steps=1, save_only_model=True)
    trainer.train()
    trainer.save_model(str(shared_path / "last"))
    expected = state_of(trainer)
    for folder in ("last", "checkpoint-1"):
        found = hf.AutoModelForCausalLM.from_pretrained(shared_path / folder)
        torch.testing.assert_close(copied(found.state_dict()), expected, rtol=0, atol=0)
    assert not list(shared_path.glob("*/*.h5"))
    assert {path.name for path in (shared_path / "last").iterdir()} >= {"config.json", "model.safetensors"}


@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["ln_f", "ln_1"]}, {"use_dora": True}])
@pytest.mark.filterwarnings("ignore:.*fan_in_fan_out")
def test_adapters_alone_are_saved(world, shared_path, options):
    trainer = make(shared_path, world, adapted(**options), max_steps=2)
    trainer.train()
    trainer.save_model(str(shared_path / "last"))
    names = list(checkpoint.open_index(shared_path / "checkpoint-2" / "checkpoint.h5").tensors)
    assert all("lora_" in name or "modules_to_save" in name for name in names)
    batch = torch.arange(3, 9)[None]
    with torch.no_grad():
        expected = trainer.model_wrapped.eval()(input_ids=batch, use_cache=False).logits
        for folder in ("last", "checkpoint-2"):
            found = {path.name for path in (shared_path / folder).iterdir()}
            assert found >= {"adapter_model.safetensors", "adapter_config.json"}
            assert "model.safetensors" not in found
            plain = peft.PeftModel.from_pretrained(with_dropout(), shared_path / folder).eval()
            close(plain(input_ids=batch, use_cache=False).logits, expected)


def test_errors_of_rank_0_while_saving_are_those_of_all(world, shared_path):
    trainer = make(shared_path, world, save_strategy="no")
    if world.rank == 0:
        (shared_path / "file").write_text("x")
    world.comm.Barrier()
    with pytest.raises((OSError, HpcfsdpError)):
        trainer.save_model(str(shared_path / "file"))
