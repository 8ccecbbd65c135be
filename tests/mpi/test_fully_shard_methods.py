"""Methods that ``fully_shard`` adds to modules: next to torch's where it has the same, and errors for wrong uses."""

import copy
import functools
import inspect
import pickle
import time

import pytest
import torch
import torch.distributed.fsdp as stock
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import hpcfsdp
import hpcfsdp.fsdp2 as ours
from hpcfsdp.comm.communicator import CommOptions
from hpcfsdp.errors import EngineError
from hpcfsdp.params.gradient import ShardedGrad
from tests.mpi.row_cases import Net, batches, make, same, train, whole

pytestmark = pytest.mark.ranks(2)


def kinds(model):
    """Of each parameter whether its module computes with rows or the whole."""
    found = [(path, module, name) for path, module in model.named_modules() for name in module._parameters]
    return str({f"{path}.{name}": isinstance(getattr(module, name), DTensor) for path, module, name in found})


def trainable(model):
    """Whether all that ``parameters()`` lists is what an optimizer steps."""
    return all(isinstance(param, DTensor) for param in model.parameters())


@pytest.mark.parametrize("async_op", [False, True])
def test_unshard_and_reshard(world, row_meshes, ours_on, async_op):
    def program(fsdp, mesh):
        model = make(fsdp, mesh)
        found = [kinds(model)]
        for _ in range(2):
            handle = model.blocks[1].unshard(async_op=async_op)
            if async_op:
                assert isinstance(handle, stock.UnshardHandle)
                handle.wait()
                handle.wait()
            else:
                assert handle is None
            found += [kinds(model), model.blocks[1].up.weight.detach().clone()]
            model.blocks[1].reshard()
            model.blocks[1].reshard()
            found.append(kinds(model))
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(2)
        return [*found, train(model, world.rank)]

    same(program, row_meshes["torch"], ours_on)


def test_unsharded_before_the_forward_and_within_it(world, row_meshes, ours_on):
    def program(fsdp, mesh):
        model = make(fsdp, mesh)
        found = []

        def ahead(*_):
            model.blocks[2].unshard(async_op=True)

        model.blocks[0].register_forward_pre_hook(ahead)
        for ids in batches(world.rank, 2):
            model.unshard(async_op=True)
            model.blocks[1].unshard()
            loss = model(ids).square().mean()
            assert fsdp is stock or trainable(model)
            found += [kinds(model), loss.detach()]
            loss.backward()
            found += [whole(param.grad) for param in model.parameters()]
            with torch.no_grad():
                for param in model.parameters():
                    param.sub_(param.grad, alpha=0.1)
                    param.grad = None
        return found

    same(program, row_meshes["torch"], ours_on)


@pytest.mark.parametrize("reshard", [True, False, 1])
def test_a_choice_of_one_rank_keeps_values_after_the_forward(world, row_meshes, reshard):
    mesh = row_meshes["torch"]
    layer = ours.fully_shard(nn.Linear(4, 4), mesh=mesh, reshard_after_forward=reshard)
    model = ours.fully_shard(nn.Sequential(layer, nn.Linear(4, 1)), mesh=mesh)
    loss = model(torch.ones(1, 4)).sum()
    assert isinstance(layer.weight, DTensor) is (reshard is True)
    loss.backward()
    assert isinstance(layer.weight, DTensor)


def test_what_modules_hold_after_forward_and_backward(world, row_meshes, ours_on):
    def program(fsdp, mesh):
        model, found = make(fsdp, mesh), []

        def look():
            assert fsdp is stock or trainable(model)
            found.append(kinds(model))

        first, second, third = batches(world.rank, 3)
        loss = model(first).square().mean()
        look()
        loss.backward()
        look()
        model.set_reshard_after_forward(False)
        loss = model(second).square().mean()
        look()
        loss.backward()
        model.set_reshard_after_forward(True)
        model.set_reshard_after_backward(False)
        loss = model(third).square().mean()
        look()
        loss.backward()
        look()
        loss = model(first).square().mean()
        found.append(loss.detach())
        loss.backward()
        return [*found, [whole(model.blocks[0].up.weight.detach().clone())]]

    same(program, row_meshes["torch"], ours_on)


