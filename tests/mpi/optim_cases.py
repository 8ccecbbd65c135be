"""Optimizers, models and comparisons for the tests of the state dicts of optimizers; no tests."""

import contextlib
import functools
import warnings
from typing import ClassVar

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from tests.mpi import parity
from tests.mpi.parity import WIDTH, Around, build, inputs, loss_of, plain_name

KINDS = torch_fsdp.StateDictType
EXACT = {"rtol": 1e-9, "atol": 1e-11}
SINGLE = {"rtol": 1e-5, "atol": 1e-6}

FORMS = {
    "full": (KINDS.FULL_STATE_DICT, torch_fsdp.FullOptimStateDictConfig, {"offload_to_cpu": False}),
    "full offloaded": (KINDS.FULL_STATE_DICT, torch_fsdp.FullOptimStateDictConfig, {"offload_to_cpu": True}),
    "rank 0": (
        KINDS.FULL_STATE_DICT,
        torch_fsdp.FullOptimStateDictConfig,
        {"offload_to_cpu": False, "rank0_only": True},
    ),
    "rank 0 offloaded": (
        KINDS.FULL_STATE_DICT,
        torch_fsdp.FullOptimStateDictConfig,
        {"offload_to_cpu": True, "rank0_only": True},
    ),
    "sharded": (KINDS.SHARDED_STATE_DICT, torch_fsdp.ShardedOptimStateDictConfig, {"offload_to_cpu": False}),
    "sharded offloaded": (KINDS.SHARDED_STATE_DICT, torch_fsdp.ShardedOptimStateDictConfig, {"offload_to_cpu": True}),
    "local": (KINDS.LOCAL_STATE_DICT, torch_fsdp.LocalOptimStateDictConfig, {}),
}
"""Kinds of state dicts. The configurations are made anew each time: torch keeps them, and writes into them."""


# Optimizers


class ByParameter(torch.optim.Optimizer):
    """Steps one parameter after the other, by ``_step``."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step(param, self.state[param], group["lr"])


class Odd(ByParameter):
    """State of every kind, in dtypes other than the parameter's; steps each element by itself."""

    def __init__(self, params, lr=0.02):
        super().__init__(params, {"lr": lr, "note": "odd", "window": (3, 5), "limit": None})

    def _step(self, param, state, lr):
        if not state:
            state["average"] = torch.zeros_like(param, dtype=torch.float64)
            state["largest"] = torch.zeros_like(param)
            state["seen"] = torch.zeros_like(param, dtype=torch.uint8)
            state["total"] = torch.zeros((), dtype=torch.int64)
            state.update(count=0, rate=1.0, kind="mean", nothing=None, even=True)
        state["average"].mul_(0.9).add_(param.grad.double(), alpha=0.1)
        torch.maximum(state["largest"], param.grad.abs(), out=state["largest"])
        state["seen"] += 1
        state["total"] += 2
        state["count"] += 1
        state["rate"] *= 0.5
        state["even"] = not state["even"]
        param.sub_(lr * (1 + state["rate"]) * state["average"] / (1 + state["largest"]))

    def load_state_dict(self, state_dict):
        """Without torch's conversion of every state to the dtype of the parameter."""
        params = [param for group in self.param_groups for param in group["params"]]
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        self.state.clear()
        for key, param in zip(keys, params, strict=True):
            if key in state_dict["state"]:
                self.state[param] = dict(state_dict["state"][key])


class Keyed(torch.optim.Optimizer):
    """An optimizer whose state dict goes by names, in the manner of TorchRec's ``KeyedOptimizer``.

    State is loaded in place, so it has to be there, for each parameter and under the same names.
    """

    def __init__(self, params, make):
        super().__init__(list(params.values()), {})
        self.params = dict(params)
        self.inner = make(list(self.params.values()))
        self.state, self.param_groups = self.inner.state, self.inner.param_groups

    def step(self, closure=None):
        return self.inner.step()

    def init_state(self):
        """One step with gradients of zero, which gives every parameter its state."""
        for param in self.params.values():
            param.grad = torch.zeros_like(param)
        self.step()
        self.zero_grad()

    def state_dict(self):
        names = {param: name for name, param in self.params.items()}
        groups = [{**group, "params": sorted(names[param] for param in group["params"])} for group in self.param_groups]
        return {"state": {names[param]: state for param, state in self.state.items()}, "param_groups": groups}

    def load_state_dict(self, state_dict):
        for name, param in self.params.items():
            here, there = self.state[param], state_dict["state"][name]
            if here.keys() != there.keys():
                raise ValueError(f"state {sorted(there)} for {name!r}, which has {sorted(here)}")
            for key, value in there.items():
                if isinstance(value, torch.Tensor):
                    here[key].copy_(value)
                else:
                    here[key] = value
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})


