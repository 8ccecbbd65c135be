import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from hpcfsdp.units.arguments import resolve_ignored
from hpcfsdp.units.materialize import materialize
from hpcfsdp.units.own import Ignored
from tests.unit.units.units import mark_as_unit

CPU = torch.device("cpu")


class Unit(nn.Module):
    """Stands for the wrapper."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        mark_as_unit(self)


class Rotary(nn.Module):
    """A buffer that the constructor computes, as positional encodings do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("angles", 1.0 / 10 ** torch.arange(4.0), persistent=False)


class RotaryWithReset(Rotary):
    """The same, mended."""

    def reset_parameters(self):
        self.angles.copy_(1.0 / 10 ** torch.arange(4.0))


class Net(nn.Module):
    """Embedding tied to the head, attention, statistics, recurrence, and a plain container."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(4, 2, 8), nn.Sequential(nn.Linear(4, 4), nn.ReLU())])
        self.norm = nn.BatchNorm1d(4)
        self.memory = nn.LSTM(4, 4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embed.weight


def build(kind=Net, device="meta", seed=1):
    torch.manual_seed(seed)
    with torch.device(device):
        return kind()


def make(module, param_init_fn=None, seed=1, device=CPU, **options):
    torch.manual_seed(seed)
    return materialize(module, device=device, param_init_fn=param_init_fn, **options)


def reset(module):
    """What users pass: memory, then values."""
    module.to_empty(device="cpu", recurse=False)
    method = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if method is not None:
        method()


def states(module):
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def test_the_values_are_those_that_the_module_has_without_the_meta_device():
    plain, module = build(device="cpu"), build()
    names = make(module)
    assert set(names) == set(plain.state_dict())
    for name, tensor in plain.state_dict().items():
        assert torch.equal(module.state_dict()[name], tensor), name
    ids = torch.tensor([[0, 1, 2]])
    for net in (plain, module):
        net.eval()
    outputs = [net.memory(net.blocks[0](net.embed(ids)))[0] for net in (plain, module)]
    torch.testing.assert_close(*outputs)


@pytest.mark.parametrize("param_init_fn", [None, reset], ids=["reset_parameters", "param_init_fn"])
def test_everything_gets_a_value_and_ties_survive(param_init_fn):
    module = build()
    make(module, param_init_fn)
    assert all(tensor.device == CPU and not tensor.isnan().any() for tensor in states(module).values())
    assert module.head.weight is module.embed.weight
    assert sum(name.endswith("weight") and p.shape == (5, 4) for name, p in module.named_parameters()) == 1


@pytest.mark.parametrize("param_init_fn", [None, reset], ids=["reset_parameters", "param_init_fn"])
def test_a_tied_parameter_has_the_values_of_the_first_module_that_holds_it(param_init_fn):
    def fill(value):
        return lambda self: nn.init.constant_(self.weight, value)

    first = type("First", (nn.Linear,), {"reset_parameters": fill(1.0)})
    second = type("Second", (nn.Linear,), {"reset_parameters": fill(2.0)})

    def tied():
        model = nn.Sequential(first(2, 2, bias=False), second(2, 2, bias=False))
        model.append(second(2, 2, bias=False))
        model[1].weight = model[2].weight = model[0].weight
        return model

    module = build(tied)
    make(module, param_init_fn)
    assert module[0].weight is module[1].weight is module[2].weight
    assert module[0].weight.eq(1.0).all()


def test_a_buffer_registered_twice_is_one_afterwards():
    def shared():
        pair = nn.ModuleList([RotaryWithReset(), RotaryWithReset()])
        pair[1].angles = pair[0].angles
        return pair

    for function in (None, reset):
        module = build(shared)
        make(module, function)
        assert module[0].angles is module[1].angles
        assert module[0].angles[1] == pytest.approx(0.1)


def test_dtype_requires_grad_class_and_attributes_are_kept():
    class Special(nn.Parameter):
        pass

    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = Special(torch.empty(3, dtype=torch.bfloat16), requires_grad=False)
            self.weight.tag = "mine"

        def reset_parameters(self):
            self.weight.fill_(1)

    module = build(Holder)
    make(module)
    assert type(module.weight) is Special
    assert (module.weight.dtype, module.weight.requires_grad, module.weight.tag) == (torch.bfloat16, False, "mine")


def test_a_reset_may_write_leaves_in_place():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(2))

        def reset_parameters(self):
            self.weight[0] = 1
            self.weight[1:].fill_(2)

    module = build(Scale)
    make(module)
    assert module.weight.tolist() == [1, 2]
    assert module.weight.requires_grad


def test_what_is_not_on_the_meta_device_is_left_alone():
    calls = []
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert make(module, calls.append) == calls == []
    module.append(nn.Linear(2, 2, device="meta"))
    before = copy.deepcopy(module[:2].state_dict())
    make(module, reset)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module[:2].state_dict().items())
    module[0].weight = nn.Parameter(torch.empty(2, 2, device="meta"))
    assert make(module) == ["0.weight"]


def test_units_and_ignored_modules_are_not_entered():
    module = build()
    module.blocks[1] = Unit(module.blocks[1])
    ignored = resolve_ignored(module, [module.memory], None)
    names = make(module, ignored=ignored)
    on_meta = {name for name, tensor in states(module).items() if tensor.is_meta}
    assert on_meta == {name for name in states(module) if name.startswith(("memory.", "blocks.1."))}
    assert not on_meta & set(names)


def test_an_ignored_parameter_alone_is_left_and_beside_others_gets_a_value():
    module = nn.Sequential(nn.Linear(2, 2, device="meta"), nn.Linear(2, 2, bias=False, device="meta"))
    ignored = Ignored(params=frozenset([module[0].weight, module[1].weight]))
    assert make(module, ignored=ignored) == ["0.weight", "0.bias"]
    assert module[1].weight.is_meta


def test_the_function_is_called_with_modules_that_own_something_and_with_containers_of_those():
    seen = []

    def function(module):
        seen.append(type(module).__name__)
        reset(module)

    module = build()
    module.blocks.append(nn.Sequential(nn.Linear(2, 2)))  # nothing to do in there
    make(module, function)
    assert seen == [
        *("Net", "Embedding", "ModuleList", "TransformerEncoderLayer", "MultiheadAttention"),
        *("NonDynamicallyQuantizableLinear", "Linear", "Linear", "LayerNorm", "LayerNorm"),
        *("Sequential", "Linear", "BatchNorm1d", "LSTM", "Linear"),
    ]


def test_a_function_that_initialises_what_is_inside_too_is_not_called_for_it_again():
    seen = []

    def function(module):
        seen.append(type(module).__name__)
        if isinstance(module, nn.Sequential):
            module.to_empty(device="cpu")
            for param in module.parameters():
                nn.init.ones_(param)

    module = build(lambda: nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))]))
    make(module, function)
    assert seen == ["ModuleList", "Sequential"]
    assert all(param.eq(1).all() for param in module.parameters())


def test_a_function_that_replaces_parameters_keeps_ties():
    def function(module):
        for name, param in list(module.named_parameters(recurse=False)):
            if param.is_meta:
                setattr(module, name, nn.Parameter(torch.full(param.shape, 3.0)))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.zeros(buffer.shape, dtype=buffer.dtype))

    module = build()
    make(module, function)
    assert module.head.weight is module.embed.weight
    assert module.embed.weight.eq(3.0).all()


def test_modules_without_a_reset_are_named_together_with_what_they_own():
    def lacking():
        return nn.ModuleDict({"position": Rotary(), "deep": nn.Sequential(nn.Linear(2, 2), Rotary())})

    module = build(lacking)
    with pytest.raises(TypeError) as caught:
        make(module)
    assert str(caught.value) == (
        "modules on the meta device without a method reset_parameters(): Rotary 'position' (angles), Rotary 'deep.1' "
        "(angles); give them one that initialises their own parameters and buffers, or pass param_init_fn"
    )
    assert all(tensor.is_meta for tensor in states(module).values())


class Forgetful(nn.Module):
    """Its reset leaves things as they were found."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))
        self.forgotten = nn.Parameter(torch.empty(4, dtype=dtype), requires_grad=False)
        self.register_buffer("angles", torch.empty(4))
        self.register_buffer("ids", torch.empty(4, dtype=torch.int64))
        self.register_buffer("nothing", None)
        self.register_buffer("none", torch.empty(0))

    def reset_parameters(self):
        self.weight.fill_(1)
        self.angles[:3] = 1


