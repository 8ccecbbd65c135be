"""transformers loads what was exported, and computes the same; and what it saves is imported."""

import functools
import importlib
import os

import pytest
import torch

from hpcfsdp import checkpoint
from hpcfsdp.checkpoint.convert.export import export_checkpoint
from hpcfsdp.checkpoint.convert.importing import import_checkpoint

TOKENS = torch.arange(10).view(2, 5)


@functools.cache
def transformers():
    os.environ["HF_HUB_OFFLINE"] = "1"  # before the import; nothing is to be looked for
    return importlib.import_module("transformers")


def gpt2():
    """Its input and output embeddings are one parameter."""
    return transformers().GPT2Config(
        n_layer=2, n_embd=8, n_head=2, n_positions=8, vocab_size=11, bos_token_id=0, eos_token_id=0
    )


def llama(**more):
    return transformers().LlamaConfig(
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=11,
        max_position_embeddings=8,
        **more,
    )


CONFIGS = {"gpt2": gpt2, "llama": llama, "llama, tied": lambda: llama(tie_word_embeddings=True)}


def make(kind, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return transformers().AutoModelForCausalLM.from_config(CONFIGS[kind]()).to(dtype).eval()


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shard_bytes", [None, 1500], ids=["whole", "split"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_exported_models_have_equal_logits(tmp_path, kind, shard_bytes, dtype):
    model = make(kind, dtype)
    checkpoint.save(tmp_path / "a.h5", model=model)
    model.config.save_pretrained(tmp_path / "hf")
    done = export_checkpoint(tmp_path / "a.h5", tmp_path / "hf", format="safetensors", shard_bytes=shard_bytes)
    assert (len(done.files) > 2) == (shard_bytes is not None)
    loaded, told = transformers().AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=dtype, output_loading_info=True
    )
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
    assert torch.equal(logits(loaded.eval()), logits(model))


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("size", ["50GB", "1500"], ids=["whole", "split"])
def test_what_transformers_saves_is_imported(tmp_path, kind, size):
    model = make(kind)
    model.save_pretrained(tmp_path / "hf", max_shard_size=size if size.endswith("B") else int(size))
    tied = kind != "llama"
    names = ("lm_head.weight", "transformer.wte.weight" if kind == "gpt2" else "model.embed_tokens.weight")
    import_checkpoint(tmp_path / "hf", tmp_path / "a.h5", ties=[names] if tied else [])
    other = make(kind, seed=1)
    assert not torch.equal(logits(other), logits(model))
    checkpoint.load(tmp_path / "a.h5", model=other)
    assert torch.equal(logits(other), logits(model))
