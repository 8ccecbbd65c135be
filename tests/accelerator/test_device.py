"""The simulated device by itself: programs of one process that are right, and what becomes of those that are not."""

import contextlib
import copy
import threading
import weakref

import pytest
import torch
from torch import nn

from tests.accelerator import simulated

pytestmark = pytest.mark.ranks(1)

SIM = torch.device("sim", 0)
NUMEL = 1000


def default_stream():
    return torch.accelerator.current_stream()


def ones(stream):
    """Ones that a stream has made, and that are there."""
    with stream:
        made = torch.ones(NUMEL, device=SIM)
    torch.accelerator.synchronize()
    return made


# What a right program computes


def trained(device):
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(11, 16), model, nn.Linear(16, 11)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)  # as on a device
    tokens = torch.arange(24).view(4, 6).remainder(11).to(device)
    losses = []
    for _ in range(3):
        losses.append(nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()))
        losses[-1].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses).detach().cpu(), [param.detach().cpu() for param in model.parameters()]


@pytest.mark.parametrize("policy", ["eager", "starved", "random"])
def test_a_model_trains_as_on_the_cpu(policy):
    if policy != "eager":
        simulated.starve(*[default_stream()] * (policy == "starved"), seed=0 if policy == "random" else None)
    losses, params = trained(SIM)
    expected_losses, expected_params = trained(torch.device("cpu"))
    torch.testing.assert_close(losses, expected_losses)
    torch.testing.assert_close(params, expected_params)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64], ids=str)
def test_copies_keep_and_convert_values(dtype):
    values = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    there = values.to(SIM)
    assert torch.equal(there.cpu(), values)
    assert torch.equal(there.t().to(torch.complex128).cpu(), values.t().to(torch.complex128))
    assert torch.equal(torch.empty(3, 2, dtype=dtype, device=SIM).copy_(values.t()).cpu(), values.t())


def test_views_share_memory():
    whole = torch.zeros(4, 6, device=SIM)
    whole.view(24)[3] = 1
    whole[:, 1::2].t().unfold(1, 2, 2).add_(1)
    torch.view_as_complex(whole.view(4, 3, 2))[2, 2] = 5
    expected = torch.zeros(4, 6)
    expected.view(24)[3] = 1
    expected[:, 1::2].t().unfold(1, 2, 2).add_(1)
    torch.view_as_complex(expected.view(4, 3, 2))[2, 2] = 5
    assert torch.equal(whole.cpu(), expected)
    assert simulated.waits() == {"copy to host": 1}


def test_autocast_computes_in_the_lower_precision():
    layer, x = nn.Linear(4, 4, device=SIM), torch.ones(2, 4, device=SIM)
    with torch.autocast("sim", dtype=torch.bfloat16):
        assert layer(x).dtype is torch.bfloat16
        assert layer(x).softmax(-1).dtype is torch.float32


def test_data_of_a_tensor_moves_between_the_device_and_the_host():
    for first, second in ((SIM, "cpu"), ("cpu", SIM)):
        param = nn.Parameter(torch.ones(3, device=first))
        for device in (second, first):
            param.data = param.data.to(device)
            (param * 2).sum().backward()
            assert param.grad.device == param.device == torch.device(device)
            assert param.grad.tolist() == [2.0] * 3
            param.grad = None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_layer_norm_is_that_of_the_cpu_to_the_last_bit(dtype):
    results = []
    for device in ("cpu", SIM):
        torch.manual_seed(0)
        layer, x = nn.LayerNorm(7, dtype=dtype), torch.randn(4, 7).to(dtype)
        layer, x = layer.to(device), x.to(device).requires_grad_()
        layer(x).square().sum().backward()
        results.append([layer(x).detach().cpu(), x.grad.cpu(), layer.weight.grad.cpu()])
    assert all(map(torch.equal, *results))


