"""``optim.Muon`` against torch's Muon and AdamW, and against Newton-Schulz written out in float64."""

import copy
import math

import pytest
import torch
from torch import nn

from hpcfsdp.errors import UsageError
from hpcfsdp.optim import Muon
from hpcfsdp.optim.muon import orthogonalize

COEFFICIENTS = (3.4445, -4.775, 2.0315)
SHAPES = [(6, 4), (4, 6), (6, 4), (5, 5), (6, 4), (1, 7)]


def make_params(shapes=SHAPES, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes]


def set_grads(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator, dtype=param.dtype)


def written_out(matrix, steps=5, eps=1e-7):
    a, b, c = COEFFICIENTS
    x = matrix / max(math.sqrt(float((matrix**2).sum())), eps)
    for _ in range(steps):
        x = a * x + b * (x @ x.T) @ x + c * (x @ x.T) @ (x @ x.T) @ x
    return x


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (6, 6), (1, 5), (5, 1)])
def test_a_stack_is_computed_as_each_matrix_alone(shape):
    generator = torch.Generator().manual_seed(0)  # others have singular values near 0, which stay small
    matrices = torch.randn(3, *shape, generator=generator, dtype=torch.float64)
    matrices[1] = 0
    options = {"coefficients": COEFFICIENTS, "steps": 5, "eps": 1e-7, "dtype": torch.float64}
    found = orthogonalize(matrices, **options)
    torch.testing.assert_close(orthogonalize(matrices[0], **options), found[0], rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(found, torch.stack([written_out(m) for m in matrices]), rtol=1e-11, atol=1e-13)
    values = torch.linalg.svdvals(found[0])
    assert values.min() > 0.6
    assert values.max() < 1.3


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", [None, "original", "match_rms_adamw"])
def test_steps_are_those_of_the_formula(nesterov, adjust):
    params = make_params()
    expected = [param.detach().clone() for param in params]
    momenta = [torch.zeros_like(value) for value in expected]
    optimizer = Muon(
        params, lr=0.1, weight_decay=0.3, momentum=0.8, nesterov=nesterov, adjust_lr_fn=adjust, ns_dtype="float64"
    )
    for step in range(3):
        set_grads(params, step)
        optimizer.step()
        for value, momentum, param in zip(expected, momenta, params, strict=True):
            momentum.copy_(0.8 * momentum + 0.2 * param.grad)
            update = 0.2 * param.grad + 0.8 * momentum if nesterov else momentum
            rows, columns = value.shape
            factor = 0.2 * math.sqrt(max(rows, columns)) if adjust == "match_rms_adamw" else 0
            factor = factor or math.sqrt(max(1, rows / columns))
            value.copy_(value * (1 - 0.1 * 0.3) - 0.1 * factor * written_out(update))
        torch.testing.assert_close([param.detach() for param in params], expected, rtol=1e-10, atol=1e-12)


def test_steps_are_those_of_torch():
    params = make_params(dtype=torch.float32)
    theirs = copy.deepcopy(params)
    ours, reference = Muon(params, lr=0.02), torch.optim.Muon(theirs, lr=0.02)
    for step in range(5):
        for each in (params, theirs):
            set_grads(each, step)
        ours.step()
        reference.step()
        # bfloat16: another order of the same sums
        torch.testing.assert_close(params, theirs, rtol=0, atol=(step + 1) * 0.02 * 2**-6)


def test_matrices_are_computed_in_batches(monkeypatch):
    seen = []

    def noted(matrices, **options):
        seen.append(tuple(matrices.shape))
        return orthogonalize(matrices, **options)

    monkeypatch.setattr("hpcfsdp.optim.muon.orthogonalize", noted)
    params = make_params([(6, 4)] * 5 + [(4, 6)] * 2)
    set_grads(params, 0)
    params[1].grad = None
    Muon(params).step()
    assert seen == [(4, 6, 4), (2, 4, 6)]
    seen.clear()
    monkeypatch.setattr("hpcfsdp.optim.muon._HOST_BATCH_BYTES", 3 * 24 * 2)
    Muon(params).step()
    assert seen == [(3, 6, 4), (6, 4), (2, 4, 6)]


def test_other_parameters_are_stepped_by_adamw():
    shapes = [(6, 4), (4,), (), (2, 3, 4), (5, 5)]
    params = make_params(shapes)
    theirs = copy.deepcopy(params)
    ours = Muon(params, lr=0.1, adamw_lr=0.01, adamw_betas=(0.8, 0.9), weight_decay=0.2)
    muon = torch.optim.Muon([theirs[0], theirs[4]], lr=0.1, weight_decay=0.2)
    adamw = torch.optim.AdamW(theirs[1:4], lr=0.01, betas=(0.8, 0.9), weight_decay=0.2)
    assert [group["algorithm"] for group in ours.param_groups] == ["muon", "adamw"]
    for step in range(4):
        for each in (params, theirs):
            set_grads(each, step)
        ours.step()
        muon.step()
        adamw.step()
        assert all(map(torch.equal, params[1:4], theirs[1:4]))
        torch.testing.assert_close(params[::4], theirs[::4], rtol=0, atol=(step + 1) * 0.1 * 2**-6)


def test_groups():
    hidden, embedding, bias = make_params([(6, 4), (9, 4), (4,)])
    named = [("hidden", hidden), ("bias", bias)]
    groups = [
        {"params": named, "lr": 0.5, "momentum": 0.7, "betas": (0.1, 0.2), "mine": 3},
        {"params": [("embedding", embedding)], "algorithm": "adamw", "weight_decay": 0.0, "amsgrad": True},
    ]
    found = Muon(groups, lr=0.1, weight_decay=0.4, adamw_weight_decay=0.3).param_groups
    assert [group["param_names"] for group in found] == [["hidden"], ["bias"], ["embedding"]]
    assert [group["params"] for group in found] == [[hidden], [bias], [embedding]]
    assert [group["lr"] for group in found] == [0.5, 0.5, 0.1]
    assert [group["weight_decay"] for group in found] == [0.4, 0.3, 0.0]
    assert found[0]["momentum"] == 0.7
    assert [group.get("betas") for group in found] == [None, (0.1, 0.2), (0.9, 0.95)]
    assert [group.get("amsgrad") for group in found] == [None, False, True]
    assert [group.get("mine") for group in found] == [3, 3, None]


def test_a_scheduler_changes_both_learning_rates():
    params = make_params([(6, 4), (4,)])
    optimizer = Muon(params, lr=0.1, adamw_lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    set_grads(params, 0)
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.005]


def test_state_goes_on_where_it_was_saved():
    params = make_params([(6, 4), (4,), (6, 4)])
    optimizer = Muon(params)
    set_grads(params, 0)
    optimizer.step()
    again = copy.deepcopy(params)
    other = Muon(again, lr=9.0)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    copied = copy.deepcopy(optimizer)
    for stepped in (optimizer, other, copied):
        for group in stepped.param_groups:
            for param in group["params"]:
                param.grad = torch.full_like(param, 0.5)
        stepped.step()
    assert all(map(torch.equal, params, again))
    assert torch.equal(copied.param_groups[0]["params"][1], params[2])
    assert torch.equal(copied.param_groups[1]["params"][0], params[1])


def test_the_state_of_torchs_muon_is_loaded():
    params = make_params([(6, 4), (4, 6)], torch.float32)
    theirs = torch.optim.Muon(params, lr=0.3)
    set_grads(params, 0)
    theirs.step()
    ours = Muon(params)
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["lr"] == 0.3
    for param in params:
        assert torch.equal(ours.state[param]["momentum_buffer"], theirs.state[param]["momentum_buffer"])
    ours.step()


def test_the_state_of_torchs_adamw_stays_with_adamw():
    embedding, vector = make_params([(6, 4), (4,)], torch.float32)
    theirs = torch.optim.AdamW([embedding, vector], lr=0.3, weight_decay=0.0)
    set_grads([embedding, vector], 0)
    theirs.step()
    saved = theirs.state_dict()
    del saved["param_groups"][0]["fused"]  # as an older version
    ours = Muon([{"params": [embedding, vector], "algorithm": "adamw"}])
    ours.load_state_dict(saved)
    again = copy.deepcopy(theirs)
    set_grads(again.param_groups[0]["params"], 1)
    set_grads([embedding, vector], 1)
    ours.step()
    again.step()
    assert ours.param_groups[0]["algorithm"] == "adamw"
    assert all(map(torch.equal, [embedding, vector], again.param_groups[0]["params"]))


def test_loading_muons_state_for_what_is_no_matrix_is_refused():
    matrix, vector = make_params([(4, 4), (4,)])
    ours = Muon([matrix, vector])
    saved = ours.state_dict()
    for group in saved["param_groups"]:
        group["algorithm"] = "muon"
    with pytest.raises(UsageError, match="is no matrix"):
        ours.load_state_dict(saved)
    saved["param_groups"][0]["algorithm"] = "sgd"
    with pytest.raises(UsageError, match="is 'sgd'"):
        ours.load_state_dict(saved)
    assert [group["algorithm"] for group in ours.param_groups] == ["muon", "adamw"]


def test_a_learning_rate_that_is_a_tensor_is_each_groups_own():
    params = make_params([(6, 4), (4,)])
    optimizer = Muon(params, lr=torch.tensor(0.1))
    torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda _: 1.0, lambda _: 0.5])
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.1, 0.05])


