import pytest
import torch
from torch import nn

from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.engine.root import Root
from hpcfsdp.engine.unit import TRANSITIONS, TrainingState, Unit
from hpcfsdp.errors import EngineError
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.params.flat_param import FlatParam
from hpcfsdp.params.layout import FlatLayout
from hpcfsdp.params.sharded_params import Dtypes
from tests.unit.params.gathering import grad_bytes, unshard, values_bytes

LEGAL = {
    (TrainingState.IDLE, TrainingState.FORWARD),
    (TrainingState.IDLE, TrainingState.BACKWARD),
    (TrainingState.IDLE, TrainingState.SUMMON),
    (TrainingState.FORWARD, TrainingState.IDLE),
    (TrainingState.BACKWARD, TrainingState.IDLE),
    (TrainingState.BACKWARD, TrainingState.RECOMPUTE),
    (TrainingState.RECOMPUTE, TrainingState.BACKWARD),
    (TrainingState.SUMMON, TrainingState.IDLE),
}


def make_unit():
    leaf = nn.Parameter(torch.ones(2))
    flat = FlatParam([leaf], FlatLayout.plan([("w", (2,), ())], torch.float32, 1), FakeCommunicator())
    return Unit("blocks.0", [flat])


def test_the_table_lists_each_legal_transition():
    assert {(before, after) for before, afters in TRANSITIONS.items() for after in afters} == LEGAL
    assert set(TRANSITIONS) == set(TrainingState)


@pytest.mark.parametrize("before", TrainingState)
@pytest.mark.parametrize("after", TrainingState)
def test_a_unit_goes_where_the_table_allows_and_stays_otherwise(before, after):
    unit = make_unit()
    unit.training_state = before
    if (before, after) in LEGAL:
        unit.enter_state(after)
        assert unit.training_state is after
        return
    with pytest.raises(EngineError) as caught:
        unit.enter_state(after)
    assert str(caught.value) == (
        f"blocks.0: cannot go from {before.value} to {after.value}; a unit may be called several times in a step, but "
        "not from inside of its own forward"
    )
    assert unit.training_state is before


def test_a_unit_that_calls_itself_is_refused_and_can_be_used_afterwards():
    class Recursive(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x, again=None):
            return self.layer(x) if again is None else again(x)

    model = FullyShardedDataParallel(Recursive(), process_group=FakeCommunicator())
    with pytest.raises(EngineError, match=r"^Recursive: cannot go from forward to forward; "):
        model(torch.ones(1, 2), model)
    assert model._unit.is_idle
    assert model(torch.ones(1, 2)).shape == (1, 2)


@pytest.fixture
def broken_off():
    """A root after an exception in a backward; the values of its unit are gathered, its gradient begun."""
    leaf = nn.Parameter(torch.ones(2))
    lowered = Dtypes.plan(torch.float32, param=torch.bfloat16)
    layout = FlatLayout.plan([("w", (2,), ())], torch.float32, 1)
    unit = Unit("blocks.0", [FlatParam([leaf], layout, FakeCommunicator(), dtypes=lowered)])
    root = Root([unit], FakeCommunicator(), "0")
    root.context.unshard(unit.unsharded_params)
    root.context.await_unshard(unit.unsharded_params)
    root.context.reductions.enqueue(unit.grads[0])
    leaf.grad = torch.ones_like(leaf)
    root.context.reductions.move_from_leaf(unit.grads[0], 0)
    unit.training_state = TrainingState.BACKWARD
    root.in_backward = True
    assert values_bytes(unit.sharded_params[0]) > 0
    assert grad_bytes(unit.grads[0]) > 0
    return root, unit


