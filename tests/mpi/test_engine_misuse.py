"""What the engine refuses, with the hint, and what it recovers from."""

import pytest
import torch
from torch import nn

from hpcfsdp.errors import DisagreementError, EngineError
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.wrap import ModuleWrapPolicy
from tests.mpi.models import (
    WIDTH,
    adamw,
    batch,
    make_net,
    plain_copy,
    shard,
    train_plain,
    train_sharded,
    unsharded_bytes,
    vectors,
)

pytestmark = pytest.mark.ranks(2)


def test_an_exception_in_forward_leaves_shards_and_a_model_that_works(comm):
    plain = make_net()
    sharded = shard(plain_copy(plain))
    handle = sharded.blocks[1].module.register_forward_hook(lambda *_: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        sharded(batch(0)[0])
    assert unsharded_bytes(sharded) == 0
    handle.remove()
    expected = train_plain(plain, adamw(plain), range(2))
    torch.testing.assert_close(train_sharded(sharded, adamw(sharded), range(2), comm), expected, rtol=1e-5, atol=0)


def test_an_exception_in_backward_is_recovered_from_at_the_next_forward(comm):
    class Fuse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ZeroDivisionError("blown")

    plain = make_net()
    sharded = shard(plain_copy(plain))

    handle = sharded.blocks[0].module.register_forward_hook(lambda _m, _i, out: Fuse.apply(out))
    with pytest.raises(ZeroDivisionError, match="blown"):
        sharded(batch(0)[0]).sum().backward()
    handle.remove()
    sharded.zero_grad()
    expected = train_plain(plain, adamw(plain), range(2))
    torch.testing.assert_close(train_sharded(sharded, adamw(sharded), range(2), comm), expected, rtol=1e-5, atol=0)
    assert unsharded_bytes(sharded) == 0


def test_gradients_come_to_tensors_in_outputs_of_any_type(comm):
    class Hidden:
        def __init__(self, tensor):
            self.tensor = tensor

    class Hiding(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, 2)

        def forward(self, x):
            return Hidden(self.layer(x))

    sharded = FullyShardedDataParallel(nn.Sequential(Hiding()), auto_wrap_policy=ModuleWrapPolicy({Hiding}))
    x = vectors(0)
    sharded(x).tensor.sum().backward()
    bias = sharded._fsdp_wrapped_module[0].module.layer.bias
    with FullyShardedDataParallel.summon_full_params(sharded, with_grads=True):
        torch.testing.assert_close(bias.grad, torch.full((2,), float(len(x))))
    assert unsharded_bytes(sharded) == 0


@pytest.mark.parametrize("grads", [True, False])
def test_a_unit_inside_must_not_return_a_view_of_an_own_parameter(comm, grads):
    class Leaky(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, x):
            return self.weight.t()[:2]

    sharded = FullyShardedDataParallel(nn.Sequential(FullyShardedDataParallel(Leaky())))
    with torch.set_grad_enabled(grads), pytest.raises(EngineError, match=r"view of one of its own parameters.*clone"):
        sharded(vectors(0))


def test_different_models_on_different_ranks_are_named_on_every_rank(comm):
    if comm.size == 1:
        pytest.skip("one rank cannot disagree")
    width = 3 + (comm.rank == comm.size - 1)
    with pytest.raises(
        DisagreementError, match=rf"rank 0 has weight \(2, 3\).*rank {comm.size - 1} has weight \(2, 4\)"
    ):
        FullyShardedDataParallel(nn.Linear(width, 2))


def test_fewer_parameters_than_ranks(comm):
    if comm.size == 1:
        pytest.skip("one rank needs one parameter, which the module has")
    sharded = FullyShardedDataParallel(nn.Linear(1, 1, bias=False))
    with pytest.raises(EngineError, match=rf"1 parameter element\(s\) for {comm.size} ranks"):
        sharded(torch.ones(2, 1))


def test_clip_grad_norm_belongs_to_the_root(comm):
    sharded = shard(make_net())

    sharded(batch(0)[0]).sum().backward()
    with pytest.raises(EngineError, match="on the root"):
        sharded.blocks[0].clip_grad_norm_(1.0)
    with pytest.raises(ValueError, match="positive"):
        sharded.clip_grad_norm_(1.0, -1)


def test_units_inside_of_modules_that_read_their_childrens_parameters_are_refused(comm):
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    with pytest.raises(ValueError, match=r"inside of the TransformerEncoderLayer.*wrap the whole"):
        FullyShardedDataParallel(layer, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))


def test_a_module_in_two_units_is_refused(comm):
    shared = nn.Linear(WIDTH, WIDTH)
    model = nn.Sequential(shared, FullyShardedDataParallel(nn.Sequential(shared, nn.ReLU())))
    with pytest.raises(ValueError, match=r"'0\.weight' is tied to '0\.weight', which belongs to a unit"):
        FullyShardedDataParallel(model)


def test_writing_to_a_sharded_parameter_is_refused_or_forgotten(comm):
    sharded = FullyShardedDataParallel(nn.Linear(3, 2))
    weight, bias = sharded.module.weight, sharded.module.bias
    with pytest.raises(RuntimeError, match="single memory location"):
        nn.init.normal_(weight)
    nn.init.ones_(weight)
    assert bias.isnan().all()
    with torch.no_grad():
        sharded(torch.ones(1, 3))
    assert weight.isnan().all()
