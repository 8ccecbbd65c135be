import copy
from collections import OrderedDict
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.distributed import utils as stock
from torch.testing._internal.two_tensor import TwoTensor

from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.errors import CommunicationError, DisagreementError, EngineError
from hpcfsdp.params.module_states import (
    BUCKET_BYTES,
    get_root_modules,
    replace_by_prefix,
    sync_module_states,
    sync_params_and_buffers,
    verify_param_shape_across_processes,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64]


class Recording(FakeCommunicator):
    """Writes down what is broadcast, and may fill it with another rank's values."""

    def __init__(self, rank=0, size=2, fill=None):
        super().__init__(rank, size)
        self.fill, self.calls, self.gathers = fill, [], 0

    def broadcast(self, tensor, src, *, async_op=False):
        super().broadcast(tensor, src, async_op=async_op)
        self.calls.append((tensor.dtype, tensor.numel(), src))
        if self.fill is not None and self.rank != src:
            tensor.fill_(self.fill)

    def all_gather_object(self, value):
        self.gathers += 1
        return super().all_gather_object(value)


@pytest.fixture
def on_ranks(run_ranks):
    """``on_ranks(size, body)``: ``run_ranks`` with communicators that have a device."""

    def run(size, body):
        def with_device(comm):
            comm.device = torch.device("cpu")
            return body(comm)

        return run_ranks(size, with_device)

    return run


def raised_everywhere(results, kind):
    """The message that all ranks raised."""
    assert [type(result) for result in results] == [kind] * len(results)
    assert all(error.raised_on_all_ranks for error in results)
    messages = {str(error) for error in results}
    assert len(messages) == 1
    return messages.pop()


# Agreement


def test_agreement_costs_one_small_gather():
    comm = Recording()
    gathered = []
    comm.all_gather_object = lambda value: gathered.append(value) or [value] * comm.size
    verify_param_shape_across_processes(comm, nn.Sequential(*(nn.Linear(3, 3) for _ in range(50))).named_parameters())
    assert len(gathered) == 1
    assert len(gathered[0]) <= 32


def shapes(*found):
    return [(name, torch.empty(shape, dtype=dtype)) for name, shape, dtype in found]


def test_a_difference_names_parameter_values_and_ranks_on_every_rank(on_ranks):
    """torch compares with rank 0 and names the number of the parameter, neither its name nor the ranks that differ."""

    def body(comm):
        rows = 4 if comm.rank in (1, 3, 4) else 3
        named = shapes(("same", (2,), torch.float32), ("a.weight", (rows, 5), torch.float32))
        verify_param_shape_across_processes(comm, named)

    assert raised_everywhere(on_ranks(5, body), DisagreementError) == (
        "parameter 'a.weight' differs: torch.float32 of shape (3, 5) on ranks 0, 2, "
        "torch.float32 of shape (4, 5) on ranks 1, 3-4"
    )


def test_another_dtype_is_a_difference(on_ranks):
    """torch's check does not look at dtypes: bytes of one would be taken for those of another."""

    def body(comm):
        verify_param_shape_across_processes(comm, shapes(("w", (2,), torch.int32 if comm.rank else torch.float32)))

    assert raised_everywhere(on_ranks(2, body), DisagreementError) == (
        "parameter 'w' differs: torch.float32 of shape (2,) on rank 0, torch.int32 of shape (2,) on rank 1"
    )


def test_what_a_rank_does_not_have_is_a_difference(on_ranks):
    def body(comm):
        verify_param_shape_across_processes(comm, shapes(("w", (), torch.float32))[: comm.rank])

    assert raised_everywhere(on_ranks(2, body), DisagreementError) == (
        "parameter 'w' differs: missing on rank 0, torch.float32 of shape () on rank 1"
    )


def test_another_order_is_a_difference(on_ranks):
    def body(comm):
        named = shapes(("a", (1,), torch.float32), ("b", (1,), torch.float32))
        verify_param_shape_across_processes(comm, named[::-1] if comm.rank == 2 else named)

    assert raised_everywhere(on_ranks(3, body), DisagreementError) == (
        "number 1 of them differs: parameter 'a' on ranks 0-1, parameter 'b' on rank 2"
    )


