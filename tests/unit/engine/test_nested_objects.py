"""Objects of types that are no containers, in what modules are given and return."""

import copy
import dataclasses
import functools
import types
import warnings
from collections import UserDict, deque
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils import _pytree

from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.engine import nested
from hpcfsdp.engine.nested import InPlace, warn_of_opaque
from hpcfsdp.fsdp import FullyShardedDataParallel

A, B = torch.zeros(1), torch.ones(2)


class Plain:
    def __init__(self, item):
        self.item = item


class Slotted:
    __slots__ = ("item", "unset")

    def __init__(self, item):
        self.item = item


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    item: object


class Attributed(dict):
    """A dict with an attribute besides its items."""

    def __init__(self, item):
        super().__init__(other=1)
        self.item = item


HOLDERS = [Plain, Slotted, Frozen, Attributed, types.SimpleNamespace]


def make(kind, item):
    return kind(item=item) if kind is types.SimpleNamespace else kind(item)


def tensors_of(value):
    found = []
    InPlace(lambda tensor, _: found.append(tensor) or tensor)(value)
    return found


@pytest.mark.parametrize("kind", HOLDERS)
def test_tensors_are_found_and_replaced_where_they_lie(kind):
    inner = [A, {"b": (B, deque([A]))}]
    holder = make(kind, inner)
    assert InPlace(lambda tensor, _: tensor + 1)((1, holder))[1] is holder
    assert holder.item is inner
    assert inner[0].item() == 1
    tensor, queue = inner[1]["b"]
    assert (tensor.tolist(), queue[0].item()) == ([2, 2], 1)


def test_what_cannot_be_written_to_is_rebuilt():
    got = InPlace(lambda tensor, _: tensor + 1)(types.MappingProxyType({"a": A}))
    assert isinstance(got, types.MappingProxyType)
    assert got["a"].item() == 1


def test_objects_are_distinguished_from_containers():
    found = []
    InPlace(lambda tensor, in_object: found.append(in_object) or tensor)((A, [A], {"a": A}, UserDict(a=A), Plain(A)))
    assert found == [False, False, False, *found[3:-1], True]
    assert not any(found[3:-1])


def test_objects_that_hold_each_other_are_visited_once():
    one, other = Plain(A), Plain(B)
    one.other, other.other = other, [one, other]
    assert [id(tensor) for tensor in tensors_of([one, other, one])] == [id(A), id(B)]


def some_generator():
    yield A


@contextmanager
def some_context():
    yield A


