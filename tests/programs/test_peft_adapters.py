"""hpcfsdp.integrations.peft: adapters of sharded models, in memory and in the folder that PEFT loads."""

import peft
import pytest
import torch

from hpcfsdp.errors import StateDictError
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.integrations import peft as adapters
from hpcfsdp.wrap import ModuleWrapPolicy
from tests.programs.test_peft_export import CONFIGS, logits, make_base

OTHERS = {
    "biases": peft.LoraConfig(task_type="CAUSAL_LM", r=2, bias="lora_only", fan_in_fan_out=True),
    "ia3": peft.IA3Config(task_type="CAUSAL_LM", fan_in_fan_out=True),
    "prompts": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "no task": peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True),
}
LORA = {
    kind: peft.LoraConfig(task_type="CAUSAL_LM", r=2, fan_in_fan_out=True, **options)
    for kind, options in {**CONFIGS, "with modules in units": {"modules_to_save": ["ln_1", "ln_f"]}}.items()
}


def adapted(config, adapter="default"):
    """Adapters with values of their own in every tensor."""
    inner = peft.get_peft_model(make_base(), config, adapter_name=adapter).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in inner.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return inner


def sharded(inner, original=True):
    kind = type(inner.get_base_model().transformer.h[0])
    return FullyShardedDataParallel(inner, auto_wrap_policy=ModuleWrapPolicy({kind}), use_orig_params=original)


@pytest.mark.parametrize("kind", [*LORA, *OTHERS])
@pytest.mark.filterwarnings(
    "ignore:Setting `save_embedding_layers`", "ignore:fan_in_fan_out", "ignore:.*fan_in_fan_out"
)
def test_the_adapter_is_that_of_the_plain_model(world, shared_path, kind):
    config = {**LORA, **OTHERS}[kind]
    plain, model = adapted(config), sharded(adapted(config))
    with torch.no_grad():
        expected = logits(plain)
    got = adapters.adapter_state_dict(model)
    if kind == "embedding":  # PEFT copies the frozen embedding next to its adapter, which needs none
        whole = peft.get_peft_model_state_dict(plain, save_embedding_layers=False)
    else:
        whole = peft.get_peft_model_state_dict(plain)
    torch.testing.assert_close(got, dict(whole) if world.rank == 0 else {}, rtol=0, atol=0)
    adapters.save_adapter(model, shared_path / "adapter")
    assert {path.name for path in (shared_path / "adapter").iterdir()} == {
        "adapter_model.safetensors",
        "adapter_config.json",
    }
    with torch.no_grad():
        again = peft.PeftModel.from_pretrained(make_base(), shared_path / "adapter").eval()
        torch.testing.assert_close(logits(again), expected, rtol=0, atol=0)
    assert peft.PeftConfig.from_pretrained(shared_path / "adapter").inference_mode
    assert not model.module.peft_config["default"].inference_mode
    if kind == "no task":
        assert peft.PeftConfig.from_pretrained(shared_path / "adapter").auto_mapping == {
            "base_model_class": "GPT2LMHeadModel",
            "parent_library": "transformers.models.gpt2.modeling_gpt2",
        }


def test_the_frozen_model_is_not_gathered(world):
    """Whole tensors that rank 0 makes are those of the adapter alone, with flat parameters, too."""
    model = sharded(adapted(LORA["lora"]), original=False)
    names = adapters.tensors_of_adapter(model)
    assert names
    assert all("lora_" in name for name in names)
    got = adapters.adapter_state_dict(model)
    assert len(got) == (len(names) if world.rank == 0 else 0)


def test_one_of_several_adapters(world, shared_path):
    inner = adapted(LORA["lora"])
    inner.add_adapter("second", peft.LoraConfig(task_type="CAUSAL_LM", r=3, fan_in_fan_out=True))
    plain = adapted(LORA["lora"])
    model = sharded(inner)
    adapters.save_adapter(model, shared_path / "a", "default")
    adapters.save_adapter(model, shared_path / "b", "second")
    found = peft.PeftModel.from_pretrained(make_base(), shared_path / "a").eval()
    with torch.no_grad():
        torch.testing.assert_close(logits(found), logits(plain), rtol=0, atol=0)
    assert peft.PeftModel.from_pretrained(make_base(), shared_path / "b").peft_config["default"].r == 3


def test_mistakes(world, shared_path):
    model = sharded(adapted(LORA["lora"]))
    with pytest.raises(StateDictError, match="the model has no adapter 'defaults'; did you mean 'default'"):
        adapters.adapter_state_dict(model, "defaults")
    plain = FullyShardedDataParallel(torch.nn.Linear(2, 2))
    with pytest.raises(StateDictError, match="this is a Linear, and not a PeftModel"):
        adapters.save_adapter(plain, shared_path)
