"""Well-known architectures as ``transformers`` writes them, tiny and with random weights.

They bring what hand-made models lack: outputs in classes of their own, keyword arguments, masks and position tables in
buffers, weights tied across the model, encoders with an output that goes into every block of a decoder.
"""

import functools
import importlib
import os

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import MixedPrecision

from hpcfsdp.wrap import ModuleWrapPolicy, transformer_auto_wrap_policy
from tests.mpi import parity
from tests.mpi.models import ORIGINAL

pytestmark = pytest.mark.ranks(2)

LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH, ROWS, STEPS = 2, 12, 2, 19, 5, 2, 5
COMMON = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}  # no ids beyond the vocabulary


@functools.cache
def transformers():
    os.environ["HF_HUB_OFFLINE"] = "1"  # before the import; nothing is to be looked for on a compute node
    return importlib.import_module("transformers")


@functools.cache
def language_model(name, **sizes):
    hf = transformers()
    return getattr(hf, f"{name}Config")(vocab_size=VOCABULARY, **COMMON, **sizes)


def gpt2():
    config = language_model(
        "GPT2", n_layer=LAYERS, n_embd=WIDTH, n_head=HEADS, n_positions=LENGTH, **no_dropout("pdrop")
    )
    return transformers().GPT2LMHeadModel(config)


def no_dropout(suffix):
    return {f"{name}_{suffix}": 0.0 for name in ("resid", "embd", "attn")}


def llama():
    sizes = {"num_hidden_layers": LAYERS, "hidden_size": WIDTH, "intermediate_size": 17}
    config = language_model(
        "Llama", num_attention_heads=HEADS, num_key_value_heads=1, max_position_embeddings=LENGTH, **sizes
    )
    return transformers().LlamaForCausalLM(config)