def test_of_many_differences_a_few_are_named(on_ranks):
    def body(comm):
        named = [(f"p{index}", torch.empty(comm.rank + 1)) for index in range(10)]
        verify_param_shape_across_processes(comm, named)

    message = raised_everywhere(on_ranks(2, body), DisagreementError)
    assert [f"'p{index}'" in message for index in range(10)] == [True] * 3 + [False] * 7
    assert message.endswith("; and 7 more")


def test_equal_shapes_are_silent_and_strides_do_not_matter(on_ranks):
    def body(comm):
        weight = torch.empty(3, 4) if comm.rank else torch.empty(4, 3).t()
        verify_param_shape_across_processes(comm, {"w": weight}.items())
        return "fine"

    assert on_ranks(3, body) == ["fine"] * 3


# Broadcasts


def various(rank):
    """One of everything; other values on each rank."""
    generator = torch.Generator().manual_seed(rank)  # of its own: ranks are threads
    tensors = []
    for dtype in DTYPES:
        values = torch.randint(0, 2, (24,), generator=generator) + (0 if dtype is torch.bool else rank)
        values = values.to(dtype)
        tensors += [
            values[:6].view(2, 3).clone(),
            values[6:12].view(3, 2).clone().t(),
            values[12:20].clone()[::2],
            values[20].clone(),
            values[:0].view(0, 3),
        ]
    tensors.append(torch.randn(2, 3, 4, 4, generator=generator).to(memory_format=torch.channels_last))
    tensors.append(torch.randn(1, generator=generator).expand(4))
    tensors.append(nn.Parameter(torch.randn(5, generator=generator)))
    return tensors


@pytest.mark.parametrize("src", [0, 2])
@pytest.mark.parametrize("bucket_bytes", [0, 1, 40, 1000, BUCKET_BYTES])
def test_all_ranks_get_the_values_of_one(on_ranks, src, bucket_bytes):
    expected = various(src)

    def body(comm):
        mine = various(comm.rank)
        before = [(id(tensor), tensor.stride(), tensor.data_ptr(), tensor.requires_grad) for tensor in mine]
        sync_params_and_buffers(comm, mine, bucket_bytes, src)
        after = [(id(tensor), tensor.stride(), tensor.data_ptr(), tensor.requires_grad) for tensor in mine]
        assert before == after
        return mine

    for mine in on_ranks(3, body):
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(mine, expected, strict=True))


def test_values_arrive_bit_by_bit(on_ranks):
    odd = torch.tensor([0x7FC12345, -(1 << 31), 1, 0x7F800001], dtype=torch.int32).view(torch.float32)

    def body(comm):
        mine = [odd.clone() if comm.rank == 0 else torch.zeros(4), torch.zeros(2)]
        sync_params_and_buffers(comm, mine)
        return mine[0].view(torch.int32).tolist()

    assert on_ranks(2, body) == [odd.view(torch.int32).tolist()] * 2


def test_strides_may_differ_between_ranks(on_ranks):
    """torch's check refuses that."""

    def body(comm):
        mine = torch.arange(6.0).view(2, 3) if comm.rank == 0 else torch.zeros(3, 2).t()
        sync_params_and_buffers(comm, [mine])
        return mine.tolist()

    assert on_ranks(2, body) == [[[0, 1, 2], [3, 4, 5]]] * 2


def test_tensors_travel_together_up_to_the_size_of_a_bucket():
    comm = Recording()
    sizes = [10, 20, 5, 100, 8, 30]
    sync_params_and_buffers(comm, [torch.zeros(size) for size in sizes], bucket_bytes=4 * 40)
    assert comm.calls == [(torch.float32, numel, 0) for numel in (100, 35, 38)]
    comm.calls.clear()
    sync_params_and_buffers(comm, [torch.zeros(size) for size in sizes], bucket_bytes=4 * 35)  # three fit exactly
    assert comm.calls == [(torch.float32, numel, 0) for numel in (100, 35, 8, 30)]


