"""What tests of state dicts share: saving, loading, comparing; no tests."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor

from hpcfsdp._compat import ShardedTensor
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.reshard.sharded_tensors import all_boxes, local_blocks, properties_of
from tests.mpi import parity
from tests.mpi.parity import Recipe

FULL, SHARDED, LOCAL = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT
KINDS = pytest.mark.parametrize("kind", [FULL, SHARDED, LOCAL], ids=["full", "sharded", "local"])
CARRIERS = pytest.mark.parametrize("carrier", ["hpcfsdp", "messages", "gloo"])
STRATEGIES = pytest.mark.parametrize("strategy", parity.STRATEGIES)


@functools.cache
def line_mesh():
    """Collective over all ranks."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def saved(engine, model, kind=FULL, config=None, **arguments):
    """Collective over all ranks."""
    with engine.quiet(), engine.cls.state_dict_type(model, kind, config):
        return model.state_dict(**arguments)


def loaded(engine, model, state, kind=FULL, **arguments):
    """Collective over all ranks."""
    with engine.quiet(), engine.cls.state_dict_type(model, kind):
        return model.load_state_dict(state, **arguments)


def parts(value):
    """What can be compared of a value: blocks of this rank, all of them, shape, dtype."""
    shape, dtype = properties_of(value)
    if isinstance(value, (ShardedTensor, DTensor)):
        return type(value).__name__, shape, dtype, all_boxes(value), local_blocks(value)
    return "tensor", shape, dtype, None, [(None, value)]


def same(found, expected, *, order=True):
    """Bit by bit."""
    assert (list if order else set)(found) == (list if order else set)(expected)
    for key, value in expected.items():
        *facts, blocks = parts(found[key])
        *theirs, their_blocks = parts(value)
        assert facts == theirs, key
        assert [box for box, _ in blocks] == [box for box, _ in their_blocks], key
        for (_, block), (_, other) in zip(blocks, their_blocks, strict=True):
            assert torch.equal(block, other), key


def memory(model):
    """Every bit of a model that this rank holds."""
    sharded_params = [
        flat for unit in FullyShardedDataParallel.fsdp_modules(model) for flat in unit._unit.sharded_params
    ]
    return [flat.parameter.detach().clone() for flat in sharded_params] + [buffer.clone() for buffer in model.buffers()]


def unchanged(model, before):
    after = memory(model)
    assert len(after) == len(before)
    assert all(torch.equal(tensor, other) for tensor, other in zip(after, before, strict=True))


def train_a_little(engine, model):
    """Collective over all ranks. One step, after which buffers and parameters are not those of a new model."""
    engine.train(model, Recipe("sgd", steps=1, dtype=next(model.parameters()).dtype))
