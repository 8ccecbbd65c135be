"""Steps of training are those of one process: units, options, what is called how often and in which order."""

import pytest
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.tensor import Shard

from tests.conformance.models import (
    MLP,
    Counted,
    Language,
    Layer,
    data_of,
    ids_of,
    mesh_of,
    tensor_parallel,
    trains_as_one_process,
)


def along_the_longest(param):
    """Where to cut a parameter."""
    return Shard(param.shape.index(max(param.shape)))


def loss_of_ids(model, rank, step):
    return model(ids_of(rank + 10 * step, 2, 5)).square().sum()


def loss_of_data(model, rank, step):
    return model(data_of(rank + 10 * step, 4, 6)).square().sum()


@pytest.mark.parametrize("shapes", [[(16, 15), (15, 8)], [(7, 15), (15, 3)], [(16, 17), (17, 8)], "longest"], ids=str)
def test_one_unit_against_one_process(fsdp, mesh, world, shapes):
    first, second = [(32, 16), (16, 8)] if shapes == "longest" else shapes
    model = nn.Sequential(nn.Linear(*first), nn.ReLU(), nn.Linear(*second)).double()

    def loss_of(model, rank, step):
        return model(data_of(rank + 10 * step, 4, first[0])).sum()

    def shard(model):
        fsdp.fully_shard(model, mesh=mesh, shard_placement_fn=along_the_longest if shapes == "longest" else None)

    trains_as_one_process(model, world, loss_of, shard)


def test_a_unit_on_one_rank_communicates_nothing(fsdp, world):
    mesh = mesh_of(all=world.size, one=1)["one"]
    alone = type("World", (), {"rank": 0, "size": 1, "comm": world.comm.Split(world.rank)})
    counted = Counted()

    def shard(model):
        fsdp.fully_shard(model, mesh=mesh)
        counted.on(model)

    def loss_of(model, _, step):
        return loss_of_data(model, world.rank, step)

    trains_as_one_process(MLP(6).double(), alone, loss_of, shard)
    assert counted.gathers == counted.reductions == 0


OPTIONS = ["reshard", "keep", "offload", "asynchronous", "prefetch", "longest"]


@pytest.mark.parametrize("option", OPTIONS)
def test_units_of_layers(fsdp, mesh, world, option):
    def shard(model):
        options = {"reshard_after_forward": option != "keep"}
        if option == "offload":
            options["offload_policy"] = fsdp.CPUOffloadPolicy(pin_memory=False)
        if option == "longest":
            options["shard_placement_fn"] = along_the_longest
        for unit in (*model.layers, model):
            fsdp.fully_shard(unit, mesh=mesh, **options)
        if option == "asynchronous":
            model._set_unshard_async_op(True)
        if option == "prefetch":
            for index, layer in enumerate(model.layers):
                layer.set_modules_to_forward_prefetch(model.layers[index + 1 : index + 3])
                layer.set_modules_to_backward_prefetch(model.layers[max(index - 2, 0) : index][::-1])

    model = Language(words=12, layers=3).double()
    trains_as_one_process(
        model, world, lambda model, rank, step: model(ids_of(rank + step, 2, 5, words=12)).square().sum(), shard
    )


@pytest.mark.ranks(4)
def test_units_that_some_ranks_keep(fsdp, mesh, world):
    def shard(model):
        for unit in (*model.layers, model):
            fsdp.fully_shard(unit, mesh=mesh, reshard_after_forward=2)

    trains_as_one_process(Language().double(), world, loss_of_ids, shard)


def test_an_inner_unit_is_called_after_the_outermost(fsdp, mesh, world):
    def loss_of(model, rank, step):
        return loss_of_data(model[0] if step == 1 else model, rank, step)

    def shard(model):
        for unit in (*model, model):
            fsdp.fully_shard(unit, mesh=mesh)

    trains_as_one_process(nn.Sequential(*(MLP(6) for _ in range(3))).double(), world, loss_of, shard)


@pytest.mark.parametrize("reshard", [True, False])
def test_a_unit_is_called_twice_in_one_forward(fsdp, mesh, world, reshard):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 5)

        def forward(self, x):
            return self.outer(self.inner(x) + self.inner(2 * x))

    def shard(model):
        for unit in (model.inner, model):
            fsdp.fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)

    trains_as_one_process(Twice().double(), world, loss_of_data, shard)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("recompute", ["contract", "function", "wrapper"])
@pytest.mark.parametrize("units", ["layers", "lists", "lists with tied words"])
def test_activation_checkpointing(fsdp, mesh, world, units, recompute, reshard):
    model = Language(layers=3, tied=units != "lists", recomputes=recompute == "function").double()

    def shard(model):
        if recompute == "wrapper":
            apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Layer))
        elif recompute == "contract":
            for layer in model.layers:
                checkpoint(layer)
        parts = list(model.layers)
        if units == "lists":
            parts = [parts[0], parts[1:], [model.embed], [model.norm, model.head]]
        elif units == "lists with tied words":
            parts += [[model.embed, model.head]]
        for unit in (*parts, model):
            fsdp.fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
        if units == "lists":
            model.embed.set_unshard_in_backward(False)

    trains_as_one_process(model, world, loss_of_ids, shard)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("recompute", ["contract", "function"])
