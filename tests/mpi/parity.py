"""Small models with something unusual in them, trained whole in one process, and sharded by an engine over all ranks.

Every rank has its own data; the plain model is trained on the data of all of them. The engine is an argument
everywhere, because torch's own FSDP1 is one: it says what is right where the plain model cannot (low precision), and
``HPCFSDP_TEST_ENGINE=torch`` runs the tests on it in place of hpcfsdp, which tests the tests.
"""

import contextlib
import dataclasses
import functools
import gc
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint as recompute

import hpcfsdp.fsdp as our_fsdp
from hpcfsdp.comm.mpi.communicator import MpiCommunicator
from hpcfsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

WIDTH, ROWS = 7, 2  # rows that no number of ranks divides

STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]


# Models. Each names the classes that become units, and units that no forward calls.


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, 5)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 5))

    def forward(self, x):
        return self.linear(x) * self.gain


class Block(nn.Module):
    """A unit that holds another one."""

    def __init__(self):
        super().__init__()
        self.norm, self.inner, self.down = nn.LayerNorm(WIDTH), Inner(), nn.Linear(5, WIDTH)
        self.register_buffer("shift", torch.linspace(-0.2, 0.2, WIDTH))

    def forward(self, x):
        return x + self.down(torch.tanh(self.inner(self.norm(x)))) + self.shift.to(x.dtype)


class Nested(nn.Module):
    """Units in units between layers of the root; two of these share a weight."""

    units: ClassVar = {Block, Inner}
    idle = ()

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(self.norm(x))


class Untied(Nested):
    def __init__(self):
        super().__init__()
        self.last.weight = nn.Parameter(self.last.weight.detach().clone())


class Linears(nn.Module):
    """Two layers, for units with any content."""

    def __init__(self, *, tied=False):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        if tied:
            self.b.weight = self.a.weight

    def forward(self, x):
        return x + self.b(torch.tanh(self.a(x)))


class Around(nn.Module):
    """One unit between two layers."""

    units: ClassVar = {Linears}
    idle = ()

    def __init__(self):
        super().__init__()
        self.first, self.unit, self.last = nn.Linear(WIDTH, WIDTH), self.make_unit(), nn.Linear(WIDTH, 3)

    def make_unit(self):
        return Linears()

    def forward(self, x):
        return self.last(self.unit(self.first(x)))


class TiedInUnit(Around):
    def make_unit(self):
        return Linears(tied=True)


class Frozen(Around):
    """Frozen parameters next to trained ones, and layers without trained ones."""

    def __init__(self):
        super().__init__()
        self.unit.a.weight.requires_grad_(False)
        self.unit.b.bias.requires_grad_(False)
        self.first.requires_grad_(False)


class FrozenUnit(Around):
    def __init__(self):
        super().__init__()
        self.unit.requires_grad_(False)


class Spare(Linears):
    def __init__(self):
        super().__init__()
        self.spare = nn.Parameter(torch.linspace(-1, 1, 11))


class UnusedParameter(Around):
    units: ClassVar = {Spare}
    partly_used = True

    def make_unit(self):
        return Spare()


class TwiceAndIdle(Around):
    """A unit that is called twice, and one that is not called."""

    idle = ("idle",)

    def __init__(self):
        super().__init__()
        self.idle = Linears()

    def forward(self, x):
        return self.last(self.unit(self.unit(self.first(x))))


class Uneven(nn.Module):
    """Units of prime sizes, one of them of a single element."""

    units: ClassVar = {nn.PReLU, nn.Linear, nn.LayerNorm}
    idle = ()

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 13), nn.PReLU(), nn.LayerNorm(13), nn.Linear(13, 1, bias=False), nn.PReLU(1)
        )
        self.out = nn.Linear(1, 1)

    def forward(self, x):
        return self.out(self.layers(x))


class MixedLinears(Linears):
    def forward(self, x):
        return x + self.b(torch.tanh(self.a(x.to(self.a.weight.dtype))).to(x.dtype))


class MixedDtypes(Around):
    """A unit of two dtypes, see ``build``."""

    units: ClassVar = {MixedLinears}

    def make_unit(self):
        return MixedLinears()


