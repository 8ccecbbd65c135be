import dataclasses
import functools
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed import utils as stock
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils import _pytree

from hpcfsdp import accelerator
from hpcfsdp.engine import nested
from hpcfsdp.engine.nested import (
    apply_to_tensors,
    cast_forward_inputs,
    pack_kwargs,
    recursive_to,
    tensors_in,
    to_kwargs,
    unpack_kwargs,
)

A, B, C = torch.zeros(1), torch.ones(2), torch.full((3,), 2.0)

Point = namedtuple("Point", ["x", "y"])


class Typed(NamedTuple):
    x: torch.Tensor
    y: Any = None


class Watched(Point):
    """A named tuple with an attribute, and a constructor of its own."""

    def __new__(cls):
        made = super().__new__(cls, A, B)
        made.note = "kept"
        return made


class Items(list):
    def __init__(self, note):
        super().__init__([A, B])
        self.note = note


class Scores(defaultdict):
    """A constructor that takes nothing."""

    def __init__(self):
        super().__init__(list)


class Named(OrderedDict):
    """A constructor that must be given something."""

    def __init__(self, name):
        super().__init__()
        self.name = name


class Attributes(dict):
    """Keys are attributes, by a trick that is often seen."""

    def __init__(self, **items):
        super().__init__(**items)
        self.__dict__ = self


class Mirrored(dict):
    """An item that is in a slot too."""

    __slots__ = ("first", "unset")


class Record(UserDict):
    def __init__(self, name, first):
        super().__init__(first=first)
        self.name = name


class Sealed(dict):
    def __setitem__(self, key, value):
        raise TypeError("read only")


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    further: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    y: Any = None


@dataclasses.dataclass(frozen=True)
class FrozenSlots:
    __slots__ = ("x", "y")
    x: torch.Tensor
    y: Any


@dataclasses.dataclass
class Derived:
    """Fields that the constructor does not take, and one that it takes but that is no field."""

    x: torch.Tensor
    scale: dataclasses.InitVar[float]
    scaled: torch.Tensor = dataclasses.field(init=False)
    runs: list = dataclasses.field(init=False, default_factory=list)
    late: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self, scale):
        self.scaled = self.x * scale
        self.alias = self.x
        self.runs.append(scale)

    @functools.cached_property
    def total(self):
        return self.x.sum()


@dataclasses.dataclass
class ModelOutput(OrderedDict):
    """As the one of transformers: fields that are set are items too, and are changed together."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    states: tuple | None = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                super().__setitem__(field.name, value)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def update(self, *_args, **_kwargs):
        raise RuntimeError("refused")


class Unknown:
    def __init__(self):
        self.tensor = A


class Registered:
    def __init__(self, inner, note):
        self.inner, self.note = inner, note


@pytest.fixture
def registered():
    _pytree.register_pytree_node(
        Registered, lambda value: ([value.inner], value.note), lambda children, note: Registered(*children, note)
    )
    yield Registered
    _pytree._deregister_pytree_node(Registered)


def plus_one(tensor):
    return tensor + 1


def equal(a, b):
    """Equal in type and value, down to the tensors."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(equal, a, b))
    if dataclasses.is_dataclass(a):
        return equal(vars(a), vars(b))
    return a == b


MAPPED_BY_TORCH = [
    A,
    nn.Parameter(A),
    (A, B),
    [A, [B, (C,)]],
    (),
    {},
    {"b": A, "a": {"c": [B, C]}},
    OrderedDict(b=A, a=B),
    Point(A, Point(B, 3)),
    Typed(A),
    Output(A, [B, None]),
    Output(A, Output(B)),
    Frozen(A, {"z": B}),
    [None, A, 1, "text", 2.5, torch.float32],
]


@pytest.mark.parametrize("value", MAPPED_BY_TORCH, ids=lambda value: type(value).__name__)
def test_where_torch_is_right_the_result_is_that_of_torch(value):
    got = apply_to_tensors(plus_one, value)
    assert equal(got, stock._apply_to_tensors(plus_one, value))
    if list(tensors_in(value)):
        assert not equal(got, value)


