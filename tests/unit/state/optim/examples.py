"""Flat parameters, models and optimizers for the tests of optimizer state; no tests."""

import math

import torch
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.params.flat_param import FlatParam
from hpcfsdp.params.layout import FlatLayout
from hpcfsdp.state.optim.keys import FSDPParamInfo, get_fqn_to_fsdp_param_info
from hpcfsdp.state.optim.save import FlatParamState, communicate_optim_state
from hpcfsdp.state.settings import StateDictFormat
from hpcfsdp.state.wrappers import clean_fqn
from hpcfsdp.units.groups import resolve_mesh
from hpcfsdp.wrap import ModuleWrapPolicy

NO_SHARD = ShardingStrategy.NO_SHARD
SHAPES = {"a": (5, 3), "scalar": (), "none": (0, 2), "b": (7,), "one": (1,)}


def make_info(comm=None, shapes=None, *, dtype=torch.float32, original=False, strategy=None, frozen=(), aliases=None):
    """Collective over `comm`. A flat parameter of leaves with these names and shapes, all zero."""
    shapes, groups = SHAPES if shapes is None else shapes, resolve_mesh(comm or FakeCommunicator(), None, strategy)
    leaves = [nn.Parameter(torch.zeros(shape, dtype=dtype), name not in frozen) for name, shape in shapes.items()]
    named = [(name, shape, (aliases or {}).get(name, ())) for name, shape in shapes.items()]
    layout = FlatLayout.plan(named, dtype, groups.shard.size)
    whole = strategy is NO_SHARD
    flat = FlatParam(leaves, layout, groups.shard, use_orig_params=original, always_whole=whole)
    return FSDPParamInfo(groups, flat, layout)


def values_of(shapes, dtype=torch.float32, seed=0):
    """A tensor for each name, no two elements alike where the dtype allows it; the same on all ranks."""
    found, count = {}, seed * 1000 + 1
    for name, shape in shapes.items():
        numel = math.prod(shape)
        found[name] = torch.arange(count, count + numel).view(shape).to(dtype)
        count += numel
    return found


def shard_of(info, values):
    """This rank's shard of whole tensors, cut by hand; zero where no parameter is."""
    full = torch.zeros(info.layout.padded_numel, dtype=next(iter(values.values())).dtype)
    for slot in info.layout.slots:
        full[slot.offset : slot.end] = values[slot.fqn].reshape(-1)
    begin = info.comm.rank * info.layout.shard_numel
    return full[begin : begin + info.layout.shard_numel].clone()


def run_of(info, fqn, value):
    """This rank's run of a whole tensor, 1-D, cut by hand."""
    run = info.layout.param_run(fqn, info.comm.rank)
    begin, numel = (run.start, run.numel) if run else (0, 0)
    return value.reshape(-1)[begin : begin + numel].clone()


def gathered(info, states, merged, form=None):
    """Collective over ``info.mesh``. What a state dict shows of `states`, this rank's by parameter."""
    return communicate_optim_state(info, FlatParamState.of(info, states, merged), form or StateDictFormat())


class Odd:
    """State of a user's own class, that knows what it is equal to."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, Odd) and self.value == other.value

    def __hash__(self):
        return hash(self.value)

    def __repr__(self):
        return f"Odd({self.value})"


class Incomparable(Odd):
    """Raises when it is compared, as arrays do whose shapes do not fit."""

    def __eq__(self, other):
        raise ValueError("ambiguous")

    __hash__ = None


class Uncopyable(Odd):
    """Cannot be copied, as a lock cannot."""

    def __init__(self):
        super().__init__(1)

    def __deepcopy__(self, memo):
        raise TypeError("there is one")


class Unreadable:
    """Can be pickled, and not unpickled, as an object of a class that another rank cannot import."""

    def __reduce__(self):
        return _refuse, ()


def _refuse():
    raise ImportError("no such module")


values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-2, 2), st.floats(width=16), st.text("ab", max_size=2)),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.sampled_from("ab"), inner, max_size=2)),
    max_leaves=4,
)
"""What is no tensor, nested."""


class Block(nn.Module):
    """A unit with parameters of two dtypes, a frozen one, and one without elements."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5, 3))
        self.fixed = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.wide = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.none = nn.Parameter(torch.zeros(0, 2))


class Net(nn.Module):
    """A unit inside, tied weights, a parameter without dimensions, and parameters that no unit owns."""

    def __init__(self):
        super().__init__()
        self.block = Block()
        self.embed = nn.Embedding(6, 3)
        self.head = nn.Linear(3, 6)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.loose = nn.Linear(2, 4)


def shard(model, comm=None, *, original=False, **options):
    """Collective over `comm`. A model of this file wrapped, each ``Block`` a unit, ``loose`` left as it is."""
    if hasattr(model, "loose"):
        options["ignored_modules"] = [model.loose]
    return FullyShardedDataParallel(
        model,
        process_group=FakeCommunicator() if comm is None else comm,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=original,
        **options,
    )


def whole_states(model, steps=3):
    """State that an optimizer of a plain model could have, of every kind, for each parameter that is trained."""
    found = {}
    for place, (name, param) in enumerate(model.named_parameters()):
        if param.requires_grad:
            found[name] = {
                "step": torch.tensor(float(steps)),
                "mean": values_of({name: param.shape}, param.dtype, place)[name],
                "seen": values_of({name: param.shape}, torch.int64, place + 100)[name],
                "count": steps,
                "rate": 0.5,
                "kind": "mean",
                "nothing": None,
                "on": True,
            }
    return found


def copied(tree):
    """Nested dicts, lists and tensors as new memory."""
    if isinstance(tree, dict):
        return {key: copied(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [copied(value) for value in tree]
    return tree.clone() if isinstance(tree, torch.Tensor) else tree


def give(model, optimizer, states):
    """Have an optimizer of a sharded model hold this rank's part of whole states, cut by hand."""
    infos = get_fqn_to_fsdp_param_info(model)
    for info in {id(info): info for info in infos.values()}.values():
        names = list(info.param_indices)
        if info.flat.use_orig_params:
            for name, leaf in zip(names, info.flat.leaves, strict=True):
                if name in states:
                    optimizer.state[leaf] = {
                        key: copied(value) if _is_one(key) or info.keeps_shapes else run_of(info, name, value)
                        for key, value in states[name].items()
                    }
        elif names[0] in states:
            optimizer.state[info.flat.parameter] = {
                key: copied(value) if _is_one(key) else shard_of(info, {name: states[name][key] for name in names})
                for key, value in states[names[0]].items()
            }
    for name, param in model.named_parameters():
        clean = clean_fqn(name)
        if clean in states and clean not in infos:
            optimizer.state[param] = copied(states[clean])


def _is_one(key):
    """Whether this state of ``whole_states`` is one for the parameter, and not one for each element."""
    return key not in ("mean", "seen")


def raised(results, kind):
    """The messages that all ranks raised, each by itself the same as the first but for the rank that is named."""
    for result in results:
        assert type(result) is kind, result
    return [str(result) for result in results]