@pytest.mark.parametrize("param_init_fn", [None, reset], ids=["reset_parameters", "param_init_fn"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.complex64, torch.int16]
)
def test_uninitialised_tensors_are_named(param_init_fn, dtype):
    module = build(lambda: nn.Sequential(nn.Linear(1, 1), Forgetful(dtype)))
    with pytest.raises(ValueError) as caught:
        make(module, param_init_fn)
    how = "reset_parameters()" if param_init_fn is None else "param_init_fn"
    assert str(caught.value) == (
        f"{how} did not initialise, or only in part, or set to NaN: 1.forgotten, 1.angles, 1.ids; every parameter and "
        "buffer of a module built on the meta device needs a value"
    )


@pytest.mark.parametrize("way", ["empty", "empty_like", "new_empty", "empty_strided"])
def test_memory_without_values_is_found_however_the_function_asked_for_it(way):
    ways = {
        "empty": lambda t: torch.empty(t.shape),
        "empty_like": lambda t: torch.empty_like(t, device="cpu"),
        "new_empty": lambda t: t.new_empty(t.shape, device="cpu"),
        "empty_strided": lambda t: torch.empty_strided(t.shape, t.stride()),
    }

    def function(module):
        for name, param in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(ways[way](param)))

    with pytest.raises(ValueError, match=r"param_init_fn did not initialise, .*: weight, bias; every"):
        make(nn.Linear(2, 2, device="meta"), function)


