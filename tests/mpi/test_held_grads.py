"""Gradients that ``no_sync`` holds can be read, changed and thrown away between backwards, as in a plain model."""

import contextlib

import pytest
import torch
from torch.distributed.fsdp import CPUOffload, MixedPrecision

from hpcfsdp.errors import EngineError
from hpcfsdp.fsdp import ShardedGradScaler
from tests.mpi import parity
from tests.mpi.models import ORIGINAL

EXACT = {"rtol": 1e-9, "atol": 1e-12}
ALL = pytest.mark.parametrize("strategy", parity.STRATEGIES)


def model_of(engine, strategy="FULL_SHARD", original=False, model_type=parity.Around, **options):
    options = {"strategy": strategy, "use_orig_params": original, **options}
    return engine.shard(parity.build(model_type, options.pop("dtype", torch.float64)), **options)


def backward(model, rank, part, dtype=torch.float64):
    parity.loss_of(model, parity.inputs(0, rank, dtype, part)).backward()


def backward_of_all(model, ranks, part, dtype=torch.float64):
    """On the plain model, with the gradients that come averaged, and those that are there left alone."""
    before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for rank in range(ranks):
        backward(model, rank, part, dtype)
    for parameter, grad in zip(model.parameters(), before, strict=True):
        if parameter.grad is not None:
            parameter.grad.div_(ranks)
        if grad is not None:
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad


def whole_grads(engine, model):
    """Collective over all ranks. By plain name; zero where there is none."""
    with engine.quiet(), engine.cls.summon_full_params(model, writeback=False, with_grads=True):
        return grads_of(model)


def grads_of(model):
    grads = {}
    for name, parameter in model.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        grads[parity.plain_name(name)] = grad.detach()
    return grads


def by_optimizer(model):
    torch.optim.SGD(model.parameters(), 0.1).zero_grad()


def to_zero(model):
    torch.optim.SGD(model.parameters(), 0.1).zero_grad(set_to_none=False)


def by_model(model):
    model.zero_grad()


def to_none(model):
    for parameter in model.parameters():
        parameter.grad = None


def half_of_it(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def nothing(model):
    del model


CHANGES = [by_optimizer, to_zero, by_model, to_none, half_of_it, nothing]


@ORIGINAL
@ALL
def test_what_a_program_does_to_held_gradients_is_done(engine, strategy, original):
    engine.beyond_torch("gradients of earlier steps next to held ones")
    plain, ranks = parity.build(parity.Around), engine.comm.size
    model = model_of(engine, strategy, original)
    for change in CHANGES:
        for synchronised_before in (False, True):
            if synchronised_before and change is half_of_it:
                continue
            plain.zero_grad()
            model.zero_grad()
            for part, held in enumerate([not synchronised_before, True, False]):
                backward_of_all(plain, ranks, part)
                with model.no_sync() if held else contextlib.nullcontext():
                    backward(model, engine.comm.rank, part)
                if part == 1:
                    change(plain)
                    change(model)
            torch.testing.assert_close(whole_grads(engine, model), grads_of(plain), **EXACT, msg=change.__name__)


@ALL
def test_one_parameter_alone(engine, strategy):
    plain, ranks = parity.build(parity.Around), engine.comm.size
    model = model_of(engine, strategy, original=True)
    for part, held in enumerate([True, True, False]):
        backward_of_all(plain, ranks, part)
        with model.no_sync() if held else contextlib.nullcontext():
            backward(model, engine.comm.rank, part)
        if part == 0:
            plain.unit.a.weight.grad = None
            model.module.unit.a.weight.grad = None
        if part == 1:
            plain.last.bias.grad.zero_()
            model.module.last.bias.grad.zero_()
    torch.testing.assert_close(whole_grads(engine, model), grads_of(plain), **EXACT)


@ORIGINAL
@ALL
def test_held_gradients_are_those_of_this_rank(engine, strategy, original):
    plain, model = parity.build(parity.Around), model_of(engine, strategy, original)
    for part in (0, 1):
        backward(plain, engine.comm.rank, part)
        with model.no_sync():
            backward(model, engine.comm.rank, part)
        expected = grads_of(plain)
        if original:
            torch.testing.assert_close(grads_of_shapes(model), expected, **EXACT)
        else:
            held = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
            total = sum(grad.sum() for grad in expected.values())
            torch.testing.assert_close(held.sum(), total, **EXACT)


def grads_of_shapes(model):
    return {parity.plain_name(name): p.grad.clone() for name, p in model.named_parameters()}


@ORIGINAL
@pytest.mark.parametrize(
    "options",
    [
        {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)},
        {"mixed_precision": MixedPrecision(reduce_dtype=torch.bfloat16), "cpu_offload": CPUOffload(True)},
        {"mixed_precision": MixedPrecision(torch.bfloat16, keep_low_precision_grads=True)},
        {"dtype": torch.bfloat16},
    ],
    ids=["compute", "reduce offloaded", "low", "kept"],
)
def test_what_is_thrown_away_leaves_no_trace_in_other_dtypes(engine, options, original):
    engine.beyond_torch("held gradients in other dtypes than the parameters")
    options = {"dtype": torch.float32, **options}
    dtype, grads = options["dtype"], []
    for thrown_away in (False, True):
        model = model_of(engine, original=original, **options)
        if thrown_away:
            with model.no_sync():
                backward(model, engine.comm.rank, 0, dtype)
            by_optimizer(model)
        backward(model, engine.comm.rank, 1, dtype)
        grads.append(whole_grads(engine, model))
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=0)


