"""``fully_shard`` trains as torch's does: losses, norms, gradients, parameters and state, whatever the options."""

import contextlib
import copy
import functools

import pytest
import torch
import torch.distributed.fsdp as stock
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import hpcfsdp
import hpcfsdp.fsdp2 as ours
from hpcfsdp.fsdp import FullyShardedDataParallel
from tests.mpi.row_cases import WIDTH, Net, batches, make, same, train, whole


@pytest.mark.ranks(2, 1, 3, 4)
@pytest.mark.parametrize("reshard", [None, False, True, 1])
def test_training(world, row_meshes, ours_on, reshard):
    def program(fsdp, mesh):
        return train(make(fsdp, mesh, reshard_after_forward=reshard), world.rank)

    same(program, row_meshes["torch"], ours_on)


@pytest.mark.ranks(3)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # torch's, about views
@pytest.mark.parametrize("reduce", [torch.bfloat16, torch.float16], ids=str)
def test_sums_of_the_backend_are_those_of_torch_to_the_last_bit(world, row_meshes, reduce):
    policy = ours.MixedPrecisionPolicy(torch.bfloat16, reduce)

    def grads(fsdp, mesh, **options):
        model = make(fsdp, mesh, dtype=torch.float32, mp_policy=policy, **options)
        for ids in batches(world.rank, 2):
            model(ids).square().mean().backward()
        return [whole(param.grad) for param in model.parameters()]

    expected, gloo = grads(stock, row_meshes["gloo"]), row_meshes["gloo"]
    found = grads(ours, gloo, comm_options=ours.CommOptions(sums_by="backend"))
    assert all(map(torch.equal, found, expected))
    assert not all(map(torch.equal, grads(ours, gloo), expected)), "the test can tell"


@pytest.mark.ranks(2, 3)
def test_without_a_mesh_over_all_ranks(world):
    same(lambda fsdp, _: train(make(fsdp, None), world.rank), None)


@pytest.mark.parametrize("reshard", [None, False])
def test_a_list_of_modules_is_one_unit(world, row_meshes, ours_on, reshard):
    def program(fsdp, mesh):
        return train(make(fsdp, mesh, grouped=True, reshard_after_forward=reshard), world.rank, micro=2)

    same(program, row_meshes["torch"], ours_on)


def test_tied_parameters_of_one_unit(world, row_meshes, ours_on):
    same(lambda fsdp, mesh: train(make(fsdp, mesh, tied=True), world.rank), row_meshes["torch"], ours_on)


@pytest.mark.parametrize("dim", ["1", "-1", "by shape"])
def test_parameters_cut_along_other_dimensions(world, row_meshes, ours_on, dim):
    width = 4 * world.size

    def placement(param):
        if dim == "by shape":
            return Shard(int(param.shape.index(max(param.shape)))) if param.dim() > 1 and param.shape[1] > 11 else None
        return Shard(int(dim)) if param.dim() > 1 and param.shape[1] % world.size == 0 else None

    def program(fsdp, mesh):
        model = make(fsdp, mesh, width=width, shard_placement_fn=placement)
        placements = {name: param.placements for name, param in model.named_parameters()}
        shapes = {name: param.to_local().shape for name, param in model.named_parameters()}
        return {**train(model, world.rank), "placements": str(placements), "shapes": str(shapes)}

    same(program, row_meshes["torch"], ours_on)