def test_uninitialised_small_integers_are_zero():
    class Masks(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.empty(64, dtype=torch.bool))
            self.register_buffer("bytes", torch.empty(64, dtype=torch.uint8))
            self.register_buffer("nibbles", torch.empty(64, dtype=torch.uint4))

        def reset_parameters(self):
            pass

    module = build(Masks)
    make(module)
    assert not module.mask.any()
    assert not module.bytes.any()
    assert not module.nibbles.view(torch.uint8).any()


def test_what_is_left_on_the_meta_device_is_named():
    with pytest.raises(ValueError, match=r"param_init_fn left tensors on the meta device: 0\.weight, 0\.bias"):
        make(nn.Sequential(nn.Linear(2, 2, device="meta")), lambda module: None)


def test_memory_is_enough_where_another_ranks_values_follow():
    module = build(lambda: nn.ModuleDict({"position": Rotary(), "layer": nn.Linear(2, 2)}))
    make(module, values_count=False)
    assert not any(tensor.is_meta for tensor in states(module).values())
    module = build()
    make(module, lambda inner: inner.to_empty(device="cpu", recurse=False), values_count=False)
    assert not any(tensor.is_meta for tensor in states(module).values())
    assert module.head.weight is module.embed.weight
    with pytest.raises(ValueError, match="left tensors on the meta device"):
        make(build(), lambda inner: None, values_count=False)


def test_a_function_that_cannot_be_called_is_refused():
    with pytest.raises(ValueError, match="param_init_fn must be a function of a module, not str"):
        make(nn.Linear(2, 2), "reset")


def test_the_device_may_be_another(monkeypatch):
    module = nn.Linear(2, 2, device="meta")
    asked = []
    real = torch.empty_like

    def empty_like(tensor, device):
        asked.append(device)
        return real(tensor, device="cpu")

    monkeypatch.setattr(torch, "empty_like", empty_like)
    make(module, device=torch.device("cuda", 1))
    assert asked == [torch.device("cuda", 1)] * 2


@pytest.mark.parametrize("param_init_fn", [None, reset], ids=["reset_parameters", "param_init_fn"])
def test_a_parameter_divided_over_a_mesh_stays_so(param_init_fn):
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        module = nn.LayerNorm(6, device="meta")  # no random numbers: of DTensors torch warns on the CPU
        shard = distribute_tensor(module.weight, DeviceMesh("cpu", torch.arange(2)), [Shard(0)])
        module.weight = nn.Parameter(shard)
        make(module, param_init_fn)
        assert isinstance(module.weight, DTensor)
        assert isinstance(module.weight, nn.Parameter)
        assert module.weight.placements == (Shard(0),)
        assert module.weight.to_local().tolist() == [1, 1, 1]
        module.weight = nn.Parameter(shard)
        with pytest.raises(
            ValueError, match="param_init_fn did not initialise, or only in part, or set to NaN: weight;"
        ):
            make(module, lambda inner: inner.to_empty(device="cpu", recurse=False))
    finally:
        dist.destroy_process_group()
