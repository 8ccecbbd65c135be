"""Graphs that are gone through in unusual ways: several forwards, leaves that thaw, checkpoints, and broken passes."""

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hpcfsdp.fsdp import FullyShardedDataParallel, MixedPrecision
from hpcfsdp.params.gradient import ShardedGrad
from hpcfsdp.wrap import ModuleWrapPolicy
from tests.mpi.models import ORIGINAL, WIDTH, plain_copy, vectors

pytestmark = pytest.mark.ranks(2)

CARRIERS = pytest.mark.parametrize("carrier", ["shared memory", "messages"])
CLOSE = {"rtol": 1e-5, "atol": 1e-7}


def linear():
    return nn.Linear(WIDTH, WIDTH)


def wrap(module, group, *kinds, **arguments):
    return FullyShardedDataParallel(module, group, auto_wrap_policy=ModuleWrapPolicy(set(kinds)), **arguments)


@pytest.fixture(autouse=True)
def same_values():
    torch.manual_seed(0)


@pytest.fixture
def begun(monkeypatch):
    """The gradients with reductions that have begun, in that order."""
    found, reduce = [], ShardedGrad.reduce

    def noted(grad, *args, **options):
        found.append(grad)
        return reduce(grad, *args, **options)

    monkeypatch.setattr(ShardedGrad, "reduce", noted)
    return found


def backward_both(plain, sharded, comm, step, *, sync=True):
    """Losses of all ranks' data through the plain module, and of this rank's through the sharded one, and back."""
    parts = vectors(step).chunk(comm.size)
    (sum(plain(part).square().mean() for part in parts) / comm.size).backward()
    with contextlib.nullcontext() if sync else sharded.no_sync():
        sharded(parts[comm.rank]).square().mean().backward()


def assert_same_grads(plain, sharded):
    with FullyShardedDataParallel.summon_full_params(sharded, with_grads=True, writeback=False):
        grads = {name: param.grad for name, param in sharded.named_parameters()}
        for name, param in plain.named_parameters():
            # Within a flat parameter an unused leaf has zeros.
            expected = torch.zeros_like(param) if param.grad is None and grads[name] is not None else param.grad
            torch.testing.assert_close(grads[name], expected, msg=lambda text, name=name: f"{name}: {text}", **CLOSE)


# Several forwards


@CARRIERS
@ORIGINAL
@pytest.mark.parametrize("lowered", [False, True])
def test_a_model_that_is_called_twice_is_reduced_once(groups, comm, carrier, original, lowered, begun):
    """As losses have it that compare what becomes of two inputs."""
    plain = nn.Sequential(linear(), linear(), linear())
    mixed = MixedPrecision(param_dtype=torch.bfloat16) if lowered else None
    options = {"use_orig_params": original, "mixed_precision": mixed}
    sharded = wrap(plain_copy(plain), groups[carrier], nn.Linear, **options)
    for step in range(2):
        parts = vectors(step).chunk(comm.size)
        sum((plain(x) - plain(x.flip(-1))).square().mean() for x in parts).div(comm.size).backward()
        x = parts[comm.rank]
        (sharded(x) - sharded(x.flip(-1))).square().mean().backward()
        assert len(begun) == 3 * (step + 1)
    if not lowered:
        assert_same_grads(plain, sharded)


@CARRIERS
def test_forwards_that_no_backward_follows_do_not_put_reductions_off(groups, carrier, begun):
    """A unit waits for the backwards of all its calls, but not for ever for one that does not come."""
    sharded = wrap(nn.Sequential(linear(), linear(), linear()), groups[carrier], nn.Linear)
    seen = []
    sharded[0].register_forward_hook(
        lambda _module, _args, y: y.register_hook(lambda _grad: seen.append(len(begun))) and None
    )
    for _ in range(2):
        sharded(vectors(0))  # as in validation that forgets torch.no_grad
    for _ in range(2):
        sharded(vectors(0)).sum().backward()
    assert seen[-1] >= 4  # in the second step that of the last unit, before the first one has had its gradients
    assert len(begun) == 6


# Leaves that thaw


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = linear(), linear()

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


@CARRIERS
@pytest.mark.parametrize("first", ["validation", "training"])
def test_leaves_that_were_frozen_for_a_while_get_their_gradients(groups, comm, carrier, first):
    plain = nn.Sequential(linear(), Pair(), Pair(), linear())
    sharded = wrap(plain_copy(plain), groups[carrier], Pair, use_orig_params=True)
    if first == "validation":
        with torch.no_grad():
            sharded(vectors(0))
    else:
        backward_both(plain, sharded, comm, 0)
        assert_same_grads(plain, sharded)
    for step, trained in enumerate((False, True, True)):
        for model in (plain, sharded):
            model.zero_grad()
            for name, param in model.named_parameters():
                if name.endswith("a.weight") or "1." in name:
                    param.requires_grad_(trained)
        backward_both(plain, sharded, comm, step)
        if trained:
            assert_same_grads(plain, sharded)


