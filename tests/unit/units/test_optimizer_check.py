"""Which optimizers may step shards, by what they do to small tensors."""

import pytest
import torch
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hpcfsdp.errors import EngineError
from hpcfsdp.units.optimizer_check import check_on_shards, cut_runs, whole_runs
from tests.optimizers import Lamb, Own, Prodigy, Sam

ROWS, OWNERS, PLACES = "fully_shard", "WholeTensors", "granularity"


class Float32(Own):
    """Computes in another dtype, with functions that are not rounded alike everywhere."""

    def update(self, param, grad):
        grad = grad.float()
        return (grad.exp().log1p().pow(0.3) / (grad.square().sqrt() + 1e-8)).sigmoid().to(param.dtype)


class MatricesApart(Own):
    def update(self, param, grad):
        return torch.linalg.qr(grad)[0] if param.ndim == 2 else grad.sign()


class MatricesAlone(Own):
    def update(self, param, grad):
        assert param.ndim == 2
        return torch.linalg.qr(grad)[0]


class Noisy(Own):
    def update(self, param, grad):
        return grad + torch.randn_like(grad)


class Listed(Own):
    """Keeps what its constructor is given under names of its own, so that no other can be made."""

    def __init__(self, params, names):
        super().__init__(params)
        self.kept = names

    def update(self, param, grad):
        return grad * grad.norm()


class ByItsGroups(Own):
    def __init__(self, params):
        assert all("kind" in group for group in params)
        super().__init__(params)

    def update(self, param, grad):
        return grad * (grad.norm() if self.param_groups[0]["kind"] == "norm" else 1)


class Lookahead(optim.Optimizer):
    """Each second step goes back half of the way."""

    def __init__(self, params, base_optimizer):
        self.base_optimizer = base_optimizer(params)
        super().__init__(self.base_optimizer.param_groups, self.base_optimizer.defaults)

    @torch.no_grad()
    def step(self, closure=None):
        before = [param.clone() for group in self.param_groups for param in group["params"]]
        self.base_optimizer.step()
        for param, old in zip((p for group in self.param_groups for p in group["params"]), before, strict=True):
            param.lerp_(old, 0.5)


class Around(optim.Optimizer):
    """Is given an optimizer, and is none by construction. Each gradient counts by its norm."""

    def __init__(self, optimizer, by_norm=True):
        self.optimizer, self.by_norm = optimizer, by_norm
        self.param_groups = optimizer.param_groups

    def step(self):
        for param in (param for group in self.param_groups for param in group["params"]):
            param.grad *= param.grad.norm() if self.by_norm else 1
        self.optimizer.step()


class ScheduleFree(Own):
    """Steps only when it was told to train."""

    def __init__(self, params):
        super().__init__(params, train_mode=False)

    def train(self):
        self.param_groups[0]["train_mode"] = True

    def update(self, param, grad):
        assert self.param_groups[0]["train_mode"]
        return grad * grad.norm()


def params():
    return [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(5))]


def refusal(optimizer, split=cut_runs):
    """The remedies that an error names; none if there is no error."""
    try:
        check_on_shards(optimizer, split)
    except EngineError as error:
        assert type(optimizer).__name__ in str(error)
        return {word for word in (ROWS, OWNERS, PLACES) if word in str(error)}
    return set()


