"""Several backwards before a step: of micro-batches, and of parts of a loss that calls the head by itself."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed.tensor import DTensor

from tests.conformance.models import (
    MLP,
    Counted,
    Language,
    close,
    data_of,
    ids_of,
    mesh_of,
    trains_as_one_process,
    whole,
)

MICRO = 3


def micro_loss(model, rank, step, micro):
    return model(data_of(rank + 10 * step + 100 * micro, 2, 6)).square().sum()


def loss_of(model, rank, step):
    return sum(micro_loss(model, rank, step, micro) for micro in range(MICRO))


def accumulate(fsdp, mesh, world, waits, reshard, *, kept=False, offload=False, partly=False):
    """Train with micro-batches, and count.

    Args:
        waits: which units reduce gradients in the last backward alone: "all", "root" or "some".
        kept: whether these keep whole parameters until then.
        partly: whether their gradients wait for the sum over replicas alone.

    Returns:
        What one step has counted.
    """
    model = nn.Sequential(nn.Linear(6, 6), *(MLP(6) for _ in range(3))).double()
    policy = fsdp.CPUOffloadPolicy(pin_memory=False) if offload else fsdp.OffloadPolicy()
    steps = []

    def shard(model):
        for unit in (*model[1:], model):
            fsdp.fully_shard(unit, mesh=mesh, reshard_after_forward=reshard, offload_policy=policy)

    def run(model, step):
        counted, total = Counted(), 0
        for unit in (*model[1:], model):
            counted.on(unit)
            if mesh.ndim == 2:
                unit.set_all_reduce_hook(counted.hook)
        for micro in range(MICRO):
            last = micro == MICRO - 1
            for module in {"all": [model], "root": [model], "some": model[1:3]}[waits]:
                recurse = {"recurse": waits != "root"}
                (module.set_requires_all_reduce if partly else module.set_requires_gradient_sync)(last, **recurse)
                if kept:
                    module.set_reshard_after_backward(last, **recurse)
            loss = micro_loss(model, world.rank, step, micro)
            loss.backward()
            total += loss.detach()
        steps.append((counted.gathers, counted.reductions, counted.over_replicas))
        return total

    trains_as_one_process(model, world, loss_of, shard, run=run)
    assert len(set(steps)) == 1
    return steps[0]


REDUCTIONS = {"all": 4, "root": 3 * MICRO + 1, "some": 2 * MICRO + 2}


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("waits", REDUCTIONS)
def test_micro_batches(fsdp, mesh, world, waits, offload):
    counted = accumulate(fsdp, mesh, world, waits, True, offload=offload)
    assert counted == (2 * 4 * MICRO, REDUCTIONS[waits], 0)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("waits", ["all", "root"])
def test_micro_batches_with_kept_parameters(fsdp, mesh, world, waits, kept):
    gathers = {"all": 4, "root": 3 * MICRO + 1}[waits] if kept else 4 * MICRO
    assert accumulate(fsdp, mesh, world, waits, False, kept=kept) == (gathers, REDUCTIONS[waits], 0)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("partly", [False, True])
@pytest.mark.parametrize("waits", REDUCTIONS)
def test_micro_batches_of_hybrid_sharding(fsdp, world, waits, partly):
    mesh = mesh_of(replicate=2, shard=2)
    counted = accumulate(fsdp, mesh, world, waits, True, partly=partly)
    assert counted == (2 * 4 * MICRO, 4 * MICRO if partly else REDUCTIONS[waits], REDUCTIONS[waits])


@pytest.mark.parametrize("first", ["unsharded", "sharded"])
@pytest.mark.parametrize("reshard", [True, False])
def test_micro_batches_of_a_pipeline(fsdp, mesh, world, reshard, first):
    def shard(model):
        for unit in (*model, model):
            fsdp.fully_shard(unit, mesh=mesh, reshard_after_forward=False)

    def run(model, step):
        if first == "unsharded":
            for unit in (model, *model):
                unit.unshard(async_op=True)
        total = 0
        for micro in range(MICRO):
            last = micro == MICRO - 1
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
            if not reshard:
                model.set_reshard_after_backward(last)
            loss = micro_loss(model, world.rank, step, micro)
            loss.backward()
            total += loss.detach()
        return total

    trains_as_one_process(nn.Sequential(*(MLP(6) for _ in range(3))).double(), world, loss_of, shard, run=run)


def shard_parts(fsdp, mesh, model, *, together=True, policies=None, **options):
    """The norm and the head, and the embedding if it has their weight, in one unit or each in its own.

    Args:
        policies: for mixed precision, of these parts and of the rest.
    """
    ours, others = policies or 2 * [fsdp.MixedPrecisionPolicy()]
    parts = [model.norm, model.head]
    if model.head.weight is model.embed.weight:
        parts.append(model.embed)
    for unit in [parts] if together else parts:
        fsdp.fully_shard(unit, mesh=mesh, mp_policy=ours, **options)
    for unit in (*model.layers, model):
        fsdp.fully_shard(unit, mesh=mesh, mp_policy=others, **options)


def in_chunks(model, ids, each=lambda model: None):
    """Forward and backward of ``loss_of_chunks``, with a call of the head and a backward for each part of the words."""
    x = model(ids, skip_head=True)
    total, grads = 0, []
    for chunk in x.detach().double().chunk(2, dim=1):
        chunk = chunk.contiguous().requires_grad_()
        loss = model.head(chunk).double().square().sum()
        loss.backward()
        total += loss.detach()
        grads.append(chunk.grad)
        each(model)
    x.backward(torch.cat(grads, dim=1).to(x.dtype))
    return total


def loss_of_chunks(model, rank, step):
    return model(ids_of(rank + step, 2, 4)).square().sum()


def note(found, model):
    found.append(whole(model.head.weight.grad).clone())


@pytest.mark.parametrize("case", ["reshard", "keep", "one rank keeps", "recompute"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_head_of_a_list_is_called_for_each_chunk(fsdp, mesh, world, tied, case):
    heads, expected = [], []

    def shard(model):
        grads = [[] for _ in range(world.size)]
        for rank, found in enumerate(grads):
            in_chunks(copy.deepcopy(model), ids_of(rank, 2, 4), functools.partial(note, found))
        expected.extend(sum(of_ranks) / world.size for of_ranks in zip(*grads, strict=True))
        if case == "recompute":
            for layer in model.layers:
                checkpoint(layer)
        shard_parts(fsdp, mesh, model, reshard_after_forward={"keep": False, "one rank keeps": 1}.get(case, True))

    def run(model, step):
        return in_chunks(model, ids_of(world.rank + step, 2, 4), functools.partial(note, heads))

    trains_as_one_process(Language(tied=tied).double(), world, loss_of_chunks, shard, run=run)
    for found, right in zip(heads[:2], expected, strict=True):  # later ones are those of later steps
        close(found, right)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("where", ["the list", "everywhere"])
def test_results_of_a_list_that_is_called_in_parts_are_cast(fsdp, mesh, world, where, reshard):
    cast = fsdp.MixedPrecisionPolicy(param_dtype=torch.float64, output_dtype=torch.float32)
    policies = [cast, cast if where == "everywhere" else fsdp.MixedPrecisionPolicy(param_dtype=torch.float64)]
    ids, found, model = ids_of(world.rank, 2, 4), [], Language().double()
    for together in (True, False):
        used = copy.deepcopy(model)
        shard_parts(fsdp, mesh, used, together=together, policies=policies, reshard_after_forward=reshard)
        assert used(ids, skip_head=True).dtype == torch.float32
        used.reset_iter_state()
        assert used.head(data_of(world.rank, 2, 6)).dtype == torch.float32
        used.reset_iter_state()
        loss = in_chunks(used, ids)
        found.append([loss, *(param.grad.full_tensor() for param in used.parameters())])
    for one, other in zip(*found, strict=True):
        close(one, other)


def test_a_list_casts_the_inputs_of_each_of_its_modules(fsdp, mesh, world):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, x):
            return self.second(self.first(x).float())

    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=True)
    model = Two()
    fsdp.fully_shard([model.first, model.second], mesh=mesh, mp_policy=policy)
    fsdp.fully_shard(model, mesh=mesh, mp_policy=policy)
    out = model(data_of(world.rank, 2, 4, dtype=torch.float32))
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert all(param.grad.dtype == torch.float32 for param in model.parameters())


@pytest.mark.parametrize("reshard", [True, False])
def test_chunks_of_micro_batches(fsdp, mesh, world, reshard):
    def loss_of(model, rank, step):
        return sum(model(ids_of(rank + step + 10 * micro, 2, 4)).square().sum() for micro in range(MICRO))

    def run(model, step):
        total = 0
        for micro in range(MICRO):
            model.set_requires_gradient_sync(micro == MICRO - 1)
            model.set_is_last_backward(micro == MICRO - 1)
            total += in_chunks(model, ids_of(world.rank + step + 10 * micro, 2, 4))
        return total

    def shard(model):
        shard_parts(fsdp, mesh, model, reshard_after_forward=reshard)

    trains_as_one_process(Language().double(), world, loss_of, shard, run=run)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("initial", [False, True])
def test_a_list_stays_whole_for_all_chunks(fsdp, mesh, world, initial, tied):
    def switch(model, reshard):
        model.head.set_reshard_after_forward(reshard)
        model.head.set_reshard_after_backward(reshard)

    def run(model, step):
        ids, grads, total = ids_of(world.rank + step, 2, 4), [], 0
        x = model(ids, skip_head=True)
        switch(model, False)
        for chunk in x.detach().chunk(2, dim=1):
            chunk = chunk.contiguous().requires_grad_()
            loss = model.head(chunk).square().sum()
            loss.backward()
            total += loss.detach()
            grads.append(chunk.grad)
            assert not isinstance(model.head.weight, DTensor)
        switch(model, True)
        model.head.reshard()
        assert isinstance(model.head.weight, DTensor)
        x.backward(torch.cat(grads, dim=1))
        assert all(param.grad is not None for param in model.parameters())
        return total

    def shard(model):
        shard_parts(fsdp, mesh, model, reshard_after_forward=initial)

    trains_as_one_process(Language(tied=tied).double(), world, loss_of_chunks, shard, run=run)


def grads_of_one_process(model, world, loss_of):
    """Gradients by name of a copy that gets the mean of the losses of all ranks."""
    model = copy.deepcopy(model)
    (sum(loss_of(model, rank) for rank in range(world.size)) / world.size).backward()
    return {name: param.grad for name, param in model.named_parameters()}


def check_grads(model, expected):
    """Assert equality of gradients, also of which there are none."""
    for name, param in model.named_parameters():
        if expected[name] is None:
            assert param.grad is None, name
        else:
            close(param.grad, expected[name])


def test_a_step_after_an_exception_and_a_reset(fsdp, mesh, world):
    def loss_of(model, rank):
        return model(ids_of(rank, 2, 4)).square().sum()

    def fail(*_):
        raise RuntimeError("in the middle of a forward")

    model = Language(layers=1).double()
    expected = grads_of_one_process(model, world, loss_of)
    fsdp.fully_shard([model.norm, model.head], mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    hook = model.layers[0].second.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        model(ids_of(world.rank, 2, 4), skip_head=True)
    hook.remove()
    model.reset_iter_state()
    loss_of(model, world.rank).backward()
    check_grads(model, expected)


def test_two_forwards_that_call_a_part_of_a_list(fsdp, mesh, world):
    def loss_of(model, rank):
        return sum(model(ids_of(rank + 10 * call, 2, 4), skip_head=True).square().sum() for call in range(2))

    model = Language().double()
    with torch.no_grad():  # else squares of normalised values have no gradient
        model.norm.weight.copy_(torch.arange(6.0))
    expected = grads_of_one_process(model, world, loss_of)
    assert expected["head.weight"] is None
    fsdp.fully_shard([model.norm, model.head], mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    loss_of(model, world.rank).backward()
    check_grads(model, expected)