_ADAM = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-5}
"""Epsilon far above rounding errors, see ``parity.Recipe``."""

OPTIMIZERS = {
    "adamw": functools.partial(torch.optim.AdamW, **_ADAM),
    "foreach": functools.partial(torch.optim.AdamW, foreach=True, **_ADAM),
    "fused": functools.partial(torch.optim.AdamW, fused=True, **_ADAM),
    "amsgrad": functools.partial(torch.optim.AdamW, amsgrad=True, **_ADAM),
    "tensor lr": lambda params: torch.optim.AdamW(params, **{**_ADAM, "lr": torch.tensor(1e-2)}, foreach=False),
    "sgd": functools.partial(torch.optim.SGD, lr=0.05),
    "momentum": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.05, eps=1e-5, initial_accumulator_value=0.1),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=1e-3, centered=True, momentum=0.9, eps=1e-3),
    "odd": Odd,
}
"""All of them step each element by itself, so that a sharded model does what the plain one does.

There is no capturable one: on CPUs torch's optimizers refuse to step with that flag.
"""

DTYPES = {"odd": torch.float32}
"""Of parameters that are not float64, so that state may be of a wider dtype."""


# Models


class Few(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.nothing = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(0, 3))
        self.shift = nn.Parameter(torch.tensor([0.5]))

    def forward(self, x):
        return x * self.scale + self.shift + self.nothing.sum()


class WithNothing(Around):
    """A parameter without elements and one without dimensions, in a unit with fewer elements than ranks."""

    units: ClassVar = {Few}

    def make_unit(self):
        return Few()


class WithIgnored(Around):
    """Parameters that no unit owns, see ``make``."""

    loose = ("side.",)

    def __init__(self):
        super().__init__()
        self.side = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return super().forward(x + torch.tanh(self.side(x)))


class Outside(Around):
    """A unit within a model that is not wrapped itself."""

    loose = ("first.", "last.")


# Training, plain and sharded


def make(engine, model_type=parity.Nested, kind="adamw", *, original=False, values=None, **options):
    """Collective over all ranks. A sharded model and its optimizer.

    Args:
        values: of all parameters of the plain model.
    """
    model = build(model_type, DTYPES.get(kind, torch.float64))
    if values is not None:
        set_values(model, values)
    options["use_orig_params"] = original
    if model_type is Outside:
        model.unit = engine.shard(model.unit, wrapping="whole", **options)
    else:
        left = [model.side] if model_type is WithIgnored else None
        model = engine.shard(model, ignored_modules=left, **options)
    return model, OPTIMIZERS[kind](model.parameters())


def make_plain(model_type=parity.Nested, kind="adamw", values=None):
    """A plain model and its optimizer."""
    model = build(model_type, DTYPES.get(kind, torch.float64))
    if values is not None:
        set_values(model, values)
    return model, OPTIMIZERS[kind](model.parameters())


@torch.no_grad()
def set_values(model, values):
    for name, param in model.named_parameters(remove_duplicate=False):
        param.copy_(values[name])


def values_of(engine, model):
    """Collective over all ranks. All parameters by their names in the plain model."""
    with engine.quiet(), contextlib.ExitStack() as stack:
        for unit in engine.cls.fsdp_modules(model, root_only=True):
            stack.enter_context(engine.cls.summon_full_params(unit, writeback=False))
        return {plain_name(name): tensor for name, tensor in parity.named(model).items()}


def train(engine, model, optimizer, steps):
    """Collective over all ranks. The mean loss of each step; each rank takes its own data."""
    losses, loose = [], tuple(getattr(model, "loose", ()))
    with engine.quiet():
        for step in steps:
            loss = loss_of(model, inputs(step, engine.comm.rank, _dtype(model)))
            loss.backward()
            for name, param in model.named_parameters():
                if plain_name(name).startswith(loose):  # of no unit: its gradient is averaged by hand
                    param.grad.copy_(torch.from_numpy(engine.mean(param.grad.numpy())))
            optimizer.step()
            model.zero_grad()
            losses.append(engine.mean(loss.item()))
    return losses


