"""Parameters of ``fully_shard`` on a device: all are copied by one operation, to where a CPU copies them one by one."""

import pytest
import torch
from torch import nn

from hpcfsdp import _compat, accelerator
from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.params.dtensor_layout import DTensorLayout
from hpcfsdp.params.dtensor_params import DTensorParam, DTensorParams
from hpcfsdp.params.gradient import ShardedGrad
from hpcfsdp.params.sharded_params import Dtypes

SHAPES = [((7, 3), 0), ((5,), 0), ((4, 7), 1), ((2, 6, 2), 1), ((1, 2), 0), ((12, 2), 0)]
BY_ROWS = [each for each in SHAPES if each[1] == 0]
F32, BF16 = torch.float32, torch.bfloat16


class Operators(_compat.TorchDispatchMode):
    """The operators that write what is gathered or reduced, with the tensors that they read and write."""

    def __init__(self):
        super().__init__()
        self.called = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.called.append((function.name(), args, kwargs or {}))
        return function(*args, **(kwargs or {}))

    def named(self, *names):
        return [call for call in self.called if call[0].split("::")[1] in names]


class Ranks(FakeCommunicator):
    """Rank 1 of 4, which gets these shards."""

    def __init__(self, shards):
        super().__init__(1, 4)
        self.shards = shards

    def _all_gather_into_tensor(self, label, output, shard, async_op):
        output.copy_(self.shards)


def make(shapes, dtypes):
    """Parameters with the shards of all ranks, numbered, and the whole values that these are."""
    given = [(f"p{index}", shape, dim, (), None) for index, (shape, dim) in enumerate(shapes)]
    layout = DTensorLayout.plan(given, dtypes.param, 4, itemsize=dtypes.itemsize)
    wholes = [torch.randn(shape).to(dtypes.compute) for shape, _ in shapes]
    shards = torch.full((layout.padded_numel,), torch.nan, dtype=dtypes.compute)
    for index, whole in enumerate(wholes):
        for rows in layout.rows(index):
            rows.in_shards.of(shards).copy_(rows.of_param(whole))
    own = [slot.chunk_shape(slot.rows_of(1)[1]) for slot in layout.slots]
    params = [
        DTensorParam(nn.Parameter(torch.zeros(part, dtype=dtypes.param)), nn.Parameter(torch.zeros(shape)), [])
        for part, (shape, _) in zip(own, shapes, strict=True)
    ]
    return DTensorParams(params, layout, Ranks(shards), dtypes=dtypes), wholes


@pytest.fixture
def device(monkeypatch):
    """Host memory counts as that of a device."""
    monkeypatch.setattr(accelerator, "is_accelerator", lambda device: True)


@pytest.mark.parametrize(("shapes", "columns"), [(BY_ROWS, 0), (SHAPES, 3)], ids=["rows", "columns"])
@pytest.mark.parametrize("dtypes", [Dtypes.plan(F32), Dtypes.plan(F32, param=BF16)], ids=["float32", "cast"])
@torch.no_grad()
def test_one_operation_copies_all_parameters_out(device, shapes, columns, dtypes):
    flat, wholes = make(shapes, dtypes)
    flat.gather()
    with Operators() as operators:
        flat.finish_gather()
    flat.bind()
    assert all(map(torch.equal, flat.leaves, wholes))
    ((_, (shards, *_), kwargs),) = operators.named("split_with_sizes_copy.out")
    # What CUDA asks for to do it in one kernel.
    assert all(each.is_contiguous() and each.dtype == shards.dtype for each in (shards, *kwargs["out"]))
    copied = operators.named("_foreach_copy_", "copy_")
    assert sum(len(args[0]) for _, args, _ in copied) == columns


@pytest.mark.parametrize("unused", [(), (1, 2)], ids=["all", "some"])
@pytest.mark.parametrize(("shapes", "columns"), [(BY_ROWS, 0), (SHAPES, 3)], ids=["rows", "columns"])
@pytest.mark.parametrize(
    "dtypes", [Dtypes.plan(F32), Dtypes.plan(F32, param=BF16, reduce=F32), Dtypes.plan(F32, param=BF16)], ids=str
)
@torch.no_grad()
def test_one_operation_copies_all_gradients_in(monkeypatch, shapes, columns, dtypes, unused):
    used = [index not in unused for index in range(len(shapes))]
    values = [
        torch.randn(shape).to(dtypes.compute) if each else None for (shape, _), each in zip(shapes, used, strict=True)
    ]

    def assembled():
        flat, _ = make(shapes, dtypes)
        flat.gather()
        flat.finish_gather()
        flat.bind()
        grad, buffer = ShardedGrad(flat), torch.full((flat.layout.padded_numel,), torch.nan, dtype=dtypes.reduce)
        for leaf, value in zip(flat.leaves, values, strict=True):
            leaf.grad = value
        with Operators() as operators:
            grad.begin(buffer)
            grad.complete()
        return buffer, grad.used, operators

    expected = assembled()
    monkeypatch.setattr(accelerator, "is_accelerator", lambda device: True)
    found = assembled()
    assert torch.equal(found[0], expected[0])
    assert found[1] == expected[1] == used
    assert not expected[2].named("_chunk_cat.out")
    ((_, (grads, *_), kwargs),) = found[2].named("_chunk_cat.out")
    assert all(each.is_contiguous() and each.dtype == dtypes.compute for each in grads)
    assert kwargs["out"].is_contiguous() and kwargs["out"].dtype == dtypes.reduce
    copied = sum(len(args[0]) for _, args, _ in found[2].named("_foreach_copy_"))
    assert copied == (columns - 2 if columns and unused else columns)
    assert not found[2].named("copy_", "zero_", "_foreach_zero_")


@torch.no_grad()
def test_gradients_that_no_kernel_casts_are_copied_one_by_one(device):
    """Else the operator makes a copy of each, as large as it is."""
    flat, _ = make(BY_ROWS, Dtypes.plan(F32, reduce=BF16))
    buffer = torch.full((flat.layout.padded_numel,), torch.nan, dtype=BF16)
    grads = [torch.ones(shape) for shape, _ in BY_ROWS]
    with Operators() as operators:
        assert not flat.fill(buffer, grads)
    assert not operators.called