def test_a_step_of_an_optimizer_ends_what_backwards_have_kept(world, ours_on):
    model = make(ours, ours_on)
    model.set_reshard_after_backward(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(2):
        ids = batches(world.rank, 2)[number]
        loss = model(ids).square().mean()
        loss.backward()
        with torch.no_grad():
            assert model(ids).square().mean() == loss
            optimizer.step()
            optimizer.zero_grad()
            assert model(ids).square().mean() < loss


@pytest.mark.parametrize("recurse", [True, False])
def test_gradient_divide_factor(world, row_meshes, ours_on, recurse):
    def program(fsdp, mesh):
        model = make(fsdp, mesh)
        for module in model.modules() if recurse else [model.blocks[1]]:
            if isinstance(module, stock.FSDPModule):
                module.set_gradient_divide_factor(3.0)
        return train(model, world.rank, clip=1e9)

    same(program, row_meshes["torch"], ours_on)


@pytest.mark.ranks(4)
def test_gradient_divide_factor_of_hybrid_sharding(world):
    def program(fsdp, mesh):
        model = make(fsdp, mesh)
        for module in model.modules():
            if isinstance(module, stock.FSDPModule):
                module.set_gradient_divide_factor(3.0)
        return train(model, world.rank, clip=1e9)

    same(program, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def test_all_reduce_hook(world, row_meshes, ours_on):
    def program(fsdp, mesh):
        model, calls = make(fsdp, mesh), []

        def hook(grad):
            calls.append(grad.dim())
            grad.mul_(3)

        model.blocks[1].set_all_reduce_hook(hook)
        found = train(model, world.rank, clip=1e9)
        return {**found, "calls": str(calls)}

    same(program, row_meshes["torch"], ours_on)


class Comm:
    """Counts, and does what torch does without it."""

    def __init__(self):
        self.calls = []

    def allocate(self, size, *, dtype, device):
        self.calls.append("allocate")
        return torch.empty(*size, dtype=dtype, device=device)


class Gather(Comm, AllGather):
    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.calls.append("gather")
        return torch.distributed.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class Scatter(Comm, ReduceScatter):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.calls.append("scatter")
        return torch.distributed.reduce_scatter_tensor(output_tensor, input_tensor, op, group=group, async_op=async_op)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch has renamed the functions
@pytest.mark.filterwarnings("ignore:.*is deprecated")
def test_custom_collectives(world, row_meshes, ours_on):
    used = []

    def program(fsdp, mesh):
        model, gather, scatter = make(fsdp, mesh), Gather(), Scatter()
        model.blocks[1].set_custom_all_gather(gather)
        model.blocks[2].set_custom_reduce_scatter(scatter)
        found = train(model, world.rank)
        used.append((gather.calls, scatter.calls))
        return found

    same(program, row_meshes["torch"], ours_on)
    gathered, scattered = used[-1]
    assert gathered == ["allocate", "gather"] * 6  # in each forward and each backward
    assert scattered == ["allocate", "scatter"] * 3


def test_explicit_prefetching(world, row_meshes):
    """The parameters of a block are being gathered while another computes."""
    seen = {}

    def program(fsdp, mesh):
        model = make(fsdp, mesh)
        first, second, third = model.blocks
        first.set_modules_to_forward_prefetch([second, third])
        third.set_modules_to_backward_prefetch([second, first])
        if fsdp is ours:

            def note(when):
                seen.setdefault(when, [block._hpcfsdp_unit.unsharded_params.is_gathered for block in model.blocks])

            first.register_forward_pre_hook(lambda *_: note("forward"))
            third.register_full_backward_hook(lambda *_: note("backward"))
        return train(model, world.rank)

    same(program, row_meshes["torch"], row_meshes["gloo"])
    assert seen["forward"] == [True, True, True]
    assert seen["backward"][:2] == [True, True]


def test_options_that_change_no_result(world, row_meshes, ours_on):
    def program(fsdp, mesh):
        model = make(fsdp, mesh)
        model.set_reduce_scatter_max_input_buffers(2)
        for module in model.modules():
            if isinstance(module, stock.FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        if fsdp is ours:
            model.set_separate_reduce_scatter_group(False)
            model.set_post_optim_event(torch.Event())
        model.set_is_last_backward(True)
        model.get_submodule("blocks.0").set_unshard_in_backward(True)
        first = train(model, world.rank)
        model.set_reduce_scatter_max_input_buffers(3)
        return [first, train(model, world.rank)]

    same(program, row_meshes["torch"], ours_on)


def test_an_embedding_is_not_gathered_in_the_backward(world, row_meshes, ours_on):
    def program(fsdp, mesh):
        torch.manual_seed(0)
        model = Net().double()
        fsdp.fully_shard(model.embed, mesh=mesh)
        model.embed.set_unshard_in_backward(False)
        return train(fsdp.fully_shard(model, mesh=mesh), world.rank)

    same(program, row_meshes["torch"], ours_on)


@pytest.mark.parametrize("fill", [False, True])
def test_parameters_that_no_rank_uses(world, row_meshes, ours_on, fill):
    class Partly(Net):
        def forward(self, ids):
            return self.head(self.embed(ids)) + self.blocks[0].up.bias.sum() * 0

    def program(fsdp, mesh):
        torch.manual_seed(0)
        model = fsdp.fully_shard(Partly().double(), mesh=mesh)
        model.set_reduce_scatter_unused_params(fill)
        model(batches(world.rank, 1)[0]).square().mean().backward()
        return {name: None if p.grad is None else whole(p.grad) for name, p in model.named_parameters()}

    found = same(program, row_meshes["torch"], ours_on)
    assert (found["norm.weight"] is None) is not fill


def test_parameters_that_one_rank_uses(world, ours_on):
    """torch needs an option to have ranks reduce the same gradients. Here the others contribute zeros."""
    torch.manual_seed(0)
    layers = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)}).double()

    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers

        def forward(self, x):
            return self.layers["a"](x) if world.rank else self.layers["b"](x)

    model = ours.fully_shard(Either(), mesh=ours_on)
    model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    assert torch.equal(whole(layers["b"].bias.grad), torch.full((3,), 1 / world.size, dtype=torch.float64))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_after_an_exception(world, row_meshes, ours_on, where):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("on purpose")

    model, other = make(ours, ours_on), make(ours, ours_on)

    def fail(_module, _arguments, out):
        if where == "forward":
            raise RuntimeError("on purpose")
        return Fails.apply(out)

    model.set_requires_gradient_sync(False)
    model(batches(world.rank, 1)[0]).sum().backward()
    model.set_requires_gradient_sync(True)
    handle = model.blocks[1].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        model(batches(world.rank, 1)[0]).sum().backward()
    handle.remove()
    model.reset_iter_state()
    torch.testing.assert_close(train(model, world.rank), train(other, world.rank), rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="inner unit"):
        model.blocks[0].reset_iter_state()