def test_a_scheduler_may_cycle_the_momentum():
    params = make_params([(6, 4), (4,)])
    optimizer = Muon(params, lr=0.1)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=10)
    assert optimizer.param_groups[0]["momentum"] == 0.95


def test_a_group_that_is_refused_adds_nothing():
    matrix, vector, other = make_params([(6, 4), (4,), (2, 2)])
    optimizer = Muon([other])
    with pytest.raises(ValueError, match="Invalid beta"):
        optimizer.add_param_group({"params": [matrix, vector], "betas": (2.0, 0.9)})
    optimizer.add_param_group({"params": [matrix, vector]})
    optimizer.add_param_group({"params": []})
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1, 1, 0]


def test_a_closure_computes_the_loss_with_gradients():
    (param,) = make_params([(3, 4)])
    optimizer = Muon([param])

    def closure():
        loss = param.square().sum()
        loss.backward()
        return loss

    before = param.detach().clone()
    assert optimizer.step(closure).item() == pytest.approx(before.square().sum().item())
    assert not torch.equal(param, before)


def test_matrices_without_elements_and_without_gradients_stay():
    params = make_params([(0, 4), (3, 4)])
    params[0].grad = torch.zeros(0, 4, dtype=torch.float64)
    optimizer = Muon(params)
    before = params[1].detach().clone()
    optimizer.step()
    assert torch.equal(params[1], before)
    assert not optimizer.state


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr is -1.0: it must be finite, and not negative"),
        ({"momentum": math.nan}, "momentum is nan"),
        ({"weight_decay": "0"}, "weight_decay is '0': give a number"),
        ({"ns_coefficients": (1.0, 2.0)}, r"ns_coefficients is \(1.0, 2.0\): give three numbers"),
        ({"ns_coefficients": 3}, "ns_coefficients is 3: give three"),
        ({"ns_steps": 100}, "ns_steps is 100"),
        ({"ns_dtype": torch.int8}, "ns_dtype is torch.int8: choose one of bfloat16, float32, float64"),
        ({"adjust_lr_fn": "rms"}, "adjust_lr_fn is 'rms'"),
    ],
)
def test_wrong_values(options, message):
    with pytest.raises(UsageError, match=message):
        Muon(make_params(), **options)


