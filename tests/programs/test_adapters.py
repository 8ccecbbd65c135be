"""Adapters by peft: a frozen model, and small parameters that are trained within its layers."""

import functools

import peft
import pytest
import torch

from hpcfsdp import checkpoint
from tests.programs.loops import STEPS, Program, alone, close, shard, together
from tests.programs.test_transformers import gpt2, images, llama, original, text, vit


def adapted(make, task, **options):
    def with_adapters():
        model = peft.get_peft_model(make(), peft.LoraConfig(task_type=task, r=4, **options))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:  # zero at the start, so that half of the gradients would be
                    parameter.normal_(std=0.1)
        return model

    return with_adapters


LORA = Program(adapted(llama, "CAUSAL_LM"), text, ("LlamaDecoderLayer",), lr=1e-2)
DORA = Program(adapted(llama, "CAUSAL_LM", use_dora=True), text, ("LlamaDecoderLayer",), lr=1e-2)
# With its own dropout, and a whole layer that is trained besides the adapters.
WITH_HEAD = Program(
    adapted(gpt2, "CAUSAL_LM", fan_in_fan_out=True, lora_dropout=0.1, modules_to_save=["ln_f"]),
    text,
    ("GPT2Block",),
    lr=1e-2,
)
VISION = Program(adapted(vit, None, target_modules=["q_proj", "v_proj"]), images, ("ViTLayer",), lr=1e-2)
ADAPTED = {"lora": LORA, "dora": DORA, "with a head": WITH_HEAD, "vision": VISION}


@functools.cache
def expected(program, ranks):
    return alone(program, ranks)


@original
@pytest.mark.parametrize("program", ADAPTED.values(), ids=ADAPTED)
def test_trains_as_one_process(world, program, original):
    got = together(program, world, shard(program, use_orig_params=original))
    close(got, expected(program, world.size))


@pytest.mark.parametrize("program", [LORA, DORA], ids=["lora", "dora"])
def test_saves_and_resumes(world, shared_path, program):
    first = shard(program, use_orig_params=True)
    optimizer = program.optimizer(first)
    together(program, world, first, optimizer=optimizer, steps=range(STEPS - 1))
    checkpoint.save(shared_path / "adapters.h5", model=first, optimizer=optimizer, step=STEPS - 1)

    second = shard(program)
    optimizer = program.optimizer(second)
    step = checkpoint.load(shared_path / "adapters.h5", model=second, optimizer=optimizer).step
    after = together(program, world, second, optimizer=optimizer, steps=range(step, STEPS))
    whole = expected(program, world.size)
    torch.testing.assert_close(after.losses, whole.losses[-1:], rtol=1e-5, atol=0)
    torch.testing.assert_close(after.state, whole.state, rtol=1e-5, atol=1e-6)