def test_each_dtype_fills_buckets_of_its_own():
    comm = Recording()
    mixed = [torch.zeros(3, dtype=dtype) for dtype in (torch.float32, torch.bool, torch.int64) * 4]
    sync_params_and_buffers(comm, mixed)
    assert comm.calls == [(torch.float32, 12, 0), (torch.bool, 12, 0), (torch.int64, 12, 0)]


def test_a_large_contiguous_tensor_travels_from_where_it_is(monkeypatch):
    comm = Recording(rank=1, fill=7)
    large, turned = torch.zeros(100), torch.zeros(10, 10).t()
    made = []
    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **how: made.append(size) or real(*size, **how))
    sync_params_and_buffers(comm, [large, turned], bucket_bytes=80)
    assert made == [(100,)]
    assert large.eq(7).all()
    assert turned.eq(7).all()


def test_what_is_only_marked_as_conjugated_does_not_travel_as_it_is(monkeypatch):
    comm = Recording()
    marked = torch.tensor([1 + 2j, 3 - 4j]).conj()
    sent = []
    monkeypatch.setattr(comm, "broadcast", lambda tensor, src: sent.append((tensor.is_conj(), tensor.tolist())))
    sync_params_and_buffers(comm, [marked], bucket_bytes=1)
    assert marked.is_conj()
    assert sent == [(False, [1 - 2j, 3 + 4j])]


def test_tied_tensors_travel_once():
    """torch sends each of them."""
    comm = Recording()
    weight = torch.zeros(10)
    sync_params_and_buffers(comm, [weight, weight, weight.detach(), nn.Parameter(weight), weight[:5]])
    assert comm.calls == [(torch.float32, 15, 0)]


def test_ties_that_differ_are_refused(on_ranks):
    """What another tensor receives afterwards would change the first one, on the ranks where they are tied."""

    def body(comm):
        weight = torch.zeros(2)
        sync_params_and_buffers(comm, [weight, weight if comm.rank else weight.clone()])

    assert raised_everywhere(on_ranks(2, body), DisagreementError) == (
        "tensor 1 differs: torch.float32 of shape (2,) on rank 0, "
        "torch.float32 of shape (2,), tied to tensor 0 on rank 1"
    )


def test_expanded_tensors_must_be_expanded_everywhere(on_ranks):
    def body(comm):
        mine = torch.zeros(2, 1).expand(2, 3) if comm.rank else torch.arange(6.0).view(2, 3)
        sync_params_and_buffers(comm, [mine])

    assert raised_everywhere(on_ranks(2, body), DisagreementError) == (
        "tensor 0 differs: torch.float32 of shape (2, 3) on rank 0, "
        "torch.float32 of shape (2, 3), expanded along (1,) on rank 1"
    )


@pytest.mark.parametrize("name", ["src", "bucket_bytes"])
def test_arguments_that_differ_are_refused(on_ranks, name):
    def body(comm):
        sync_params_and_buffers(comm, [torch.zeros(2)], **{name: comm.rank})

    assert raised_everywhere(on_ranks(2, body), DisagreementError) == f"{name} differs: 0 on rank 0, 1 on rank 1"


def test_a_rank_without_tensors_does_not_leave_the_others_waiting(on_ranks):
    """torch's function returns at once where the list is empty."""

    def body(comm):
        sync_params_and_buffers(comm, [] if comm.rank else [torch.zeros(2)])

    assert raised_everywhere(on_ranks(2, body), DisagreementError) == (
        "tensor 0 differs: torch.float32 of shape (2,) on rank 0, missing on rank 1"
    )


def test_nothing_to_send_is_fine():
    comm = Recording()
    sync_params_and_buffers(comm, [])
    sync_params_and_buffers(comm, [torch.zeros(0)])
    sync_module_states(nn.ReLU(), comm)
    assert comm.calls == []


