"""Models of transformers with its default configuration: sizes are small, everything else is as the library has it."""

import dataclasses
import functools

import pytest
import torch
import transformers as hf
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

from hpcfsdp import checkpoint
from hpcfsdp.errors import EngineError
from hpcfsdp.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy
from hpcfsdp.wrap import transformer_auto_wrap_policy
from tests.programs.loops import STEPS, Program, alone, close, shard, together

VOCABULARY, LENGTH, ROWS = 61, 12, 2
TOKENS = {"bos_token_id": 1, "eos_token_id": 2}  # within the vocabulary
LAYERS = {"num_hidden_layers": 2, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 2}


def text(generator):
    """Rows of tokens; the first is shorter, and its padding is not a target."""
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def translated(generator):
    return text(generator) | {"labels": torch.randint(3, VOCABULARY, (ROWS, 7), generator=generator)}


def speech(generator):
    labels = torch.randint(3, VOCABULARY, (ROWS, 7), generator=generator)
    return {"input_features": torch.randn(ROWS, 8, 20, generator=generator), "labels": labels}


def images(generator):
    pixels = torch.randn(ROWS, 3, 8, 8, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(3, (ROWS,), generator=generator)}


def gpt2():
    sizes = {"n_layer": 2, "n_embd": 24, "n_head": 2, "n_positions": 32}
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=VOCABULARY, **sizes, **TOKENS))


def llama():
    config = hf.LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=1, max_position_embeddings=32, **LAYERS)
    return hf.LlamaForCausalLM(config)


def mixtral():
    sizes = {"num_key_value_heads": 1, "max_position_embeddings": 32, "num_local_experts": 4}
    return hf.MixtralForCausalLM(hf.MixtralConfig(vocab_size=VOCABULARY, **sizes, **LAYERS))


def t5():
    sizes = {"num_layers": 2, "d_model": 24, "d_kv": 6, "d_ff": 40, "num_heads": 2}
    return hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **sizes))


def whisper():
    sizes = {f"{side}_{size}": 2 for side in ("encoder", "decoder") for size in ("layers", "attention_heads")}
    widths = {"d_model": 24, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "num_mel_bins": 8}
    lengths = {"max_source_positions": 10, "max_target_positions": 32}
    ids = {"pad_token_id": 0, "decoder_start_token_id": 1, **TOKENS}
    config = hf.WhisperConfig(vocab_size=VOCABULARY, **sizes, **widths, **lengths, **ids)
    return hf.WhisperForConditionalGeneration(config)


def wav2vec2():
    """With layer drop, as the library has it."""
    convolutions = {"conv_dim": (8,), "conv_stride": (5,), "conv_kernel": (10,), "num_feat_extract_layers": 1}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0}
    sizes = {**LAYERS, "num_hidden_layers": 4, "layerdrop": 0.5, **convolutions, **positions}
    return hf.Wav2Vec2ForSequenceClassification(hf.Wav2Vec2Config(**sizes))


def sounds(generator):
    labels = torch.randint(2, (ROWS,), generator=generator)
    return {"input_values": torch.randn(ROWS, 200, generator=generator), "labels": labels}


def vit():
    return hf.ViTForImageClassification(hf.ViTConfig(image_size=8, patch_size=4, num_labels=3, **LAYERS))


GPT2 = Program(gpt2, text, ("GPT2Block",))
LLAMA = Program(llama, text, ("LlamaDecoderLayer",))
MIXTRAL = Program(mixtral, text, ("MixtralDecoderLayer",))
T5 = Program(t5, translated, ("T5Block",))
WHISPER = Program(whisper, speech, ("WhisperEncoderLayer", "WhisperDecoderLayer"))
WAV2VEC2 = Program(wav2vec2, sounds, ("Wav2Vec2EncoderLayer",))
VIT = Program(vit, images, ("ViTLayer",))

MODELS = {"gpt2": GPT2, "llama": LLAMA, "mixtral": MIXTRAL, "t5": T5, "whisper": WHISPER, "vit": VIT}
each = pytest.mark.parametrize("program", MODELS.values(), ids=MODELS)
original = pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])


@functools.cache
def expected(program, ranks, **options):
    return alone(program, ranks, **options)


@each
@original
def test_trains_as_one_process(world, program, original):
    got = together(program, world, shard(program, use_orig_params=original))
    close(got, expected(program, world.size))