RIGHT = {
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD, foreach": lambda p: optim.SGD(p, lr=0.1, foreach=True),
    "Adam": lambda p: optim.Adam(p, amsgrad=True),
    "Adam, fused": lambda p: optim.Adam(p, lr=1e-9, fused=True),
    "Adam, a tensor as lr": lambda p: optim.Adam(p, lr=torch.tensor(0.1)),
    "AdamW": lambda p: optim.AdamW(p, capturable=True),
    "Adagrad": optim.Adagrad,
    "Adadelta": optim.Adadelta,
    "Adamax": lambda p: optim.Adamax(p, differentiable=True),
    "NAdam": optim.NAdam,
    "RAdam": lambda p: optim.RAdam(p, decoupled_weight_decay=True, weight_decay=0.1),
    "RMSprop": lambda p: optim.RMSprop(p, centered=True, momentum=0.9),
    "Rprop": optim.Rprop,
    "ASGD": lambda p: optim.ASGD(p, t0=3),
    "SparseAdam": optim.SparseAdam,
    "diverging": lambda p: optim.SGD(p, lr=1e300),
    "warm-up from 0": lambda p: optim.SGD(p, lr=0.0),
    "groups": lambda p: optim.AdamW([{"params": p[:1], "weight_decay": 0.1}, {"params": p[1:], "name": "others"}]),
    "names": lambda p: optim.AdamW([("first", p[0]), ("second", p[1])]),
    "in float32": Float32,
    "lookahead": lambda p: Lookahead(p, optim.Adam),
    "around": lambda p: Around(optim.SGD(p), by_norm=False),
    "random": Noisy,
    "not to be made": lambda p: Listed(p, ["first"]),
    "matrices alone": MatricesAlone,
    "by its groups": lambda p: ByItsGroups([{"params": p, "kind": "none"}]),
}
assert {name for name in dir(optim) if isinstance(getattr(optim, name), type)} <= {
    *RIGHT, "Optimizer", "Adafactor", "LBFGS", "Muon"
}  # fmt: skip
WRONG = {
    "LBFGS": (lambda p: optim.LBFGS(p, max_iter=2), {ROWS}),
    "LBFGS, line search": (lambda p: optim.LBFGS(p, line_search_fn="strong_wolfe"), {ROWS}),
    "Adafactor": (optim.Adafactor, {OWNERS}),
    "LAMB": (Lamb, {OWNERS, PLACES}),
    "LAMB in a warm-up": (lambda p: Lamb(p, lr=0.0), {OWNERS, PLACES}),
    "SAM": (lambda p: Sam(p, optim.SGD, lr=0.1, momentum=0.9), {ROWS}),
    "SAM, small": (lambda p: Sam(p, optim.AdamW, rho=1e-3), {ROWS}),
    "around": (lambda p: Around(optim.SGD(p)), {OWNERS, PLACES}),
    "Prodigy": (Prodigy, {ROWS}),
    "matrices apart": (MatricesApart, {OWNERS}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_optimizers_that_step_each_element_pass(name):
    assert not refusal(RIGHT[name](params()))


@pytest.mark.parametrize("name", WRONG)
def test_others_are_refused_with_what_computes_the_same(name):
    make, remedies = WRONG[name]
    assert refusal(make(params())) == remedies
    assert refusal(make(params()), whole_runs) == (set() if PLACES in remedies else remedies)


def test_each_kind_of_group_is_tried():
    first, second = params()
    optimizer = ByItsGroups([{"params": [first], "kind": "none"}, {"params": [second], "kind": "norm"}])
    assert refusal(optimizer) == {OWNERS, PLACES}


def test_an_optimizer_that_was_told_to_train_is_tried_so():
    optimizer = ScheduleFree(params())
    assert not refusal(optimizer)  # its first step raises
    optimizer.train()
    assert refusal(optimizer) == {OWNERS, PLACES}


def test_adafactor_of_transformers():
    optimization = pytest.importorskip("transformers.optimization")
    assert refusal(optimization.Adafactor(params())) == {OWNERS}


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_nothing_else_changes(device):
    calls = []
    optimizer = optim.Adam(params())
    hook = register_optimizer_step_pre_hook(lambda *_: calls.append("hook"))
    before, state = [p.clone() for p in params()], torch.get_rng_state()
    with torch.device(device), torch.inference_mode(device == "cpu"):
        check_on_shards(optimizer, cut_runs)
    hook.remove()
    assert not optimizer.state and not calls and torch.equal(torch.get_rng_state(), state) and before


class ByTheAngle(Own):
    """As AdamP: a gradient at right angles to the parameter loses its part along it."""

    def update(self, param, grad):
        is_turned = (param * grad).sum().abs() < 1e-6 * param.norm() * grad.norm()
        return grad - param * grad.abs().sum() / param.norm() if is_turned else grad


class KeepsNoOption(Own):
    """The constructor needs an option, and only what follows from it is kept."""

    def __init__(self, params, size, lr=0.01):
        super().__init__(params, lr)
        self.factor = 1 / size

    def update(self, param, grad):
        return grad * self.factor / grad.norm()


class KeepsAnObject(KeepsNoOption):
    def __init__(self, params, size, lr=0.01):
        super().__init__(params, size, lr)
        self.other = [size]


def test_gradients_at_right_angles_are_tried():
    assert refusal(ByTheAngle(params())) == {OWNERS, PLACES}


def test_an_option_that_is_not_kept():
    optimizer = KeepsNoOption(params(), size=2)
    assert refusal(optimizer) == {OWNERS, PLACES}
    assert not optimizer.state and all(len(group["params"]) == 2 for group in optimizer.param_groups)
    assert not refusal(KeepsAnObject(params(), size=2))  # a trial could change it