def test_a_method_that_computes(world, row_meshes, ours_on):
    class Generates(Net):
        def generate(self, ids, *, times):
            for _ in range(times):
                ids = self(ids).argmax(-1)
            return self.norm(self.embed(ids))

    def program(fsdp, mesh):
        torch.manual_seed(0)
        model = Generates().double()
        fsdp.fully_shard(model.norm, mesh=mesh)
        fsdp.fully_shard(model, mesh=mesh)
        fsdp.register_fsdp_forward_method(model, "generate")
        with torch.no_grad():
            found = model.generate(batches(world.rank, 1)[0], times=2)
        return found.clone()

    same(program, row_meshes["torch"], ours_on)
    plain = Net()
    ours.register_fsdp_forward_method(plain, "anything")  # no module of ours: nothing happens
    with pytest.raises(ValueError, match="has no method 'nothing'"):
        ours.register_fsdp_forward_method(make(ours, ours_on), "nothing")


def test_hooks_of_users_see_reduced_rows(world, row_meshes, ours_on):
    def program(fsdp, mesh):
        model, seen = make(fsdp, mesh), []

        def note(param):
            seen.append(whole(param.grad))
            param.grad = None

        for param in model.blocks[1].parameters():
            param.register_post_accumulate_grad_hook(note)
        model(batches(world.rank, 1)[0]).square().mean().backward()
        return [len(seen), seen, [param.grad is None for param in model.parameters()]]

    same(program, row_meshes["torch"], ours_on)


