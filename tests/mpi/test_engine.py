"""The sharded model computes what the plain one computes, and keeps nothing between."""

import ctypes
import dataclasses
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as recompute

from hpcfsdp.comm.mpi import communicator
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.wrap import ModuleWrapPolicy
from tests.mpi.models import (
    WIDTH,
    Block,
    adamw,
    batch,
    both_step,
    loss_of,
    make_net,
    plain_copy,
    shard,
    train_plain,
    train_sharded,
    units,
    unsharded_bytes,
    vectors,
    whole_parameters,
)

pytestmark = pytest.mark.ranks(2, 1, 3)

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.mark.parametrize("carrier", ["shared memory", "messages", "gloo"])
@pytest.mark.parametrize("wrapping", ["blocks", "whole"])
@pytest.mark.ranks(2, 1, 3, 4)
@pytest.mark.transport
def test_ten_steps_equal_the_plain_module(groups, comm, shared_path, carrier, wrapping):
    plain, group = make_net(), groups[carrier]
    sharded = (
        shard(plain_copy(plain), group) if wrapping == "blocks" else FullyShardedDataParallel(plain_copy(plain), group)
    )
    expected = train_plain(plain, adamw(plain), range(10))
    got = train_sharded(sharded, adamw(sharded), range(10), comm)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=0)
    whole = whole_parameters(sharded, shared_path / "after.h5")
    assert whole.keys() == plain.state_dict().keys()
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(whole[name], tensor, **CLOSE)


@pytest.mark.parametrize("carrier", ["shared memory", "messages"])
def test_only_shards_are_left_after_backward_and_those_of_the_root_after_forward(groups, world, comm, carrier):
    sharded = shard(make_net(), groups[carrier])
    held, whole = [], []
    for unit in units(sharded):
        unit.sharded_params[0].leaves[0].register_hook(lambda _: whole.append(unsharded_bytes(sharded)))
    train_sharded(sharded, adamw(sharded), range(2), comm, after=lambda when: held.append(unsharded_bytes(sharded)))
    is_shared = carrier == "shared memory" and world.num_nodes == 1
    root = (
        0 if is_shared or comm.size == 1 else sum(4 * f.layout.padded_numel for f in units(sharded)[0].sharded_params)
    )
    assert held == [root, 0, root, 0]
    assert all(whole) == (not is_shared and comm.size > 1)  # what is shared has no memory but the shards'
    shards = sum(param.numel() * param.element_size() for param in sharded.parameters())
    assert shards * comm.size == sum(
        flat.layout.padded_numel * 4 for unit in units(sharded) for flat in unit.sharded_params
    )
    if carrier == "messages":
        assert sum(param.untyped_storage().nbytes() for param in sharded.parameters()) == shards