@pytest.mark.parametrize(
    "value",
    [
        *MAPPED_BY_TORCH,
        {A, B},
        frozenset([A]),
        defaultdict(list, a=[A]),
        Items("note"),
        Attributes(x=A),
        ModelOutput(loss=A, states=(B,)),
        UserDict(a=A),
        MappingProxyType({"a": A}),
        deque([A]),
        Derived(A, 2.0),
        pack_sequence([A, A]),
        torch.max(torch.ones(2, 2), dim=1),
        torch.Size([2, 3]),
        nn.Linear(1, 1),
        SimpleNamespace(a=A),
        Unknown(),
        Output,
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_container_in_which_nothing_is_replaced_is_returned_itself(value):
    """torch rebuilds each container it knows: what is written into one is not seen in the other."""
    assert apply_to_tensors(lambda tensor: tensor, value) is value


def test_torch_replaces_containers_in_which_nothing_changed():
    value = {"cache": []}
    assert stock._apply_to_tensors(lambda tensor: tensor, value) is not value


def test_only_containers_around_what_is_replaced_are_new():
    kept, opaque = [B], Unknown()
    got = apply_to_tensors(lambda tensor: tensor + 1 if tensor is A else tensor, (kept, [A], opaque))
    assert got[0] is kept
    assert got[1][0].item() == 1
    assert got[2] is opaque


def test_the_given_containers_are_not_changed():
    inner, table, out = [A], {"a": A}, Output(A)
    apply_to_tensors(plus_one, (inner, table, out))
    assert inner[0] is table["a"] is out.logits is A


@pytest.mark.parametrize("base", [set, frozenset])
def test_sets_stay_what_they_are(base):
    """torch leaves a frozenset as it is."""

    class Own(base):
        pass

    for kind in (base, Own):
        got = apply_to_tensors(plus_one, kind([A, "text"]))
        assert type(got) is kind
        assert {"text", 1.0} == {item if isinstance(item, str) else item.item() for item in got}
    if base is frozenset:
        [same] = stock._apply_to_tensors(plus_one, frozenset([A]))
        assert same is A


def test_the_mapped_packed_sequence_is_returned():
    """torch maps the data, and returns the sequence that it was given."""
    value = pack_sequence([torch.ones(1), torch.ones(3)], enforce_sorted=False)
    got = apply_to_tensors(plus_one, [value])[0]
    assert type(got) is PackedSequence
    assert got.data.tolist() == [2, 2, 2, 2]
    for name in ("batch_sizes", "sorted_indices", "unsorted_indices"):
        assert getattr(got, name) is getattr(value, name)
    assert stock._apply_to_tensors(plus_one, value) is value


def test_the_orders_of_a_packed_sequence_go_where_its_data_goes():
    value = pack_sequence([torch.ones(1), torch.ones(3)], enforce_sorted=False)
    got = apply_to_tensors(lambda tensor: tensor.to("meta"), value)
    assert {got.data.device.type, got.sorted_indices.device.type, got.unsorted_indices.device.type} == {"meta"}
    assert got.batch_sizes is value.batch_sizes


def test_a_defaultdict_keeps_its_factory():
    """torch makes a dict of it, so that the next missing key raises."""
    value = defaultdict(list, b=A, a=[B])
    got = apply_to_tensors(plus_one, value)
    assert type(got) is defaultdict
    assert list(got) == ["b", "a"]
    assert got["missing"] == []
    assert "missing" not in value
    assert type(stock._apply_to_tensors(plus_one, value)) is dict


def test_a_subclass_of_dict_stays_what_it_is_with_its_attributes():
    """torch makes a dict of it."""
    value = Scores()
    value["a"], value.note = A, ["note"]
    got = apply_to_tensors(plus_one, value)
    assert type(got) is Scores
    assert got["a"].item() == 1
    assert got["missing"] == []
    assert got.note is value.note
    assert type(stock._apply_to_tensors(plus_one, value)) is dict


def test_an_ordered_dict_with_a_constructor_of_its_own_keeps_order_and_attributes():
    """torch calls the constructor without arguments."""
    value = Named("name")
    value.update(a=A, b=B)
    value.move_to_end("a")
    got = apply_to_tensors(plus_one, value)
    assert type(got) is Named
    assert list(got) == ["b", "a"]
    assert list(reversed(got)) == ["a", "b"]
    assert (got.name, got["a"].item()) == ("name", 1)
    with pytest.raises(TypeError, match="name"):
        stock._apply_to_tensors(plus_one, value)


def test_a_dict_that_refuses_items_is_rebuilt_all_the_same():
    got = apply_to_tensors(plus_one, Sealed(a=A))
    assert type(got) is Sealed
    assert got["a"].item() == 1


def test_keys_that_are_attributes_too_change_in_both_places():
    got = apply_to_tensors(plus_one, Attributes(x=A, y=3))
    assert type(got) is Attributes
    assert got.x is got["x"]
    assert (got.x.item(), got.y) == (1, 3)
    got.z = 4
    assert got["z"] == 4


def test_slots_are_kept_and_follow_the_items():
    value = Mirrored(first=A)
    value.first = A
    got = apply_to_tensors(plus_one, value)
    assert got.first is got["first"]
    assert got.first.item() == 1
    assert not hasattr(got, "unset")


def test_the_output_of_a_transformers_model_changes_items_and_attributes():
    """torch takes it for a dataclass and builds it from its fields; that works as long as no field is a pair."""
    value = ModelOutput(loss=A, states=(B, (C,)))
    got = apply_to_tensors(plus_one, value)
    assert type(got) is ModelOutput
    assert list(got) == ["loss", "states"]
    assert got.loss is got["loss"]
    assert got.states is got["states"]
    assert got.logits is None
    assert (got.loss.item(), got.states[1][0].tolist()) == (1, [3, 3, 3])
    assert (value.loss is A, value["loss"] is A) == (True, True)


def test_mappings_that_are_no_dicts_are_mapped():
    """torch passes over them: their tensors are neither cast nor moved."""
    value = UserDict(a=A, b=(B,))
    got = apply_to_tensors(plus_one, value)
    assert type(got) is UserDict
    assert (got["a"].item(), value["a"].item()) == (1, 0)
    record = apply_to_tensors(plus_one, Record("name", A))
    assert (type(record), record.name, record["first"].item()) == (Record, "name", 1)
    read_only = apply_to_tensors(plus_one, MappingProxyType({"a": A}))
    assert type(read_only) is MappingProxyType
    assert read_only["a"].item() == 1
    assert stock._apply_to_tensors(plus_one, value) is value


@pytest.mark.parametrize("kind", [FrozenSlots, Frozen])
def test_frozen_dataclasses_are_rebuilt(kind):
    got = apply_to_tensors(plus_one, kind(A, [B]))
    assert type(got) is kind
    assert (got.x.item(), got.y[0].tolist()) == (1, [2, 2])
    with pytest.raises(dataclasses.FrozenInstanceError):
        got.x = A


def test_a_dataclass_is_rebuilt_without_its_constructor():
    """torch calls the constructor, which does not take the fields that are marked ``init=False``."""
    value = Derived(A + 1, 2.0)
    assert value.total.item() == 1
    got = apply_to_tensors(plus_one, value)
    assert (got.x.item(), got.scaled.item()) == (2, 3)
    assert got.alias is got.x
    assert got.runs == [2.0]
    assert got.total.item() == 2
    assert not hasattr(got, "late")
    with pytest.raises((ValueError, TypeError), match=r"scale|init=False"):
        stock._apply_to_tensors(plus_one, value)


def test_a_field_with_the_default_of_the_class_is_mapped():
    @dataclasses.dataclass
    class Holder:
        held: Any = dataclasses.field(init=False, default=(A,))

    got = apply_to_tensors(plus_one, Holder())
    assert got.held[0].item() == 1
    assert Holder().held == (A,)


def test_named_tuples_are_made_without_their_constructor():
    """torch hands the items to the constructor, which may take others."""
    got = apply_to_tensors(plus_one, Watched())
    assert type(got) is Watched
    assert (got.x.item(), got.y.tolist(), got.note) == (1, [2, 2], "kept")
    with pytest.raises(TypeError):
        stock._apply_to_tensors(plus_one, Watched())


def test_named_results_of_torch_are_rebuilt():
    got = apply_to_tensors(plus_one, torch.max(torch.ones(2, 2), dim=1))
    assert type(got) is torch.return_types.max
    assert (got.values.tolist(), got.indices.tolist()) == ([2, 2], [1, 1])


def test_subclasses_of_list_keep_their_attributes():
    got = apply_to_tensors(plus_one, Items("note"))
    assert type(got) is Items
    assert [item.tolist() for item in got] == [[1], [2, 2]]
    assert got.note == "note"


def test_types_of_pytree_are_mapped_and_unknown_ones_left(registered):
    """torch's own function looks into neither."""
    opaque = Unknown()
    got = apply_to_tensors(plus_one, [registered({"a": A}, "note"), deque([B], maxlen=4), opaque])
    assert type(got[0]) is registered
    assert (got[0].inner["a"].item(), got[0].note) == (1, "note")
    assert (got[1][0].tolist(), got[1].maxlen) == ([2, 2], 4)
    assert got[2] is opaque


def test_a_type_may_be_registered_after_it_was_seen(request):
    assert apply_to_tensors(plus_one, Registered(A, "")).inner is A
    registered = request.getfixturevalue("registered")
    assert apply_to_tensors(plus_one, registered(A, "")).inner.item() == 1


def test_modules_and_sizes_are_left_alone():
    @dataclasses.dataclass(eq=False)
    class Layer(nn.Module):
        weight: Any

        def __post_init__(self):
            super().__init__()

    layer = Layer.__new__(Layer)
    nn.Module.__init__(layer)
    layer.weight = nn.Parameter(A)
    size = torch.Size([2])
    got = apply_to_tensors(plus_one, (layer, size, A))
    assert got[0] is layer
    assert got[1] is size


def test_fn_may_return_anything():
    assert apply_to_tensors(lambda tensor: tensor.numel(), {"a": (A, B), "b": Output(C)}) == {
        "a": (1, 2),
        "b": Output(3),
    }


def test_subclasses_of_tensor_are_given_to_fn_whole():
    class Own(torch.Tensor):
        pass

    value = torch.ones(2).as_subclass(Own)
    seen = []
    apply_to_tensors(seen.append, [value, nn.Parameter(A)])
    assert [type(tensor) for tensor in seen] == [Own, nn.Parameter]


# Arguments packed


@pytest.mark.parametrize(("args", "kwargs"), [((1, 2), {"b": 3, "a": 4}), ((), {}), ((1,), {}), ((), {"a": 1})])
def test_arguments_are_packed_as_torch_does_and_unpacked_again(args, kwargs):
    flat, keys = pack_kwargs(*args, **kwargs)
    assert (flat, keys) == stock._pack_kwargs(*args, **kwargs)
    assert unpack_kwargs(flat, keys) == stock._unpack_kwargs(flat, keys) == (args, kwargs)


def test_more_keywords_than_values_are_refused_with_both_numbers():
    """torch raises an AssertionError."""
    with pytest.raises(ValueError, match=r"^3 keywords for 2 values: "):
        unpack_kwargs((1, 2), ("a", "b", "c"))
    with pytest.raises(AssertionError):
        stock._unpack_kwargs((1, 2), ("a", "b", "c"))


# Casts


def test_floating_point_alone_is_cast():
    ids, mask, phase = torch.arange(2), torch.tensor([True]), torch.zeros(1, dtype=torch.complex64)
    args = (A, ids, [mask, B.double()], Output(phase, A.bfloat16()))
    got, kwargs = cast_forward_inputs(torch.bfloat16, args, {"x": {"y": A}, "z": ids})
    assert [tensor.dtype for tensor in tensors_in(got)] == [
        torch.bfloat16,
        torch.int64,
        torch.bool,
        torch.bfloat16,
        torch.complex64,
        torch.bfloat16,
    ]
    assert (got[1] is ids, got[2][0] is mask, got[3] is args[3]) == (True, True, True)
    assert kwargs["x"]["y"].dtype is torch.bfloat16
    assert equal((got, kwargs), stock._cast_forward_inputs(torch.bfloat16, *args, x={"y": A}, z=ids))


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_nothing_to_cast_leaves_the_arguments_themselves(dtype):
    args, kwargs = (A, {"a": [B]}), {"x": C}
    got = cast_forward_inputs(dtype, args, kwargs)
    assert got[0] is args
    assert got[1] is kwargs


def test_gradients_flow_through_the_cast_in_the_dtype_of_the_input():
    x, fixed = torch.ones(2, requires_grad=True), torch.ones(2)
    (got, constant), _ = cast_forward_inputs(torch.bfloat16, (x, fixed), {})
    assert (got.requires_grad, constant.requires_grad) == (True, False)
    (got * constant).sum().backward()
    assert (x.grad.dtype, x.grad.tolist()) == (torch.float32, [1, 1])


# Moves: the meta device stands for another one


def everything():
    return {
        "tuple": (A, [B]),
        "named": Point(A, 1),
        "dataclass": Frozen(A, {"b": B}),
        "default": defaultdict(list, a=[A]),
        "packed": pack_sequence([A, A]),
        "set": frozenset([A]),
    }


@pytest.mark.parametrize("side_stream", [False, True])
@pytest.mark.parametrize("device", ["meta", torch.device("meta")])
def test_all_tensors_are_moved_in_containers_that_stay(device, side_stream):
    value = everything()
    moved = recursive_to(value, device, side_stream)
    assert {tensor.device.type for tensor in tensors_in(moved)} == {"meta"}
    assert [type(item) for item in moved.values()] == [type(item) for item in value.values()]


@pytest.mark.parametrize("kind", everything())
def test_where_torch_moves_tensors_they_are_moved_alike(kind):
    """torch leaves tensors in dataclasses and sets where they are, and cannot build a defaultdict."""
    value = everything()[kind]
    moved = recursive_to(value, "meta", False)
    if kind == "default":
        with pytest.raises(TypeError, match="callable"):
            stock._recursive_to(value, torch.device("meta"), False)
        return
    [by_torch] = stock._recursive_to(value, torch.device("meta"), False)
    if kind in ("dataclass", "set"):
        assert by_torch is value
        return
    places = [[tensor.device for tensor in tensors_in(found)] for found in (moved, by_torch)]
    assert type(moved) is type(by_torch)
    assert places[0] == places[1]


def test_what_is_on_the_device_already_stays_itself():
    value = everything()
    assert recursive_to(value, "cpu", True) is value


def test_both_kinds_of_arguments_are_moved():
    args, kwargs = to_kwargs((A, 1), {"x": [B], "y": None}, "meta", False)
    assert (args[0].device.type, args[1], kwargs["x"][0].device.type, kwargs["y"]) == ("meta", 1, "meta", None)
    assert [args, kwargs] == [got[0] for got in stock._to_kwargs((args[0], 1), kwargs, torch.device("meta"), False)]


@pytest.mark.parametrize(("args", "kwargs"), [((), None), ((), {}), ((1,), None), ((), {"a": 1})])
def test_arguments_may_be_missing(args, kwargs):
    assert to_kwargs(args, kwargs, "cpu", False) == (args, kwargs or {})


class FakeGpu:
    """A stand-in for ``hpcfsdp.accelerator`` that writes down what is asked of it."""

    def __init__(self):
        self.events = []
        self.side = SimpleNamespace(name="side")
        self.current = SimpleNamespace(
            name="current", wait_stream=lambda stream: self.events.append(f"current waits for {stream.name}")
        )

    def new_stream(self, device):
        return self.side

    def current_device(self):
        return torch.device("cuda", 0)

    def current_stream(self, device):
        return self.current

    def on(self, stream):
        gpu = self

        class Entered:
            def __enter__(self):
                gpu.events.append(f"enter {stream.name}")

            def __exit__(self, *_):
                gpu.events.append(f"leave {stream.name}")

        return Entered()

    def tensor(self, name, device="cpu", pinned=False, requires_grad=False):
        return FakeTensor._make_subclass(FakeTensor, torch.zeros(1), requires_grad).describe(
            self, name, torch.device(device), pinned
        )


class FakeTensor(torch.Tensor):
    """A tensor with another device."""

    def describe(self, gpu, name, device, pinned):
        self.gpu, self.called, self.place, self.pinned = gpu, name, device, pinned
        return self

    @property
    def device(self):
        return self.place

    @property
    def layout(self):
        return torch.sparse_coo if self.called == "sparse" else torch.strided

    def is_pinned(self):
        return self.pinned

    def pin_memory(self):
        self.gpu.events.append(f"pin {self.called}")
        return self.gpu.tensor(self.called, pinned=True)

    def to(self, device, non_blocking=False):
        how = "without waiting" if non_blocking else "waiting"
        self.gpu.events.append(f"copy {self.called} from {'pinned' if self.pinned else 'plain'} memory {how}")
        return self.gpu.tensor(self.called, device)

    def record_stream(self, stream):
        self.gpu.events.append(f"{self.called} is used by {stream.name}")


@pytest.fixture
def gpu(monkeypatch):
    made = FakeGpu()
    for name in ("new_stream", "current_device", "current_stream", "on"):
        monkeypatch.setattr(accelerator, name, getattr(made, name))
    nested._side_stream.cache_clear()
    yield made
    nested._side_stream.cache_clear()


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_host_tensors_go_to_the_gpu_pinned_and_on_the_side_stream(gpu, device):
    x, y, here = gpu.tensor("x"), gpu.tensor("y", pinned=True), gpu.tensor("here", "cuda:0")
    args, kwargs = to_kwargs((x, here), {"y": y}, device, True)
    assert gpu.events == [
        "pin x",
        "enter side",
        "copy x from pinned memory without waiting",
        "leave side",
        "enter side",
        "copy y from pinned memory without waiting",
        "leave side",
        "current waits for side",
        "x is used by current",
        "y is used by current",
    ]
    assert args[1] is here
    assert (args[0].place, kwargs["y"].place) == (torch.device("cuda:0"), torch.device("cuda:0"))


def test_torch_copies_from_the_host_on_the_current_stream_and_waits(gpu):
    stock._recursive_to((gpu.tensor("x"),), torch.device("cuda:0"), True)
    assert gpu.events == ["copy x from plain memory waiting"]


def test_copies_from_another_gpu_are_not_pinned_and_those_with_gradients_neither(gpu):
    recursive_to([gpu.tensor("x", "cuda:1"), gpu.tensor("y", requires_grad=True)], "cuda:0", True)
    assert not [event for event in gpu.events if event.startswith("pin")]
    assert len([event for event in gpu.events if event.startswith("copy")]) == 2


def test_sparse_tensors_are_copied_on_the_current_stream(gpu):
    recursive_to(gpu.tensor("sparse"), "cuda:0", True)
    assert gpu.events == ["copy sparse from plain memory waiting"]


def test_nothing_waits_where_nothing_moves(gpu):
    value = (gpu.tensor("x", "cuda:0"), 3)
    assert recursive_to(value, "cuda:0", True) is value
    assert gpu.events == []


def test_without_a_side_stream_the_current_one_copies(gpu):
    recursive_to(gpu.tensor("x"), "cuda:0", False)
    assert gpu.events == ["copy x from plain memory waiting"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("side_stream", [False, True])
def test_values_arrive_on_a_gpu(side_stream):
    x = torch.randn(1 << 20)
    weight = torch.ones(4, requires_grad=True)
    packed = pack_sequence([torch.ones(1), torch.ones(3)], enforce_sorted=False)
    moved, (there, _), sequence = recursive_to([x, Point(weight, None), packed], "cuda", side_stream)
    assert torch.equal((moved * 2).cpu(), x * 2)
    there.sum().backward()
    assert weight.grad.tolist() == [1] * 4
    assert torch.equal(sequence.sorted_indices.cpu(), packed.sorted_indices)