def freed():
    tensor = torch.zeros(2)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.zeros(2, device="meta"), "tensor 0 is on the meta device: materialize it before"),
        (freed, "tensor 0 has its memory freed"),
        (lambda: torch.eye(2).to_sparse(), r"tensor 0 is torch\.sparse_coo: only dense tensors"),
        (nn.UninitializedParameter, "tensor 0 is lazy, it has no shape yet: run the module once before"),
    ],
)
def test_what_has_no_values_is_refused_on_every_rank(on_ranks, make, message):
    def body(comm):
        mine = torch.ones(2)
        try:
            sync_params_and_buffers(comm, [make() if comm.rank == 1 else mine])
        finally:
            assert mine.tolist() == [1, 1]

    results = on_ranks(3, body)
    assert [type(error) for error in results] == [EngineError] * 3
    assert str(results[0]).startswith("rank 1: tensor 0")
    with pytest.raises(EngineError, match=f"^{message}"):
        raise results[1]


def test_a_source_that_is_not_there_is_refused_on_every_rank(on_ranks):
    results = on_ranks(2, lambda comm: sync_params_and_buffers(comm, [torch.zeros(2)], src=5 * comm.rank))
    assert [type(error) for error in results] == [CommunicationError] * 2
    assert "there is no rank 5" in str(results[0])


def test_one_rank_sends_nothing():
    comm = Recording(size=1)
    values = torch.arange(3.0)
    sync_params_and_buffers(comm, [values])
    assert comm.calls == []
    assert values.tolist() == [0, 1, 2]


def test_wrapper_subclasses_are_synchronized_by_what_they_hold(on_ranks):
    def body(comm):
        parameter = nn.Parameter(TwoTensor(torch.full((2,), comm.rank + 1.0), torch.full((2,), comm.rank + 10.0)))
        sync_params_and_buffers(comm, [parameter], src=1)
        return parameter.a.tolist(), parameter.b.tolist()

    assert on_ranks(2, body) == [([2, 2], [11, 11])] * 2


# Modules


def state_of(model):
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}


def same_state(a, b, names=None):
    assert list(a) == list(b)
    return all(torch.equal(a[name], b[name]) for name in (names or a))


@pytest.mark.parametrize("src", [0, 1])
def test_a_module_becomes_that_of_the_source(on_ranks, make_model, src):
    models = [make_model(rank) for rank in range(3)]
    for rank, model in enumerate(models):
        model.scratch.fill_(rank)
    expected = state_of(models[src])
    others = state_of(models[2])
    assert not same_state(expected, others)
    assert on_ranks(3, lambda comm: sync_module_states(models[comm.rank], comm, src=src)) == [None] * 3
    for model in models:
        assert same_state(state_of(model), expected)
        assert model.head.weight is model.embed.weight


def test_tied_parameters_and_buffers_travel_once():
    comm = Recording()
    layer = nn.Linear(3, 3, bias=False)
    layer.register_buffer("scale", torch.ones(3))
    outer = nn.Sequential(layer, layer, nn.Linear(3, 3, bias=False))
    outer[2].weight = layer.weight
    sync_module_states(outer, comm)
    assert comm.calls == [(torch.float32, 12, 0)]


@pytest.mark.parametrize("buffers", [True, False])
def test_buffers_are_optional(on_ranks, make_model, buffers):
    models = [make_model(rank) for rank in range(2)]
    expected, before = state_of(models[0]), state_of(models[1])
    on_ranks(2, lambda comm: sync_module_states(models[comm.rank], comm, buffers=buffers))
    names = {name for name, _ in models[1].named_buffers()}
    after = state_of(models[1])
    assert same_state(after, expected, [name for name in after if name not in names])
    assert same_state(after, expected if buffers else before, names)