# Checkpoints


class Partly(nn.Module):
    """Uses one layer inside of a checkpoint and outside of it."""

    def __init__(self):
        super().__init__()
        self.layer = linear()

    def forward(self, x):
        return checkpoint(self.layer, torch.tanh(self.layer(x)), use_reentrant=True)


class Hidden(nn.Module):
    """All of its leaves are in the graph of a reentrant checkpoint, and no gradient leaves it."""

    def __init__(self):
        super().__init__()
        self.layers = Pair()

    def forward(self, x):
        return checkpoint(self.layers, x.detach().requires_grad_(), use_reentrant=True)


@CARRIERS
@ORIGINAL
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(linear(), Partly(), linear()),
        lambda: nn.Sequential(Partly(), linear()),
        lambda: nn.Sequential(linear(), Partly(), Partly(), linear()),
        lambda: nn.Sequential(linear(), Hidden(), linear()),
    ],
    ids=["after a layer", "first", "two of them", "all hidden"],
)
@pytest.mark.parametrize("sync", [True, False])
def test_layers_of_a_unit_in_reentrant_checkpoints(groups, comm, carrier, original, make, sync):
    plain = make()
    sharded = wrap(plain_copy(plain), groups[carrier], Partly, Hidden, use_orig_params=original)
    for step in range(3):
        backward_both(plain, sharded, comm, step, sync=sync or step == 2)
    assert_same_grads(plain, sharded)


class Recomputed(nn.Sequential):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


@CARRIERS
def test_units_in_a_checkpoint_are_reduced_one_by_one(groups, comm, carrier, begun):
    plain = nn.Sequential(Recomputed(linear(), linear(), linear()), linear())
    sharded = wrap(plain_copy(plain), groups[carrier], nn.Linear)
    first, seen = sharded[0][0], []
    first.register_forward_hook(
        lambda _module, _args, y: y.register_hook(lambda _grad: seen.append(len(begun))) and None
    )
    for step in range(2):
        backward_both(plain, sharded, comm, step)
    assert seen[-1] >= 4 + 2
    assert_same_grads(plain, sharded)


# Passes that break off


class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = linear(), linear(), linear()
        self.fails = None

    def forward(self, x, short=False):
        if self.fails == "early":
            raise RuntimeError("early")
        x = self.first(x)
        if not short:
            x = self.second(x)
        if self.fails == "late":
            raise RuntimeError("late")
        return self.third(x)


def test_a_forward_that_broke_off_at_different_places_on_the_ranks_is_forgotten(groups, comm):
    """Nothing is gathered where ranks share memory: there ranks may break off where they like."""
    plain = Failing()
    sharded = wrap(plain_copy(plain), groups["shared memory"], nn.Linear)
    assert sharded.check_is_root()
    sharded_params = [flat for unit in sharded._unit.root.units for flat in unit.sharded_params]
    if any(flat.comm.size > 1 and not flat.shares_gathered for flat in sharded_params):
        pytest.skip("ranks on several nodes wait for each other in gathers")
    for short in (False, True):
        sharded(vectors(0), short).sum().backward()
    sharded.zero_grad()
    sharded.module.fails = "late" if comm.rank == 0 else "early"
    with pytest.raises(RuntimeError, match=r"early|late"):
        sharded(vectors(0))
    sharded.module.fails = None
    parts = vectors(1).chunk(comm.size)
    (sum(plain(part, True).square().mean() for part in parts) / comm.size).backward()
    sharded(parts[comm.rank], True).square().mean().backward()
    assert_same_grads(plain, sharded)


def test_an_error_in_ending_what_was_begun_leaves_the_units_at_rest(groups, comm, monkeypatch):
    plain = nn.Sequential(linear(), linear())
    sharded = wrap(plain_copy(plain), groups["messages"], nn.Linear)

    def refuse(_grad):
        raise ValueError("no further")

    sharded[0].register_forward_hook(lambda _module, _args, out: out.register_hook(refuse) and None)
    with pytest.raises(ValueError, match="no further"):
        sharded(vectors(0)).sum().backward()
    root = sharded._unit.root

    def fail():
        raise RuntimeError("lost")

    with monkeypatch.context() as patched:
        drain = root.context.streams.drain
        patched.setattr(root.context.streams, "drain", lambda: (drain(), fail()))
        with pytest.raises(RuntimeError, match="lost"):
            root.recover()
    assert {unit.training_state.value for unit in root.units} == {"idle"}
    assert not any(unit.unsharded_params.is_bound for unit in root.units)
