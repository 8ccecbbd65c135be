"""The account of one backward, in backwards of autograd itself."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hpcfsdp.engine.backward import BackwardAccount, ForwardCall, will_run


class Grad:
    """A gradient that counts what is still to come."""

    def __init__(self):
        self.outstanding = 0


class Example:
    """A linear layer, an input, and the account of its backward: `log` has what is known after each event."""

    def __init__(self, *, input_requires_grad=True, frozen=False, holds_units=False):
        self.grads, self.account, self.log = [Grad(), Grad()], BackwardAccount(), []
        self.layer, self.holds_units = nn.Linear(3, 3), holds_units
        self.layer.bias.requires_grad_(not frozen)
        self.found = [(grad, 0, leaf) for grad, leaf in zip(self.grads, self.layer.parameters(), strict=True)]
        self.given = torch.ones(2, 3, requires_grad=input_requires_grad)
        for grad, index, leaf in self.found:
            if leaf.requires_grad:
                leaf.register_post_accumulate_grad_hook(lambda _leaf, own=(grad, index): self.arrive(own))

    def call(self, change=lambda out: out):
        """A forward, as a unit records it."""
        call, given = ForwardCall(), self.given
        if given.requires_grad:
            given = given.view_as(given)
            call.inputs = [given.grad_fn]
            given.register_hook(lambda _grad: self.input_done(call))
        out = change(self.layer(given))
        for grad, index, leaf in self.found:
            node = leaf.view_as(leaf).grad_fn.next_functions[0][0] if leaf.requires_grad else None
            call.accumulators.append(((grad, index), node))
        out.register_hook(lambda _grad: self.note("begins", self.account.begin_call(call)))
        return out

    def arrive(self, leaf):
        self.note("leaf" if self.account.arrive(leaf) else "leaf not counted")

    def input_done(self, call):
        call.inputs_pending -= 1
        self.note("input")

    def is_complete(self, is_followed=False):
        leaves = SimpleNamespace(found=self.found)
        return self.account.is_complete(leaves, holds_units=self.holds_units, is_followed=is_followed)

    def note(self, what, _done=None):
        self.log.append((what, [grad.outstanding for grad in self.grads], self.is_complete()))


def test_a_backward_is_complete_when_leaves_and_inputs_have_their_gradients():
    example = Example()
    example.call().sum().backward()
    assert example.log[0] == ("begins", [1, 1], False)
    assert sorted(what for what, _, _ in example.log[1:]) == ["input", "leaf", "leaf"]
    assert example.log[-1][1:] == ([0, 0], True)
    assert [done for _, _, done in example.log] == [False, False, False, True]


def test_without_inputs_all_leaves_end_it_unless_parameters_may_still_be_needed():
    for options, ends in (({}, True), ({"frozen": True}, False), ({"holds_units": True}, False)):
        example = Example(input_requires_grad=False, **options)
        example.call().sum().backward()
        assert (example.log[-1][0], example.log[-1][2]) == ("leaf", ends), options
        assert example.is_complete(is_followed=True), options


def test_two_calls_end_together_and_a_leaf_counts_once_for_one_node():
    example = Example()
    (example.call().sum() + example.call().sum()).backward()
    begins = [outstanding for what, outstanding, _ in example.log if what == "begins"]
    assert begins[0] == [1, 1] and max(map(max, begins)) == 1
    assert [done for _, _, done in example.log[:-1]].count(True) == 0
    assert example.log[-1][2]


def test_leaves_that_the_backward_does_not_reach_keep_the_gradient_open_until_it_is_closed():
    example = Example()
    example.call(lambda out: out.detach() + example.given).sum().backward()
    assert example.log[0] == ("begins", [1, 1], False)
    assert not any(what.startswith("leaf") for what, _, _ in example.log)
    example.account.close(example.grads)
    assert [grad.outstanding for grad in example.grads] == [0, 0]
    assert example.account.arrive((example.grads[0], 0)) is False


def test_what_has_run_already_is_ignored():
    example = Example()
    out = example.call()
    nodes = [leaf.view_as(leaf).grad_fn.next_functions[0][0] for _, _, leaf in example.found]
    example.account.ignore(nodes)
    out.sum().backward()
    assert {what for what, _, _ in example.log} == {"begins", "leaf not counted", "input"}


def test_a_call_whose_inputs_do_not_show_its_end_ends_when_another_unit_follows():
    account, leaves = BackwardAccount(), SimpleNamespace(found=[])
    call = ForwardCall(is_open=True)
    account.begin_call(call)
    call.inputs_pending = 1
    assert not account.is_complete(leaves, holds_units=False, is_followed=False)
    assert account.is_complete(leaves, holds_units=False, is_followed=True)
    call.is_open = False
    assert not account.is_complete(leaves, holds_units=False, is_followed=True)


def test_a_gradient_that_goes_to_the_caller_does_not_run_a_node():
    leaf, seen = torch.ones(2, requires_grad=True), []
    node = leaf.view_as(leaf).grad_fn.next_functions[0][0]
    out = leaf * 2
    out.register_hook(lambda _grad: seen.append(will_run(node)))
    torch.autograd.grad(out.sum(), leaf)
    out = leaf * 2
    out.register_hook(lambda _grad: seen.append(will_run(node)))
    out.sum().backward()
    assert seen == [False, True]
    assert will_run(None) is False


@pytest.mark.parametrize("times", [1, 2])
def test_an_account_serves_one_backward_after_the_other(times):
    example = Example()
    for _ in range(times):
        example.log.clear()
        example.call().sum().backward()
        assert example.log[0] == ("begins", [1, 1], False) and example.log[-1][2]
        example.account.close(example.grads)
