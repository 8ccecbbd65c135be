import copy

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.fsdp import FullyShardedDataParallel, MixedPrecision
from hpcfsdp.units.mixed_precision import cast_buffers, find_full_precision, keep_full_precision
from hpcfsdp.units.own import Ignored, UnitOptions
from tests.unit.units.units import mark_as_unit

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16


class Stop(nn.Module):
    """Stands for a unit."""

    def __init__(self):
        super().__init__()
        self.norm = Seeing()
        self.register_buffer("inner", torch.zeros(1))
        mark_as_unit(self)


class Seeing(nn.LayerNorm):
    """Remembers in which dtypes it was called."""

    def __init__(self, dtype=F32):
        super().__init__(2, dtype=dtype)
        self.seen = []

    def forward(self, x, scale=None, *, index=None):
        self.seen.append([x.dtype, *(tensor.dtype for tensor in (scale, index) if tensor is not None)])
        return super().forward(x.to(self.weight.dtype)), index


def apart(module):
    keep_full_precision(find_full_precision(module, (nn.LayerNorm,)))
    return module


@pytest.mark.parametrize("dtype", [F32, F64])
def test_modules_that_stay_in_full_precision_are_given_it_and_give_back_what_came_in(dtype):
    model = apart(nn.ModuleList([Seeing(dtype)]))
    index = torch.arange(2)
    y, same = model[0](torch.ones(2, dtype=BF16), scale=torch.ones(2, dtype=torch.float16), index=index)
    assert model[0].seen == [[dtype, dtype, torch.int64]]
    assert y.dtype == BF16
    assert same is index


def test_a_module_that_gets_no_real_numbers_returns_what_it_likes():
    class Table(nn.LayerNorm):
        def forward(self, index):
            return self.weight[index]

    table = apart(Table(2, dtype=F64))
    assert table(torch.tensor([0])).dtype == F64


def test_gradients_come_back_through_both_casts():
    norm = apart(Seeing())
    x = torch.tensor([1.0, 3.0], dtype=BF16, requires_grad=True)
    norm(x)[0].sum().backward()
    assert x.grad.dtype == BF16
    assert norm.weight.grad.dtype == F32


def test_units_inside_are_left_to_themselves():
    model = apart(nn.ModuleList([Stop(), Seeing()]))
    for norm in (model[0].norm, model[1]):
        norm(torch.ones(2, dtype=BF16))
    assert model[0].norm.seen == [[BF16]]
    assert model[1].seen == [[F32]]
    apart(model[0])
    assert not model[0].norm._forward_pre_hooks


def test_buffers_of_real_numbers_are_cast_wherever_they_are_registered():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1), nn.BatchNorm1d(2), Stop())
    shared = torch.tensor([1.0])
    for layer in model[:2]:
        layer.register_buffer("shared", shared, persistent=False)
    model[0].register_buffer("count", torch.ones(1, dtype=torch.int64))
    model[0].register_buffer("other", torch.ones(1))
    model[0].register_buffer("missing", None)
    cast = {}
    mixed = MixedPrecision(buffer_dtype=BF16)
    ignored = Ignored(buffers=frozenset({model[0].other}))
    cast_buffers(model, UnitOptions(mixed_precision=mixed, ignored=ignored), cast)
    assert model[0].shared is model[1].shared
    assert (model[0].shared.dtype, model[0].shared.item()) == (BF16, 1)
    assert [model[0].count.dtype, model[0].other.dtype, model[2].running_mean.dtype] == [torch.int64, F32, F32]
    assert model[0].missing is None
    assert model[3].inner.dtype == F32
    unit = nn.Linear(1, 1)
    unit.register_buffer("shared", shared)
    cast_buffers(unit, UnitOptions(mixed_precision=mixed), cast)
    assert unit.shared is model[0].shared
    assert "shared" not in model.state_dict()


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        (MixedPrecision(), ()),
        (MixedPrecision(buffer_dtype=BF16), (_BatchNorm,)),
        (MixedPrecision(param_dtype=BF16), (_BatchNorm,)),
        (MixedPrecision(reduce_dtype=BF16, _module_classes_to_ignore=[nn.LayerNorm]), (nn.LayerNorm,)),
    ],
)
def test_modules_stay_apart_only_where_something_is_lowered(precision, expected):
    assert UnitOptions(mixed_precision=precision).full_precision == expected


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_unit_computes_low_but_for_its_norms_and_casts_its_inputs(use_orig_params):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm = nn.Linear(2, 2), Seeing()

        def forward(self, x, *, index):
            seen.append((x.dtype, index.dtype, self.layer.weight.dtype, self.norm.weight.dtype))
            return self.norm(self.layer(x))[0]

    seen = []
    model = FullyShardedDataParallel(
        Net(),
        process_group=FakeCommunicator(),
        mixed_precision=MixedPrecision(param_dtype=BF16, _module_classes_to_ignore=[nn.LayerNorm]),
        use_orig_params=use_orig_params,
    )
    x = torch.ones(1, 2, requires_grad=True)
    y = model(x, index=torch.arange(2))
    y.sum().backward()
    assert seen == [(BF16, torch.int64, BF16, F32)]
    assert model.module.norm.seen == [[F32]]
    assert (y.dtype, x.grad.dtype) == (BF16, F32)
    assert {param.grad.dtype for param in model.parameters()} == {F32}