@pytest.mark.parametrize("by", ["name", "tensor"])
def test_ignored_parameters_and_buffers_are_left_alone(on_ranks, make_model, by):
    """torch takes names only, and of a tied parameter only the first one."""
    names = ["head.weight", "hidden.bias", "wide"]
    models = [make_model(rank) for rank in range(2)]
    expected, before = state_of(models[0]), state_of(models[1])

    def body(comm):
        model = models[comm.rank]
        everything = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers()])
        ignored = names if by == "name" else [everything[name] for name in names]
        sync_module_states(model, comm, ignored=ignored)

    assert on_ranks(2, body) == [None, None]
    after = state_of(models[1])
    left = {"embed.weight", "hidden.bias", "wide"}
    assert same_state(after, before, left)
    assert same_state(after, expected, after.keys() - left)


def test_differences_between_modules_are_named_before_anything_is_sent(on_ranks):
    """torch's function takes it for granted that shapes are equal."""
    models = [nn.BatchNorm1d(3), nn.BatchNorm1d(3), nn.BatchNorm1d(4)]
    models[1].running_mean = models[1].running_mean.double()
    before = copy.deepcopy(models[1].state_dict())
    with torch.no_grad():
        models[0].bias.fill_(9)
    message = raised_everywhere(
        on_ranks(3, lambda comm: sync_module_states(models[comm.rank], comm)), DisagreementError
    )
    assert message.split("; ") == [
        "parameter 'weight' differs: torch.float32 of shape (3,) on ranks 0-1, torch.float32 of shape (4,) on rank 2",
        "parameter 'bias' differs: torch.float32 of shape (3,) on ranks 0-1, torch.float32 of shape (4,) on rank 2",
        "buffer 'running_mean' differs: torch.float32 of shape (3,) on rank 0, torch.float64 of shape (3,) on rank 1, "
        "torch.float32 of shape (4,) on rank 2",
        "and 1 more",
    ]
    assert all(torch.equal(value, before[name]) for name, value in models[1].state_dict().items())


def test_a_tie_on_one_rank_alone_is_refused(on_ranks):
    def body(comm):
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        if comm.rank == 1:
            model[1].weight = model[0].weight
        sync_module_states(model, comm)

    assert raised_everywhere(on_ranks(2, body), DisagreementError) == (
        "parameter '1.weight' differs: torch.float32 of shape (2, 2) on rank 0, "
        "torch.float32 of shape (2, 2), tied to parameter '0.weight' on rank 1"
    )


def test_a_second_call_sends_everything_again():
    """Until pytorch#178569 torch left out buffers in the second of two process groups."""
    model = nn.BatchNorm1d(3)
    calls = []
    for _ in range(2):
        comm = Recording()
        sync_module_states(model, comm)
        calls.append(comm.calls)
    assert calls[0] == calls[1] == [(torch.float32, 12, 0), (torch.int64, 1, 0)]


def test_gradients_and_graphs_are_left_alone(on_ranks):
    def body(comm):
        layer = nn.Linear(2, 1, bias=False)
        layer(torch.ones(1, 2)).sum().backward()
        sync_module_states(layer, comm)
        return layer.weight.grad.tolist(), layer.weight.is_leaf, layer.weight.requires_grad

    assert on_ranks(2, body) == [([[1, 1]], True, True)] * 2


# Names


@pytest.mark.parametrize(
    ("old", "new"), [("a.", "z."), ("a.", ""), ("", "module."), ("a.b", "q"), ("none.", "x."), ("a.", "a.deep.")]
)
def test_keys_are_renamed_as_torch_does(old, new):
    ours, theirs = ({"a.b": 1, "c": 2, "a.x": 3, "ba.": 4} for _ in range(2))
    replace_by_prefix(ours, old, new)
    stock._replace_by_prefix(theirs, old, new)
    assert ours == theirs


def test_the_order_of_keys_is_kept():
    """torch puts renamed keys at the end."""
    ours, theirs = ({"a.x": 1, "b": 2, "a.y": 3} for _ in range(2))
    replace_by_prefix(ours, "a.", "")
    stock._replace_by_prefix(theirs, "a.", "")
    assert list(ours) == ["x", "b", "y"]
    assert list(theirs) == ["b", "x", "y"]