def memory_held(*kinds):
    """Bytes as the kernel counts them, without what malloc keeps of freed pieces for later."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/smaps_rollup") as file:
        fields = dict(line.split(":", 1) for line in file if ":" in line and "kB" in line)
    return sum(int(fields[kind].split()[0]) * 1024 for kind in kinds)


def large_model(group):
    """Three layers of 49 MiB, and the bytes of one."""
    width = 3600
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(3)])
    sharded = FullyShardedDataParallel(model, group, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    return sharded, torch.randn(2, width), 4 * width * width


@pytest.mark.ranks(2)
def test_memory_of_other_ranks_shards_is_given_back_to_the_system(groups, comm, monkeypatch):
    monkeypatch.setattr(communicator, "KEPT_PART", 0)

    def private_bytes():
        return memory_held("Private_Dirty", "Private_Clean")

    sharded, x, layer = large_model(groups["messages"])
    sharded(x).sum().backward()  # the first step warms allocators up and leaves the gradients' shards
    at_rest = private_bytes()
    peak = []
    sharded.module[1].module.register_forward_hook(lambda *_: peak.append(private_bytes()))
    loss = sharded(x).sum()
    after_forward = private_bytes()
    loss.backward()
    after_backward = private_bytes()
    if comm.size > 1:
        assert peak[0] - at_rest > 0.8 * layer, "the probe does not see a gathered unit"
    assert after_forward - at_rest < 0.2 * layer
    assert after_backward - at_rest < 0.2 * layer


@pytest.mark.ranks(2)
def test_ranks_that_share_memory_hold_every_value_once_at_any_time(world, comm):
    """Memory that several processes map counts in parts that add up to one (PSS, the proportional set size)."""
    if world.num_nodes > 1:
        pytest.skip("ranks on several nodes share no parameters")

    def node_bytes():
        world.comm.Barrier()
        mine = memory_held("Pss_Anon", "Pss_Shmem")
        world.comm.Barrier()
        return world.comm.allreduce(mine)

    before, held = node_bytes(), {}
    sharded, x, layer = large_model(None)
    held["at rest"] = node_bytes() - before
    handle = sharded.module[1].module.register_forward_hook(lambda *_: held.update(inside=node_bytes() - before))
    with torch.no_grad():
        sharded(x)
    handle.remove()
    model = 3 * layer
    assert abs(held["at rest"] - model) < 0.3 * layer, "each value once, and nothing else"
    assert abs(held["inside"] - model) < 0.3 * layer, "no rank holds more while it computes"
    sharded(x).sum().backward()
    gradients = model  # the shards of all ranks
    buffers = 2 * layer * comm.size  # two of one layer, in which whole gradients are put together
    after = node_bytes() - before
    assert after < model + gradients + buffers + 0.3 * layer
    for _ in range(2):
        sharded(x).sum().backward()
    assert node_bytes() - before < after + 0.2 * layer
    del sharded, handle
    assert node_bytes() - before < 0.3 * layer


def test_a_unit_called_twice_and_one_not_called(comm):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused, self.out = Block(), Block(), nn.Linear(WIDTH, 2)

        def forward(self, x):
            return self.out(self.used(self.used(x)))

    torch.manual_seed(0)
    plain = Twice()
    sharded = shard(plain_copy(plain))
    for expected, got in both_step(plain, sharded, comm, vectors):
        assert got == pytest.approx(expected, rel=1e-5)
    assert all(flat.parameter.grad is None for flat in sharded.unused._unit.sharded_params)
    assert unsharded_bytes(sharded) == 0


def test_a_parameter_that_takes_no_part_counts_as_zero(comm):
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.a(x)

    sharded = FullyShardedDataParallel(Half())
    sharded(vectors(0)).sum().backward()
    assert unsharded_bytes(sharded) == 0
    (flat,) = sharded._unit.sharded_params
    full = torch.empty(flat.layout.padded_numel)
    comm.all_gather_into_tensor(full, flat.parameter.grad)
    by_name = flat.layout.by_name
    assert full[by_name["a.weight"].offset : by_name["a.weight"].end].abs().sum() > 0
    assert full[by_name["b.weight"].offset : by_name["b.weight"].end].abs().sum() == 0


def test_gradients_accumulate_over_several_backwards(comm):
    plain = make_net()
    sharded = shard(plain_copy(plain))

    for step in range(3):
        (loss_of(plain, *batch(step)) / 3).backward()
        ids, targets = (part.chunk(comm.size)[comm.rank] for part in batch(step))
        (loss_of(sharded, ids, targets) / 3).backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    torch.testing.assert_close(sharded.clip_grad_norm_(1e9), expected, **CLOSE)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, float("inf")])
def test_clip_grad_norm_equals_the_plain_one(comm, norm_type):

    plain = make_net()
    sharded = shard(plain_copy(plain))
    loss_of(plain, *batch(0)).backward()
    ids, targets = (part.chunk(comm.size)[comm.rank] for part in batch(0))
    loss_of(sharded, ids, targets).backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01, norm_type)
    torch.testing.assert_close(sharded.clip_grad_norm_(0.01, norm_type), expected, **CLOSE)
    again = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9, norm_type)
    torch.testing.assert_close(sharded.clip_grad_norm_(1e9, norm_type), again, **CLOSE)


def test_frozen_parameters_cost_no_gradient_and_stay(comm):
    torch.manual_seed(0)
    plain = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 3))
    for name, param in plain.named_parameters():
        param.requires_grad = "down" in name or name.startswith("2.")
    sharded = shard(plain_copy(plain))
    for expected, got in both_step(plain, sharded, comm, vectors):
        assert got == pytest.approx(expected, rel=1e-5)
    kinds = {flat.requires_grad: flat for flat in sharded[0]._unit.sharded_params}
    assert set(kinds) == {True, False}
    assert kinds[False].parameter.grad is None
    assert unsharded_bytes(sharded) == 0


def sgd_steps(plain, sharded, comm, before_step):
    """Both trained on the same batches, after ``before_step(step, model)``; whole parameters of both at the end."""
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (plain, sharded)]
    for step in range(5):
        for model, part, optimizer in zip((plain, sharded), (0, comm.rank), optimizers, strict=True):
            before_step(step, model)
            x = vectors(step).chunk(1 if model is plain else comm.size)[part]
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    with FullyShardedDataParallel.summon_full_params(sharded, writeback=False):
        whole = {name: param.detach().clone() for name, param in sharded.named_parameters()}
    return dict(plain.named_parameters()), whole


@pytest.mark.parametrize("carrier", ["shared memory", "messages"])
@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
def test_units_may_be_frozen_and_thawed_between_steps(groups, comm, carrier, original):
    torch.manual_seed(0)
    plain = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 3))
    sharded = shard(plain_copy(plain), groups[carrier], use_orig_params=original)

    def freeze(step, model):
        model[0].requires_grad_(step not in (1, 2))
        model[1].requires_grad_(step != 2)
        if step in (1, 2):
            assert not any(param.grad is not None for param in model[0].parameters())

    expected, got = sgd_steps(plain, sharded, comm, freeze)
    assert got.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], **CLOSE)
    assert unsharded_bytes(sharded) == 0


def test_what_was_frozen_when_it_was_wrapped_may_be_thawed(comm):
    torch.manual_seed(0)
    plain = nn.Sequential(Block(), nn.Linear(WIDTH, 3))
    plain[0].up.requires_grad_(False)
    sharded = shard(plain_copy(plain))
    frozen = next(flat.parameter for flat in sharded[0]._unit.sharded_params if not flat.requires_grad)

    def thaw(step, model):
        if step == 2:
            (model[0].up if model is plain else frozen).requires_grad_(True)

    expected, got = sgd_steps(plain, sharded, comm, thaw)
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], **CLOSE)


@pytest.mark.parametrize("carrier", ["shared memory", "messages"])
def test_original_parameters_may_be_frozen_one_by_one(groups, comm, carrier):
    torch.manual_seed(0)
    plain = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 3))
    sharded = shard(plain_copy(plain), groups[carrier], use_orig_params=True)

    def freeze(step, model):
        model[0].up.weight.requires_grad_(step % 2 == 0)
        model[1].norm.requires_grad_(step % 3 == 0)
        model[2].bias.requires_grad_(step < 3)

    expected, got = sgd_steps(plain, sharded, comm, freeze)
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], **CLOSE)


def test_a_frozen_model_computes_and_passes_gradients_on(comm):
    torch.manual_seed(0)
    plain = nn.Sequential(Block(), nn.Linear(WIDTH, 2))
    sharded = shard(plain_copy(plain)).requires_grad_(False)
    assert not sharded(vectors(0)).requires_grad
    for model in (plain, sharded):
        model.requires_grad_(False)
    found = []
    for model in (plain, sharded):
        x = vectors(0).requires_grad_()
        model(x).square().sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(*found)
    assert all(param.grad is None for param in sharded.parameters())
    assert unsharded_bytes(sharded) == 0


def test_a_detached_weight_is_there_until_the_inputs_have_their_gradients(comm):
    class Stop(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.b(nn.functional.linear(x, self.a.weight.detach(), self.a.bias))

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), Stop(), Stop())
    sharded = FullyShardedDataParallel(plain_copy(plain), auto_wrap_policy=ModuleWrapPolicy({Stop}))
    for expected, got in both_step(plain, sharded, comm, vectors):
        assert got == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_activation_checkpointing(comm, reentrant, where):
    class Recomputed(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return recompute(self.inner, x, use_reentrant=reentrant)

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), Recomputed(Block()), Recomputed(Block()), nn.Linear(WIDTH, 2))
    unit_type = Recomputed if where == "inside" else Block
    sharded = FullyShardedDataParallel(plain_copy(plain), auto_wrap_policy=ModuleWrapPolicy({unit_type}))
    for expected, got in both_step(plain, sharded, comm, vectors):
        assert got == pytest.approx(expected, rel=1e-5)
    assert unsharded_bytes(sharded) == 0


def test_recurrent_layers_that_keep_lists_of_their_weights(comm):
    torch.manual_seed(0)
    plain = nn.LSTM(5, 7, num_layers=2, batch_first=True)
    sharded = FullyShardedDataParallel(plain_copy(plain))
    inputs = lambda step: vectors(step, 4, 5)  # noqa: E731
    for expected, got in both_step(plain, sharded, comm, inputs, call=lambda model, x: model(x)[0]):
        assert got == pytest.approx(expected, rel=1e-5)


@dataclasses.dataclass
class Answer:
    value: torch.Tensor
    note: str


@pytest.mark.parametrize("form", ["tuple", "dict", "dataclass", "keyword"])
def test_containers_on_the_way_in_and_out(comm, form):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x=None, *, nested=None):
            y = self.layer(x if nested is None else nested["x"][0])
            return {"tuple": (1, y), "dict": {"y": [y]}, "dataclass": Answer(y, "n"), "keyword": y}[form]

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.odd = nn.Linear(WIDTH, WIDTH), Odd()

        def forward(self, x):
            x = self.first(x)
            out = self.odd(nested={"x": [x]}) if form == "keyword" else self.odd(x)
            return {"tuple": lambda: out[1], "dict": lambda: out["y"][0], "dataclass": lambda: out.value}.get(
                form, lambda: out
            )()

    torch.manual_seed(0)
    plain = Outer()
    sharded = FullyShardedDataParallel(plain_copy(plain), auto_wrap_policy=ModuleWrapPolicy({Odd}))
    for expected, got in both_step(plain, sharded, comm, vectors):
        assert got == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_forward_without_gradients(comm, mode):
    plain = make_net()
    sharded = shard(plain_copy(plain))

    ids, _ = batch(0)
    with mode():
        torch.testing.assert_close(sharded(ids), plain(ids))
    assert unsharded_bytes(sharded) == 0
    expected = train_plain(plain, adamw(plain), range(2))
    torch.testing.assert_close(train_sharded(sharded, adamw(sharded), range(2), comm), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_other_dtypes(comm, dtype):
    torch.manual_seed(0)
    plain = nn.Sequential(Block(), nn.Linear(WIDTH, 2)).to(dtype)
    sharded = shard(plain_copy(plain))
    tolerance = 1e-9 if dtype == torch.float64 else 0.05
    for expected, got in both_step(plain, sharded, comm, lambda step: vectors(step).to(dtype)):
        assert got == pytest.approx(expected, rel=tolerance)


def test_parameters_of_two_dtypes_in_one_unit(comm):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.narrow = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, 2)

        def forward(self, x):
            return self.narrow(self.wide(x.double()).float())

    torch.manual_seed(0)
    plain = Mixed()
    sharded = FullyShardedDataParallel(plain_copy(plain))
    assert sorted(str(flat.layout.dtype) for flat in sharded._unit.sharded_params) == ["torch.float32", "torch.float64"]
    for expected, got in both_step(plain, sharded, comm, vectors):
        assert got == pytest.approx(expected, rel=1e-5)


def test_sync_module_states_takes_rank_0s_values(comm, shared_path):
    mine = make_net(seed=comm.rank)
    mine.scale.fill_(comm.rank + 2.0)
    expected = make_net(seed=0).state_dict() | {"scale": torch.tensor([2.0])}
    sharded = shard(mine, sync_module_states=True)
    whole = whole_parameters(sharded, shared_path / "synced.h5")
    for name, tensor in expected.items():
        assert torch.equal(whole[name], tensor), name
    assert sharded.scale.item() == 2.0


def test_a_unit_smaller_than_the_number_of_ranks(comm):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(1, bias=False), nn.Linear(WIDTH, 1))
    plain[1] = nn.PReLU()  # one element
    sharded = FullyShardedDataParallel(plain_copy(plain), auto_wrap_policy=ModuleWrapPolicy({nn.PReLU}))
    for expected, got in both_step(plain, sharded, comm, vectors):
        assert got == pytest.approx(expected, rel=1e-5)


def test_units_inside_of_a_plain_module(comm):
    torch.manual_seed(0)
    plain = nn.Sequential(Block(), Block())
    mixed = plain_copy(plain)
    mixed[0], mixed[1] = FullyShardedDataParallel(mixed[0]), FullyShardedDataParallel(mixed[1])
    for expected, got in both_step(plain, mixed, comm, vectors):
        assert got == pytest.approx(expected, rel=1e-5)
    assert unsharded_bytes(mixed) == 0


def test_nesting_by_hand(comm):
    torch.manual_seed(0)
    plain = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 2))
    nested = plain_copy(plain)
    nested[0] = FullyShardedDataParallel(nested[0])
    sharded = FullyShardedDataParallel(nested)
    for expected, got in both_step(plain, sharded, comm, vectors):
        assert got == pytest.approx(expected, rel=1e-5)


def test_enable_wrap(comm):
    from hpcfsdp.wrap import enable_wrap, wrap

    with enable_wrap(wrapper_cls=FullyShardedDataParallel):
        sharded = wrap(nn.Sequential(wrap(nn.Linear(WIDTH, 5)), nn.Linear(5, 2)))
    assert len(FullyShardedDataParallel.fsdp_modules(sharded)) == 2
    sharded(vectors(0)).sum().backward()
    assert unsharded_bytes(sharded) == 0


@pytest.mark.parametrize("frozen", [False, True])
def test_one_graph_run_through_twice(comm, frozen):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), nn.Linear(WIDTH, 2))
    plain[1].requires_grad_(not frozen)
    sharded = shard(plain_copy(plain))
    for model in (plain, sharded):
        x = vectors(0) if model is plain else vectors(0).chunk(comm.size)[comm.rank]
        y = model(x)
        y.square().mean().backward(retain_graph=True)
        y.abs().mean().backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    torch.testing.assert_close(sharded.clip_grad_norm_(1e9), expected, **CLOSE)
    assert unsharded_bytes(sharded) == 0


def test_a_model_that_is_deleted_is_freed(comm):
    sharded = shard(make_net())
    train_sharded(sharded, adamw(sharded), range(1), comm)
    watched = [weakref.ref(flat) for unit in units(sharded) for flat in unit.sharded_params]
    del sharded
    gc.collect()
    assert [flat() for flat in watched] == [None] * len(watched)


def test_an_input_that_is_used_again_and_again_collects_no_hooks(comm):
    sharded = FullyShardedDataParallel(nn.Linear(WIDTH, 2))
    x = vectors(0).requires_grad_()
    for _ in range(4):
        sharded(x).sum().backward()
    assert not x._backward_hooks


def test_a_layer_called_several_times_under_reentrant_checkpointing(comm):
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            for _ in range(3):
                x = recompute(self.layer, x, use_reentrant=True)
            return x

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), Loop())
    sharded = FullyShardedDataParallel(plain_copy(plain), auto_wrap_policy=ModuleWrapPolicy({Loop}))
    for expected, got in both_step(plain, sharded, comm, vectors):
        assert got == pytest.approx(expected, rel=1e-5)