def t5():
    config = language_model(
        "T5",
        num_layers=LAYERS,
        d_model=WIDTH,
        d_kv=6,
        d_ff=17,
        num_heads=HEADS,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return transformers().T5ForConditionalGeneration(config)


def bert():
    sizes = {"num_hidden_layers": LAYERS, "hidden_size": WIDTH, "intermediate_size": 17}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = language_model("Bert", num_attention_heads=HEADS, max_position_embeddings=LENGTH, **sizes, **dropout)
    return transformers().BertForMaskedLM(config)


def vit():
    hf = transformers()
    config = hf.ViTConfig(
        num_hidden_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        intermediate_size=17,
        image_size=6,
        patch_size=3,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return hf.ViTForImageClassification(config)


def gemma3n():
    """The last layers compute with the keys and values of earlier ones, from the cache."""
    layers = 4
    sizes = {"num_hidden_layers": layers, "hidden_size": WIDTH, "intermediate_size": [17] * layers, "head_dim": 6}
    kinds = {"layer_types": ["full_attention", "sliding_attention"] * 2, "activation_sparsity_pattern": [0.0] * layers}
    config = transformers().Gemma3nTextConfig(
        vocab_size=VOCABULARY,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=4,
        num_attention_heads=HEADS,
        num_key_value_heads=1,
        num_kv_shared_layers=2,
        laurel_rank=4,
        **COMMON,
        **sizes,
        **kinds,
    )
    return transformers().Gemma3nForCausalLM(config)


def gemma3n_queries_alone():
    """With frozen weights in each unit, which are needed as long as gradients go through it."""
    model = gemma3n()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name or "norm" in name)
    return model


ARCHITECTURES = {
    gpt2: ["GPT2Block"],
    llama: ["LlamaDecoderLayer"],
    t5: ["T5Block"],
    bert: ["BertLayer"],
    vit: ["ViTLayer"],
    gemma3n: ["Gemma3nTextDecoderLayer"],
    gemma3n_queries_alone: ["Gemma3nTextDecoderLayer"],
}
MODELS = pytest.mark.parametrize("make", list(ARCHITECTURES)[:5], ids=lambda make: make.__name__)


def block_types(model, make):
    """The classes of the blocks; found by name, which no release of transformers keeps in one place."""
    types = {type(module) for module in model.modules() if type(module).__name__ in ARCHITECTURES[make]}
    assert len(types) == len(ARCHITECTURES[make])
    return types


def build(make):
    torch.manual_seed(0)
    return make().train()


def batch(make, rank):
    """The same for every step, so that losses fall."""
    generator = torch.Generator().manual_seed(rank)
    if make is vit:
        images = torch.randn(ROWS, 3, 6, 6, generator=generator)
        return {"pixel_values": images, "labels": torch.randint(3, (ROWS,), generator=generator)}
    ids, labels = torch.randint(1, VOCABULARY, (2, ROWS, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, -1] = 0  # one row is shorter
    if make not in (t5, bert):
        labels = ids
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def optimizer_of(model):
    # Epsilon well above rounding errors: the bias of keys, which the softmax does not feel, has no other gradient.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


@functools.cache
def expected_losses(make, ranks):
    model = build(make)
    optimizer, losses = optimizer_of(model), []
    for _ in range(STEPS):
        total = 0.0
        for rank in range(ranks):
            loss = model(**batch(make, rank)).loss / ranks
            loss.backward()
            total += loss.item()
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def wrap(engine, model, make, **options):
    options.setdefault("auto_wrap_policy", ModuleWrapPolicy(block_types(model, make)))
    if engine.is_torch:
        options["device_id"] = torch.device("cpu")
    with engine.quiet():
        return engine.cls(model, engine.group(), **options)


def losses_of(engine, sharded, make, dtype=torch.float32):
    optimizer, losses = optimizer_of(sharded), []
    with engine.quiet():
        for _ in range(STEPS):
            output = sharded(**batch(make, engine.comm.rank))
            assert output.logits.dtype == dtype
            output.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(engine.mean(output.loss.item()))
    return losses


def check(engine, sharded, make):
    got, expected = losses_of(engine, sharded, make), expected_losses(make, engine.comm.size)
    assert expected[-1] < expected[0], "nothing is learnt: no test of anything"
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=0)


@ORIGINAL
@MODELS
def test_losses_are_those_of_the_whole_model(engine, make, original):
    check(engine, wrap(engine, build(make), make, use_orig_params=original), make)


@MODELS
def test_parameters_put_together_are_those_of_the_whole_model(engine, make):
    model = build(make)
    expected = parity.named(model)
    whole = engine.whole(wrap(engine, model, make, use_orig_params=True))
    torch.testing.assert_close(whole, expected, rtol=0, atol=0)


@pytest.mark.parametrize("make", [gemma3n, gemma3n_queries_alone], ids=lambda make: make.__name__)
def test_units_that_use_what_others_have_left_in_the_cache(engines, make):
    """Over messages, where values are freed: keys get gradients from later units, and units end before earlier ones."""
    engine = parity.under_test(engines, "messages")
    check(engine, wrap(engine, build(make), make, use_orig_params=True), make)


def test_transformer_policy_and_sharding_of_gradients_alone(engine):
    model = build(t5)
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=block_types(model, t5))
    strategy = engine.api.ShardingStrategy.SHARD_GRAD_OP
    sharded = wrap(engine, model, t5, auto_wrap_policy=policy, sharding_strategy=strategy)
    check(engine, sharded, t5)


@ORIGINAL
@pytest.mark.parametrize("where", ["own", "around units"])
def test_activation_checkpointing(engine, where, original):
    model = build(llama)
    types = tuple(block_types(model, llama))
    if where == "own":  # inside of the block's __call__, which the unit is around
        old = "gradient_checkpointing_enable"
        enable = getattr(model, "activation_checkpointing_enable", None) or getattr(model, old)
        enable({"use_reentrant": False})
    sharded = wrap(engine, model, llama, use_orig_params=original)
    if where == "around units":
        model.config.use_cache = False  # to which a recomputed block would add its keys again, as in the plain model
        with engine.quiet():
            apply_activation_checkpointing(sharded, check_fn=lambda module: isinstance(module, types))
    check(engine, sharded, llama)


@ORIGINAL
@pytest.mark.parametrize("make", [gpt2, bert], ids=lambda make: make.__name__)
def test_bfloat16_as_torch_does_it(engine, engines, make, original):
    """Losses in bfloat16, of eight bits, rounded at the same places, in a model whose updates are of 1e-2."""

    def losses(engine, **options):
        mixed = MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)
        sharded = wrap(engine, build(make), make, mixed_precision=mixed, **options)
        return losses_of(engine, sharded, make, torch.bfloat16)

    known = engines["torch"].known
    if make not in known:
        known[make] = losses(engines["torch"])
    got = losses(engine, use_orig_params=original)
    # Before the first update nothing has been added up over ranks: the same operations on the same numbers.
    torch.testing.assert_close(got[0], known[make][0], rtol=1e-6, atol=0)
    torch.testing.assert_close(got, known[make], rtol=4 * 2.0**-8, atol=0)