@pytest.mark.parametrize("how", ["loop", "foreach", "fused", "by hand"])
def test_a_step_between_forward_and_backward(world, row_meshes, ours_on, how):
    """The backward computes with the new values, of ranks that are late too."""

    def program(fsdp, mesh):
        model = make(fsdp, mesh, reshard_after_forward=True)
        options = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}.get(how, {})
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, **options)
        for ids in batches(world.rank, 2):
            loss = model(ids).square().mean()
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            if world.rank == 1:
                time.sleep(0.1)
            if how == "by hand":
                with torch.no_grad():
                    for param in model.parameters():
                        param.sub_(param.grad, alpha=0.1)
            else:
                optimizer.step()
            optimizer.zero_grad()
            loss.backward()
        return [whole(param.grad) for param in model.parameters()]

    same(program, row_meshes["torch"], ours_on)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kept", ["unshard", "after the forward"])
def test_no_rank_steps_while_another_reads_whole_parameters(world, row_meshes, kept):
    model = make(ours, row_meshes["shared memory"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=True)
    model.set_reshard_after_forward(kept != "after the forward")
    loss = model(batches(world.rank, 1)[0]).square().mean()
    if kept != "after the forward":
        loss.backward()
    if kept == "unshard":
        model.blocks[0].unshard()
    for param in model._hpcfsdp_unit.inner_units()[1].own:
        param.param.sharded.grad = torch.ones_like(param.param.sharded)
    seen = model.blocks[0].up.weight
    assert not isinstance(seen, DTensor)
    before = seen.detach().clone()
    if world.rank == 1:
        time.sleep(0.1)
        assert torch.equal(seen, before)
    optimizer.step()
    assert not torch.equal(whole(model.blocks[0].up.weight), before)


def test_an_inner_module_is_unsharded_before_the_first_forward(world, row_meshes, ours_on):
    def program(fsdp, mesh):
        model = make(fsdp, mesh)
        model.blocks[1].unshard(async_op=True)
        return train(model, world.rank)

    same(program, row_meshes["torch"], ours_on)


def test_a_unit_of_several_modules_is_unsharded_before_the_first_forward(world, row_meshes, ours_on):
    def program(fsdp, mesh):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
        fsdp.fully_shard([model[0], model[2]], mesh=mesh)
        fsdp.fully_shard(model, mesh=mesh)
        model[0].unshard()
        kinds = [isinstance(layer.weight, DTensor) for layer in model]
        model[2].reshard()
        model(torch.ones(2, 3) * world.rank).sum().backward()
        return kinds, [param.grad.full_tensor() for param in model.parameters()]

    same(program, row_meshes["torch"], ours_on)


def test_columns_are_contiguous_as_in_torch(world, row_meshes, ours_on):
    def program(fsdp, mesh):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 6))
        fsdp.fully_shard(model, mesh=mesh, shard_placement_fn=lambda param: Shard(param.dim() - 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(2, 8) * world.rank).square().sum().backward()
            optimizer.step()
        rows = [param.to_local() for param in model.parameters()]
        wholes = [param.full_tensor() for param in model.parameters()]
        return [(local.stride(), local.is_contiguous()) for local in rows], wholes

    same(program, row_meshes["torch"], ours_on)


def test_several_outermost_modules_are_resharded_in_one_order(world, row_meshes):
    kinds = [type(f"Linear{number}", (nn.Linear,), {}) for number in range(4)]
    layers = [ours.fully_shard(kind(3, 3), mesh=row_meshes["shared memory"]) for kind in kinds]
    optimizer = torch.optim.SGD([param for layer in layers for param in layer.parameters()], lr=0.1)
    for layer in layers:
        layer.unshard()
    optimizer.step()
    assert all(isinstance(param, DTensor) for layer in layers for param in layer.parameters())


@pytest.mark.ranks(4)
def test_use_of_parameters_on_another_mesh_of_as_many_ranks(world):
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))

    class Uses(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.expert = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            x = self.first(x)
            return (
                x + self.expert(x) * (1.0 if world.rank == 2 else 0.0)
                if world.rank == 2
                else x + 0 * self.expert(x.detach()).detach()
            )

    for _ in range(square.get_local_rank("a")):  # ranks that share the expert have called other models before
        ours.fully_shard(nn.Linear(3, 3), mesh=square["b"])(torch.ones(2, 3))
    model = Uses().double()
    ours.fully_shard(model.expert, mesh=square["a"])
    ours.fully_shard(model, mesh=square["b"])
    model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
    has = world.comm.allgather(model.expert.weight.grad is not None)
    column = square.mesh[:, square.get_local_rank("b")].tolist()
    assert has[column[0]] == has[column[1]] == (2 in column)


def test_explicit_prefetching_and_recomputation(world, row_meshes):
    """Computing a forward again for the backward gathers nothing ahead."""
    seen = []
    torch.manual_seed(0)
    model = Net().double()
    for block in model.blocks:
        ours.fully_shard(block, mesh=row_meshes["gloo"])
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    ours.fully_shard(model, mesh=row_meshes["gloo"])
    first, second, third = model.blocks
    first.set_modules_to_forward_prefetch([second, third])
    first.register_full_backward_hook(
        lambda *_: seen.append([block._hpcfsdp_unit.unsharded_params.is_gathered for block in (second, third)])
    )
    for ids in batches(world.rank, 2):
        model(ids).square().mean().backward()
    assert seen == [[False, False]] * 2


@pytest.mark.parametrize("micro", [1, 2])
def test_a_weight_of_the_outermost_module_is_used_outside_of_its_forward(world, row_meshes, ours_on, micro):
    """As by losses that take the head's weight."""

    class Body(Net):
        def forward(self, ids):
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x)
            return self.norm(x)

    def program(fsdp, mesh):
        torch.manual_seed(0)
        model = Body().double()
        for block in model.blocks:
            fsdp.fully_shard(block, mesh=mesh)
        fsdp.fully_shard(model, mesh=mesh)
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
        data = iter(batches(world.rank, 3 * micro))
        for _ in range(3):
            for number in range(micro):
                model.set_requires_gradient_sync(number == micro - 1)
                hidden = model(next(data))
                loss = nn.functional.linear(hidden, model.head.weight, model.head.bias).square().mean()
                loss.backward()
                found.append(loss.detach())
            found += [None if p.grad is None else whole(p.grad) for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        return found

    same(program, row_meshes["torch"], ours_on)


def test_the_hook_sees_all_rows_of_a_unit_at_once(world, row_meshes, ours_on):
    def program(fsdp, mesh):
        torch.manual_seed(0)
        model = fsdp.fully_shard(nn.Sequential(nn.Linear(1200, 1000), nn.Linear(1000, 1200)), mesh=mesh)
        sizes = []
        model.set_all_reduce_hook(lambda grad: sizes.append(grad.numel()))
        model(torch.ones(1, 1200)).sum().backward()
        return [len(sizes)]

    same(program, row_meshes["torch"], ours_on)


def test_values_stay_between_forwards_without_gradients(world, row_meshes, ours_on):
    def program(fsdp, mesh):
        model = make(fsdp, mesh)
        model.set_reshard_after_forward(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for ids in batches(world.rank, 3):
            with torch.no_grad():
                for _ in range(2):
                    found.append(model(ids).clone())
                    assert fsdp is stock or trainable(model)
                if fsdp is ours:
                    for param in model.parameters():
                        param.mul_(2)  # after which all are gathered anew
                    found.append(model(ids).clone())
                    for param in model.parameters():
                        param.mul_(0.5)
                else:
                    model.reshard()
                    for block in model.blocks:
                        block.reshard()
                    for param in model.parameters():
                        param.mul_(2)
                    found.append(model(ids).clone())
                    model.reshard()
                    for block in model.blocks:
                        block.reshard()
                    for param in model.parameters():
                        param.mul_(0.5)
        model.reshard()
        for block in model.blocks:
            block.reshard()
        model(ids).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found.append(model(ids).clone())
        return found

    same(program, row_meshes["torch"], ours_on)


def test_clipping_by_torch_is_right_where_one_rank_has_all_rows(world, row_meshes):
    """And is not taken for clipping by the norm of a shard, which raises a warning for the wrapper class."""

    def program(fsdp, mesh):
        torch.manual_seed(0)
        model = fsdp.fully_shard(nn.Linear(5, 1).double(), mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator, norms = torch.Generator().manual_seed(world.rank), []
        for _ in range(6):
            model(torch.randn(4, 5, generator=generator, dtype=torch.float64)).square().sum().backward()
            norms.append(whole(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
        return [norms, whole(model.weight)]

    same(program, row_meshes["torch"])


def test_lists_with_modules_inside_of_others(world, row_meshes):
    def program(fsdp, mesh):
        torch.manual_seed(0)
        model = Net().double()
        fsdp.fully_shard([model.blocks[0], model.blocks[0].up, model.norm], mesh=mesh)
        fsdp.fully_shard(model, mesh=mesh)
        names = str([type(module).__name__ for module in model.modules()])
        return {**train(model, world.rank), "names": names}

    same(program, row_meshes["torch"])


# Wrong uses


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("build", "error", "match"),
    [
        (lambda: ours.fully_shard(nn.ModuleList([nn.Linear(2, 2)])), ValueError, "has no forward"),
        (lambda: ours.fully_shard([]), ValueError, "empty list"),
        (lambda: ours.fully_shard([nn.Linear(2, 2)] * 2), ValueError, "names a module twice"),
        (lambda: ours.fully_shard("model"), TypeError, "not str"),
        (lambda: ours.fully_shard(ours.fully_shard(nn.Linear(2, 2))), ValueError, "twice"),
        (lambda: ours.fully_shard(Scalar()), ValueError, "has no dimension"),
        (lambda: ours.fully_shard(nn.Sequential(stock.fully_shard(nn.Linear(2, 2)))), ValueError, "torch's"),
        (
            lambda: ours.fully_shard(nn.Sequential(hpcfsdp.FullyShardedDataParallel(nn.Linear(2, 2)))),
            ValueError,
            "wrapped in FullyShardedDataParallel",
        ),
        (lambda: ours.fully_shard(nn.Linear(2, 2), mesh="all"), TypeError, "must be a torch DeviceMesh"),
        (
            lambda: ours.fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1, 1, 1))),
            ValueError,
            "one dimension, or of two",
        ),
        (
            lambda: ours.fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1, 1))),
            ValueError,
            "needs names",
        ),
        (lambda: ours.fully_shard(nn.Linear(2, 2), mp_policy=torch.bfloat16), TypeError, "MixedPrecisionPolicy"),
        (lambda: ours.fully_shard(nn.Linear(2, 2), offload_policy=True), TypeError, "OffloadPolicy"),
        (lambda: ours.fully_shard(nn.Linear(2, 2), reshard_after_forward=2), ValueError, "must divide the 1 rank"),
        (lambda: ours.fully_shard(nn.Linear(2, 2), reshard_after_forward="yes"), ValueError, "'yes'"),
        (
            lambda: ours.fully_shard(nn.Linear(2, 2), shard_placement_fn=lambda _: Replicate()),
            ValueError,
            "must be a Shard",
        ),
        (
            lambda: ours.fully_shard(nn.Linear(2, 2), shard_placement_fn=lambda _: stock_shard(3)),
            ValueError,
            r"which has 2 dimension\(s\)",
        ),
        (lambda: ours.fully_shard(nn.Linear(2, 2), dp_mesh_dims=object()), TypeError, "dp_mesh_dims"),
        (lambda: copy.copy(ours.fully_shard(nn.Linear(2, 2))), EngineError, "cannot be pickled"),
        (lambda: pickle.dumps(ours.fully_shard(nn.Linear(2, 2))), EngineError, "cannot be pickled"),
        (lambda: ours.share_comm_ctx([nn.Linear(2, 2)]), ValueError, "a Linear: shard it"),
        (
            lambda: ours.fully_shard(nn.Linear(2, 2)).set_modules_to_forward_prefetch([nn.Linear(2, 2)]),
            ValueError,
            "a Linear: shard it",
        ),
        (lambda: ours.fully_shard(nn.Linear(2, 2)).set_reshard_after_forward("all"), ValueError, "not 'all'"),
        (lambda: ours.fully_shard(nn.Linear(2, 2)).set_requires_gradient_sync(None), ValueError, "not None"),
        (lambda: ours.fully_shard(nn.Linear(2, 2)).set_gradient_divide_factor(0), ValueError, "other than 0"),
        (lambda: ours.fully_shard(nn.Linear(2, 2)).set_reduce_scatter_max_input_buffers(0), ValueError, "got 0"),
        (lambda: ours.fully_shard(nn.Linear(2, 2)).set_reduce_scatter_max_input_buffers(True), TypeError, "bool"),
        (lambda: ours.fully_shard(nn.Linear(2, 2)).set_symm_mem_for_comm("CUDA"), ValueError, "not 'CUDA'"),
        (lambda: ours.fully_shard(nn.Linear(2, 2), comm_options={"max_ctas": 4}), TypeError, "CommOptions or None"),
        (lambda: ours.fully_shard(nn.Linear(2, 2))._get_fsdp_state()._comm_ctx, EngineError, "its own fully_shard"),
        (lambda: hpcfsdp.FullyShardedDataParallel(ours.fully_shard(nn.Linear(2, 2))), ValueError, "fully_shard"),
    ],
)
def test_wrong_uses(world, build, error, match):
    with pytest.raises(error, match=match):
        build()