def train_plain(model, optimizer, ranks, steps, *, zero_unused=True):
    """As ``train``, in one process on the data of all ranks.

    Args:
        zero_unused: whether what takes no part in a unit that was called has a gradient of zero, and not none.
    """
    losses = []
    for step in steps:
        total = 0.0
        for rank in range(ranks):
            loss = loss_of(model, inputs(step, rank, _dtype(model)))
            (loss / ranks).backward()
            total += loss.item() / ranks
        for name, param in model.named_parameters():
            unused = param.requires_grad and param.grad is None
            if zero_unused and unused and not name.startswith(tuple(model.idle)):
                param.grad = torch.zeros_like(param)
        optimizer.step()
        model.zero_grad()
        losses.append(total)
    return losses


def _dtype(model):
    """Of the data."""
    return torch.float64 if any(param.dtype is torch.float64 for param in model.parameters()) else torch.float32


# State dicts


def form_of(engine, model, form):
    """The context in which an engine shows and takes state dicts of a form."""
    kind, config, arguments = FORMS[form]
    return engine.cls.state_dict_type(model, kind, None, config(**arguments))


def show(engine, model, optimizer, form="full", given=None):
    """Collective over all ranks. What the engine says of an optimizer's state."""
    with engine.quiet(), form_of(engine, model, form):
        found = engine.cls.optim_state_dict(model, optimizer, given)
    return own_memory(found) if engine.is_torch else found  # torch's scalars may be those of the optimizer


def to_load(engine, model, optimizer, osd, form="full", **options):
    """Collective over all ranks. What the engine has the optimizer load."""
    given = own_memory(osd) if engine.is_torch else osd  # the optimizer would step torch's scalars
    with engine.quiet(), form_of(engine, model, form):
        return engine.cls.optim_state_dict_to_load(model, optimizer, given, **options)


def load(engine, model, optimizer, osd, form="full", **options):
    """Collective over all ranks."""
    optimizer.load_state_dict(to_load(engine, model, optimizer, osd, form, **options))


@contextlib.contextmanager
def legacy(engine):
    """The older methods may say that there are newer ones."""
    with engine.quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def plain_osd(model, optimizer):
    """The state of a plain model's optimizer by name, as new memory."""
    names = {param: name for name, param in model.named_parameters()}
    state = {
        names[param]: {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in each.items()}
        for param, each in optimizer.state.items()
    }
    groups = [{**group, "params": [names[param] for param in group["params"]]} for group in optimizer.param_groups]
    return {"state": state, "param_groups": groups}