class Leaving(parity.Around):
    """Skips its unit if a flag is set."""

    calls_unit = True

    def forward(self, x):
        x = self.first(x)
        return self.last(self.unit(x) if self.calls_unit else x)


@ORIGINAL
@pytest.mark.parametrize("thrown_away", [False, True])
def test_a_unit_that_is_not_called_again(engine, original, thrown_away):
    plain, model = parity.build(Leaving), model_of(engine, original=original, model_type=Leaving)
    for part in (0, 1):
        plain.calls_unit = model.module.calls_unit = part == 0
        backward_of_all(plain, engine.comm.size, part)
        with contextlib.nullcontext() if part else model.no_sync():
            backward(model, engine.comm.rank, part)
        if part == 0 and thrown_away:
            plain.zero_grad()
            model.zero_grad()
    torch.testing.assert_close(whole_grads(engine, model), grads_of(plain), **EXACT)


@ORIGINAL
def test_what_needs_averaged_gradients_is_refused(engine, original):
    engine.beyond_torch("held gradients are noticed")
    model = model_of(engine, original=original)
    optimizer = torch.optim.AdamW(model.parameters())
    start = engine.whole(model)
    with model.no_sync():
        backward(model, engine.comm.rank, 0)
    with pytest.raises(EngineError, match=r"a step of AdamW .* held by no_sync: .*zero_grad"):
        optimizer.step()
    with pytest.raises(EngineError, match=r"clip_grad_norm_ would .* held by no_sync"):
        model.clip_grad_norm_(1.0)
    with (
        pytest.raises(EngineError, match=r"with_grads=True would .* held"),
        engine.cls.summon_full_params(model, with_grads=True),
    ):
        pass
    torch.testing.assert_close(engine.whole(model), start, rtol=0, atol=0)
    optimizer.zero_grad()
    assert model.clip_grad_norm_(1.0) == 0
    optimizer.step()
    backward(model, engine.comm.rank, 1)
    plain = parity.build(parity.Around)
    backward_of_all(plain, engine.comm.size, 1)
    torch.testing.assert_close(whole_grads(engine, model), grads_of(plain), **EXACT)


def test_a_change_that_cannot_mean_both_gradients_is_refused(engine):
    engine.beyond_torch("gradients of earlier steps next to held ones")
    model = model_of(engine, original=True)
    backward(model, engine.comm.rank, 0)
    with model.no_sync():
        backward(model, engine.comm.rank, 1)
    half_of_it(model)
    with pytest.raises(EngineError, match=r"gradient of '.*' was changed in place between two backwards"):
        backward(model, engine.comm.rank, 2)
    model.zero_grad()
    backward(model, engine.comm.rank, 2)
    plain = parity.build(parity.Around)
    backward_of_all(plain, engine.comm.size, 2)
    torch.testing.assert_close(whole_grads(engine, model), grads_of(plain), **EXACT)


@ORIGINAL
def test_a_scaler_unscales_what_is_held(engine, original):
    model = model_of(engine, original=original, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with model.no_sync():
        backward(model, engine.comm.rank, 0, torch.float32)
    before = [parameter.grad.clone() for parameter in model.parameters()]
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    after = [parameter.grad for parameter in model.parameters()]
    torch.testing.assert_close(after, [grad / 4 for grad in before])


def break_backward(_module, _args, output):
    output.register_hook(lambda _: {}["broken"])


@ORIGINAL
def test_an_error_in_a_backward_throws_away_what_is_held(engine, original):
    """The step is to be done again from its first backward: which gradients are complete differs by rank."""
    engine.beyond_torch("training goes on after an error")
    model = model_of(engine, original=original)
    with model.no_sync():
        backward(model, engine.comm.rank, 0)
    x = parity.inputs(0, engine.comm.rank, torch.float64, 1)
    handle = model.module.first.register_forward_hook(break_backward)
    with pytest.raises(KeyError, match="broken"):
        parity.loss_of(model, x).backward()
    handle.remove()
    model.zero_grad()  # units with complete gradients have set ``grad``
    backward(model, engine.comm.rank, 1)
    plain = parity.build(parity.Around)
    backward_of_all(plain, engine.comm.size, 1)
    torch.testing.assert_close(whole_grads(engine, model), grads_of(plain), **EXACT)