def test_recover_brings_units_of_a_broken_backward_to_rest(broken_off):
    root, unit = broken_off
    unit.owes_grads = True
    root.context.order.note(("forward", "blocks.0"))
    root.recover()
    assert not root.in_backward
    assert not root.is_busy
    assert unit.is_idle
    assert not unit.unsharded_params.is_gathered
    assert not unit.owes_grads
    assert values_bytes(unit.sharded_params[0]) == 0
    assert grad_bytes(unit.grads[0]) == 0
    assert unit.sharded_params[0].parameter.grad is None
    assert unit.sharded_params[0].leaves[0].grad is None
    assert root.context.order.path() == []


def test_recover_leaves_a_backward_alone_that_is_still_running(broken_off, monkeypatch):
    root, unit = broken_off
    monkeypatch.setattr("hpcfsdp._compat.in_backward", lambda: True)
    root.recover()
    assert root.is_busy
    assert unit.training_state is TrainingState.BACKWARD
    assert unit.sharded_params[0].is_unsharded


def test_recover_does_nothing_outside_of_a_backward(broken_off):
    root, unit = broken_off
    root.in_backward = False
    root.recover()
    assert unit.training_state is TrainingState.BACKWARD


def test_a_gradient_that_comes_when_those_of_its_unit_have_been_reduced_is_not_dropped(broken_off):
    root, unit = broken_off
    unit.grads[0].prepare()
    unit._leaf_done(unit.grads[0], 0)
    root.context.reductions.advance()
    with pytest.raises(
        EngineError, match=r"^blocks\.0: a gradient of 'w' arrived after the gradients of the unit had been"
    ):
        unit._leaf_done(unit.grads[0], 0)


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_training_goes_on_after_an_error_in_the_middle_of_a_step(place):
    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x, fail=False):
            x = self.first(x)
            if fail and place == "forward":
                raise KeyError("forward")
            if fail:
                x.register_hook(lambda _: {}["backward"])
            return self.second(x)

    torch.manual_seed(0)
    plain = Failing()
    model = Failing()
    model.load_state_dict(plain.state_dict())
    model = FullyShardedDataParallel(model, process_group=FakeCommunicator())
    with pytest.raises(KeyError, match=place):
        model(torch.ones(1, 2), fail=True).sum().backward()
    for net in (plain, model):
        net(torch.ones(1, 2)).sum().backward()
    expected = torch.cat([param.grad.flatten() for param in plain.parameters()])
    shard = model._unit.sharded_params[0]
    grads = [shard.parameter.grad[slot.offset : slot.end] for slot in shard.layout.slots]
    assert torch.equal(torch.cat(grads), expected)
    assert values_bytes(shard) == 0


def test_a_whole_parameter_used_outside_of_its_unit_gets_a_gradient_or_is_named():
    model = FullyShardedDataParallel(nn.Linear(2, 2), process_group=FakeCommunicator())
    model(torch.ones(1, 2))
    unshard(model._unit.sharded_params[0])
    model.module.weight.sum().backward()
    assert model._unit.sharded_params[0].parameter.grad.tolist()[:4] == [1.0] * 4
    model = FullyShardedDataParallel(nn.Linear(2, 2), process_group=FakeCommunicator(), use_orig_params=True)
    model(torch.ones(1, 2))
    unshard(model._unit.sharded_params[0])
    loss = model.module.weight.sum()
    with pytest.raises(EngineError) as caught:
        loss.backward()
    assert str(caught.value) == (
        "Linear: a gradient of 'weight' arrived while the unit was in idle; use the parameters of a unit only by "
        "calling the unit, and do not change a view that a unit returns in place: write x = x + y instead of x += y"
    )


def test_an_output_that_views_a_parameter_is_refused():
    class Leaking(nn.Linear):
        def forward(self, x):
            return self.weight[0]

    leaking = FullyShardedDataParallel(Leaking(2, 3), process_group=FakeCommunicator())
    model = FullyShardedDataParallel(nn.Sequential(leaking), process_group=FakeCommunicator())
    with pytest.raises(EngineError) as caught:
        model(torch.ones(1, 2))
    assert str(caught.value) == (
        "0: its forward returns a view of one of its own parameters (shape (2,)), whose memory is freed "
        "after the forward: return a clone"
    )