@pytest.mark.ranks(3, 2)
def test_columns_that_no_number_of_ranks_divides(world, ours_on):
    """torch refuses them; the result is that of rows."""

    def run(**options):
        model = make(ours, ours_on, **options)
        return train(model, world.rank)

    by_columns = run(shard_placement_fn=lambda param: Shard(param.dim() - 1))
    torch.testing.assert_close(by_columns, run(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["frozen blocks", "frozen embedding", "frozen biases", "frozen later", "thawed"])
def test_frozen_parameters(world, row_meshes, ours_on, kind):
    def freeze(model):
        if kind == "frozen blocks":
            model.blocks[1].requires_grad_(False)
        elif kind == "frozen embedding":
            model.embed.requires_grad_(False)
        elif kind in ("frozen biases", "thawed"):
            for name, param in model.named_parameters():
                param.requires_grad_(not name.endswith("bias"))

    def program(fsdp, mesh):
        model = make(fsdp, mesh, prepare=freeze)
        first = train(model, world.rank, steps=2)
        if kind == "frozen later":
            model.blocks[0].requires_grad_(False)
        elif kind == "thawed":
            model.requires_grad_(True)
        return [first, train(model, world.rank, steps=2)]

    same(program, row_meshes["torch"], ours_on)


class WithEmpty(nn.Linear):
    """Has parameters without elements; the gradient of one comes first."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.rows, self.columns = nn.Parameter(torch.empty(0, WIDTH)), nn.Parameter(torch.empty(3, 0))

    def forward(self, x):
        return torch.cat([super().forward(x) + self.columns.sum(), self.rows])


class OnlyEmpty(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.empty(0, WIDTH))

    def forward(self, x):
        return torch.cat([x, self.rows])


@pytest.mark.parametrize("kind", ["rows", "flat", "original"])
def test_parameters_without_elements(world, ours_on, kind):
    torch.manual_seed(0)
    plain = nn.Sequential(WithEmpty(), OnlyEmpty(), WithEmpty()).double()
    model = copy.deepcopy(plain)
    if kind == "rows":
        for module in (*model, model):
            ours.fully_shard(module, mesh=ours_on)
    else:
        policy = ModuleWrapPolicy({WithEmpty, OnlyEmpty})
        model = FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=kind == "original")
    for _ in range(2):
        norms = []
        for net in (plain, model):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            optimizer.zero_grad()
            net(torch.ones(2, WIDTH, dtype=torch.float64)).square().sum().backward()
            if net is model and kind != "rows":
                norm = model.clip_grad_norm_(0.5)
            else:
                norm = whole(nn.utils.clip_grad_norm_(net.parameters(), 0.5))
            optimizer.step()
            norms.append(norm)
        torch.testing.assert_close(norms[1], norms[0])
    found = {name: whole(value) for name, value in model.state_dict().items()}
    torch.testing.assert_close(found, dict(plain.state_dict()))


@pytest.mark.parametrize("recurse", [True, False])
def test_gradients_that_are_not_synchronized(world, row_meshes, ours_on, recurse):
    def program(fsdp, mesh):
        model = make(fsdp, mesh)

        def around(number):
            (model if recurse else model.blocks[1]).set_requires_gradient_sync(number == 2, recurse=recurse)
            return contextlib.nullcontext()

        return train(model, world.rank, micro=3, around=around)

    same(program, row_meshes["torch"], ours_on)


def test_gradients_wait_unseen_until_they_are_synchronized(world, row_meshes, ours_on):
    def program(fsdp, mesh):
        model = make(fsdp, mesh)
        model.set_requires_gradient_sync(False)
        first, second = batches(world.rank, 2)
        model(first).sum().backward()
        seen = [param.grad is None for param in model.parameters()]
        model.set_requires_gradient_sync(True)
        model.set_is_last_backward(True)
        model(second).sum().backward()
        return [seen, [whole(param.grad) for param in model.parameters()]]

    assert all(same(program, row_meshes["torch"], ours_on)[0])


@pytest.mark.parametrize("kind", ["reentrant", "not reentrant", "wrapper inside", "wrapper outside"])
def test_activation_checkpointing(world, row_meshes, ours_on, kind):
    def program(fsdp, mesh):
        torch.manual_seed(0)
        model = Net().double()
        for index, block in enumerate(model.blocks):
            if kind == "wrapper inside":
                block = model.blocks[index] = checkpoint_wrapper(block)
            fsdp.fully_shard(block, mesh=mesh)
            if kind == "wrapper outside":
                model.blocks[index] = checkpoint_wrapper(block)
            elif kind.endswith("reentrant"):
                call = functools.partial(checkpoint, block.forward, use_reentrant=kind == "reentrant")
                block.forward = call
        return train(fsdp.fully_shard(model, mesh=mesh), world.rank)

    same(program, row_meshes["torch"], ours_on)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's compiler reads it
@pytest.mark.parametrize("where", ["model", "blocks before", "blocks after", "in place"])
def test_compiled(world, row_meshes, ours_on, where):
    def program(fsdp, mesh):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Net().double()
        for index, block in enumerate(model.blocks):
            if where == "blocks before":
                block = model.blocks[index] = torch.compile(block, backend="aot_eager")
            elif where == "in place":
                block.compile(backend="aot_eager")
            fsdp.fully_shard(block, mesh=mesh)
            if where == "blocks after":
                model.blocks[index] = torch.compile(block, backend="aot_eager")
        fsdp.fully_shard(model, mesh=mesh)
        if where == "model":
            compiled = torch.compile(model, backend="aot_eager")
            return train(compiled, world.rank)
        return train(model, world.rank)

    same(program, row_meshes["torch"], ours_on)


@pytest.mark.parametrize("policy", ["param", "reduce", "both", "output", "no cast of inputs"])
def test_mixed_precision(world, row_meshes, ours_on, policy):
    """Sums over ranks are those of two values, or exact: torch rounds them to 16 bits after each addition."""
    bf16, fp32 = torch.bfloat16, torch.float32
    arguments = {
        "param": {"param_dtype": bf16, "reduce_dtype": fp32},
        "reduce": {"reduce_dtype": torch.float64},
        "both": {"param_dtype": bf16, "reduce_dtype": bf16},
        "output": {"param_dtype": bf16, "reduce_dtype": fp32, "output_dtype": torch.float64},
        "no cast of inputs": {"param_dtype": torch.float64, "reduce_dtype": fp32, "cast_forward_inputs": False},
    }[policy]

    def program(fsdp, mesh):
        inner = {key: value for key, value in arguments.items() if key != "output_dtype"}
        model = make(
            fsdp, mesh, dtype=fp32, mp_policy=[fsdp.MixedPrecisionPolicy(**each) for each in (inner, arguments)]
        )
        dtypes = []
        model.blocks[1].register_forward_hook(lambda _module, args, out: dtypes.append((args[0].dtype, out.dtype)))
        found = train(model, world.rank)
        params = str([param.dtype for param in model.parameters()])
        dtypes.append(model(batches(0, 1)[0]).dtype)
        return {**found, "dtypes": str(dtypes), "params": params}

    coarse = {"rtol": 0.05, "atol": 2e-3} if policy == "both" else {"rtol": 1e-4, "atol": 1e-5}
    same(program, row_meshes["torch"], ours_on, **coarse)


def test_offload(world, row_meshes, ours_on):
    def program(fsdp, mesh):
        return train(make(fsdp, mesh, offload_policy=fsdp.CPUOffloadPolicy(pin_memory=False)), world.rank)

    same(program, row_meshes["torch"], ours_on)


OPTIMIZERS = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW fused": functools.partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "AdamW foreach": functools.partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=1e-3),
    "Adagrad": functools.partial(torch.optim.Adagrad, lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(world, row_meshes, ours_on, name):
    def program(fsdp, mesh):
        model = make(fsdp, mesh)
        return train(model, world.rank, optimizer=OPTIMIZERS[name](model.parameters()))

    same(program, row_meshes["torch"], ours_on)


@pytest.mark.parametrize("order", ["to_empty", "assign", "load"])
def test_a_model_of_the_meta_device(world, row_meshes, ours_on, order):
    """torch's recipe: shard first, then allocate, then initialise."""

    def program(fsdp, mesh):
        torch.manual_seed(1)
        source = Net().double().state_dict()
        with torch.device("meta"):
            model = Net().double()
        for block in model.blocks:
            fsdp.fully_shard(block, mesh=mesh)
        fsdp.fully_shard(model, mesh=mesh)
        assert all(param.is_meta and isinstance(param, DTensor) for param in model.parameters())
        if order == "assign":
            model.load_state_dict(
                {
                    name: value if name.endswith("shift") else _cut_like(value, dict(model.named_parameters())[name])
                    for name, value in source.items()
                },
                assign=True,
            )
        else:
            model.to_empty(device="cpu")
            with torch.no_grad():
                if order == "to_empty":
                    for name, param in model.named_parameters():
                        param.copy_(_cut_like(source[name], param))
                else:
                    named = dict(model.named_parameters())
                    cut = {name: _cut_like(source[name], param) for name, param in named.items()}
                    assert not model.load_state_dict(cut, strict=False).unexpected_keys
                for name, buffer in model.named_buffers():
                    buffer.copy_(source[name])
        return train(model, world.rank)

    same(program, row_meshes["torch"], ours_on)


def _cut_like(value, param):
    """A whole tensor, the same on all ranks, cut like a parameter."""
    local = param.to_local()
    rows = -(-value.shape[0] // param.device_mesh.size())
    begin = min(param.device_mesh.get_local_rank() * rows, value.shape[0])
    part = value[begin : begin + local.shape[0]].clone()
    return DTensor.from_local(
        part, param.device_mesh, param.placements, run_check=False, shape=value.shape, stride=value.stride()
    )


def test_parameters_that_are_cast_and_replaced_between_steps(world, row_meshes, ours_on):
    def program(fsdp, mesh):
        model = make(fsdp, mesh)
        first = train(model, world.rank, steps=1)
        model.to(torch.float32)
        model.double()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)
        second = train(model, world.rank, steps=1)
        model.load_state_dict(state, assign=True)
        return [first, second, train(model, world.rank, steps=1)]

    same(program, row_meshes["torch"], ours_on)


def test_parameters_that_change_between_forward_and_backward(world, row_meshes, ours_on):
    """The backward computes with the new values where the forward has freed the old ones."""

    def program(fsdp, mesh):
        model = make(fsdp, mesh, reshard_after_forward=True)
        loss = model(batches(world.rank, 1)[0]).square().mean()
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1.5)
        loss.backward()
        return [whole(param.grad) for param in model.parameters()]

    same(program, row_meshes["torch"], ours_on)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("all_reduce", [True, False], ids=["in each backward", "in the last backward"])
