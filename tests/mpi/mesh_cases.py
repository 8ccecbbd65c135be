"""Small models that are parallel over tensors, meshes of the ranks, and the same models in one process.

Data is drawn for all ranks at once. The plain model takes the whole batch, so it is right for every mesh; ranks that
are parallel over tensors take the same part of it.
"""

import contextlib
import copy
import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import hpcfsdp
from hpcfsdp.fsdp import FullyShardedDataParallel, ShardingStrategy
from hpcfsdp.launch.job import load_mpi
from hpcfsdp.wrap import ModuleWrapPolicy
from tests.mpi.models import ORIGINAL
from tests.mpi.parity import plain_name

SIZE = load_mpi().COMM_WORLD.size
SHAPES = {
    2: [(1, 2, 1), (1, 1, 2)],
    3: [(1, 3, 1), (1, 1, 3)],
    4: [(1, 2, 2), (1, 1, 4), (1, 4, 1), (2, 1, 2)],
    8: [(2, 2, 2), (1, 2, 4), (1, 4, 2)],
}.get(SIZE, [(1, 1, SIZE)])
"""(replicate, shard, tensor), which multiply to the number of ranks."""
CASES = {4: [(1, 2, 2), (2, 1, 2)]}.get(SIZE, SHAPES)
"""Those that tests take one by one: meshes that have one dimension of several ranks are tested on two or three."""
MIXED_SHAPE = {4: (1, 2, 2), 8: (2, 2, 2)}.get(SIZE, SHAPES[-1])
"""The one that has the most dimensions of more than one rank."""

BATCH, SEQUENCE, VOCABULARY = 24, 12, 12  # which all meshes divide
TIGHT = {"rtol": 1e-9, "atol": 1e-12}
"""Of float64: sums of a few hundred values in another order."""


def _name(value):
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def each_mesh(function):
    return pytest.mark.parametrize("shape", CASES, ids=_name)(function)


def each_mesh_in_one_mode(function):
    """Flat and original parameters by turns, both at the last mesh: for what has little to do with the two together."""
    cases = [(shape, index % 2 == 1) for index, shape in enumerate(CASES)]
    cases.append((CASES[-1], not cases[-1][1]))
    names = [f"{_name(shape)}-{'original' if original else 'flat'}" for shape, original in cases]
    return pytest.mark.parametrize(("shape", "original"), cases, ids=names)(function)


def each_mesh_in_each_mode(function):
    """Both kinds of parameters at all meshes; by turns where eight ranks share the cores of one machine."""
    if SIZE == 8:
        return each_mesh_in_one_mode(function)
    return each_mesh(ORIGINAL(function))


# Models. Each names the classes that become units, what of it is parallel over tensors, and draws its data.


class Block(nn.Module):
    """Parameters that are cut by rows, by columns, and not at all; buffers that are saved, and that are not."""

    def __init__(self, width, hidden):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.register_buffer("shift", torch.linspace(-0.2, 0.2, width))
        self.register_buffer("scratch", torch.linspace(0.5, 1, width), persistent=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x)))) * self.scratch + self.shift


class Model(nn.Module):
    units: ClassVar = {Block}
    by_hand: ClassVar = {Block}

    @classmethod
    def plan(cls) -> dict[str, Any]:
        """Of ``parallelize_module``."""
        raise NotImplementedError

    def parallelize(self, mesh):
        return parallelize_module(self, mesh, self.plan())

    @staticmethod
    def batch(step, part=0):
        """Inputs and targets of all ranks."""
        generator = torch.Generator().manual_seed(1000 + 10 * step + part)
        ids = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
        return ids[:, :-1], ids[:, 1:]

    def loss(self, inputs, targets):
        return nn.functional.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())


class Vectors(Model):
    width = 8

    @classmethod
    def batch(cls, step, part=0):
        generator = torch.Generator().manual_seed(1000 + 10 * step + part)
        inputs, targets = torch.randn(2, BATCH, cls.width, dtype=torch.float64, generator=generator)
        return inputs, targets[:, :5]

    def loss(self, inputs, targets):
        return nn.functional.mse_loss(self(inputs), targets.to(inputs.dtype))


