"""Steps on the meta device, next to what autograd really saves and to operations counted by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hpcfsdp.errors import UsageError
from hpcfsdp.examples.gpt.run_config import ModelConfig
from hpcfsdp.examples.gpt.transformer import GPT
from hpcfsdp.plan import models
from hpcfsdp.plan.meta_trace import trace
from hpcfsdp.plan.traced_step import EventKind
from tests.bench.memory import saved_bytes


@pytest.mark.parametrize(
    ("shape", "batch"),
    [
        (ModelConfig(layers=4, width=128, heads=4, context=64), 2),
        (ModelConfig(layers=2, width=256, heads=8, context=128), 4),
        (ModelConfig(layers=1, width=64, heads=1, context=16), 1),
    ],
    ids=["4 layers", "2 layers", "1 layer"],
)
def test_saved_bytes_are_those_that_autograd_saves(shape, batch):
    """Except for blocks of 512 bytes."""
    found = models.from_shape(shape, batch=batch, name="gpt").step()
    model, ids = GPT(shape), torch.zeros(batch, shape.context, dtype=torch.int64)
    logits_bytes = ids.numel() * 256 * 4
    saved = saved_bytes(lambda: model(ids), model)
    assert found.saved_bytes == pytest.approx(saved + logits_bytes, abs=512 * 4 * shape.layers + 2048)


def test_checkpointed_units_save_their_inputs_alone():
    shape = ModelConfig(layers=6, width=128, heads=4, context=64)
    source = models.from_shape(shape, batch=2, name="gpt")
    plain, recomputed = source.step(), source.step(checkpointed=True)
    inputs = shape.layers * 2 * shape.context * shape.width * 4
    assert inputs <= recomputed.saved_bytes <= inputs + 4 * 2 * shape.context * (256 + 4 * shape.width)
    assert recomputed.saved_bytes < plain.saved_bytes / 5
    assert recomputed.units == plain.units
    # A forward once more, without that of the head.
    assert 1.2 < recomputed.flops / plain.flops < 4 / 3


def layers_of(count, width=64, frozen=()):
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))
    for index in frozen:
        model[index].requires_grad_(False)
    return model


def traced(model, **options):
    x = torch.zeros(4, 64, device="meta")
    return trace(model, list(model), lambda model: model(x).sum(), name="layers", tokens=4, **options)


def test_events_follow_the_engine():
    found = traced(layers_of(2))
    events = [(event.kind, event.unit, event.param) for event in found.events]
    forward = [
        (EventKind.FORWARD, 0, 0),
        (EventKind.FORWARD_END, 0, 0),
        (EventKind.FORWARD, 1, 0),
        (EventKind.FORWARD_END, 1, 0),
    ]
    assert events[:4] == forward  # the root has no parameters of its own
    assert events[4][:2] == (EventKind.BACKWARD, 1)
    assert {event[2] for event in events if event[0] is EventKind.GRADIENT and event[1] == 1} == {0, 1}
    assert [event[1] for event in events if event[0] is EventKind.BACKWARD_END] == [1, 0]
    assert sum(event.net for event in found.events) <= 512  # the loss is all that is left


def test_operations_are_counted():
    """Forward, gradients of weights, and of inputs but the first."""
    assert traced(layers_of(2)).flops == 2 * 4 * 64 * 64 * (2 + 2 + 1)


def test_a_frozen_unit_gets_no_gradients():
    found = traced(layers_of(3, frozen=[1]))
    assert not [event for event in found.events if event.kind is EventKind.GRADIENT and event.unit == 1]
    assert [param.trained for param in found.units[1].params] == [False, False]


def test_attention_saves_no_matrix_of_scores_and_is_restored():
    length, heads, width = 512, 2, 32
    own = F.scaled_dot_product_attention, F.rms_norm

    class Attends(nn.Linear):
        def forward(self, x):
            heads_of = super().forward(x).view(1, length, heads, 3, width).transpose(1, 2).unbind(3)
            return F.scaled_dot_product_attention(*heads_of, is_causal=True)

    def of(fused, checkpointed=False):
        with torch.device("meta"):
            model, x = nn.Sequential(Attends(8, 3 * heads * width)), torch.zeros(1, length, 8)
        options = {"fused": fused, "checkpointed": checkpointed}
        return trace(model, list(model), lambda model: model(x).sum(), name="attention", tokens=length, **options)

    scores = 4 * heads * length * length
    assert of(fused=False).events[0].high > scores
    assert of(fused=True).events[0].high < scores / 2
    assert own == (F.scaled_dot_product_attention, F.rms_norm)
    linear = 2 * length * 8 * 3 * heads * width
    scores_flops = 2 * heads * length * length * 2 * width // 2
    assert of(fused=True).flops == 2 * linear + scores_flops * 7 // 2
    assert of(fused=True, checkpointed=True).flops == 3 * linear + scores_flops * 9 // 2


def test_a_parameter_of_two_units_is_refused():
    model = layers_of(2)
    model[1].weight = model[0].weight
    with pytest.raises(UsageError, match=r"'weight' of Linear is also one of"):
        traced(model)


def test_a_unit_that_is_called_twice_reduces_at_the_end():
    model = layers_of(2)
    x = torch.zeros(4, 64, device="meta")
    found = trace(model, list(model), lambda model: model[0](model[1](model[0](x))).sum(), name="twice", tokens=4)
    assert 0 in found.outer and 1 not in found.outer


def test_buffers_count():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    assert traced(model).buffer_bytes == 3 * 512


@pytest.mark.parametrize("option", ["compute", "param"])
def test_complex_parameters_stay_complex(option):
    class Spectral(nn.Module):
        def __init__(self):
            super().__init__()
            self.lift, self.weight = nn.Linear(1, 4), nn.Parameter(torch.ones(4, 4, 3, dtype=torch.complex64))

        def forward(self, x):
            modes = torch.fft.rfft(self.lift(x).float(), dim=1)[:, :3]
            return torch.fft.irfft(torch.einsum("bmi,iom->bmo", modes, self.weight), n=8, dim=1)

    found = models.ModelSource(
        "spectral", Spectral, lambda model: model(torch.ones(2, 8, 1, device="meta")).sum(), tokens=2
    )
    (unit,) = found.step(**{option: torch.bfloat16}).units
    real = torch.bfloat16 if option == "param" else torch.float32
    assert {param.dtype for param in unit.params} == {real, torch.complex64}
