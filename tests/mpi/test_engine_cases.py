"""What modules may do around a unit: return its input, change tensors in place, hide them, take different paths."""

import contextlib
import gc
import re
import weakref

import pytest
import torch
from torch import nn

from hpcfsdp import checkpoint
from hpcfsdp.comm.communicator import Communicator
from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.engine.backward import ForwardCall
from hpcfsdp.errors import CommunicationError, DisagreementError, EngineError
from hpcfsdp.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from hpcfsdp.wrap import ModuleWrapPolicy
from tests.mpi.models import (
    ORIGINAL,
    WIDTH,
    adamw,
    make_net,
    plain_copy,
    shard,
    train_plain,
    train_sharded,
    units,
    unsharded_bytes,
    vectors,
)

CLOSE = {"rtol": 1e-5, "atol": 1e-6}
CARRIERS = pytest.mark.parametrize("carrier", ["shared memory", "messages"])


def linear():
    return nn.Linear(WIDTH, WIDTH)


def wrap(module, group, *kinds, **arguments):
    return FullyShardedDataParallel(module, group, auto_wrap_policy=ModuleWrapPolicy(set(kinds)), **arguments)


def around(*middle):
    """The modules between two layers that belong to the root: gradients come to what the modules are given."""
    return nn.Sequential(linear(), *middle, nn.Linear(WIDTH, 3))


def mine(comm, step, *shape):
    return vectors(step, *shape).chunk(comm.size)[comm.rank]


def assert_same_parameters(plain, sharded):
    with FullyShardedDataParallel.summon_full_params(sharded, writeback=False):
        whole = {name: param.detach().clone() for name, param in sharded.named_parameters()}
    expected = dict(plain.named_parameters())
    assert whole.keys() == expected.keys()
    for name, param in expected.items():
        torch.testing.assert_close(whole[name], param.detach(), msg=lambda text, name=name: f"{name}: {text}", **CLOSE)


def assert_trains_alike(plain, sharded, comm, *, shape=(), per_rank=lambda model, x, rank: model(x)):
    """Train the plain module on what all ranks compute, one after the other, and compare losses and parameters."""
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], 0.1) for m in (plain, sharded)]
    for step in range(3):
        parts = enumerate(vectors(step, *shape).chunk(comm.size))
        losses = [per_rank(plain, part, rank).square().mean() for rank, part in parts]
        torch.stack(losses).mean().backward()
        loss = per_rank(sharded, mine(comm, step, *shape), comm.rank).square().mean()
        torch.testing.assert_close(loss, losses[comm.rank], **CLOSE)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(plain, sharded)
    assert unsharded_bytes(sharded) == 0


# Inputs that are passed on


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = linear()

    def forward(self, x):
        return x + torch.tanh(self.layer(x))


class Skipping(Residual):
    def forward(self, x, use=False):
        return super().forward(x) if use else x


class Choosing(nn.Module):
    """Units that the ranks in ``using`` compute with; the others return what they are given."""

    def __init__(self, using):
        super().__init__()
        self.first, self.last = linear(), nn.Linear(WIDTH, 3)
        self.options, self.blocks = nn.ModuleList([Skipping(), Skipping()]), nn.ModuleList([Residual(), Residual()])
        self.using = using

    def forward(self, x, rank):
        x = self.first(x)
        for block, option in zip(self.blocks, self.options, strict=True):
            x = option(block(x), rank in self.using)
        return self.last(x)


@CARRIERS
@pytest.mark.parametrize("using", [(), (0, 3)], ids=["no rank", "some ranks"])
def test_a_unit_may_return_its_input_on_some_ranks(groups, comm, carrier, using):
    torch.manual_seed(0)
    plain = Choosing(using)
    sharded = wrap(plain_copy(plain), groups[carrier], Skipping, Residual)
    unused = pytest.warns(UserWarning, match=r"no parameter of the unit 'options\.0' and of 1 more has got a gradient")
    with contextlib.nullcontext() if using else unused:
        assert_trains_alike(plain, sharded, comm, per_rank=lambda model, x, rank: model(x, rank))


