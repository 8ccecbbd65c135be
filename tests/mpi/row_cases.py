"""Programs with ``fully_shard``, run once with torch's and once with hpcfsdp's: what they return must be equal.

A program gets the module with the names of ``torch.distributed.fsdp``, and a mesh. All ranks begin with one seed, and
have data of their own.
"""

import contextlib
import warnings

import torch
import torch.distributed.fsdp as stock
from torch import nn
from torch.distributed.tensor import DTensor

import hpcfsdp.fsdp2 as ours

WIDTH, VOCABULARY = 7, 11  # which no number of ranks divides
TIGHT = {"rtol": 1e-9, "atol": 1e-12}


class Block(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.register_buffer("shift", torch.linspace(-0.2, 0.2, width))

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x)))) + self.shift.to(x.dtype)

    def reset_parameters(self):
        self.shift.copy_(torch.linspace(-0.2, 0.2, self.shift.numel()))


class Net(nn.Module):
    """An embedding, blocks, a norm and a head, which may be the embedding's weight."""

    def __init__(self, *, tied=False, width=WIDTH):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make(fsdp, mesh, *, dtype=torch.float64, grouped=False, tied=False, prepare=None, width=WIDTH, **options):
    """A sharded ``Net``; `prepare` gets the model before. Of a pair of policies the second is that of the model."""
    torch.manual_seed(0)
    model = Net(tied=tied, width=width).to(dtype)
    if prepare is not None:
        prepare(model)
    policies = options.get("mp_policy")
    if isinstance(policies, list):
        options["mp_policy"] = policies[0]
    for block in model.blocks:
        fsdp.fully_shard(block, mesh=mesh, **options)
    if grouped:
        fsdp.fully_shard([model.norm, model.head], mesh=mesh, **options)
    if isinstance(policies, list):
        options["mp_policy"] = policies[1]
    return fsdp.fully_shard(model, mesh=mesh, **options)


def batches(rank, count, rows=4):
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randint(0, VOCABULARY, (rows, 5), generator=generator) for _ in range(count)]


_compares_parts = False
"""Whether two engines that cut tensors alike are compared: then each rank compares its part, and gathers nothing."""


def whole(value):
    """A tensor without its ranks. Collective for a ``DTensor``."""
    return value.detach().full_tensor() if isinstance(value, DTensor) else value.detach().clone()


def _taken(value):
    """What ``train`` finds: within ``same`` this rank's part. Collective for other ``DTensor``."""
    is_cut = isinstance(value, DTensor) and not any(place.is_partial() for place in value.placements)
    return value.detach().to_local().clone() if _compares_parts and is_cut else whole(value)


def train(model, rank, *, steps=3, optimizer=None, micro=1, around=lambda _: contextlib.nullcontext(), clip=1.0):
    """Losses, norms, gradients of the last step, parameters and the optimizer's state.

    Args:
        micro: backwards in each step.
        around: makes a context for each of them, from its number.
    """
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    found, data = {"losses": [], "norms": []}, iter(batches(rank, steps * micro))
    for step in range(steps):
        for number in range(micro):
            with around(number):
                loss = model(next(data)).double().square().mean()
                loss.backward()
            found["losses"].append(loss.detach())
        found["norms"].append(_taken(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        if step == steps - 1:
            found["grads"] = {n: p.grad if p.grad is None else _taken(p.grad) for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    found["state"] = {name: _taken(value) for name, value in model.state_dict().items()}
    names = [name for name, _ in model.named_parameters()]
    state = optimizer.state_dict()["state"]
    found["optimizer"] = {
        f"{names[key]}/{name}": _taken(value)
        for key, values in sorted(state.items())
        for name, value in values.items()
        if isinstance(value, torch.Tensor)
    }
    return found


def same(program, mesh, own_mesh=None, **tolerance):
    """Collective. Run a program on both, and compare. Returns the results of ours."""
    global _compares_parts
    _compares_parts = own_mesh is None or own_mesh.shape == mesh.shape
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # torch's, about views
            expected = program(stock, mesh)
        got = program(ours, mesh if own_mesh is None else own_mesh)
    finally:
        _compares_parts = False
    texts = [[value for value in leaves(found) if isinstance(value, str)] for found in (got, expected)]
    assert texts[0] == texts[1], "\n".join(map(str, texts))
    torch.testing.assert_close(without_text(got), without_text(expected), **(tolerance or TIGHT))
    return got


def leaves(value):
    """What is in nested dictionaries and lists."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return [value] if items is None else [leaf for item in items for leaf in leaves(item)]


def without_text(value):
    """The same, without strings: torch compares none."""
    if isinstance(value, dict):
        return {key: without_text(item) for key, item in value.items() if not isinstance(item, str)}
    return [without_text(item) for item in value if not isinstance(item, str)] if isinstance(value, list) else value