def test_modules_inside_of_a_unit_are_called_in_its_forward_alone(world, ours_on):
    class Peeks(Net):
        def forward(self, ids):
            return self.blocks[1].up(self.embed(ids)).sum()

    torch.manual_seed(0)
    model = Peeks()
    for module in (*model.blocks, model):
        ours.fully_shard(module, mesh=ours_on)
    up, ids = model.blocks[1].up, batches(0, 1)[0]
    for call in (lambda: model(ids), lambda: up(torch.ones(2, 7)), lambda: model.embed(ids)):
        with pytest.raises(EngineError, match=r"^(blocks\.1: its Linear|Peeks: its Embedding) was called .* outside"):
            call()
    model.reset_iter_state()
    rows = DTensor.from_local(torch.ones(2, 7), up.weight.device_mesh, [Replicate()])
    copied = copy.deepcopy(up)
    expected = up(rows).full_tensor()
    torch.testing.assert_close(copied(rows).full_tensor(), expected)
    model.blocks[1].unshard()
    torch.testing.assert_close(up(torch.ones(2, 7)), expected)
    model(ids).backward()


def test_the_forward_of_a_layer_decides_whether_it_is_refused_outside_of_its_unit(world, ours_on):
    class Named(nn.Linear):
        """Its forward is torch's."""

    class Converts(nn.Linear):
        def forward(self, x):
            return x @ self.weight.full_tensor().T

    torch.manual_seed(0)
    model = nn.Sequential(Named(3, 2), Converts(3, 2))
    x, expected = torch.ones(1, 3), model[1].weight.sum(1)
    ours.fully_shard(model, mesh=ours_on)
    with pytest.raises(EngineError, match="its Named was called with plain tensors"):
        model[0](x)
    torch.testing.assert_close(model[1](x)[0], expected)


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


