"""Whole parameters, on ranks that are threads and alone. ``tests/mpi/test_unshard.py`` does it on ranks of MPI."""

import copy
import functools
import gc
import warnings
import weakref

import pytest
import torch
from torch import nn

from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.engine.unit import TrainingState
from hpcfsdp.errors import EngineError
from hpcfsdp.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from hpcfsdp.units.summon import walk_full_params
from hpcfsdp.wrap import ModuleWrapPolicy
from tests.unit.params.gathering import values_bytes

summon = FullyShardedDataParallel.summon_full_params
ORIGINAL = pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
SHARES = pytest.mark.parametrize("shares_memory", [False, True], ids=["messages", "shared"])


class Net(nn.Module):
    """Odd sizes, a tie, a scalar, two dtypes, frozen parameters, buffers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
        self.scale = nn.Parameter(torch.randn(()))
        self.wide = nn.Linear(5, 1, dtype=torch.float64)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.last = nn.Linear(5, 5, bias=False)
        self.last.weight = self.frozen.weight

    def forward(self, x):
        return self.wide(self.last(self.frozen(self.first(x)) * self.scale).double())


@functools.cache
def plain_net():
    torch.manual_seed(0)
    return Net()


def make_net():
    """The same values each time, in threads too, which share one generator of random numbers."""
    return copy.deepcopy(plain_net())


def shard(module, comm=None, **arguments):
    arguments = {"auto_wrap_policy": ModuleWrapPolicy({nn.Sequential}), **arguments}
    return FullyShardedDataParallel(module, process_group=comm or FakeCommunicator(), **arguments)


def sharded_params_of(model):
    return [flat for wrapper in FullyShardedDataParallel.fsdp_modules(model) for flat in wrapper._unit.sharded_params]


def shards_of(model):
    return [flat.parameter.detach().clone() for flat in sharded_params_of(model)]


def at_rest(model):
    for wrapper in FullyShardedDataParallel.fsdp_modules(model):
        assert wrapper._unit.is_idle
        for flat in wrapper._unit.sharded_params:
            assert not flat.is_unsharded
            assert values_bytes(flat) == 0
            assert flat.use_orig_params or flat.comm.size == 1 or flat.leaves[0].isnan().all()
    assert all(param.dim() == 1 for param in model.parameters())


def all_ok(results):
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


# What is seen


@ORIGINAL
@SHARES
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_parameters_are_those_of_the_plain_module_by_name_shape_and_value(
    run_ranks, strategy, size, shares_memory, original
):
    plain = plain_net()
    expected = dict(plain.named_parameters())

    def body(comm):
        model = shard(
            copy.deepcopy(plain), comm, use_orig_params=original, sharding_strategy=ShardingStrategy[strategy]
        )
        before = [name for name, _ in model.named_parameters()]
        with summon(model):
            found = dict(model.named_parameters())
            assert found.keys() == expected.keys()
            assert all(isinstance(param, nn.Parameter) for param in found.values())
            for name, param in found.items():
                assert (param.shape, param.dtype) == (expected[name].shape, expected[name].dtype)
                assert param.requires_grad == expected[name].requires_grad
                assert torch.equal(param, expected[name])
            assert model.last.weight is model.frozen.weight is found["frozen.weight"]
            assert dict(model.named_buffers()).keys() == dict(plain.named_buffers()).keys()
            assert model.first.module[0].weight is found["first.0.weight"]
        assert [name for name, _ in model.named_parameters()] == before
        return "done"

    assert run_ranks(size, body, shares_memory=shares_memory) == ["done"] * size


@ORIGINAL
def test_parameters_stand_in_the_order_of_the_plain_module(original):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1, dtype=torch.float64))
            self.c, self.layer = nn.Parameter(torch.ones(1)), nn.Linear(2, 2)
            self.layer.weight.requires_grad_(False)
            self.last = nn.Linear(2, 2)
            self.last.weight = self.layer.weight

    names = [name for name, _ in Mixed().named_parameters()]
    model = shard(Mixed(), use_orig_params=original)
    for _ in range(2):
        with summon(model):
            assert [name for name, _ in model.named_parameters()] == names


@ORIGINAL
def test_parameters_of_one_unit_alone(run_ranks, original):
    def body(comm):
        model = shard(make_net(), comm, use_orig_params=original)
        with summon(model, recurse=False):
            assert model.scale.shape == ()
            assert model.wide.weight.shape == (1, 5)
            assert model.first._unit.is_idle
            assert original or model.first.module[0].weight.isnan().all()
        with summon(model.first):
            assert model.first.module[0].weight.shape == (5, 3)
            assert {name for name, _ in model.first.named_parameters()} == {"0.weight", "0.bias", "1.weight", "1.bias"}
            assert model._unit.is_idle
        with summon(nn.Sequential(model)):
            assert not model.first.module[0].weight.isnan().any()
        with summon(nn.Sequential(model), recurse=False):
            assert model._unit.is_idle
        return "done"

    assert run_ranks(2, body) == ["done"] * 2


def test_a_model_without_units_is_whole_already():
    layer = nn.Linear(2, 2)
    with summon(layer):
        assert layer.weight.shape == (2, 2)
    with summon(layer, recurse=False, writeback=False, with_grads=True):
        pass


@ORIGINAL
def test_values_are_those_that_are_kept_not_those_that_are_computed_with(run_ranks, original):
    def body(comm):
        layer = nn.Linear(2, 2)
        nn.init.constant_(layer.weight, 257.0)
        precision = MixedPrecision(param_dtype=torch.bfloat16)
        model = shard(layer, comm, mixed_precision=precision, use_orig_params=original)
        with summon(model):
            assert model.weight.dtype == torch.float32
            assert model.weight.tolist() == [[257, 257], [257, 257]]
            with torch.no_grad():
                model.weight.add_(2)
        with summon(model):
            assert model.weight.tolist() == [[259, 259], [259, 259]]
        return "done"

    assert run_ranks(2, body) == ["done"] * 2


@ORIGINAL
def test_rank_0_alone_has_whole_parameters_if_asked(run_ranks, original):
    def body(comm):
        model = shard(make_net(), comm, use_orig_params=original)
        before = [param.detach().clone() for flat in sharded_params_of(model) for param in flat.leaves]
        with summon(model, rank0_only=True, writeback=False):
            if comm.rank == 0:
                assert model.wide.weight.shape == (1, 5)
                assert not model.wide.weight.isnan().any()
            else:
                now = [param for flat in sharded_params_of(model) for param in flat.leaves]
                for a, b in zip(before, now, strict=True):
                    torch.testing.assert_close(a, b.detach(), rtol=0, atol=0, equal_nan=True)
        at_rest(model)
        return "done"

    assert all_ok(run_ranks(3, body)) == ["done"] * 3


# What is written back


@ORIGINAL
@SHARES
@pytest.mark.parametrize("way", ["in place", "data", "replaced", "rank 0"])
def test_changes_are_written_back_whatever_the_way(run_ranks, shares_memory, original, way):
    def body(comm):
        model = shard(make_net(), comm, use_orig_params=original)
        leaves = [leaf for flat in sharded_params_of(model) for leaf in flat.leaves]
        params = list(model.parameters())
        with summon(model, rank0_only=way == "rank 0"), torch.no_grad():
            for name, param in list(model.named_parameters()):
                if way == "in place" or (way == "rank 0" and comm.rank == 0):
                    param.add_(1)
                elif way == "data":
                    param.data = param.data + 1
                elif way == "rank 0":
                    param.data = torch.full_like(param, 99)  # is lost
                else:
                    module, _, last = name.rpartition(".")
                    owner = model.module.get_submodule(module.replace("first", "first._fsdp_wrapped_module"))
                    setattr(owner, last, nn.Parameter(param.detach() + 1, requires_grad=param.requires_grad))
        at_rest(model)
        assert all(
            a is b for a, b in zip(leaves, (leaf for f in sharded_params_of(model) for leaf in f.leaves), strict=True)
        )
        assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
        with summon(model, writeback=False):
            return {name: param.detach().clone() for name, param in model.named_parameters()}

    for found in all_ok(run_ranks(2, body, shares_memory=shares_memory)):
        for name, param in make_net().named_parameters():
            assert torch.equal(found[name], param + 1), name


@ORIGINAL
def test_changes_are_lost_without_writeback(run_ranks, original):
    def body(comm):
        model = shard(make_net(), comm, use_orig_params=original)
        before = shards_of(model)
        with summon(model, writeback=False), torch.no_grad():
            for param in model.parameters():
                param.fill_(7)
            model.wide.weight = nn.Parameter(torch.zeros(3))  # of any shape
        at_rest(model)
        return all(map(torch.equal, before, shards_of(model)))

    assert all_ok(run_ranks(2, body)) == [True, True]


def test_each_rank_writes_its_own_shard(run_ranks):
    def body(comm):
        model = shard(nn.Linear(3, 3, bias=False), comm)
        with summon(model), torch.no_grad():
            model.weight.fill_(comm.rank + 1.0)
        with summon(model):
            return model.weight.flatten().tolist()

    assert run_ranks(3, body) == [[1, 1, 1, 1, 2, 2, 2, 2, 3]] * 3


@pytest.mark.parametrize("arguments", [{}, {"rank0_only": True}])
def test_padding_stays_zero(run_ranks, arguments):
    def body(comm):
        model = shard(nn.Sequential(nn.Linear(3, 5), nn.PReLU()), comm, auto_wrap_policy=None)
        (flat,) = sharded_params_of(model)
        with summon(model, **arguments), torch.no_grad():
            if comm.rank == 0 or not arguments:
                for leaf in flat.leaves:  # beyond their ends, too
                    leaf.data.untyped_storage().fill_(127)
        full = torch.empty(flat.layout.padded_numel)
        comm.all_gather_into_tensor(full, flat.parameter.data)
        return [full[begin:end].tolist() for begin, end in flat.layout.gaps()], full.ne(0).sum().item()

    for gaps, used in all_ok(run_ranks(3, body)):
        assert gaps
        assert not any(any(gap) for gap in gaps)
        assert used == 3 * 5 + 5 + 1


@ORIGINAL
def test_an_optimizer_goes_on_with_what_was_written(run_ranks, original):
    def body(comm):
        model = shard(nn.Linear(3, 3, bias=False), comm, use_orig_params=original)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with summon(model), torch.no_grad():
            model.weight.fill_(5.0)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        with summon(model):
            return model.weight.flatten().tolist()

    assert all_ok(run_ranks(2, body)) == [[4] * 9] * 2


# Gradients


def trained(comm, original, **arguments):
    model = shard(make_net(), comm, use_orig_params=original, **arguments)
    model(torch.arange(12.0).view(4, 3)).sum().backward()
    return model


@ORIGINAL
@SHARES
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("rank0_only", [False, True])
def test_gradients_are_whole_too_if_asked(run_ranks, strategy, shares_memory, original, rank0_only):
    plain = make_net()
    plain(torch.arange(12.0).view(4, 3)).sum().backward()
    expected = {name: param.grad for name, param in plain.named_parameters()}

    def body(comm):
        model = trained(comm, original, sharding_strategy=ShardingStrategy[strategy])
        before = [None if param.grad is None else param.grad.clone() for param in model.parameters()]
        with summon(model, with_grads=True, writeback=False, rank0_only=rank0_only):
            if comm.rank == 0 or not rank0_only:
                for name, param in model.named_parameters():
                    if expected[name] is None:
                        assert param.grad is None, name
                    else:
                        torch.testing.assert_close(param.grad, expected[name])
        with summon(model, with_grads=True, rank0_only=rank0_only), torch.no_grad():
            for param in model.parameters():
                if param.grad is not None:
                    param.grad.mul_(2)
        for param, grad in zip(model.parameters(), before, strict=True):
            assert (param.grad is None) == (grad is None)
            if grad is not None:
                torch.testing.assert_close(param.grad, 2 * grad)
        model.clip_grad_norm_(1.0)
        return "done"

    assert all_ok(run_ranks(2, body, shares_memory=shares_memory)) == ["done"] * 2


@ORIGINAL
def test_gradients_are_hidden_and_kept_if_not_asked_for(run_ranks, original):
    def body(comm):
        model = trained(comm, original)
        before = [None if param.grad is None else param.grad.clone() for param in model.parameters()]
        with summon(model):
            assert [param.grad for param in model.parameters()] == [None] * len(list(model.parameters()))
        for param, grad in zip(model.parameters(), before, strict=True):
            assert (param.grad is None) == (grad is None)
            assert grad is None or torch.equal(param.grad, grad)
        return "done"

    assert all_ok(run_ranks(2, body)) == ["done"] * 2


@ORIGINAL
def test_where_there_is_no_gradient_there_is_none(run_ranks, original):
    def body(comm):
        model = shard(make_net(), comm, use_orig_params=original)
        with summon(model, with_grads=True):
            assert all(param.grad is None for param in model.parameters())
        assert all(param.grad is None for param in model.parameters())
        return "done"

    assert all_ok(run_ranks(2, body)) == ["done"] * 2


@ORIGINAL
@pytest.mark.parametrize("rank0_only", [False, True])
def test_gradients_of_a_low_precision_are_whole_too(run_ranks, original, rank0_only):
    def body(comm):
        precision = MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)
        model = shard(nn.Linear(3, 3, bias=False), comm, use_orig_params=original, mixed_precision=precision)
        model(torch.ones(1, 3)).sum().backward()
        with summon(model, with_grads=True, rank0_only=rank0_only):
            if comm.rank == 0 or not rank0_only:
                assert model.weight.grad.tolist() == [[1, 1, 1]] * 3
        assert {param.grad.dtype for param in model.parameters()} == {torch.bfloat16}
        return "done"

    assert all_ok(run_ranks(2, body)) == ["done"] * 2


@ORIGINAL
def test_a_replaced_parameter_brings_its_gradient(run_ranks, original):
    def body(comm):
        model = shard(nn.Linear(3, 3, bias=False), comm, use_orig_params=original)
        model(torch.ones(1, 3)).sum().backward()
        with summon(model, with_grads=True):
            new = nn.Parameter(torch.full((3, 3), 2.0))
            new.grad = torch.full((3, 3), 3.0)
            model.module.weight = new
        with summon(model, with_grads=True):
            return model.weight.tolist(), model.weight.grad.tolist()

    assert all_ok(run_ranks(2, body)) == [([[2, 2, 2]] * 3, [[3, 3, 3]] * 3)] * 2


@ORIGINAL
def test_a_replaced_parameter_may_have_another_dtype(original):
    model = shard(nn.Linear(3, 3, bias=False), use_orig_params=original)
    model(torch.ones(1, 3)).sum().backward()
    with summon(model, with_grads=True):
        new = nn.Parameter(torch.full((3, 3), 2.0, dtype=torch.float64))
        new.grad = torch.full_like(new, 3.0)
        model.module.weight = new
    with summon(model, with_grads=True):
        assert (model.weight.dtype, model.weight.unique().item()) == (torch.float32, 2)
        assert (model.weight.grad.dtype, model.weight.grad.unique().item()) == (torch.float32, 3)


# In host memory


@ORIGINAL
@pytest.mark.parametrize("rank0_only", [False, True])
def test_whole_parameters_may_be_in_host_memory(run_ranks, original, rank0_only):
    def body(comm):
        model = shard(make_net(), comm, use_orig_params=original)
        with summon(model, offload_to_cpu=True, rank0_only=rank0_only), torch.no_grad():
            if comm.rank == 0 or not rank0_only:
                assert model.wide.weight.device == torch.device("cpu")
                model.wide.weight.fill_(3.0)
        with summon(model, writeback=False):
            return model.wide.weight.flatten().tolist()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert all_ok(run_ranks(2, body)) == [[3] * 5] * 2
    warned = [warning for warning in caught if "for each rank of the node" in str(warning.message)]
    assert bool(warned) == (not rank0_only)


def test_one_rank_alone_is_not_warned_of_copies(recwarn):
    with summon(shard(make_net()), offload_to_cpu=True):
        pass
    assert not recwarn.list


# What is refused


@ORIGINAL
def test_whole_parameters_are_not_summoned_twice(original):
    model = shard(make_net(), use_orig_params=original)
    for outer, inner, name in ((model, model, "Net"), (model, model.first, "Sequential"), (model.first, model, "Seq")):
        with summon(outer), pytest.raises(EngineError) as caught, summon(inner):
            pass
        assert str(caught.value).startswith(name)
        assert str(caught.value).endswith(": its parameters are already whole: do not nest summon_full_params")
        at_rest(model)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_whole_parameters_are_not_to_be_had_within_a_step(where):
    def look(*_):
        with summon(model.first):
            pass

    model = shard(make_net())
    if where == "forward":
        handle = model.module.wide.register_forward_hook(look)
    else:
        handle = model.module.wide.register_full_backward_hook(look)
    message = r"^first: summon_full_params was called during a forward or backward of the model: call it before the "
    with pytest.raises(EngineError, match=message):
        model(torch.ones(4, 3)).sum().backward()
    handle.remove()
    model(torch.ones(4, 3)).sum().backward()


def test_a_call_of_a_summoned_unit_is_refused():
    model = shard(make_net())
    for inside, name in ((model, "Net"), (model.first, "first")):
        message = f"^{name}: the model was called within summon_full_params: leave that context first$"
        with summon(inside):
            with pytest.raises(EngineError, match=message):
                model(torch.ones(4, 3))
            with pytest.raises(EngineError, match="summon_full_params"):
                model.first(torch.ones(4, 3))
        at_rest(model)
    model(torch.ones(4, 3)).sum().backward()


@ORIGINAL
@pytest.mark.parametrize("way", ["data", "replaced"])
def test_another_shape_is_named_and_nothing_is_written(run_ranks, original, way):
    def body(comm):
        model = shard(make_net(), comm, use_orig_params=original)
        before = shards_of(model)
        with pytest.raises(EngineError) as caught, summon(model):
            if way == "data":
                model.module.wide.weight.data = torch.zeros(5, 1, dtype=torch.float64)
            else:
                model.module.wide.weight = nn.Parameter(torch.zeros(5, 1, dtype=torch.float64))
        assert all(map(torch.equal, before, shards_of(model)))
        at_rest(model)
        with summon(model):
            assert model.wide.weight.shape == (1, 5)
        return str(caught.value)

    message = (
        "'wide.weight' has shape (5, 1) at the end of summon_full_params, and had (1, 5): shapes of sharded parameters "
        "cannot be changed"
    )
    assert all_ok(run_ranks(2, body)) == [message] * 2


@ORIGINAL
def test_another_shape_on_rank_0_alone_raises_on_all(run_ranks, original):
    def body(comm):
        model = shard(nn.Linear(3, 3, bias=False), comm, use_orig_params=original)
        with summon(model, rank0_only=True):
            if comm.rank == 0:
                model.module.weight.data = torch.zeros(2, 2)

    for error in run_ranks(2, body):
        assert type(error) is EngineError
        assert "'weight' has shape (2, 2)" in str(error)


@ORIGINAL
@pytest.mark.parametrize("arguments", [{}, {"writeback": False}, {"rank0_only": True}], ids=str)
def test_an_exception_within_leaves_shards(run_ranks, original, arguments):
    def body(comm):
        model = shard(make_net(), comm, use_orig_params=original)
        with pytest.raises(ZeroDivisionError), summon(model, **arguments):
            raise ZeroDivisionError
        at_rest(model)
        model(torch.ones(4, 3)).sum().backward()
        return "done"

    assert all_ok(run_ranks(2, body)) == ["done"] * 2


# One unit at a time


@ORIGINAL
def test_a_walk_shows_one_unit_at_a_time_under_its_own_name(run_ranks, original):
    def body(comm):
        model = nn.Sequential(shard(make_net(), comm, use_orig_params=original))
        units = [wrapper._unit for wrapper in FullyShardedDataParallel.fsdp_modules(model)]
        seen, whole = [], {}
        for name, module in walk_full_params(model):
            seen.append((name, type(module).__name__, [unit.training_state is TrainingState.SUMMON for unit in units]))
            for inner, param in module.named_parameters():
                if "_flat_param" not in inner and not (original and "_fsdp_wrapped_module" in inner):
                    whole[f"{name}.{inner}"] = param.detach().clone()
        at_rest(model[0])
        return seen, whole

    expected = {f"0.{name}": param for name, param in make_net().named_parameters()}
    for seen, whole in all_ok(run_ranks(2, body)):
        assert seen == [("0", "Net", [True, False]), ("0.first", "Sequential", [False, True])]
        assert whole.keys() == expected.keys()
        assert all(torch.equal(whole[name], expected[name]) for name in whole)


def test_a_walk_that_is_left_early_leaves_shards(run_ranks):
    def body(comm):
        model = shard(make_net(), comm)
        for _ in walk_full_params(model):
            break
        gc.collect()
        at_rest(model)
        return "done"

    assert all_ok(run_ranks(2, body)) == ["done"] * 2


def test_a_walk_may_change_values(run_ranks):
    def body(comm):
        model = shard(make_net(), comm)
        for arguments in ({"writeback": True}, {}):
            for _, module in walk_full_params(model, **arguments):
                with torch.no_grad():
                    for param in module.parameters(recurse=False):
                        param.fill_(4.0 if arguments else 5.0)
        with summon(model):
            return model.scale.item()

    assert all_ok(run_ranks(2, body)) == [4, 4]


def test_whole_values_are_gone_afterwards(run_ranks):
    def body(comm):
        model, gone = shard(make_net(), comm), []
        for _ in walk_full_params(model):
            assert [ref() for ref in gone] == [None] * len(gone)
            for wrapper in FullyShardedDataParallel.fsdp_modules(model):
                if wrapper._unit.training_state is TrainingState.SUMMON:
                    gone += [
                        weakref.ref(leaf.data.untyped_storage()) for leaf in wrapper._unit.sharded_params[0].leaves
                    ]
        return len(gone)

    assert all(count > 4 for count in all_ok(run_ranks(2, body)))


# apply


@ORIGINAL
def test_apply_sees_whole_parameters_of_every_module(run_ranks, original):
    def body(comm):
        model, seen = shard(make_net(), comm, use_orig_params=original), []

        def init(module):
            seen.append(type(module).__name__)
            if isinstance(module, nn.Linear):
                nn.init.constant_(module.weight, 2.0)
                assert module.weight.dim() == 2

        assert model.apply(init) is model
        with summon(model):
            return seen, model.first.module[0].weight.unique().item(), model.wide.weight.unique().item()

    plain = []
    make_net().apply(lambda module: plain.append(type(module).__name__))
    for seen, first, wide in all_ok(run_ranks(2, body)):
        assert [name for name in seen if name != "FullyShardedDataParallel"] == plain
        assert seen.count("FullyShardedDataParallel") == 2
        assert (first, wide) == (2, 2)