def test_the_mapping_is_changed_in_place_and_keeps_values_and_metadata():
    value = torch.ones(2)
    state = OrderedDict({"m.a": value, "b": 1})
    state._metadata = {"": {"version": 1}}
    assert replace_by_prefix(state, "m.", "") is None
    assert list(state) == ["a", "b"]
    assert state["a"] is value
    assert state._metadata == {"": {"version": 1}}


def test_a_new_name_may_be_the_old_one_of_another_that_is_renamed_too():
    """torch writes over the second before it is renamed: one value is lost, the other gets its name."""
    ours, theirs = ({"a.x": 1, "a.a.x": 2} for _ in range(2))
    replace_by_prefix(ours, "a.", "a.a.")
    stock._replace_by_prefix(theirs, "a.", "a.a.")
    assert ours == {"a.a.x": 1, "a.a.a.x": 2}
    assert theirs == {"a.a.a.x": 1}


def test_two_entries_for_one_name_are_refused_before_anything_changes():
    """torch keeps one of them."""
    state = {"m.a": 1, "m.b": 2, "b": 3}
    with pytest.raises(ValueError, match=r"^'m\.b' and 'b' would both be 'b' with '' for 'm\.'$"):
        replace_by_prefix(state, "m.", "")
    assert state == {"m.a": 1, "m.b": 2, "b": 3}


def test_equal_prefixes_are_refused():
    with pytest.raises(ValueError, match=r"both 'a\.'"):
        replace_by_prefix({"a.b": 1}, "a.", "a.")


class Counting(nn.Module):
    """Counts how often its children are asked for."""

    asked = 0

    def children(self):
        Counting.asked += 1
        return super().children()

    def modules(self):
        # as torch walks, but through children(), to be counted too
        seen, pending = set(), [self]
        while pending:
            module = pending.pop()
            if module not in seen:
                seen.add(module)
                pending += module.children()
                yield module


def chain(length):
    modules = [Counting() for _ in range(length)]
    for outer, inner in pairwise(modules):
        outer.inner = inner
    return modules


def tree():
    leaf, shared = nn.Linear(1, 1), nn.ReLU()
    left, right = nn.Sequential(leaf, shared), nn.Sequential(shared)
    root = nn.Sequential(left, right)
    return {"leaf": leaf, "shared": shared, "left": left, "right": right, "root": root, "other": nn.Linear(1, 1)}


@pytest.mark.parametrize(
    "names",
    [
        "root left right leaf shared other",
        "leaf shared left right root",
        "leaf root",
        "shared right left",
        "leaf other",
        "right leaf shared",
        "other",
        "",
        "left left leaf",
    ],
)
def test_root_modules_are_those_that_torch_finds(names):
    modules = tree()
    given = [modules[name] for name in names.split()]
    expected = stock._get_root_modules(given)
    got = get_root_modules(given)
    assert list(map(id, got)) == list(map(id, expected))
    assert bool(got) == bool(given)


def test_any_iterable_of_modules_will_do():
    root = tree()["root"]
    assert get_root_modules(root.modules()) == [root]


@pytest.mark.parametrize("order", ["outer first", "inner first"])
def test_each_module_is_looked_into_once(order):
    """torch walks below each of them: 20 100 times in a chain of 200."""
    modules = chain(200)
    given = modules if order == "outer first" else modules[::-1]
    Counting.asked = 0
    assert get_root_modules(given) == [modules[0]]
    assert Counting.asked == 200
    Counting.asked = 0
    stock._get_root_modules(given)
    assert Counting.asked == 20_100


def test_modules_that_contain_each_other_have_a_root():
    """torch finds none."""
    outer, inner = nn.Module(), nn.Module()
    outer.inner, inner.outer = inner, outer
    assert get_root_modules([outer, inner]) == [outer]
    assert stock._get_root_modules([outer, inner]) == []