def test_two_forwards_before_one_backward(fsdp, mesh, world, recompute, reshard):
    def loss_of(model, rank, step):
        return (model(ids_of(rank, 2, 5)).sum() - model(ids_of(rank + 10 + step, 2, 5)).square().sum()).square()

    def shard(model):
        for layer in model.layers:
            if recompute == "contract":
                checkpoint(layer)
            for unit in (layer.first, layer.second, layer):
                fsdp.fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
        fsdp.fully_shard(model, mesh=mesh, reshard_after_forward=reshard)

    trains_as_one_process(Language(recomputes=recompute == "function").double(), world, loss_of, shard)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("recomputes", [False, True])
def test_shared_parameters(fsdp, mesh, world, recomputes, reshard):
    def shard(model):
        for layer in model.layers:
            if recomputes:
                checkpoint(layer)
            fsdp.fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        fsdp.fully_shard(model, mesh=mesh, reshard_after_forward=reshard)

    model = trains_as_one_process(Language(tied=True).double(), world, loss_of_ids, shard)
    assert model.embed.weight is model.head.weight


@pytest.mark.parametrize("reshard", [True, False])
def test_shared_parameters_of_a_list_in_uneven_shards(fsdp, mesh, world, reshard):
    def shard(model):
        fsdp.fully_shard([model.embed, model.head], mesh=mesh, reshard_after_forward=reshard)
        fsdp.fully_shard(model, mesh=mesh, reshard_after_forward=reshard)

    words = 4 * world.size + 1

    def loss_of(model, rank, step):
        ids = ids_of(rank + step, 2, 5, words=words)
        return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    model = Language(layers=0, tied=True, words=words).double()
    before = model.embed.weight.detach().clone()
    trains_as_one_process(model, world, loss_of, shard)
    model.embed.unshard()
    after = model.embed.weight.detach().clone()
    model.embed.reshard()
    assert (before != after).any(1).all()


def test_a_forward_method_of_another_name(fsdp, mesh, world):
    class Images(nn.Module):
        def __init__(self):
            super().__init__()
            self.patches = nn.Conv2d(3, 8, kernel_size=2, stride=2)

        def features(self, images):
            return self.patches(images).flatten(2).transpose(1, 2).contiguous()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.images, self.projector = Images(), nn.Linear(8, 4, bias=False)

        def forward(self, images):
            return self.projector(self.images.features(images))

    def loss_of(model, rank, step):
        return model(data_of(rank + step, 2, 3, 4, 4)).square().sum()

    def shard(model):
        for unit in (model.images, model.projector, model):
            fsdp.fully_shard(unit, mesh=mesh)
        fsdp.register_fsdp_forward_method(model.images, "features")

    trains_as_one_process(Model().double(), world, loss_of, shard)


def test_outermost_units_that_share_their_streams(fsdp, mesh, world):
    def shard(model):
        for layer in model:
            fsdp.fully_shard(layer, mesh=mesh)
        fsdp.share_comm_ctx(list(model))

    trains_as_one_process(nn.Sequential(*(MLP(6) for _ in range(3))).double(), world, loss_of_data, shard)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("dim", [5, 16])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("reshard", [False, True])
@pytest.mark.parametrize("sizes", [(2, 2), (1, 2, 2), (2, 1, 2)], ids=str)
def test_tensor_parallelism(fsdp, world, sizes, reshard, recompute, dim):
    names = ("replicate", "shard", "tensor")[-len(sizes) :]
    mesh = mesh_of(**dict(zip(names, sizes, strict=True)))

    def loss_of(model, rank, step):
        return model(data_of(rank // 2 + 10 * step, 8, dim)).square().sum()

    def shard(model):
        tensor_parallel(model, mesh["tensor"])
        for part in model:
            if recompute:
                checkpoint(part)
        for unit in (*model, model):
            fsdp.fully_shard(unit, mesh=mesh[names[:-1]], reshard_after_forward=reshard)

    model = nn.Sequential(*(MLP(dim, hidden=hidden) for hidden in (3, 4, 3))).double()
    trains_as_one_process(model, world, loss_of, shard)
    for param in model.parameters():
        assert param.device_mesh.mesh_dim_names == names
        assert len(param.placements) == len(names)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("dim", [16, 17])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_hybrid_sharding_with_offload(fsdp, world, waits, recompute, dim, reshard):
    mesh = mesh_of(replicate=2, shard=2)
    options = {"mesh": mesh, "reshard_after_forward": reshard}
    options["offload_policy"] = fsdp.CPUOffloadPolicy(pin_memory=False)

    def micro_loss(model, rank, step, micro):
        return model(data_of(rank + 10 * step + 100 * micro, 8, dim)).square().sum()

    def run(model, step):
        total = 0
        for micro in range(3):
            model.set_requires_gradient_sync(not waits or micro == 2)
            loss = micro_loss(model, world.rank, step, micro)
            loss.backward()
            total += loss.detach()
        return total

    def shard(model):
        for part in model:
            if recompute:
                checkpoint(part)
            fsdp.fully_shard(part, **options)
        fsdp.fully_shard(model, **options)

    trains_as_one_process(
        nn.Sequential(nn.LayerNorm(dim, bias=False), MLP(dim, hidden=3), MLP(dim)).double(),
        world,
        lambda model, rank, step: sum(micro_loss(model, rank, step, micro) for micro in range(3)),
        shard,
        run=run,
    )