@pytest.mark.parametrize(
    "value",
    [
        nn.Linear(1, 1),
        nn.Linear,
        some_generator(),
        some_context(),
        functools.partial(max, A),
        lambda: A,
        max,
        types,
        torch.Generator(),
        torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1),
        (A.requires_grad_(False) * nn.Parameter(torch.ones(1))).grad_fn,
        range(3),
        FakeCommunicator(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_output_passes_in_silence(value):
    visit = InPlace(lambda tensor, _: tensor)
    assert visit(Plain(value)).item is value
    assert not visit.opaque
    assert not tensors_of(value)


def test_a_visit_has_an_end(monkeypatch):
    chain = None
    for _ in range(5000):
        chain = Plain(chain)
    visit = InPlace(lambda tensor, _: tensor)
    visit(chain)
    assert list(visit.opaque) == [Plain]
    monkeypatch.setattr(nested, "MOST_OBJECTS", 10)
    visit = InPlace(lambda tensor, _: tensor)
    visit([Plain(A) for _ in range(50)])
    assert list(visit.opaque) == [Plain]
    visit = InPlace(lambda tensor, _: tensor)
    visit([*range(2 * nested.MOST_ITEMS), Plain(A)])
    assert not visit.opaque
    visit(Plain(list(range(2 * nested.MOST_ITEMS))))
    assert list(visit.opaque) == [list]


def make_opaque():
    kind = type("Opaque", (memoryview.__mro__[-1],), {"__slots__": ()})
    kind.__module__ = "somewhere"
    return kind


def test_a_type_that_cannot_be_looked_into_is_named_once():
    kind = make_opaque()
    visit = InPlace(lambda tensor, _: tensor)
    visit([kind(), kind()])
    with pytest.warns(
        UserWarning,
        match=r"^block: its forward takes or returns an object of type somewhere\.Opaque, .*register_pytree_node",
    ) as seen:
        warn_of_opaque(visit.opaque, "block")
        warn_of_opaque(visit.opaque, "another")
    assert len(seen) == 1


def test_a_type_may_be_registered_after_it_was_seen():
    kind, held = make_opaque(), []
    assert tensors_of(kind()) == held
    _pytree.register_pytree_node(kind, lambda _: ([A], None), lambda children, _: held.extend(children) or kind())
    assert tensors_of(kind()) == [A]


# In units


class Store:
    """What a cache of keys and values is made of."""

    def __init__(self):
        self.layers, self.owner = [], self


class Layer(nn.Module):
    """Puts something into each kind of object that it is given, and computes with what others have put there."""

    def __init__(self):
        super().__init__()
        self.key, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, store, items, *, table):
        key = torch.tanh(self.key(x))
        store.layers.append(key)
        items.append(key)
        table[len(table)] = key
        return x + self.out(key * sum(store.layers))


class Sharing(nn.Module):
    """Keys of units go into the loss past the units; the store is returned, too."""

    def __init__(self, *, shares):
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.head, self.shares = nn.Linear(4, 1), shares

    def forward(self, x):
        store, items, table = Store(), [], {}
        for layer in self.layers:
            x = layer(x, store, items, table=table)
        loss = self.head(x).sum()
        if self.shares:
            loss = loss + store.layers[0].square().sum() + items[1].sum() + table[2].sum()
        return loss, store


def sharded(plain, **options):
    model = copy.deepcopy(plain)
    options = {"process_group": FakeCommunicator(), "use_orig_params": True, **options}
    for index, layer in enumerate(model.layers):
        model.layers[index] = FullyShardedDataParallel(layer, **options)
    return FullyShardedDataParallel(model, **options)


def gradients(model):
    return [torch.zeros(0) if p.grad is None else p.grad.flatten() for p in model.parameters()]


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_come_through_objects_that_units_write_to(shares, frozen):
    torch.manual_seed(0)
    plain = Sharing(shares=shares)
    plain.layers[1].requires_grad_(not frozen)
    model, x = sharded(plain), torch.randn(2, 4)
    for _ in range(2):
        for net in (plain, model):
            loss, store = net(x)
            assert len(store.layers) == 3
            loss.backward()
    for got, expected in zip(gradients(model), gradients(plain), strict=True):
        torch.testing.assert_close(got, expected)


def test_a_unit_ends_its_backward_although_it_was_given_what_earlier_ones_have_made():
    """Else the whole model would be gathered at the end of the backward."""
    model = sharded(Sharing(shares=False))
    ended = []
    for wrapper in FullyShardedDataParallel.fsdp_modules(model)[1:]:
        unit = wrapper._unit
        unit.post_backward = lambda unit=unit, end=unit.post_backward: (
            ended.append((unit.name, len(model._unit.root._due))),
            end(),
        )
    model(torch.randn(2, 4))[0].backward()
    assert [name for name, _ in ended] == ["layers.2", "layers.1", "layers.0"]
    assert [left for _, left in ended] == [2, 1, 0]


def test_objects_have_their_own_tensors_back_after_an_error():
    class Failing(nn.Linear):
        def forward(self, holder):
            assert holder.item is not x
            raise KeyError

    model, x = FullyShardedDataParallel(Failing(2, 2), process_group=FakeCommunicator()), torch.ones(2).mul(2)
    holder = Plain(x.requires_grad_())
    with pytest.raises(KeyError):
        model(holder)
    assert holder.item is x


def test_a_distribution_is_an_output():
    class Policy(nn.Linear):
        def forward(self, x):
            return torch.distributions.Normal(super().forward(x), 1.0)

    plain = Policy(2, 2)
    model = FullyShardedDataParallel(copy.deepcopy(plain), process_group=FakeCommunicator(), use_orig_params=True)
    for net in (plain, model):
        net(torch.ones(1, 2)).log_prob(torch.zeros(1, 2)).sum().backward()
    for got, expected in zip(gradients(model), gradients(plain), strict=True):
        torch.testing.assert_close(got, expected)


def test_what_cannot_be_looked_into_passes_with_one_warning():
    kind = make_opaque()

    class Strange(nn.Linear):
        def forward(self, x):
            return super().forward(x), kind()

    model = FullyShardedDataParallel(Strange(2, 2), process_group=FakeCommunicator())
    with pytest.warns(UserWarning, match="Strange: .* an object of type somewhere"):
        out, _ = model(torch.ones(1, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(1, 2))
    out.sum().backward()


def test_a_module_may_switch_gradients_on():
    class Switching(nn.Linear):
        def forward(self, x):
            torch.set_grad_enabled(True)
            return super().forward(x)

    model = FullyShardedDataParallel(Switching(2, 2), process_group=FakeCommunicator(), use_orig_params=True)
    with torch.no_grad():
        out = model(torch.ones(1, 2))
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
