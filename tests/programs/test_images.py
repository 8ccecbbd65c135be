"""Models of images: UNets of diffusers, as its training scripts train them, a ViT of timm."""

import functools

import diffusers
import pytest
import timm
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

from tests.programs.loops import Program, alone, close, shard, together

ROWS = 2
SMALL = {"sample_size": 8, "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
SMALL |= {"attention_head_dim": 4}


def denoising(model, batch):
    """A step of diffusion: the model finds the noise that was added."""
    scheduler = diffusers.DDPMScheduler()
    steps = torch.randint(scheduler.config.num_train_timesteps, (ROWS,), generator=batch["generator"])
    noisy = scheduler.add_noise(batch["images"], batch["noise"], steps)
    return nn.functional.mse_loss(model(noisy, steps, *batch["context"]).sample, batch["noise"])


def noise(channels, width, generator):
    made = [torch.randn(ROWS, channels, 8, 8, generator=generator) for _ in range(2)]
    context = [torch.randn(ROWS, 5, width, generator=generator)] if width else []
    return {"images": made[0], "noise": made[1], "context": context, "generator": generator}


def unet():
    down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
    return diffusers.UNet2DModel(in_channels=1, out_channels=1, down_block_types=down, up_block_types=up, **SMALL)


def conditional():
    down, up = ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")
    sizes = {"in_channels": 2, "out_channels": 2, "cross_attention_dim": 12, **SMALL}
    return diffusers.UNet2DConditionModel(down_block_types=down, up_block_types=up, **sizes)


def timm_vit():
    sizes = {"img_size": 32, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 3}
    return timm.create_model("vit_tiny_patch16_224", **sizes)


def pictures(generator):
    return torch.randn(ROWS, 3, 32, 32, generator=generator), torch.randint(3, (ROWS,), generator=generator)


def classified(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


BLOCKS = ("DownBlock2D", "AttnDownBlock2D", "AttnUpBlock2D", "UpBlock2D", "UNetMidBlock2D")
UNET = Program(unet, functools.partial(noise, 1, None), BLOCKS, denoising)
BLOCKS = ("ResnetBlock2D", "BasicTransformerBlock")  # within the blocks of that model
CONDITIONAL = Program(conditional, functools.partial(noise, 2, 12), BLOCKS, denoising)
VIT = Program(timm_vit, pictures, ("Block",), classified)
MODELS = {"unet": UNET, "conditional unet": CONDITIONAL, "timm": VIT}
each = pytest.mark.parametrize("program", MODELS.values(), ids=MODELS)


@functools.cache
def expected(program, ranks):
    return alone(program, ranks)


@each
@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
def test_trains_as_one_process(world, program, original):
    got = together(program, world, shard(program, use_orig_params=original))
    close(got, expected(program, world.size))


@each
def test_own_activation_checkpointing(world, program):
    model = program.build()
    if program is VIT:
        model.set_grad_checkpointing()
    else:
        model.enable_gradient_checkpointing()
    close(together(program, world, shard(program, model)), expected(program, world.size))


def test_activation_checkpointing_around_units(world):
    sharded = shard(CONDITIONAL)
    types = tuple(CONDITIONAL.unit_types(sharded))
    apply_activation_checkpointing(sharded, check_fn=lambda module: isinstance(module, types))
    close(together(CONDITIONAL, world, sharded), expected(CONDITIONAL, world.size))