@original
def test_ranks_drop_no_layers_for_themselves(world, original):
    """The library calls all layers where it takes a module for one of FSDP, as torch's."""
    plain = WAV2VEC2.build()
    plain.wav2vec2.encoder._is_fsdp_managed_module = True
    got = together(WAV2VEC2, world, shard(WAV2VEC2, use_orig_params=original))
    close(got, alone(WAV2VEC2, world.size, model=plain))


def test_transformer_policy_and_sharding_of_gradients_alone(world):
    model = T5.build()
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=T5.unit_types(model))
    strategy = ShardingStrategy.SHARD_GRAD_OP
    got = together(T5, world, shard(T5, model, auto_wrap_policy=policy, sharding_strategy=strategy))
    close(got, expected(T5, world.size))


@original
@pytest.mark.parametrize("program", [GPT2, T5, WHISPER], ids=["gpt2", "t5", "whisper"])
def test_own_activation_checkpointing(world, program, original):
    """Recomputed with the dropout of the first time; nothing else changes, so losses are those without it."""
    model = program.build()
    model.gradient_checkpointing_enable()
    got = together(program, world, shard(program, model, use_orig_params=original))
    close(got, expected(program, world.size))


@original
def test_activation_checkpointing_around_units(world, original):
    """Of a model without a cache of keys, to which a block that is recomputed would add its own again."""
    sharded = shard(VIT, use_orig_params=original)
    types = tuple(VIT.unit_types(sharded))
    apply_activation_checkpointing(sharded, check_fn=lambda module: isinstance(module, types))
    close(together(VIT, world, sharded), expected(VIT, world.size))


@original
def test_accumulation(world, original):
    got = together(LLAMA, world, shard(LLAMA, use_orig_params=original), parts=2)
    close(got, expected(LLAMA, world.size, parts=2))


@pytest.mark.parametrize("program", [GPT2, T5, MIXTRAL], ids=["gpt2", "t5", "mixtral"])
def test_saves_and_resumes(world, shared_path, program):
    """By another model, which was initialised and wrapped in another way."""
    whole = expected(program, world.size)
    first = shard(program, use_orig_params=True)
    optimizer = program.optimizer(first)
    before = together(program, world, first, optimizer=optimizer, steps=range(STEPS - 1))
    checkpoint.save(shared_path / "model.h5", model=first, optimizer=optimizer, step=STEPS - 1)

    torch.manual_seed(1)  # other values than the first model began with
    second = FSDP(program.make().train(), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    optimizer = program.optimizer(second)
    step = checkpoint.load(shared_path / "model.h5", model=second, optimizer=optimizer).step
    after = together(program, world, second, optimizer=optimizer, steps=range(step, STEPS))
    joined = dataclasses.replace(after, losses=before.losses + after.losses, norms=before.norms + after.norms)
    close(joined, whole)


@pytest.mark.parametrize("program", [LLAMA, WHISPER], ids=["llama", "whisper"])
def test_generates(world, program):
    """With the default cache, one on each rank."""
    plain, sharded = program.build(), shard(program)
    batch = program.batch(torch.Generator().manual_seed(world.rank))
    prompt = {name: value for name, value in batch.items() if name != "labels"}
    for model in (sharded, sharded.module):
        with pytest.raises(EngineError, match=r"within FullyShardedDataParallel.summon_full_params"):
            model.generate(**prompt, max_new_tokens=5, do_sample=False)
    with FSDP.summon_full_params(sharded, recurse=False), torch.no_grad():
        got = sharded.module.eval().generate(**prompt, max_new_tokens=5, do_sample=False)
    assert torch.equal(got, plain.eval().generate(**prompt, max_new_tokens=5, do_sample=False))
    assert got.shape[1] > 1


@original
def test_saved_as_pretrained(world, shared_path, original):
    """By rank 0, from the whole state; the loaded model computes the same."""
    sharded = shard(T5, use_orig_params=original)
    optimizer = T5.optimizer(sharded)
    together(T5, world, sharded, optimizer=optimizer, steps=range(1))
    whole = sharded.state_dict()
    if world.rank == 0:
        sharded.module.save_pretrained(shared_path, state_dict=dict(whole))  # it empties its argument
    world.comm.Barrier()
    found = hf.T5ForConditionalGeneration.from_pretrained(shared_path).eval()
    torch.testing.assert_close(dict(found.state_dict()), dict(whole), rtol=0, atol=0)
    batch = T5.batch(torch.Generator().manual_seed(world.rank))
    with torch.no_grad():
        torch.testing.assert_close(sharded.eval()(**batch).loss, found(**batch).loss)