@CARRIERS
def test_units_that_return_their_input_are_resharded_in_backward(groups, comm, carrier):
    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.options = linear(), nn.ModuleList([Skipping() for _ in range(4)])

        def forward(self, x):
            x = self.first(x)
            x.register_hook(lambda _: look())  # all of the units have been gone through
            for option in self.options:
                x = option(x)
            return x

    def look():
        seen.append([option._unit.unsharded_params.is_bound for option in sharded.options])

    sharded, seen = wrap(Watched(), groups[carrier], Skipping), []
    for step in range(3):
        sharded(mine(comm, step)).sum().backward()
    assert seen == [[False] * 4] * 3
    assert unsharded_bytes(sharded) == 0


class Passing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = linear()

    def forward(self, h, residual):
        return h + self.layer(h), residual


class Passes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.layers = linear(), nn.ModuleList([Passing() for _ in range(3)])

    def forward(self, x):
        x = residual = self.first(x)
        for layer in self.layers:
            x, residual = layer(x, residual)
        return x + residual


@CARRIERS
def test_an_input_that_is_passed_on_leaves_no_cycle(groups, comm, carrier, monkeypatch):
    def noted():
        call = ForwardCall()
        calls.append(weakref.ref(call))
        return call

    torch.manual_seed(0)
    plain, calls = Passes(), []
    sharded = wrap(plain_copy(plain), groups[carrier], Passing)
    monkeypatch.setattr("hpcfsdp.engine.unit.ForwardCall", noted)
    gc.disable()
    try:
        assert_trains_alike(plain, sharded, comm)
        assert len(calls) == 3 * len(units(sharded))
        assert [call() for call in calls] == [None] * len(calls)
    finally:
        gc.enable()


@CARRIERS
def test_a_tensor_that_is_passed_twice_stays_one(groups, comm, carrier):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = linear()

        def forward(self, a, b, *, c):
            assert a is b
            assert c[0] is a
            return self.layer(a) + b * c[0]

    class Doubled(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.pair = linear(), Pair()

        def forward(self, x):
            x = self.first(x)
            return self.pair(x, x, c=[x])

    torch.manual_seed(0)
    plain = Doubled()
    assert_trains_alike(plain, wrap(plain_copy(plain), groups[carrier], Pair), comm)


@CARRIERS
def test_an_ignored_parameter_that_is_returned_collects_no_hooks(groups, comm, carrier):
    class Temperature(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.temperature = linear(), nn.Parameter(torch.ones(1))

        def forward(self, x):
            return self.layer(x), self.temperature

    model = Temperature()
    sharded = FullyShardedDataParallel(model, groups[carrier], ignored_states=[model.temperature])
    for step in range(3):
        out, temperature = sharded(mine(comm, step))
        (out * temperature).sum().backward()
    assert not model.temperature._backward_hooks
    assert model.temperature.grad is not None


# Changes in place


class InPlace(nn.Module):
    """Changes its input before weights that are frozen."""

    def __init__(self, operation, trained):
        super().__init__()
        self.frozen, self.other = linear().requires_grad_(False), linear().requires_grad_(trained)
        self.operation = operation

    def forward(self, x):
        if self.operation == "relu":
            x.relu_()
        else:
            x += 1.0
        return self.other(torch.tanh(self.frozen(x)))


@CARRIERS
@pytest.mark.parametrize(("operation", "trained"), [("relu", True), ("add", True), ("relu", False)])
def test_a_unit_with_frozen_weights_may_change_its_input_in_place(groups, comm, carrier, operation, trained):
    torch.manual_seed(0)
    plain = around(InPlace(operation, trained), InPlace(operation, trained))
    assert_trains_alike(plain, wrap(plain_copy(plain), groups[carrier], InPlace), comm)


@CARRIERS
def test_an_output_that_is_a_view_and_is_changed_in_place_is_refused(groups, comm, carrier):
    class Changes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.last, self.in_place = linear(), nn.Linear(WIDTH, 3), True

        def forward(self, x):
            x = self.layer(x)
            return self.last(x.relu_() if self.in_place else x.relu())

    torch.manual_seed(0)
    plain = Changes()
    sharded = wrap(plain_copy(plain), groups[carrier], nn.Linear)
    with pytest.raises(EngineError, match=r"layer: .* do not change a view"):
        sharded(mine(comm, 0, 2, WIDTH)).sum().backward()
    sharded.zero_grad()
    plain.in_place = sharded.module.in_place = False
    assert_trains_alike(plain, sharded, comm, shape=(2, WIDTH))


# What is hidden


class Box:
    def __init__(self, x):
        self.x = x


class Adapted(nn.Module):
    """Frozen weights with a trained detour, as LoRA has them; the input comes in an object."""

    def __init__(self):
        super().__init__()
        self.one, self.two = linear().requires_grad_(False), linear().requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, box):
        x = self.two(torch.tanh(self.one(box.x)))
        return self.up(self.down(x)) + x


class Boxing(nn.Module):
    def __init__(self):
        super().__init__()
        self.adapted = Adapted()

    def forward(self, x):
        return self.adapted(Box(x))


@CARRIERS
def test_an_adapter_next_to_frozen_weights_with_an_input_in_an_object(groups, comm, carrier):
    torch.manual_seed(0)
    plain = around(Boxing(), Boxing())
    assert_trains_alike(plain, wrap(plain_copy(plain), groups[carrier], Adapted), comm)


@CARRIERS
@ORIGINAL
def test_a_parameter_that_is_hidden_in_the_dict_of_its_module(groups, comm, carrier, original):
    class Hides(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = linear(), linear()
            self.__dict__["tied"] = self.a.weight

        def forward(self, x):
            return self.b(nn.functional.linear(torch.tanh(self.a(x)), self.tied))

    torch.manual_seed(0)
    plain = around(Hides())
    assert_trains_alike(plain, wrap(plain_copy(plain), groups[carrier], Hides, use_orig_params=original), comm)


# Forwards without a backward, and values that users put in


@CARRIERS
def test_a_first_call_in_inference_mode_leaves_a_model_that_can_be_trained(groups, comm, carrier):
    plain = make_net()
    sharded = shard(plain_copy(plain), groups[carrier], mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16))
    ids = torch.zeros(2, 3, dtype=torch.long)
    with torch.inference_mode():
        torch.testing.assert_close(sharded(ids), plain(ids))
    assert sharded.scale.dtype == torch.bfloat16
    assert not any(tensor.is_inference() for tensor in (*sharded.parameters(), *sharded.buffers()))
    expected = train_plain(plain, adamw(plain), range(2))
    torch.testing.assert_close(train_sharded(sharded, adamw(sharded), range(2), comm), expected, rtol=1e-5, atol=0)


@CARRIERS
def test_a_step_after_a_forward_without_a_backward(groups, comm, carrier):
    torch.manual_seed(0)
    plain = around(linear())
    sharded = wrap(
        plain_copy(plain),
        groups[carrier],
        nn.Linear,
        use_orig_params=True,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
    )
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (plain, sharded)]
    for step in range(3):
        plain(vectors(step)).square().mean().backward()
        sharded(mine(comm, step)).square().mean().backward()
        with torch.no_grad():
            expected = plain(mine(comm, step + 10))
        torch.testing.assert_close(sharded(mine(comm, step + 10)).detach(), expected, **CLOSE)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(plain, sharded)