def test_random_numbers_depend_on_the_seed_alone():
    def drawn(starved):
        simulated.starve(*starved)
        torch.manual_seed(3)
        state = torch.get_device_module(SIM).get_rng_state()
        with side:
            first = nn.functional.dropout(torch.ones(NUMEL, device=SIM), 0.5)
        default_stream().wait_stream(side)
        second = torch.randn(NUMEL, device=SIM)
        torch.get_device_module(SIM).set_rng_state(state)
        return [first.cpu(), second.cpu(), nn.functional.dropout(torch.ones(NUMEL, device=SIM), 0.5).cpu()]

    side = torch.Stream(SIM)
    results = [drawn(starved) for starved in ((), (side,), (default_stream(),))]
    for others in results[1:]:
        assert all(map(torch.equal, results[0], others))
    assert torch.equal(results[0][0], results[0][2])
    assert 300 < int((results[0][0] == 0).sum()) < 700


def test_autograd_runs_on_a_thread_of_the_device_and_on_the_streams_of_the_forward():
    seen, side = [], torch.Stream(SIM)

    def look(grad):
        seen.append((threading.get_ident() == main, torch.accelerator.current_stream().stream_id))

    main, x = threading.get_ident(), torch.ones(3, device=SIM, requires_grad=True)
    side.wait_stream(default_stream())
    with side:
        y = x * 2
        y.register_hook(look)
    default_stream().wait_stream(side)
    y.sum().backward()
    assert seen == [(False, side.stream_id)]
    assert x.grad.cpu().tolist() == [2.0] * 3


# What a wrong program computes


@pytest.mark.parametrize("waits", [True, False], ids=["with a wait", "without"])
def test_a_missing_wait_shows_when_the_stream_is_starved(waits):
    side = torch.Stream(SIM)
    value = ones(default_stream())
    simulated.starve(side)
    with side:
        value.add_(1)
    if waits:
        default_stream().wait_stream(side)
    assert (value * 1).sum().item() == (2 if waits else 1) * NUMEL


@pytest.mark.parametrize("waits", [True, False], ids=["with a wait", "without"])
def test_a_missing_wait_shows_under_some_random_order(waits):
    found = set()
    for seed in range(20):
        side, value = torch.Stream(SIM), ones(default_stream())
        simulated.starve(side, default_stream(), seed=seed)  # so that the order is chosen when all is there
        with side:
            value.add_(1)
        if waits:
            default_stream().wait_stream(side)
        found.add((value * 1).sum().item() / NUMEL)
    assert found == ({2.0} if waits else {1.0, 2.0})


@pytest.mark.parametrize("kept", ["", "by a reference", "by record_stream"])
def test_memory_that_is_freed_too_early_is_overwritten(kept):
    side = torch.Stream(SIM)
    value = ones(side)
    simulated.starve(default_stream())
    result = value * 1  # on the default stream, which the owner of the memory does not wait for
    if kept == "by record_stream":
        value.record_stream(default_stream())
    reference = value if kept == "by a reference" else None
    del value
    with side:
        other = torch.empty(NUMEL, device=SIM)
    assert result.isnan().all().item() is not bool(kept)
    del reference, other


@pytest.mark.parametrize("strict", [False, True])
def test_memory_may_be_freed_that_its_stream_waits_to_use(strict):
    side = torch.Stream(SIM)
    value = ones(side)
    simulated.starve(default_stream())
    with simulated.poison_when_freed() if strict else contextlib.nullcontext():
        result = value * 1
        del value
        side.wait_stream(default_stream())
        with side:
            other = torch.empty(NUMEL, device=SIM)
        assert result.isnan().all().item() is strict
    del other


def test_memory_without_values_is_nan():
    for _ in range(2):  # new, and used before
        value = torch.empty(NUMEL, device=SIM)
        assert value.isnan().all().item()
        value.fill_(1)
        del value


def test_memory_of_a_storage_is_freed_and_allocated_again():
    value = ones(default_stream())
    before, storage = torch.accelerator.memory_allocated(), value.untyped_storage()
    nbytes = storage.size()
    storage.resize_(0)
    assert torch.accelerator.memory_allocated() <= before - nbytes
    storage.resize_(nbytes)
    assert torch.accelerator.memory_allocated() == before
    assert value.isnan().all().item()