def test_hybrid_sharding(world, all_reduce):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def program(fsdp, mesh):
        model = make(fsdp, mesh)

        def around(number):
            model.set_requires_all_reduce(all_reduce or number == 1)
            return contextlib.nullcontext()

        found = train(model, world.rank, micro=2, around=around)
        return {**found, "placements": str([param.placements for param in model.parameters()])}

    same(program, mesh)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("names", [("shard", "tensor"), ("replicate", "shard")])
def test_hybrid_or_tensor_parallel_on_one_of_two_dimensions(world, names):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)

    def program(fsdp, mesh):
        return train(make(fsdp, mesh[names[0]]), mesh[names[0]].get_local_rank())

    same(program, mesh)


@pytest.mark.ranks(4, 2)
@pytest.mark.parametrize("style", ["rows and columns", "all rows"])
def test_tensor_parallel(world, style):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    shards = world.size // 2
    mesh = init_device_mesh("cpu", (shards, 2), mesh_dim_names=("shard", "tensor"))

    def program(fsdp, mesh):
        torch.manual_seed(0)
        model = Net(width=8).double()
        for block in model.blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            if style == "all rows":
                plan["down"] = ColwiseParallel(output_layouts=Replicate(), input_layouts=Shard(-1))
            parallelize_module(block, mesh["tensor"], plan)
            fsdp.fully_shard(block, mesh=mesh["shard"])
        fsdp.fully_shard(model, mesh=mesh["shard"])
        # Norms of gradients on several meshes cannot be joined: torch refuses that, too.
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found = []
        for ids in batches(mesh["shard"].get_local_rank(), 3):
            loss = model(ids).square().mean()
            loss.backward()
            found += [loss.detach(), *(whole(param.grad) for param in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
        placed = {name: (str(p.placements), p.to_local().shape) for name, p in model.named_parameters()}
        return {"found": found, "placed": str(placed), "state": {n: whole(v) for n, v in model.state_dict().items()}}

    same(program, mesh)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("how", ["a unit of its own", "by placement"])
def test_experts_on_another_mesh(world, how):
    whole_mesh = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "inner"))

    def program(fsdp, mesh):
        from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

        torch.manual_seed(0)
        model = Net(width=8).double()
        inner = square["inner"]
        for block in model.blocks:
            if how == "by placement":
                chosen = set(block.up.parameters())
                info = FSDPMeshInfo(inner, shard_mesh_dim=0)
                fsdp.fully_shard(
                    block,
                    mesh=mesh,
                    shard_placement_fn=lambda param, chosen=chosen, info=info: (
                        ShardPlacementResult(Shard(0), info) if param in chosen else None
                    ),
                )
            else:
                fsdp.fully_shard(block.up, mesh=inner)
                fsdp.fully_shard(block, mesh=mesh)
        fsdp.fully_shard(model, mesh=mesh)
        found = []
        for ids in batches(world.rank, 2):
            loss = model(ids).square().mean()
            loss.backward()
            found += [loss.detach(), *(whole(param.grad) for param in model.parameters())]
            with torch.no_grad():
                for param in model.parameters():
                    param.sub_(param.grad, alpha=0.1)
                    param.grad = None
        return found

    same(program, whole_mesh)