class Mlp(Vectors):
    """Two parallel blocks between layers that every rank has."""

    by_hand: ClassVar = {Block, nn.Linear}  # units in units, some of them without anything that is parallel
    hidden = 12

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(self.width, self.width)
        self.blocks = nn.ModuleList([Block(self.width, self.hidden) for _ in range(2)])
        self.last = nn.Linear(self.width, 5)

    @classmethod
    def plan(cls):
        return {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Primes(Mlp):
    """What no number of ranks divides, and less of it than there are ranks."""

    width, hidden = 7, 5
    units: ClassVar = {Block, nn.PReLU}

    def __init__(self):
        super().__init__()
        self.activation = nn.PReLU()
        self.narrow = Block(self.width, 2)

    @classmethod
    def plan(cls):
        up, down = ColwiseParallel(use_local_output=False), RowwiseParallel()
        return {"blocks.*.up": up, "blocks.*.down": down, "narrow.up": up, "narrow.down": down}

    def forward(self, x):
        x = self.first(x)
        for block in [*self.blocks, self.narrow]:
            x = self.activation(block(x))
        return self.last(x)


class Frozen(Mlp):
    """Frozen parameters next to others, and a unit without trained ones."""

    def __init__(self):
        super().__init__()
        for frozen in (self.blocks[0].up.weight, self.blocks[0].down.bias, self.first.weight):
            frozen.requires_grad_(False)
        self.blocks[1].requires_grad_(False)


class Attention(nn.Module):
    def __init__(self, width, head):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(width), head
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x):
        y = self.norm(x)
        heads = (
            layer(y).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Gpt(Model):
    """Embeddings cut by rows and by columns, attention by heads, a head by its outputs."""

    width = 12
    units: ClassVar = {Block, Attention}
    by_hand: ClassVar = {Attention, nn.Embedding}

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, self.width)
        self.position = nn.Embedding(SEQUENCE, self.width)
        self.attention, self.block = Attention(self.width, 1), Block(self.width, 24)
        self.norm, self.head = nn.LayerNorm(self.width), nn.Linear(self.width, VOCABULARY, bias=False)

    @classmethod
    def plan(cls):
        return {
            "embed": RowwiseParallel(input_layouts=Replicate()),
            "position": ColwiseParallel(output_layouts=Replicate()),
            **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
            "attention.out": RowwiseParallel(),
            "block.up": ColwiseParallel(),
            "block.down": RowwiseParallel(),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }

    def forward(self, ids):
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.block(self.attention(x))))


class Tied(Gpt):
    """The head has the embedding's weight, both cut by rows."""

    by_hand: ClassVar = {Attention}

    def __init__(self):
        super().__init__()
        self.head.weight = self.embed.weight

    def parallelize(self, mesh):
        super().parallelize(mesh)
        self.head.weight = self.embed.weight  # which parallelize_module has made two of
        return self


class Sequence(Model):
    """Between parallel layers each rank has a part of the sequence: gradients of norms are sums over ranks."""

    width = 8

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, self.width)
        self.blocks = nn.ModuleList([Block(self.width, 12) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(self.width), nn.Linear(self.width, VOCABULARY)

    @classmethod
    def plan(cls):
        return {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "blocks.*.norm": SequenceParallel(),
            "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
            "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Twice(Mlp):
    """A unit that is called twice, and one that is not called."""

    def forward(self, x):
        return self.last(self.blocks[0](self.blocks[0](self.first(x))))


MODELS = [Mlp, Primes, Frozen, Gpt, Tied, Sequence, Twice]


@functools.cache
def _built(model, seed):
    torch.manual_seed(seed)
    return model().double()


def build(model, seed=0):
    """A plain model in float64, the same on all ranks."""
    return copy.deepcopy(_built(model, seed))


# Ranks


@dataclasses.dataclass(frozen=True)
class Place:
    """A mesh, and this rank's place in it."""

    shape: tuple[int, int, int]
    mesh: DeviceMesh
    data_rank: int

    @property
    def data_size(self):
        return self.shape[0] * self.shape[1]

    @property
    def tensor(self):
        return self.mesh["tensor"]

    @property
    def sharding(self):
        """Arguments of the wrapper."""
        if self.shape[0] == 1:
            return {"device_mesh": self.mesh["shard"]}
        return {
            "device_mesh": self.mesh["replicate", "shard"],
            "sharding_strategy": ShardingStrategy.HYBRID_SHARD,
        }

    @property
    def groups(self):
        """The same with groups in place of a mesh."""
        group = self.mesh.get_group("shard")
        if self.shape[0] == 1:
            return {"process_group": group, "device_mesh": None}
        return {"process_group": (group, self.mesh.get_group("replicate")), "device_mesh": None}

    def part(self, tensor):
        """This rank's part of a batch."""
        return tensor.chunk(self.data_size)[self.data_rank]


@functools.cache
def place(shape):
    """Collective over all ranks, the first time."""
    replicate, shard, tensor = shape
    world = hpcfsdp.init("cpu")
    if replicate == 1:
        mesh = world.mesh(shard=shard, tensor=tensor)
        return Place(shape, mesh, mesh["shard"].get_local_rank())
    mesh = world.mesh(replicate=replicate, shard=shard, tensor=tensor)
    return Place(shape, mesh, mesh["replicate"].get_local_rank() * shard + mesh["shard"].get_local_rank())


def wrap(model, at, wrapping="policy", **options):
    """Collective over all ranks. Shard a model that is parallel already."""
    options = {**at.sharding, **options}
    if wrapping == "policy":
        return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy(type(model).units), **options)
    if wrapping == "by hand":
        _wrap_inside(model, type(model).by_hand, options)
    return FullyShardedDataParallel(model, **options)


def _wrap_inside(module, types, options):
    for name, child in module.named_children():
        _wrap_inside(child, types, options)
        if type(child) in types:
            setattr(module, name, FullyShardedDataParallel(child, **options))


def shard(model, at, wrapping="policy", **options):
    """Collective over all ranks. Make a plain model parallel over tensors, and shard it."""
    return wrap(model.parallelize(at.tensor), at, wrapping, **options)


# Training


@dataclasses.dataclass(frozen=True)
class Recipe:
    optimizer: str = "adamw"
    steps: int = 3
    parts: int = 1
    clip: float | None = 0.2
    norm_type: float = 2.0
    first: int = 0

    def make_optimizer(self, params):
        return {
            "adamw": lambda: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
            "momentum": lambda: torch.optim.SGD(params, lr=5e-2, momentum=0.9),
            "sgd": lambda: torch.optim.SGD(params, lr=5e-2),
        }[self.optimizer]()


class Trained(NamedTuple):
    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor | None]
    """Of the last step, clipped."""
    parameters: dict[str, torch.Tensor]


def train_plain(model, recipe=Recipe(), optimizer=None):
    """One process and the whole batch. Not collective."""
    optimizer = optimizer or recipe.make_optimizer(model.parameters())
    losses, norms, gradients = [], [], {}
    for step in range(recipe.first, recipe.first + recipe.steps):
        optimizer.zero_grad()
        total = 0.0
        for part in range(recipe.parts):
            loss = model.loss(*model.batch(step, part)) / recipe.parts
            loss.backward()
            total += loss.item()
        losses.append(total)
        if recipe.clip is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), recipe.clip, recipe.norm_type).item())
        gradients = {name: copied(param.grad) for name, param in named(model)}
        optimizer.step()
    return Trained(losses, norms, gradients, {name: copied(param) for name, param in named(model)})