def test_buffers_that_were_replaced_after_wrapping_are_cast_too():
    norm = nn.InstanceNorm1d(2, track_running_stats=True)
    lowered = MixedPrecision(buffer_dtype=BF16, _module_classes_to_ignore=[])
    model = FullyShardedDataParallel(
        nn.Sequential(norm, nn.Linear(2, 2)), process_group=FakeCommunicator(), mixed_precision=lowered
    )
    norm.running_mean = torch.ones(2)
    model.check_is_root()
    assert (norm.running_mean.dtype, norm.running_mean.tolist()) == (BF16, [1, 1])


@pytest.mark.parametrize(("dtype", "affine"), [(F32, True), (torch.float64, True), (torch.float64, False)])
def test_batch_norm_keeps_its_statistics_when_only_buffers_are_lowered(dtype, affine):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=affine)).to(dtype)
    module = copy.deepcopy(plain)
    module.register_buffer("scale", torch.ones(2))
    lowered = MixedPrecision(buffer_dtype=BF16)
    model = FullyShardedDataParallel(module, process_group=FakeCommunicator(), mixed_precision=lowered)
    x = torch.arange(12, dtype=dtype).reshape(4, 3)
    torch.testing.assert_close(model(x), plain(x))
    torch.testing.assert_close(model.state_dict()["1.running_mean"], plain[1].running_mean)
    assert module.scale.dtype == BF16


@pytest.mark.parametrize(("cast", "expected"), [({}, F32), ({"cast_forward_inputs": True}, BF16)])
def test_inputs_of_units_inside_are_cast_where_that_is_asked_for(cast, expected):
    seen = []

    class Inner(nn.Linear):
        def forward(self, x):
            seen.append(x.dtype)
            return x

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            lowered = MixedPrecision(param_dtype=BF16, **cast)
            self.inner = FullyShardedDataParallel(
                Inner(2, 2), process_group=FakeCommunicator(), mixed_precision=lowered
            )
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x):
            seen.append(x.dtype)
            return self.inner(x.float())

    model = FullyShardedDataParallel(
        Outer(), process_group=FakeCommunicator(), mixed_precision=MixedPrecision(param_dtype=BF16)
    )
    model(torch.ones(1, 2))
    assert seen == [BF16, expected]


def test_the_root_may_leave_its_inputs_alone():
    class Seen(nn.Linear):
        def forward(self, x):
            return x.dtype

    for cast, expected in ((True, BF16), (False, F32)):
        precision = MixedPrecision(param_dtype=BF16, cast_root_forward_inputs=cast)
        model = FullyShardedDataParallel(Seen(2, 2), process_group=FakeCommunicator(), mixed_precision=precision)
        with torch.no_grad():
            assert model(torch.ones(1, 2)) == expected
