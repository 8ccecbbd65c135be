"""Models and loops of the conformance tests."""

import copy
import functools

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.checkpoint import checkpoint


class MLP(nn.Module):
    """Two layers with a ReLU between them, of `dim` features in and out."""

    def __init__(self, dim, *, bias=True, hidden=4):
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(dim, hidden * dim, bias=bias), nn.Linear(hidden * dim, dim, bias=bias)

    def forward(self, x):
        return torch.relu(self.out_proj(torch.relu(self.in_proj(x))))


@functools.cache
def mesh_of(**dims):
    """A mesh with the sizes and names of `dims`, of all ranks."""
    return init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))


def tensor_parallel(stack, mesh):
    """Give each rank of `mesh` a part of the features of each ``MLP``; a norm at the end gets parts of the sequence."""
    mlps = [name for name, module in stack.named_children() if isinstance(module, MLP)]
    has_norm = len(mlps) < len(stack)
    plan = {str(len(mlps)): SequenceParallel(sequence_dim=1)} if has_norm else {}
    for name in mlps:
        is_last = name == mlps[-1]
        layout = {"output_layouts": Shard(1)} if is_last and has_norm else {}
        plan |= {
            f"{name}.in_proj": ColwiseParallel(use_local_output=False),  # which keeps uneven parts apart
            f"{name}.out_proj": RowwiseParallel(use_local_output=is_last, **layout),
        }
    return parallelize_module(stack, mesh, plan)


class Layer(nn.Module):
    """Two residual parts."""

    def __init__(self, dim):
        super().__init__()
        self.first, self.second = MLP(dim, hidden=2), MLP(dim, hidden=2)

    def forward(self, x):
        x = x + self.first(x)
        return x + self.second(x)


class Language(nn.Module):
    """Of numbers of words it makes scores of words, or without its head what the head gets.

    Args:
        recomputes: whether the layers keep no activations.
    """

    def __init__(self, *, dim=6, words=13, layers=2, tied=False, recomputes=False):
        super().__init__()
        self.embed, self.layers = nn.Embedding(words, dim), nn.ModuleList(Layer(dim) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, words, bias=False)
        self.recomputes = recomputes
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids, *, skip_head=False):
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        x = self.norm(x)
        return x if skip_head else self.head(x)


def ids_of(rank, *shape, words=13):
    """What one rank trains a ``Language`` on."""
    return torch.randint(words, shape, generator=torch.Generator().manual_seed(42 + rank))


def whole(tensor):
    """A tensor without its ranks. Collective for a ``DTensor``."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def data_of(rank, *shape, dtype=torch.float64):
    """What one rank trains on; others have other values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(42 + rank), dtype=dtype)


def reference(model, world, loss_of, *, steps=3, lr=1e-2, **options):
    """Losses of each step, and the parameters afterwards, of one process that trains on the data of all ranks.

    Args:
        model: a copy is trained, with Adam.
        loss_of: ``loss_of(model, rank, step)``: the loss of one rank; gradients are the mean over ranks.

    Returns:
        The mean losses, and parameters by name.
    """
    model = copy.deepcopy(model)
    optim = torch.optim.Adam(model.parameters(), lr=lr, **options)
    losses = []
    for step in range(steps):
        loss = sum(loss_of(model, rank, step) for rank in range(world.size)) / world.size
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.detach())
    return losses, dict(model.named_parameters())


def check_training(model, world, loss_of, expected, **options):
    """Train a sharded `model` on this rank's data, and expect what `reference` has found. Collective over all ranks."""
    losses, params = expected
    optim = torch.optim.Adam(model.parameters(), lr=1e-2, **options)
    for step, mean in enumerate(losses):
        loss = loss_of(model, world.rank, step)
        loss.backward()
        optim.step()
        optim.zero_grad()
        close(world.comm.allreduce(whole(loss.detach())) / world.size, mean)
    for name, param in model.named_parameters():
        close(param, params[name])


def close(found, expected, **tolerance):
    """Assert equality of float64 results, sharded ones made whole. Collective for ``DTensor``s."""
    torch.testing.assert_close(
        whole(found).detach(), whole(expected).detach(), **{"rtol": 1e-9, "atol": 1e-12, **tolerance}
    )


def attribute(model, name):
    """What a module of `model` holds for a parameter or buffer: the whole tensor while its unit is unsharded."""
    module, _, last = name.rpartition(".")
    return getattr(model.get_submodule(module), last)


def trains_as_one_process(model, world, loss_of, shard, *, steps=3, run=None):
    """Assert that steps with Adam after ``shard(model)`` are those of ``reference``.

    Args:
        run: ``run(model, step)`` does forward and backward in another way, and returns the loss of ``loss_of``.

    Returns:
        The sharded model.
    """
    losses, params = reference(model, world, loss_of, steps=steps)
    shard(model)
    optim = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step, expected in enumerate(losses):
        if run is None:
            loss = loss_of(model, world.rank, step)
            loss.backward()
        else:
            loss = run(model, step)
        optim.step()
        optim.zero_grad(set_to_none=step % 2 == 0)
        close(world.comm.allreduce(loss.detach()) / world.size, expected)
    found = {name.replace("_checkpoint_wrapped_module.", ""): param for name, param in model.named_parameters()}
    assert found.keys() == params.keys()
    for name, param in found.items():
        assert isinstance(param, DTensor), name
        close(param, params[name])
    return model


class Counted:
    """Collectives for units to call: counts them, and does the same as those of the mesh."""

    def __init__(self):
        self.gathers = self.reductions = self.over_replicas = 0

    def on(self, unit):
        """Have a unit call these."""
        unit.set_custom_all_gather(self)
        unit.set_custom_reduce_scatter(self)

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False, op=None):
        if op is None:
            self.gathers += 1
            return torch.distributed.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
        self.reductions += 1
        return torch.distributed.reduce_scatter_single(output_tensor, input_tensor, op, group=group, async_op=async_op)

    def hook(self, grad):
        """For ``set_all_reduce_hook``."""
        self.over_replicas += 1
