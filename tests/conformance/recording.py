"""What units send, seen from outside: their gathers and reductions, with the computation between them."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint


class _Comm:
    """Communicates as torch does by default, and notes that."""

    def __init__(self, log, kind, name):
        self.log, self.event, self.dtypes = log, f"{kind} {name}", []

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def note(self, tensor):
        self.log.append(self.event)
        self.dtypes.append(tensor.dtype)


class _Gather(_Comm):
    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.note(input_tensor)
        return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class _Reduction(_Comm):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.note(input_tensor)
        return dist.reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def record(log, **units):
    """Append ``"gather <name>"`` and ``"reduce <name>"`` to `log` when units do it."""
    for name, unit in units.items():
        unit.set_custom_all_gather(_Gather(log, "gather", name))
        unit.set_custom_reduce_scatter(_Reduction(log, "reduce", name))


class Layer(nn.Module):
    """A linear layer that notes when it computes, once more in a checkpoint's backward."""

    def __init__(self, log, name, dim):
        super().__init__()
        self.linear, self.log, self.name = nn.Linear(dim, dim), log, name

    def forward(self, x):
        self.log.append(f"compute {self.name}")
        return torch.tanh(self.linear(x))


class Stack(nn.Module):
    """Layers, and parameters of its own before and after them."""

    def __init__(self, num, log, *, dim=4, checkpoints=False):
        super().__init__()
        self.before, self.after = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.ones(dim))
        self.layers = nn.ModuleList(Layer(log, index, dim) for index in range(num))
        self.checkpoints = checkpoints

    def forward(self, x):
        x = x * self.before
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return x * self.after


def sharded_stack(fsdp, mesh, num, *, reshard=True, **options):
    """Return a stack, its layers and the rest as units ``"0", "1", ... "root"``, and the log of what they do."""
    log = []
    model = Stack(num, log, **options).double()
    for unit in (*model.layers, model):
        fsdp.fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
    record(log, root=model, **{str(index): layer for index, layer in enumerate(model.layers)})
    return model, log


def since(log):
    """What has been done since the last call, in short: g0 c0 r0 for a gather, computation, and reduction of unit 0."""
    done = " ".join(f"{event.split()[0][0]}{event.split()[1]}" for event in log)
    log.clear()
    return done