def stock_shard(dim):
    from torch.distributed.tensor import Shard

    return Shard(dim)


@pytest.mark.ranks(2)
def test_a_parameter_tied_to_one_of_another_unit(world):
    model = Net(tied=True)
    ours.fully_shard(model.embed)
    with pytest.raises(ValueError, match="tied to 'weight'"):
        ours.fully_shard(model)


@pytest.mark.ranks(2)
def test_an_optimizer_from_before(world):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ours.fully_shard(model)
    model(batches(0, 1)[0]).sum().backward()
    with pytest.raises(EngineError, match="sharded after the optimizer was built"):
        optimizer.step()


@pytest.mark.ranks(2)
def test_an_optimizer_from_before_an_assignment(world):
    model = make(ours, None)
    model(batches(0, 1)[0]).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    model(batches(0, 1)[0]).sum().backward()
    with pytest.raises(EngineError, match="assigned another"):
        optimizer.step()


@pytest.mark.ranks(2)
def test_a_list_is_no_outermost_module(world):
    first, second = ours.fully_shard([nn.Linear(2, 2), nn.Linear(2, 2)])
    with pytest.raises(RuntimeError, match="called first"):
        first(torch.ones(1, 2))
    del second


@pytest.mark.ranks(2)
def test_a_list_reduces_its_gradients_before_the_backward_goes_on(world, monkeypatch):
    """Each module of the list is called once: no gradient can follow from another call."""
    model, order = make(ours, None, grouped=True), []
    reduce = ShardedGrad.reduce

    def noted(grad, *arguments, **options):
        order.append(grad.name)
        return reduce(grad, *arguments, **options)

    monkeypatch.setattr(ShardedGrad, "reduce", noted)
    model(batches(world.rank, 1)[0]).sum().backward()
    assert order[:2] == ["norm", "blocks.2"]