@CARRIERS
def test_values_that_are_put_in_through_data_are_saved(groups, comm, shared_path, carrier):
    sharded = wrap(around(), groups[carrier], nn.Linear, use_orig_params=True)
    sharded(mine(comm, 0)).sum().backward()
    sharded.zero_grad()
    for param in sharded.parameters():
        param.data = torch.full_like(param.data, 5.0)
    path = checkpoint.save(shared_path / "new.h5", model=sharded)
    plain = around()
    checkpoint.load(path, model=plain)
    assert all((param == 5.0).all() for param in plain.parameters())


@CARRIERS
def test_values_that_are_loaded_win_over_those_put_in_through_data(groups, comm, shared_path, carrier):
    torch.manual_seed(0)
    plain = around()
    sharded = wrap(plain_copy(plain), groups[carrier], nn.Linear, use_orig_params=True)
    path = checkpoint.save(shared_path / "old.h5", model=sharded)
    for param in sharded.parameters():
        param.data = torch.full_like(param.data, 5.0)
    checkpoint.load(path, model=sharded)
    assert_trains_alike(plain, sharded, comm)


# Paths that differ between ranks


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.experts = linear(), nn.ModuleList([Residual(), Residual()])

    def forward(self, x, which):
        return self.experts[which](self.first(x))