class Experts(nn.Module):
    """Of which each rank of a mesh has some."""

    def __init__(self, mesh):
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(torch.randn(4, 8, 8).double(), mesh, [Shard(0)]))

    def forward(self, x):
        return x + torch.einsum("...i,eij->...j", x, self.weight.to_local())


@pytest.mark.ranks(4)
@pytest.mark.parametrize("how", ["a unit of their own", "by placement", "by placement, other columns"])
def test_experts_that_are_dtensors(world, shared_path, how):
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("inner", "expert"))

    def make(fsdp, mesh):
        from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), Experts(square["expert"])) for _ in range(2)))
        placement = ShardPlacementResult(Shard(int("columns" in how)), FSDPMeshInfo(square["inner"], shard_mesh_dim=0))
        options = {"shard_placement_fn": lambda param: placement if isinstance(param, DTensor) else None}
        for block in model.double():
            if "unit" in how:
                fsdp.fully_shard(block[1], mesh=square["inner"])
            fsdp.fully_shard(block, mesh=mesh, **({} if "unit" in how else options))
        model = fsdp.fully_shard(model, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model, optimizer):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 8).double() * (world.rank + 1)).square().mean()
        loss.backward()
        optimizer.step()
        return [loss.detach(), *(whole(param.grad) for param in model.parameters())]

    def program(fsdp, mesh):
        model, optimizer = make(fsdp, mesh)
        found = [step(model, optimizer) for _ in range(2)]
        if fsdp is ours:
            hpcfsdp.checkpoint.save(shared_path / "experts.h5", model=model, optimizer=optimizer)
            model, optimizer = make(fsdp, mesh)
            hpcfsdp.checkpoint.load(shared_path / "experts.h5", model=model, optimizer=optimizer)
        found.append(step(model, optimizer))
        placed = {name: (str(p.placements), p.to_local().shape) for name, p in model.named_parameters()}
        return {"found": found, "placed": str(placed), "state": {n: whole(v) for n, v in model.state_dict().items()}}

    same(program, init_device_mesh("cpu", (4,)))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_of_ignored_parameters_and_of_several_meshes(world, norm_type):
    half = init_device_mesh("cpu", (world.size // 2, 2), mesh_dim_names=("replicate", "inner"))["inner"]
    torch.manual_seed(0)
    plain = Net().double()
    model = copy.deepcopy(plain)
    ours.fully_shard(model.blocks[0], mesh=half)
    model = ours.fully_shard(model, ignored_params={*model.blocks[1].parameters(), model.norm.weight})
    for net in (plain, model):
        net(batches(0, 1)[0]).square().sum().backward()
    norms = [nn.utils.clip_grad_norm_(net.parameters(), 0.1, norm_type) for net in (plain, model)]
    torch.testing.assert_close(norms[1], norms[0])
    for net in (plain, model):
        nn.utils.clip_grad_value_(net.parameters(), 1e-3)
    for param, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(whole(other.grad), param.grad)


def test_the_largest_gradient_where_ranks_have_no_rows(world):
    plain = nn.Linear(4, 1).double()
    model = ours.fully_shard(copy.deepcopy(plain))
    for net in (plain, model):
        net(torch.ones(2, 4).double()).sum().backward()
    norms = [nn.utils.clip_grad_norm_(net.parameters(), 0.1, float("inf")) for net in (plain, model)]
    torch.testing.assert_close(whole(norms[1]), norms[0])
    for param, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(whole(other.grad), param.grad)


def test_ignored_parameters(world, row_meshes, ours_on):
    def program(fsdp, mesh):
        torch.manual_seed(0)
        model = Net().double()
        ignored = set(model.blocks[0].norm.parameters())
        for block in model.blocks:
            fsdp.fully_shard(block, mesh=mesh, ignored_params=ignored)
        fsdp.fully_shard(model, mesh=mesh, ignored_params=ignored)
        kinds = [type(param).__name__ for param in model.parameters()]
        loss = model(batches(0, 1)[0]).square().mean()
        loss.backward()
        return [str(kinds), [whole(param.grad) for param in model.parameters()]]

    same(program, row_meshes["torch"], ours_on)


def test_parameters_that_have_no_shape_yet(world, ours_on):
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(3))
    with pytest.raises(ValueError, match=r"'1\.weight' of a lazy LazyLinear has no shape yet: run a forward of the"):
        ours.fully_shard(model, mesh=ours_on)
    ours.fully_shard(model, mesh=ours_on, ignored_params=set(model[1].parameters()))
    model(torch.ones(2, 4)).sum().backward()
    assert not isinstance(model[1].weight, DTensor)
    assert model[1].weight.grad.shape == (3, 4)


def test_several_calls_of_a_unit_in_one_forward_and_none(world, row_meshes, ours_on):
    class Twice(Net):
        def forward(self, ids):
            x = self.embed(ids)
            for index in (0, 1, 0):
                x = self.blocks[index](x)
            return self.head(self.norm(x))

    def program(fsdp, mesh):
        torch.manual_seed(0)
        model = Twice().double()
        for block in model.blocks:
            fsdp.fully_shard(block, mesh=mesh)
        return train(fsdp.fully_shard(model, mesh=mesh), world.rank)

    same(program, row_meshes["torch"], ours_on)


def test_evaluation_between_steps(world, row_meshes, ours_on):
    def program(fsdp, mesh):
        model, found = make(fsdp, mesh), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for ids in batches(world.rank, 3):
            with torch.no_grad():
                found.append(model(ids).detach().clone())
            model(ids).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.inference_mode():
                found.append(model(ids).clone())
        return found

    same(program, row_meshes["torch"], ours_on)


def test_only_blocks_are_sharded(world, row_meshes, ours_on):
    """Each is an outermost unit then; what is around them the program reduces itself."""

    def program(fsdp, mesh):
        torch.manual_seed(0)
        model = Net().double()
        for block in model.blocks:
            fsdp.fully_shard(block, mesh=mesh)
        fsdp.share_comm_ctx(list(model.blocks))
        found = []
        for ids in batches(world.rank, 3):
            loss = model(ids).square().mean()
            loss.backward()
            found += [loss.detach(), *(whole(param.grad) for param in model.blocks.parameters())]
            model.zero_grad()
        return found

    same(program, row_meshes["torch"], ours_on)


def test_the_sharded_class(world, row_meshes):
    model = make(ours, row_meshes["torch"])
    assert type(model).__name__ == "FSDPNet" and isinstance(model, Net) and isinstance(model, ours.FSDPModule)
    assert type(model.blocks[0]) is type(model.blocks[1])
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in Net().named_parameters()]
    assert type(model.blocks) is nn.ModuleList
    sequence = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    ours.fully_shard(sequence, mesh=row_meshes["torch"])
    assert type(sequence[:2]) is nn.Sequential and len(sequence[:2]) == 2