class Scalars(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor([0.5]))

    def forward(self, x):
        return x * self.scale + self.shift


class NormedLinears(Linears):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return super().forward(self.norm(x))


class Normed(Around):
    """Batch norm inside of a unit and of the root, which mixed precision leaves in float32."""

    units: ClassVar = {NormedLinears}

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def make_unit(self):
        return NormedLinears()

    def forward(self, x):
        return self.last(self.unit(self.norm(self.first(x))))


class WithScalars(Around):
    """Parameters of no dimensions, fewer elements than ranks."""

    units: ClassVar = {Scalars}

    def make_unit(self):
        return Scalars()


class Branch(Linears):
    """Which of its parameters it uses depends on the data."""

    def forward(self, x):
        return x + (self.a(x) if x.detach().sum() > 0 else self.b(x))


class Branches(Around):
    units: ClassVar = {Branch}
    partly_used = True

    def make_unit(self):
        return Branch()


class WithoutGraph(Around):
    """A unit that runs without gradients within a forward that has them, as encoders do that are not trained."""

    idle = ("unit",)

    def forward(self, x):
        x = self.first(x)
        with torch.no_grad():
            shift = self.unit(x)
        return self.last(x + shift)


class Recomputed(nn.Module):
    def __init__(self, inner, reentrant):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x):
        return recompute(self.inner, x, use_reentrant=self.reentrant)


class RecomputedOutside(Nested):
    """Activation checkpointing around units."""

    reentrant = False

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Recomputed(block, self.reentrant) for block in self.blocks])


class RecomputedOutsideReentrant(RecomputedOutside):
    reentrant = True


class RecomputedInside(RecomputedOutside):
    """Activation checkpointing inside of units."""

    units: ClassVar = {Recomputed}


class RecomputedInsideReentrant(RecomputedInside):
    reentrant = True