@CARRIERS
def test_ranks_that_take_different_paths_which_all_of_them_know(groups, several, carrier):
    sharded = wrap(Experts(), groups[carrier], Residual)
    for which in (0, 1):
        sharded(mine(several, which), which).sum().backward()
    with pytest.raises(DisagreementError, match=r"rank 0 runs .*, but rank \d runs ") as caught:
        sharded(mine(several, 2), several.rank % 2).sum().backward()
    assert set(re.findall(r"experts\.\d", str(caught.value))) == {"experts.0", "experts.1"}


@CARRIERS
def test_a_rank_that_evaluates_while_the_others_train(groups, several, carrier):
    sharded = wrap(Experts(), groups[carrier], Residual)
    for expert in (0, 1):
        with torch.no_grad():
            sharded(mine(several, expert), expert)
        sharded(mine(several, expert), expert).sum().backward()
    evaluates = several.rank == 0
    sharded.train(not evaluates)
    with (
        torch.set_grad_enabled(not evaluates),
        pytest.raises(CommunicationError, match=r"rank \d .*, but rank \d ") as caught,
    ):
        sharded(mine(several, 2), 0).sum().backward()
    calls = dict(
        re.findall(
            r"rank (\d) calls (?:forward of \"Experts\": )?forward of 'Experts'( without gradients)?", str(caught.value)
        )
    )
    assert calls.keys() > {str(several.rank)}
    assert calls == {rank: " without gradients" if rank == "0" else "" for rank in calls}


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_the_norm_of_a_model_with_other_experts_on_each_rank(comm, norm_type):
    """A unit that one rank has for itself counts once, and all ranks scale what they share by the same factor."""
    torch.manual_seed(100 + comm.rank)
    expert = FullyShardedDataParallel(linear(), FakeCommunicator())
    torch.manual_seed(0)
    sharded = FullyShardedDataParallel(nn.Sequential(linear(), expert))
    sharded(vectors(comm.rank)).square().sum().backward()
    (shared,) = (flat.parameter.grad for flat in sharded._unit.sharded_params)
    everyone = comm.all_gather_object([shared, *(param.grad for param in expert.parameters())])
    grads = torch.cat([grad.reshape(-1) for grads in everyone for grad in grads])
    expected = torch.linalg.vector_norm(grads, norm_type)
    before = shared.clone()
    torch.testing.assert_close(sharded.clip_grad_norm_(0.5, norm_type), expected)
    torch.testing.assert_close(shared, before * (0.5 / (expected + 1e-6)))


def test_a_root_of_fewer_ranks_than_a_unit_inside_cannot_clip(several):
    inner = FullyShardedDataParallel(linear())
    sharded = FullyShardedDataParallel(nn.Sequential(linear(), inner), FakeCommunicator())
    with pytest.raises(EngineError, match=r"sharded over more ranks than the root \(1\)"):
        sharded.clip_grad_norm_(1.0)


class Detaching(nn.Module):
    """Its second layer gets no gradient on ranks that do not use it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x, uses):
        second = self.second(x)
        return self.first(x) + (second if uses else second.detach())


@CARRIERS
@ORIGINAL
def test_ranks_ask_each_other_what_was_used_only_if_none_has_used_everything(
    several, groups, comm, carrier, original, monkeypatch
):
    asked, all_reduce = [], Communicator.all_reduce

    def noted(over, tensor, op, **options):
        asked.append(op)
        return all_reduce(over, tensor, op, **options)

    monkeypatch.setattr(Communicator, "all_reduce", noted)
    plain = Detaching()
    sharded = wrap(plain_copy(plain), groups[carrier], nn.Linear, use_orig_params=original)
    for ranks in (range(comm.size), [0], [comm.size - 1], []):
        parts = vectors(0).chunk(comm.size)
        sum(plain(x, rank in ranks).square().mean() for rank, x in enumerate(parts)).div(comm.size).backward()
        sharded(parts[comm.rank], comm.rank in ranks).square().mean().backward()
        assert asked == ([] if ranks else ["max"])
        with FullyShardedDataParallel.summon_full_params(sharded, with_grads=True):
            for (name, param), wanted in zip(sharded.named_parameters(), plain.parameters(), strict=True):
                grad = torch.zeros_like(wanted) if param.grad is None else param.grad
                torch.testing.assert_close(
                    grad, torch.zeros_like(wanted) if wanted.grad is None else wanted.grad, **CLOSE
                )
                assert (param.grad is None) == (wanted.grad is None), name
        plain.zero_grad()
        sharded.zero_grad()
        asked.clear()
