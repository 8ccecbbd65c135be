import torch
from torch import nn

from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.fsdp import FullyShardedDataParallel, MixedPrecision
from hpcfsdp.observe.facts import count_elements, measured_peak, training_dtype
from hpcfsdp.observe.held_memory import Holdings, ProcessMemory, memory_of

MIB = 1 << 20


def test_the_memory_of_this_process_now_and_at_its_peak():
    memory = memory_of(torch.device("cpu"))
    memory.read()
    before, _ = memory.read()
    held = bytearray(64 * MIB)
    with_it, _ = memory.read()
    del held
    bytearray(128 * MIB)
    after, peak = memory.read()
    assert with_it - before > 48 * MIB
    assert after < with_it - 32 * MIB
    assert peak - after > 96 * MIB
    _, next_peak = memory.read()
    assert next_peak < peak - 64 * MIB, "the peak is of the time since the last call"
    memory.close()
    memory.close()


def test_a_system_that_shows_no_memory(monkeypatch):
    def refuse(*_):
        raise PermissionError

    with monkeypatch.context() as patched:
        patched.setattr("os.open", refuse)
        memory = ProcessMemory()
    assert memory.read() == (0, 0)
    memory.close()


def trained(model):
    optimizer = torch.optim.AdamW(model.parameters())
    holdings = Holdings(model, optimizer)
    optimizer.register_step_pre_hook(lambda *_: holdings.look_at_gradients())
    assert holdings.figures(5) == {
        "parameters_bytes": holdings.parameters,
        "gradients_bytes": 0,
        "optimizer_bytes": 0,
        "gathered_bytes": 5,
    }
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return holdings.figures(0)


def test_bytes_of_a_plain_model():
    assert trained(nn.Linear(4, 4, dtype=torch.float32)) == {
        "parameters_bytes": 80,
        "gradients_bytes": 80,
        "optimizer_bytes": 160 + 8,  # two moments, and a step of each parameter
        "gathered_bytes": 0,
    }


def test_bytes_of_a_sharded_model():
    model = FullyShardedDataParallel(nn.Linear(4, 4), process_group=FakeCommunicator(0, 2))
    assert trained(model) == {
        "parameters_bytes": 48,  # of 10 elements, aligned to 12
        "gradients_bytes": 48,
        "optimizer_bytes": 96 + 4,
        "gathered_bytes": 0,
    }


def test_elements_of_a_model_trained_and_tied():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    assert count_elements(model) == (24, 20)
    sharded = FullyShardedDataParallel(model, process_group=FakeCommunicator(0, 2), use_orig_params=True)
    assert count_elements(sharded) == (24, 20)


def test_the_dtype_that_modules_compute_in():
    assert training_dtype(nn.Linear(2, 2, dtype=torch.float64)) == torch.float64
    assert training_dtype(nn.ReLU()) == torch.float32
    mixed = FullyShardedDataParallel(
        nn.Linear(4, 4), process_group=FakeCommunicator(0, 2), mixed_precision=MixedPrecision(torch.bfloat16)
    )
    assert training_dtype(mixed) == torch.bfloat16


def test_the_peak_is_measured_without_a_trace_on_random_numbers():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    assert measured_peak(torch.device("cpu"), torch.float32) > 1e6
    assert torch.equal(torch.rand(1), expected)
