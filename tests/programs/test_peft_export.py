"""Adapters that were trained in shards, saved alone, and read by peft."""

import peft
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hpcfsdp import checkpoint
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.wrap import ModuleWrapPolicy

ADAPTERS = ["*.lora_*", "*.modules_to_save.*"]
CONFIGS = {
    "lora": {},
    "dora": {"use_dora": True},
    "embedding": {"target_modules": ["c_attn", "wte"]},
    "with a module": {"modules_to_save": ["ln_f"]},
}


def make_base():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=31, n_embd=16, n_layer=2, n_head=2, n_positions=16)).eval()


def logits(model):
    return model(torch.arange(8)[None], use_cache=False).logits


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.filterwarnings("ignore")  # peft's own, of saved embeddings and of fan_in_fan_out
def test_peft_reads_adapters_that_were_trained_in_shards(world, shared_path, kind):
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, init_lora_weights=False, fan_in_fan_out=True, **CONFIGS[kind])
    torch.manual_seed(1)
    inner = peft.get_peft_model(make_base(), config).eval()
    policy = ModuleWrapPolicy({type(make_base().transformer.h[0])})
    model = FullyShardedDataParallel(inner, auto_wrap_policy=policy, use_orig_params=True)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.1)
    logits(model).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        expected = logits(model)
    names = ADAPTERS if kind == "with a module" else ADAPTERS[:1]
    path = checkpoint.save(shared_path / "a.h5", model=model, optimizer=optimizer, names=names)
    assert all("lora_" in name or "modules_to_save" in name for name in checkpoint.open_index(path).tensors)
    folder = shared_path / "adapter"
    if world.rank == 0:
        checkpoint.export_peft(path, folder, inner.peft_config["default"])
    world.comm.Barrier()
    with torch.no_grad():
        again = peft.PeftModel.from_pretrained(make_base(), folder).eval()
        torch.testing.assert_close(logits(again), expected, rtol=1e-5, atol=1e-6)