@functools.cache
def expected(model, recipe=Recipe()):
    """What a model of a class comes to in one process."""
    return train_plain(build(model), recipe)


def train(model, at, recipe=Recipe(), optimizer=None, *, no_sync=False, look=True):
    """Collective over all ranks. Each takes its part of the batch.

    Args:
        look: whether to gather gradients and parameters, too.
    """
    optimizer = optimizer or recipe.make_optimizer(model.parameters())
    losses, norms, gradients = [], [], {}
    for step in range(recipe.first, recipe.first + recipe.steps):
        optimizer.zero_grad()
        total = 0.0
        for part in range(recipe.parts):
            alone = no_sync and part < recipe.parts - 1
            with model.no_sync() if alone else contextlib.nullcontext():
                loss = model_loss(model, at, step, part) / recipe.parts
                loss.backward()
            total += loss.item()
        losses.append(mean(total))
        if recipe.clip is not None:
            norms.append(model.clip_grad_norm_(recipe.clip, recipe.norm_type).item())
        if look and step == recipe.first + recipe.steps - 1:
            gradients = whole_gradients(model)
        optimizer.step()
    return Trained(losses, norms, gradients, whole(model) if look else {})


def model_loss(model, at, step, part=0):
    """The loss of this rank's part of a batch, through the wrapper's forward."""
    inputs, targets = map(at.part, model.batch(step, part))
    if inputs.is_floating_point():
        inputs = inputs.to(next(model.parameters()).dtype)
    return type(model.module).loss(model, inputs, targets)


def mean(value):
    """Collective over all ranks."""
    return hpcfsdp.init("cpu").comm.allreduce(value) / SIZE


def named(model):
    """Every parameter by its name in the plain model, tied ones under each name."""
    return [(plain_name(name), param) for name, param in model.named_parameters(remove_duplicate=False)]


def copied(tensor):
    """Collective over the mesh of a ``DTensor``. All of a tensor, in new memory."""
    if tensor is None:
        return None
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def whole(model):
    """Collective over all ranks. The parameters."""
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return {name: copied(param) for name, param in named(model)}


def whole_gradients(model):
    """Collective over all ranks."""
    with FullyShardedDataParallel.summon_full_params(model, writeback=False, with_grads=True):
        return {name: copied(param.grad) for name, param in named(model)}


def close(got, wanted, rtol=TIGHT["rtol"], atol=TIGHT["atol"]):
    """Compare two trainings."""
    torch.testing.assert_close(got.losses, wanted.losses, rtol=rtol, atol=0)
    torch.testing.assert_close(got.norms, wanted.norms, rtol=rtol, atol=0)
    missing = {name for name, grad in wanted.gradients.items() if grad is None}
    assert {name for name, grad in got.gradients.items() if grad is None} == missing
    for found, theirs in ((got.gradients, wanted.gradients), (got.parameters, wanted.parameters)):
        assert list(found) == list(theirs)
        present = [name for name in theirs if theirs[name] is not None]
        torch.testing.assert_close(
            {name: found[name] for name in present}, {name: theirs[name] for name in present}, rtol=rtol, atol=atol
        )
    everyone = hpcfsdp.init("cpu").comm.allgather((got.losses, got.norms))
    assert all(other == everyone[0] for other in everyone)