@pytest.mark.ranks(2)
def test_a_wrong_parameter_is_assigned(world):
    model = make(ours, None)
    model.norm.weight = nn.Parameter(torch.ones(7, dtype=torch.float64))
    with pytest.raises(EngineError, match="assign one like it"):
        model(batches(0, 1)[0])


@pytest.mark.ranks(2)
def test_ranks_with_different_models(world):
    with pytest.raises(hpcfsdp.errors.DisagreementError, match="different models"):
        ours.fully_shard(nn.Linear(4, 4 + world.rank))


def test_options_that_a_backend_lacks(world):
    """One rank alone sends nothing, and needs none."""
    for call, text in (
        (lambda: ours.fully_shard(nn.Linear(2, 2), comm_options=CommOptions(max_ctas=4)), "max_ctas=4: le"),
        (
            lambda: hpcfsdp.FullyShardedDataParallel(nn.Linear(2, 2), comm_options=CommOptions(sums_by="backend")),
            "does not have sums_by='backend'",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            call()


@pytest.mark.ranks(1)
def test_every_method_of_torch_s_class_is_there(world):
    """A method of torch that is not would read the state of torch's own engine."""
    public = {name for name in vars(stock.FSDPModule) if not name.startswith("_")}
    missing = public - set(vars(ours.FSDPModule))
    assert not missing
    for name in public:
        theirs, own = (inspect.signature(getattr(kind, name)) for kind in (stock.FSDPModule, ours.FSDPModule))
        assert list(theirs.parameters) == list(own.parameters), name
    theirs, own = (
        [(param.name, param.kind) for param in inspect.signature(front.fully_shard).parameters.values()]
        for front in (stock, ours)
    )
    assert own == [*theirs, ("comm_options", inspect.Parameter.KEYWORD_ONLY)]
    for name in ("register_fsdp_forward_method", "share_comm_ctx"):
        theirs, own = (inspect.signature(getattr(module, name)) for module in (stock, ours))
        assert list(theirs.parameters) == list(own.parameters)
    names = {"CPUOffloadPolicy", "CommOptions", "FSDPModule", "MixedPrecisionPolicy", "OffloadPolicy", "UnshardHandle"}
    names |= {"DataParallelMeshDims", "fully_shard", "register_fsdp_forward_method", "share_comm_ctx"}
    assert names == set(ours.__all__)