def build(model_type, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    model = model_type().to(dtype)
    if model_type is MixedDtypes:
        model.unit.a.to(torch.float32)
    return model


# Training


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to train; the same for a plain and for a sharded model."""

    optimizer: str = "adamw"
    steps: int = 3
    dtype: torch.dtype = torch.float64
    """Of the parameters and the data."""
    parts: int = 1
    """Backward passes before each step."""
    no_sync: bool = False
    """Whether ranks exchange gradients in the last of these only."""
    clip: tuple[float, float] | None = None
    """Largest norm, and its kind."""
    set_to_none: bool = True
    evaluate: bool = False
    """Whether to compute a loss without gradients before each step, in eval mode."""
    autocast: bool = False
    follow: bool = False
    """Whether to keep the parameters at the start and after the first step."""
    zero_unused: bool = True
    """Whether what takes no part in a unit that was called has a gradient of zero, and not none."""

    def make_optimizer(self, parameters):
        # Decay, so that a parameter with a gradient of zero differs from one without. Epsilon is far above rounding
        # errors: the update of a gradient that ought to be zero would else be the quotient of two of them.
        if self.optimizer == "adamw":
            return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, eps=1e-5)
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


class Trained(NamedTuple):
    """What training leads to."""

    losses: list[float]
    """Of each step, the mean over ranks; those of evaluation too."""
    norms: list[float]
    """Of the gradients before each step, where they are clipped."""
    start: dict[str, torch.Tensor]
    after_one: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    """Of the whole model, at the start and after one step if they are followed, and at the end."""


def inputs(step, rank, dtype, part=0):
    generator = torch.Generator().manual_seed(10000 * part + 100 * step + rank)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)


def loss_of(model, x, autocast=False):
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(x)
    wide = output if output.dtype == torch.float64 else output.float()
    return (wide - 0.5).square().mean()


def named(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters(remove_duplicate=False)}


@functools.cache
def reference(model_type, ranks, recipe=Recipe()):
    """Training of the plain model on the data of all ranks."""
    return train_plain(build(model_type, recipe.dtype), ranks, recipe)


def train_plain(model, ranks, recipe):
    optimizer = recipe.make_optimizer(model.parameters())
    losses, norms, start, after_one = [], [], named(model) if recipe.follow else {}, {}
    for step in range(recipe.steps):
        if recipe.evaluate:
            model.eval()
            with torch.no_grad():
                losses.append(sum(loss_of(model, inputs(step, r, recipe.dtype)).item() for r in range(ranks)) / ranks)
            model.train()
        total = 0.0
        for part in range(recipe.parts):
            for rank in range(ranks):
                loss = loss_of(model, inputs(step, rank, recipe.dtype, part), recipe.autocast)
                (loss / recipe.parts).backward()
                total += loss.item() / (ranks * recipe.parts)
        losses.append(total)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(ranks)  # not the losses: a third of one would be rounded anew in low precision
        if recipe.zero_unused:
            _unused_are_zero(model)
        if recipe.clip is not None:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), *recipe.clip).item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=recipe.set_to_none)
        if recipe.follow and step == 0:
            after_one = named(model)
    return Trained(losses, norms, start, after_one, named(model))


def _unused_are_zero(model):
    """A flat parameter has a gradient as a whole, unless nothing calls its unit."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.grad is None and not name.startswith(tuple(model.idle)):
            parameter.grad = torch.zeros_like(parameter)


@dataclasses.dataclass(frozen=True, eq=False)
class Engine:
    """A class that shards modules, and the groups to do it over."""

    name: str
    api: Any
    """The module that names are imported from."""
    group: Callable[[], dist.ProcessGroup | None]
    """Over all ranks; None for the default."""
    square: Callable[[], tuple[dist.ProcessGroup, dist.ProcessGroup]]
    """On four ranks: groups of two to shard over, and of two to replicate over."""
    comm: Any
    """An mpi4py communicator, which the results are put together by."""
    known: dict[Any, Any] = dataclasses.field(default_factory=dict)
    """Results that several tests ask for."""

    @property
    def cls(self):
        return self.api.FullyShardedDataParallel

    @property
    def is_torch(self):
        return self.name == "torch"

    @contextlib.contextmanager
    def quiet(self):
        """Torch's own engine is deprecated, and warns of much; hpcfsdp is not to warn."""
        with warnings.catch_warnings():
            if self.is_torch:
                warnings.simplefilter("ignore")
            yield

    def beyond_torch(self, what):
        """Note a case that torch's own engine does not support."""
        if self.is_torch:
            pytest.skip(f"beyond torch: {what}")

    def groups(self, strategy):
        if "HYBRID" in strategy:
            return self.square()
        return self.group()

    def shard(self, model, *, strategy="FULL_SHARD", wrapping="policy", **options):
        """Collective over all ranks. Wrap a model; its class names the units."""
        if self.is_torch:
            options.setdefault("device_id", torch.device("cpu"))
        if "device_mesh" not in options:
            options.setdefault("process_group", self.groups(strategy))
        make = functools.partial(
            self.cls, sharding_strategy=torch_fsdp.ShardingStrategy[strategy], use_orig_params=False
        )
        make = functools.partial(make, **options)
        with self.quiet():
            if wrapping == "policy":
                return make(model, auto_wrap_policy=ModuleWrapPolicy(type(model).units))
            if wrapping == "size":
                policy = functools.partial(size_based_auto_wrap_policy, min_num_params=80)
                return make(model, auto_wrap_policy=policy)
            if wrapping == "by hand":
                self._wrap_inside(model, type(model).units, make)
            return make(model)

    def _wrap_inside(self, module, types, make):
        for name, child in module.named_children():
            self._wrap_inside(child, types, make)
            if type(child) in types:
                setattr(module, name, make(child))

    def whole(self, model):
        """Collective over all ranks. Every parameter by its name in the plain model, tied ones under each name."""
        with self.quiet(), self.cls.summon_full_params(model, writeback=False):
            return {plain_name(name): tensor for name, tensor in named(model).items()}

    def mean(self, value):
        """Collective over all ranks."""
        return self.comm.allreduce(value) / self.comm.size

    def train(self, model, recipe=Recipe()):
        """Collective over all ranks. Each takes its own data."""
        with self.quiet():
            return self._train(model, recipe)

    def _train(self, model, recipe):
        optimizer = recipe.make_optimizer(model.parameters())
        rank, losses, norms, after_one = self.comm.rank, [], [], {}
        start = self.whole(model) if recipe.follow else {}
        for step in range(recipe.steps):
            if recipe.evaluate:
                model.eval()
                with torch.no_grad():
                    losses.append(self.mean(loss_of(model, inputs(step, rank, recipe.dtype)).item()))
                model.train()
            total = 0.0
            for part in range(recipe.parts):
                alone = recipe.no_sync and part < recipe.parts - 1
                with model.no_sync() if alone else contextlib.nullcontext():
                    loss = loss_of(model, inputs(step, rank, recipe.dtype, part), recipe.autocast)
                    (loss / recipe.parts).backward()
                total += loss.item() / recipe.parts
            losses.append(self.mean(total))
            if recipe.clip is not None:
                norms.append(model.clip_grad_norm_(*recipe.clip).item())
            optimizer.step()
            optimizer.zero_grad(set_to_none=recipe.set_to_none)
            if recipe.follow and step == 0:
                after_one = self.whole(model)
        return Trained(losses, norms, start, after_one, self.whole(model))


def plain_name(name):
    """The name that a parameter has in the model before it is wrapped or compiled."""
    for part in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod."):
        name = name.replace(part, "")
    return name


@contextlib.contextmanager
def engines(world) -> Iterator[dict[str, Engine]]:
    """Collective over all ranks. hpcfsdp over several dtensor_ranks, and torch; groups are taken down at the end."""
    made: list[dist.ProcessGroup] = []

    def new_gloo(ranks=None):
        made.append(dist.new_group(ranks, backend="gloo"))
        return made[-1]

    @functools.cache
    def gloo():
        return new_gloo()

    @functools.cache
    def square_gloo():
        _needs_four()
        rows = [new_gloo(ranks) for ranks in ([0, 1], [2, 3])]
        columns = [new_gloo(ranks) for ranks in ([0, 2], [1, 3])]
        return rows[world.rank // 2], columns[world.rank % 2]

    @functools.cache
    def square_mpi():
        mesh = square_mesh()
        return mesh.get_group("shard"), mesh.get_group("replicate")

    def over(topology):
        """hpcfsdp on a communicator of its own, with ranks that share memory as in `topology`."""
        comm = functools.cache(lambda: MpiCommunicator(world.comm.Dup(), topology))

        @functools.cache
        def square():
            _needs_four()
            row, column = world.rank // 2, world.rank % 2
            return comm().subgroup([2 * row, 2 * row + 1]), comm().subgroup([column, column + 2])

        return Engine("hpcfsdp", our_fsdp, comm, square, world.comm)

    yield {
        "hpcfsdp": Engine("hpcfsdp", our_fsdp, lambda: None, square_mpi, world.comm),
        "messages": over(None),
        "two nodes": over(world.topology.split(2)) if world.size > 1 else None,
        "gloo": Engine("hpcfsdp", our_fsdp, gloo, square_gloo, world.comm),
        "torch": Engine("torch", torch_fsdp, gloo, square_gloo, world.comm),
    }
    gc.collect()  # models that are cycles still hold their groups
    for group in made:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


@functools.cache
def square_mesh():
    """Collective over all ranks. Two times two ranks over the default backend."""
    _needs_four()
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def _needs_four():
    if dist.get_world_size() != 4:
        pytest.skip("two by two are four ranks")


def under_test(found, carrier="hpcfsdp"):
    """The engine that a test is about, on memory that all ranks share unless another carrier is asked for."""
    asked = os.environ.get("HPCFSDP_TEST_ENGINE", "hpcfsdp")
    if carrier != "hpcfsdp" and (found[carrier] is None or asked != "hpcfsdp"):
        pytest.skip(f"no {carrier}: one rank, or another engine")
    return found[carrier if asked == "hpcfsdp" else asked]


def close(got, expected, rtol, atol):
    """Losses, norms and parameters of two trainings, these under the same names."""
    torch.testing.assert_close(got.losses, expected.losses, rtol=rtol, atol=0)
    torch.testing.assert_close(got.norms, expected.norms, rtol=rtol, atol=0)
    torch.testing.assert_close(got.parameters, expected.parameters, rtol=rtol, atol=atol)
