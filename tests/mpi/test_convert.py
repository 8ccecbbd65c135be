"""What a sharded model has saved is exported and loaded by others; what others saved is loaded by a sharded model."""

import functools
import importlib
import os

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from hpcfsdp import checkpoint
from hpcfsdp.checkpoint.convert.export import export_checkpoint
from hpcfsdp.checkpoint.convert.importing import import_checkpoint
from hpcfsdp.checkpoint.format.reader import BlockReader
from hpcfsdp.comm import raise_together
from hpcfsdp.fsdp import FullyShardedDataParallel
from tests.mpi.models import adamw, make_net, shard, train_plain

pytestmark = pytest.mark.ranks(2)


@functools.cache
def transformers():
    os.environ["HF_HUB_OFFLINE"] = "1"  # before the import; nothing is to be looked for on a compute node
    return importlib.import_module("transformers")


@pytest.mark.parametrize("shard_bytes", [None, 1500], ids=["whole", "split"])
def test_transformers_computes_what_the_sharded_model_does(comm, shared_path, shard_bytes):
    hf = transformers()
    torch.manual_seed(0)
    config = hf.GPT2Config(n_layer=2, n_embd=8, n_head=2, n_positions=8, vocab_size=11, bos_token_id=0, eos_token_id=0)
    plain = hf.GPT2LMHeadModel(config).eval()
    tokens = torch.arange(10).view(2, 5)
    model = FullyShardedDataParallel(plain, use_orig_params=True)
    with torch.no_grad():
        expected = model(tokens).logits
    checkpoint.save(shared_path / "a.h5", model=model)
    with raise_together(comm):
        if comm.rank == 0:
            config.save_pretrained(shared_path / "hf")
            export_checkpoint(shared_path / "a.h5", shared_path / "hf", format="safetensors", shard_bytes=shard_bytes)
    loaded = hf.AutoModelForCausalLM.from_pretrained(shared_path / "hf").eval()
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, expected)


def contents(path):
    """Shape, dtype and bytes of every tensor, by path."""
    index = checkpoint.open_index(path)
    with BlockReader(index) as reader:
        return {
            name: (spec.shape, spec.dtype, reader.read(name, 0, spec.numel).tobytes())
            for name, spec in index.tensors.items()
        }


@pytest.mark.parametrize("kind", ["pt", "dcp"])
def test_a_sharded_model_goes_on_from_what_torch_saved(comm, shared_path, kind):
    net = make_net()
    optimizer = adamw(net)
    train_plain(net, optimizer, range(3))
    with raise_together(comm):
        if comm.rank == 0:
            state = {"model": net.state_dict(), "optimizer": get_optimizer_state_dict(net, optimizer), "step": 3}
            torch.save(state, shared_path / "in.pt")
            import_checkpoint(shared_path / "in.pt", shared_path / "one.h5")
            out = shared_path / f"out.{kind}"
            export_checkpoint(shared_path / "one.h5", out, format=kind, optimizer=True)
            import_checkpoint(out, shared_path / "two.h5", ties=[("head.weight", "embed.weight")], step=3)
    model = shard(make_net(seed=1))
    second = adamw(model)
    info = checkpoint.load(shared_path / "two.h5", model=model, optimizer=second)
    assert info.step == 3
    checkpoint.save(shared_path / "three.h5", model=model, optimizer=second)
    with raise_together(comm):
        whole = contents(shared_path / "three.h5")
        assert whole == contents(shared_path / "one.h5")
        for name, value in net.state_dict().items():
            if name != "head.weight":
                assert whole[f"model/{name}"][2] == value.numpy().tobytes()
