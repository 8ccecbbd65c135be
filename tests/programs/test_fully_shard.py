"""Programs written for torch's ``fully_shard``, with hpcfsdp's in its place: models in default configurations."""

import itertools
import warnings

import pytest
import torch
import torch.distributed.fsdp as stock
import transformers as hf
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import hpcfsdp.fsdp2 as ours
from tests.programs.test_transformers import GPT2, LLAMA, MIXTRAL, T5, VIT, WAV2VEC2, WHISPER

MODELS = {"gpt2": GPT2, "llama": LLAMA, "mixtral": MIXTRAL, "t5": T5, "whisper": WHISPER, "vit": VIT}
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")


def losses_and_state(model, program, rank, steps=3):
    """As users write it: scheduler, clipping, evaluation."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    generator = torch.Generator().manual_seed(10 + rank)
    found = []
    model.eval()  # dropout of two runs would differ
    for _ in range(steps):
        batch = program.batch(generator)
        loss = model(**batch).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found += [loss.detach(), norm.full_tensor(), model(**batch).loss]
    state = model.state_dict()
    return found, {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}


def both(run, *, rtol=1e-9, atol=1e-11):
    """The results of a program with torch's function are those with ours."""
    expected, got = (run(fsdp) for fsdp in (stock, ours))
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("program", MODELS.values(), ids=MODELS)
def test_models_of_transformers(world, program):
    single = program in (MIXTRAL, WHISPER)  # which multiply groups of matrices, or take data, in float32 alone

    def run(fsdp):
        torch.manual_seed(0)
        model = program.build() if single else program.build().double()
        for module in list(model.modules()):
            if type(module).__name__ in program.units:
                fsdp.fully_shard(module)
        fsdp.fully_shard(model)
        return losses_and_state(model, program, world.rank)

    both(run, **({"rtol": 1e-4, "atol": 1e-5} if single else {}))


def test_generation(world):
    """``generate`` calls the model again and again, in its own method."""

    def run(fsdp):
        torch.manual_seed(0)
        model = LLAMA.build().double()
        for layer in model.model.layers:
            fsdp.fully_shard(layer)
        fsdp.fully_shard(model)
        ids = torch.tensor([[3, 4, 5]])
        # Ranks that end early go on calling the model: both functions mark modules by which the library knows.
        return model.generate(ids, max_new_tokens=5 + 3 * world.rank, do_sample=False)

    both(run)


def test_ranks_drop_no_layers_for_themselves(world):
    def run(fsdp):
        model = WAV2VEC2.build()
        for layer in model.wav2vec2.encoder.layers:
            fsdp.fully_shard(layer)
        fsdp.fully_shard(model)
        loss = WAV2VEC2.seeded_loss(model, 0, world.rank)  # in training mode: each rank draws other layers to drop
        loss.backward()
        return loss.detach(), nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()

    both(run, rtol=1e-5, atol=1e-6)


def test_a_loop_in_the_manner_of_torchtitan(world):
    """A mesh, activation checkpointing, mixed precision, norm and head as one unit, the meta device, prefetching."""
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("dp_shard",))

    def run(fsdp):
        torch._dynamo.reset()
        torch.manual_seed(0)
        plain = LLAMA.build()
        source = {**dict(plain.named_buffers()), **plain.state_dict()}
        with torch.device("meta"):
            model = LLAMA.build()
        model.config.use_cache = False  # which a second forward for the backward would fill again
        policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64)
        for index, layer in enumerate(model.model.layers):
            layer = checkpoint_wrapper(layer, preserve_rng_state=False)
            model.model.layers[index] = layer
            last = index == len(model.model.layers) - 1
            fsdp.fully_shard(layer, mesh=mesh["dp_shard"], mp_policy=policy, reshard_after_forward=not last)
        head = [model.model.norm, model.lm_head]
        fsdp.fully_shard(head, mesh=mesh["dp_shard"], mp_policy=policy, reshard_after_forward=False)
        fsdp.fully_shard(model, mesh=mesh["dp_shard"], mp_policy=policy)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                whole = source[name.replace("_checkpoint_wrapped_module.", "")]
                if isinstance(tensor, DTensor):
                    whole = distribute_tensor(whole, tensor.device_mesh, tensor.placements)
                tensor.copy_(whole)
        layers = list(model.model.layers)
        for first, second in itertools.pairwise(layers):
            first.set_modules_to_forward_prefetch([second])
            second.set_modules_to_backward_prefetch([first])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        generator, found = torch.Generator().manual_seed(10 + world.rank), []
        for _ in range(2):
            for micro in range(2):
                model.set_requires_gradient_sync(micro == 1)
                model.set_is_last_backward(micro == 1)
                loss = model(**LLAMA.batch(generator)).loss
                loss.backward()
                found.append(loss.detach())
            found.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor())
            optimizer.step()
            optimizer.zero_grad()
        return found

    both(run)


def test_adapters(world):
    """Frozen weights in the units of trained ones."""
    peft = pytest.importorskip("peft")

    def run(fsdp):
        torch.manual_seed(0)
        config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], lora_dropout=0.0, r=2)
        model = peft.get_peft_model(LLAMA.build(), config).double()
        for layer in model.base_model.model.model.layers:
            fsdp.fully_shard(layer)
        fsdp.fully_shard(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return losses_and_state(model, LLAMA, world.rank)

    both(run)


def test_the_libraries_take_it_for_torch_s(world):
    model = ours.fully_shard(hf.LlamaForCausalLM(LLAMA.build().config))
    assert isinstance(model, stock.FSDPModule) and isinstance(model, hf.LlamaForCausalLM)
