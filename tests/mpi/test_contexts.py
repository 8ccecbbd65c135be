"""Everything that may be called between the parts of a step, in each strategy, in each part: one table.

Each call works, shows what the plain model has, and leaves the training as it is; or it raises the documented error.
"""

import contextlib

import pytest
import torch
from torch.distributed.fsdp import StateDictType

from hpcfsdp.errors import EngineError
from tests.mpi import parity
from tests.mpi.models import ORIGINAL
from tests.mpi.test_held_grads import EXACT, backward, backward_of_all, grads_of

pytestmark = pytest.mark.ranks(2)

PARTS = ("at rest", "after a backward", "before a backward", "after no_sync", "after a step")


def summon(**options):
    def call(engine, model, _optimizer, plain):
        with engine.cls.summon_full_params(model, **options):
            first = engine.comm.rank == 0
            if options.get("rank0_only") and not first:
                return
            torch.testing.assert_close(named(model), named(plain), **EXACT)
            if options.get("with_grads"):
                torch.testing.assert_close(grads_of(model), grads_of(plain), **EXACT)
            else:
                assert all(parameter.grad is None for parameter in model.parameters())

    return call


def named(model):
    return {parity.plain_name(name): tensor.detach() for name, tensor in model.named_parameters()}


def shapes_of(model):
    return [parameter.shape for parameter in model.parameters()]


def state_dict(kind):
    def call(engine, model, _optimizer, plain):
        with engine.cls.state_dict_type(model, kind):
            found = model.state_dict()
        if kind is StateDictType.FULL_STATE_DICT:
            torch.testing.assert_close(dict(found), named(plain), **EXACT)
        elif kind is StateDictType.SHARDED_STATE_DICT:
            assert found.keys() == named(plain).keys()

    return call


def optim_state_dict(kind):
    def call(engine, model, optimizer, plain):
        with engine.cls.state_dict_type(model, kind):
            found = engine.cls.optim_state_dict(model, optimizer)
        assert found["state"].keys() == named(plain).keys()

    return call


def no_sync(_engine, model, _optimizer, _plain):
    with model.no_sync():
        pass


def clip(_engine, model, _optimizer, plain):
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    torch.testing.assert_close(model.clip_grad_norm_(1e9), expected, **EXACT, check_dtype=False)


CALLS = {
    "summon": summon(),
    "summon to read": summon(writeback=False),
    "summon rank 0": summon(rank0_only=True),
    "summon rank 0 to read": summon(rank0_only=True, writeback=False),
    "summon rank 0 in host memory": summon(rank0_only=True, offload_to_cpu=True),
    "summon with grads": summon(with_grads=True),
    "summon with grads to read": summon(with_grads=True, writeback=False),
    "summon with grads rank 0": summon(with_grads=True, rank0_only=True),
    "summon with grads rank 0 in host memory": summon(with_grads=True, rank0_only=True, offload_to_cpu=True),
    **{f"state dict {kind.name}": state_dict(kind) for kind in StateDictType},
    "optimizer full": optim_state_dict(StateDictType.FULL_STATE_DICT),
    "optimizer sharded": optim_state_dict(StateDictType.SHARDED_STATE_DICT),
    "no_sync": no_sync,
    "clip": clip,
}


def is_refused(name, part):
    """Only what needs averaged gradients, while there are others."""
    return part == "after no_sync" and ("with grads" in name or name == "clip")


@ORIGINAL
@pytest.mark.parametrize(
    ("carrier", "strategy"),
    [*(("hpcfsdp", strategy) for strategy in parity.STRATEGIES), ("messages", "SHARD_GRAD_OP")],
)
def test_each_call_in_each_part_of_a_step(engines, carrier, strategy, original):
    engine = parity.under_test(engines, carrier)
    engine.beyond_torch("calls between the parts of a step")
    plain, ranks, rank = parity.build(parity.Around), engine.comm.size, engine.comm.rank
    model = engine.shard(parity.build(parity.Around), strategy=strategy, use_orig_params=original)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9) for net in (plain, model)]

    def check(part):
        refused = is_refused(name, part)
        try:
            with pytest.raises(EngineError, match="held by no_sync") if refused else contextlib.nullcontext():
                CALLS[name](engine, model, optimizers[1], plain)
        except BaseException as error:
            error.add_note(f"{name}, {part}")
            raise

    def train(parts, *, held=False):
        for part in parts:
            backward_of_all(plain, ranks, part)
            with model.no_sync() if held else contextlib.nullcontext():
                backward(model, rank, part)

    def step():
        for optimizer in optimizers:
            optimizer.step()

    at_rest = shapes_of(model)
    train([0])
    step()
    for name in CALLS:
        for optimizer in optimizers:
            optimizer.zero_grad()
        check("at rest")
        train([0])
        check("after a backward")
        loss = parity.loss_of(model, parity.inputs(0, rank, torch.float64, 1))
        check("before a backward")
        if name not in ("no_sync", "clip"):  # which do not look at parameters
            assert shapes_of(model) == at_rest, name
        loss.backward()
        backward_of_all(plain, ranks, 1)
        train([2], held=True)
        check("after no_sync")
        train([3])
        step()
        check("after a step")
        torch.testing.assert_close(engine.whole(model), named(plain), **EXACT, msg=lambda text: f"{name}: {text}")  # noqa: B023


@ORIGINAL
@pytest.mark.parametrize("write", ["load", "summon"])
@pytest.mark.parametrize("carrier", ["hpcfsdp", "messages"])
def test_parameters_show_what_is_written_between_a_forward_and_its_backward(engines, carrier, write, original):
    engine = parity.under_test(engines, carrier)
    engine.beyond_torch("loads between a forward and its backward")
    plain = parity.build(parity.Around, seed=1)
    shown = []
    for forwards in (0, 1):
        model = engine.shard(parity.build(parity.Around), strategy="SHARD_GRAD_OP", use_orig_params=original)
        for part in range(forwards):
            parity.loss_of(model, parity.inputs(0, engine.comm.rank, torch.float64, part))
        if write == "load":
            model.load_state_dict(plain.state_dict())
        else:
            with engine.cls.summon_full_params(model):
                for name, parameter in named(model).items():
                    parameter.copy_(named(plain)[name])
        shown.append([parameter.detach().clone() for parameter in model.parameters()])
    torch.testing.assert_close(shown[1], shown[0], rtol=0, atol=0)