def load_plain(model, optimizer, osd):
    """Have a plain model's optimizer load state that goes by names."""
    params, names = dict(model.named_parameters()), [name for group in osd["param_groups"] for name in group["params"]]
    assert len(set(names)) == len(names)
    places = {param: key for key, param in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    groups = [
        {**group, "params": sorted(places[params[name]] for name in group["params"])} for group in osd["param_groups"]
    ]
    state = {places[params[name]]: dict(each) for name, each in osd["state"].items()}
    optimizer.load_state_dict(own_memory({"state": state, "param_groups": groups}))


@functools.cache
def plain_trained(model_type=parity.Nested, kind="adamw", steps=3):
    """The state of a plain optimizer by name after some steps; to be left alone."""
    model, optimizer = make_plain(model_type, kind)
    train_plain(model, optimizer, 1, range(steps))
    return plain_osd(model, optimizer)


def own_memory(tree):
    """A copy of nested dicts and lists, and of the plain tensors in them."""
    if isinstance(tree, dict):
        return {key: own_memory(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [own_memory(value) for value in tree]
    return tree.clone() if type(tree) is torch.Tensor else tree


def prints(tree):
    """Nested dicts and lists as something that can be compared, every bit of tensors included."""
    if isinstance(tree, dict):
        return {key: prints(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [prints(value) for value in tree]
    if isinstance(tree, ShardedTensor):
        return [(str(shard.metadata), prints(shard.tensor)) for shard in tree.local_shards()]
    if isinstance(tree, DTensor):
        return str(tree.placements), prints(tree.to_local())
    if isinstance(tree, torch.Tensor):
        tensor = tree.detach().contiguous()
        return str(tensor.dtype), tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    return tree


def whole_osd(engine, osd):
    """Collective over all ranks. A state dict in which nothing is distributed."""
    state = {}
    for fqn in sorted(osd["state"]):
        entry = osd["state"][fqn]
        state[fqn] = {key: _whole(engine, entry[key]) for key in sorted(entry)}
    return {**osd, "state": state}


def _whole(engine, value):
    if isinstance(value, DTensor):
        begins = [tuple(offsets) for offsets in engine.comm.allgather(_dtensor_offset(value))]
        shape, blocks = value.shape, [*zip(begins, engine.comm.allgather(value.to_local().numpy()), strict=True)]
    elif isinstance(value, ShardedTensor):
        shape = value.metadata().size
        mine = [(tuple(shard.metadata.shard_offsets), shard.tensor.numpy()) for shard in value.local_shards()]
        blocks = [block for blocks in engine.comm.allgather(mine) for block in blocks]
    else:
        return value
    whole = torch.zeros(shape, dtype=value.dtype if isinstance(value, DTensor) else _dtype_of(value))
    for offsets, block in blocks:
        place = tuple(slice(begin, begin + size) for begin, size in zip(offsets, block.shape, strict=True))
        whole[place] = torch.from_numpy(block)
    return whole


def _dtype_of(value):
    return value.metadata().tensor_properties.dtype


def _dtensor_offset(value):
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return offset


# Comparisons


def same_osd(got, expected, tolerance=None, *, ordered=True):
    """State and groups, values bitwise unless there is a tolerance.

    Args:
        ordered: whether parameters stand in their groups in the same order, too.
    """
    assert set(got) == set(expected)
    assert set(got["state"]) == set(expected["state"])
    for fqn, entry in expected["state"].items():
        assert set(got["state"][fqn]) == set(entry), fqn
        for key, value in entry.items():
            same_value(got["state"][fqn][key], value, f"{fqn}/{key}", tolerance)
    same_groups(got["param_groups"], expected["param_groups"], ordered=ordered)


def same_groups(got, expected, *, ordered=True):
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert set(one) == set(other)
        for key, value in other.items():
            if key == "params" and not ordered:
                assert sorted(one[key]) == sorted(value)
            else:
                same_value(one[key], value, key)


def same_value(got, expected, what, tolerance=None):
    assert type(got) is type(expected), f"{what}: {type(got)} and {type(expected)}"
    if isinstance(expected, ShardedTensor):
        one, other = got.metadata(), expected.metadata()
        assert (one.size, one.tensor_properties) == (other.size, other.tensor_properties), what
        assert _shards(one.shards_metadata) == _shards(other.shards_metadata), what
        pairs = zip(got.local_shards(), expected.local_shards(), strict=True)
        for index, (one, other) in enumerate(pairs):
            # Without their places: torch gives them ranks of the group that shards, which need not be all ranks.
            where, expected_where = one.metadata, other.metadata
            assert where.shard_offsets == expected_where.shard_offsets, what
            assert where.shard_sizes == expected_where.shard_sizes, what
            same_value(one.tensor, other.tensor, f"{what}, shard {index}", tolerance)
    elif isinstance(expected, DTensor):
        assert (got.shape, got.dtype, got.placements) == (expected.shape, expected.dtype, expected.placements), what
        assert got.device_mesh == expected.device_mesh, what
        assert got.stride() == expected.stride(), what
        same_value(got.to_local(), expected.to_local(), what, tolerance)
    elif isinstance(expected, torch.Tensor):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape), what
        assert (got.requires_grad, got.device) == (expected.requires_grad, expected.device), what
        if tolerance is None:
            assert torch.equal(got, expected), what
        else:
            torch.testing.assert_close(got, expected, **tolerance, msg=lambda text: f"{what}: {text}")
    elif tolerance is not None and isinstance(expected, float):
        torch.testing.assert_close(got, expected, **tolerance, msg=lambda text: f"{what}: {text}")
    else:
        assert got == expected, what


def shards_lie_here(osd):
    """Whether each shard that this rank holds is one that the whole tensor has on this rank."""
    values = [value for entry in osd["state"].values() for value in entry.values() if isinstance(value, ShardedTensor)]
    return all(
        shard.metadata in value.metadata().shards_metadata and shard.metadata.placement.rank() == dist.get_rank()
        for value in values
        for shard in value.local_shards()
    )


def _shards(metadata):
    return sorted((each.shard_offsets, each.shard_sizes, str(each.placement)) for each in metadata)
