"""TRL's trainers with the sharding of ShardedTrainer, next to themselves: replicated models, the same batches."""

import pytest
import torch
import transformers as hf
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.integrations.transformers import ShardedTrainer
from tests.programs.loops import copied
from tests.programs.test_accelerate import close
from tests.programs.test_trainer import history

trl = pytest.importorskip("trl", reason="TRL needs Python 3.11")
Dataset = pytest.importorskip("datasets").Dataset

WORDS = ["<pad>", "<bos>", "<eos>", "<unk>", *"abcdefghijklmnopqrst"]
LETTERS = WORDS[4:]
PAIRS = [
    {"prompt": f"{a} {b}", "chosen": f" {b} {c}", "rejected": f" {c} {c} {a}"}
    for a, b, c in zip(LETTERS[:12], LETTERS[1:], LETTERS[2:], strict=False)
]
PROMPTS = [{"prompt": pair["prompt"]} for pair in PAIRS]


def tokenizer():
    made = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = Whitespace()
    named = {f"{name}_token": f"<{name}>" for name in ("pad", "bos", "eos", "unk")}
    return hf.PreTrainedTokenizerFast(tokenizer_object=made, **named)


def llama(kind=hf.LlamaForCausalLM, seed=0):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"vocab_size": len(WORDS), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_labels": 1}
    return kind(hf.LlamaConfig(max_position_embeddings=32, num_key_value_heads=1, **sizes, **ids))


def different(completions, **_):
    return [float(len(set(text))) for text in completions]


def reference():
    return {"train_dataset": PAIRS, "ref_model": llama(seed=1)}


def adapters():
    """Their reference is the model without them."""
    return {"train_dataset": PAIRS, "peft_config": LoraConfig(task_type="CAUSAL_LM", r=2)}


SAMPLES = {"num_generations": 2, "max_completion_length": 5, "generation_kwargs": {"min_new_tokens": 5}}
ONLINE = {"train_dataset": PROMPTS, "reward_funcs": different}
RUNS = {
    "DPO": (trl.DPOTrainer, trl.DPOConfig, {}, reference),
    "DPO with a reference that follows": (
        trl.DPOTrainer,
        trl.DPOConfig,
        {"sync_ref_model": True, "ref_model_sync_steps": 1},
        reference,
    ),
    "DPO of adapters": (trl.DPOTrainer, trl.DPOConfig, {}, adapters),
    "reward": (trl.RewardTrainer, trl.RewardConfig, {}, lambda: {"train_dataset": PAIRS}),
    "GRPO": (trl.GRPOTrainer, trl.GRPOConfig, {**SAMPLES, "per_device_train_batch_size": 4}, lambda: dict(ONLINE)),
    "RLOO": (
        trl.RLOOTrainer,
        trl.RLOOConfig,
        {**SAMPLES, "beta": 0.0, "per_device_train_batch_size": 4},
        lambda: dict(ONLINE),
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_trains_as_the_trainer_of_trl_alone(world, shared_path, name):
    trainer, config, changes, given = RUNS[name]
    fixed = {"use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    steps = {"max_steps": 2, "logging_steps": 1, "learning_rate": 1e-2, "optim": "adamw_torch", "adam_epsilon": 1e-4}
    found = []
    for kind in (trainer, type(f"Sharded{trainer.__name__}", (ShardedTrainer, trainer), {})):
        arguments = config(str(shared_path), **{"per_device_train_batch_size": 2, **fixed, **steps, **changes})
        named = given()
        named["train_dataset"] = Dataset.from_list(named["train_dataset"])
        model = llama(hf.LlamaForSequenceClassification if name == "reward" else hf.LlamaForCausalLM)
        found.append(kind(model, args=arguments, processing_class=tokenizer(), **named))
        found[-1].train()
    plain, sharded = found
    assert isinstance(sharded.model_wrapped, FullyShardedDataParallel)
    assert isinstance(getattr(sharded, "ref_model", None) or sharded.model_wrapped, FullyShardedDataParallel)
    torch.testing.assert_close(history(sharded), history(plain), rtol=1e-5, atol=1e-6)
    state = sharded.accelerator.get_state_dict(sharded.model_wrapped)
    close(copied(state), copied(plain.model.state_dict()) if world.rank == 0 else {})