def test_queued_kernels_keep_no_memory_alive():
    simulated.starve(default_stream())
    before = torch.accelerator.memory_allocated()
    value = torch.ones(NUMEL, device=SIM)
    result = value * 2
    alive = weakref.ref(value)
    del value
    assert alive() is None
    assert torch.accelerator.memory_allocated() - before < 2 * NUMEL * 4
    assert result.sum().item() == 2 * NUMEL


def test_memory_is_counted():
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    one = torch.empty(1 << 20, dtype=torch.uint8, device=SIM)
    assert torch.accelerator.memory_allocated() - before == 1 << 20
    two = torch.empty_like(one)
    del one
    del two
    assert torch.accelerator.memory_allocated() == before
    assert torch.accelerator.max_memory_allocated() - before == 2 << 20


# The host


def test_waits_of_the_host_are_counted_by_their_causes():
    x = torch.arange(4.0).to(SIM)
    assert simulated.waits() == {"copy from host": 1}
    y = (x + 1).square()
    torch.ones((), device=SIM).add_(y.sum())
    assert simulated.waits() == {"copy from host": 1}
    y[0].item()
    y.tolist()
    torch.nonzero(y)
    event = default_stream().record_event()
    event.synchronize()
    default_stream().synchronize()
    torch.accelerator.synchronize()
    causes = simulated.waits()
    assert {"item", "copy to host", "aten::nonzero", "event", "stream", "device"} <= causes.keys(), causes


def test_kernels_and_allocations_are_counted():
    x = torch.zeros(4, device=SIM)  # an allocation, and a kernel that fills it
    x.add_(1)
    y = x * 2
    assert (simulated.launches(), simulated.allocations()) == (3, 2)
    assert y.sum().item() == 8


def test_copies_of_pinned_memory_do_not_wait():
    pinned = torch.arange(4.0).pin_memory()
    assert pinned.is_pinned()
    simulated.starve(default_stream())
    there = pinned.to(SIM, non_blocking=True)
    back = torch.empty(4, pin_memory=True)
    back.copy_(there * 2, non_blocking=True)
    del pinned  # the memory is freed when the copy is complete
    assert simulated.waits() == {}
    torch.empty(4, pin_memory=True).fill_(-1)
    torch.accelerator.synchronize()
    assert back.tolist() == [0.0, 2.0, 4.0, 6.0]


def test_a_copy_of_memory_that_is_not_pinned_is_an_error_unless_it_waits():
    with pytest.raises(RuntimeError, match=r"non_blocking copy of .* from host memory that is not pinned"):
        torch.ones(3).to(SIM, non_blocking=True)
    with simulated.unpinned_copies():
        assert torch.ones(3).to(SIM, non_blocking=True).sum().item() == 3
    assert simulated.waits()["copy from host"] == 1


def test_an_error_of_a_kernel_is_raised_by_the_next_wait():
    index = torch.tensor([5], device=SIM)
    picked = torch.zeros(3, device=SIM).index_select(0, index)
    with pytest.raises(RuntimeError, match=r"a kernel of the simulated accelerator has failed: .*out of range"):
        torch.accelerator.synchronize()
    del picked
    torch.accelerator.synchronize()


def test_tensors_of_the_host_are_refused():
    with pytest.raises(RuntimeError, match="xpected all tensors to be on the same device"):
        torch.ones(3, device=SIM) + torch.ones(3)
    assert (torch.ones(3, device=SIM) + torch.tensor(1.0)).sum().item() == 6


def test_models_can_be_copied_and_pickled(tmp_path):
    model = nn.Linear(3, 3).to(SIM)
    other = copy.deepcopy(model)
    torch.save(other.state_dict(), tmp_path / "a.pt")
    loaded = torch.load(tmp_path / "a.pt", map_location="cpu")
    assert torch.equal(loaded["weight"], model.weight.detach().cpu())