def test_wrong_groups():
    matrix, bias = make_params([(3, 4), (4,)])
    with pytest.raises(UsageError, match=r"'bias' of shape \(4,\) is no matrix, but in a group with"):
        Muon([{"params": [("matrix", matrix), ("bias", bias)], "algorithm": "muon"}])
    with pytest.raises(UsageError, match="\"algorithm\" of a group is 'sgd'"):
        Muon([{"params": [matrix], "algorithm": "sgd"}])
    with pytest.raises(UsageError, match='a group has \'adamw_lr\': give "lr" in a group with "algorithm"'):
        Muon([{"params": [matrix], "adamw_lr": 1.0}])
    with pytest.raises(UsageError, match="maximize=True"):
        Muon([{"params": [matrix, bias], "maximize": True}])
    with pytest.raises(UsageError, match="lr is 'a': give a number"):
        Muon([bias], lr="a")
    with pytest.raises(ValueError, match="more than one parameter group"):
        Muon([{"params": [matrix]}, {"params": [matrix]}])
    with pytest.raises(ValueError, match="Invalid beta parameter"):
        Muon([matrix, bias], adamw_betas=(2.0, 0.9))
    with pytest.raises(UsageError, match="is complex"):
        Muon([nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))])
    with pytest.raises(TypeError, match="give a list"):
        Muon([{"params": {matrix}}])
    with pytest.raises(TypeError, match="is of float: give tensors"):
        Muon([1.0])
    with pytest.raises(ValueError, match="empty parameter list"):
        Muon([])


def test_a_sparse_gradient_is_refused_before_anything_is_stepped():
    embedding, (matrix,) = nn.Embedding(5, 3, sparse=True), make_params([(4, 4)])
    embedding(torch.tensor([1, 2])).sum().backward()
    set_grads([matrix], 0)
    before = matrix.detach().clone()
    with pytest.raises(UsageError, match="sparse gradient"):
        Muon([matrix, *embedding.parameters()]).step()
    assert torch.equal(matrix, before)
