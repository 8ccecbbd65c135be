from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, strategies as st

from hpcfsdp import accelerator
from hpcfsdp.accelerator import Hardware
from hpcfsdp.errors import LaunchError
from hpcfsdp.launch import device
from hpcfsdp.launch.device import choose, fair_threads


@pytest.fixture
def gpus(monkeypatch):
    """``gpus(count)``: let this process see so many GPUs."""

    def see(count):
        monkeypatch.setattr(accelerator, "device_type", lambda: "cuda" if count else None)
        monkeypatch.setattr(accelerator, "device_count", lambda: count)

    return see


def test_without_a_gpu_ranks_compute_on_the_cpu(gpus):
    gpus(0)
    assert choose(None, 3) == torch.device("cpu")


@pytest.mark.parametrize(("count", "local_rank", "index"), [(4, 0, 0), (4, 3, 3), (1, 3, 0), (2, 5, 1)])
def test_each_rank_takes_the_gpu_of_its_local_rank_among_those_it_sees(gpus, count, local_rank, index):
    gpus(count)
    assert choose(None, local_rank) == torch.device("cuda", index)
    assert choose("cuda", local_rank) == torch.device("cuda", index)


def test_a_named_device_is_used(gpus):
    gpus(4)
    assert choose("cuda:2", 0) == torch.device("cuda", 2)
    assert choose(torch.device("cuda", 1), 3) == torch.device("cuda", 1)
    assert choose("cpu", 0) == torch.device("cpu")


@pytest.mark.parametrize("wanted", ["cuda", "cuda:0"])
def test_a_gpu_that_is_not_there_is_an_error(gpus, wanted):
    gpus(0)
    with pytest.raises(LaunchError) as caught:
        choose(wanted, 0)
    assert str(caught.value) == (
        f"device '{wanted}' was asked for, but this process sees no accelerator; ask the launcher for one"
    )
    assert caught.value.exit_code == 3


def test_a_gpu_number_beyond_those_visible_is_an_error(gpus):
    gpus(2)
    with pytest.raises(LaunchError, match=r"^device 'cuda:2' was asked for, but this process sees 2 device\(s\)$"):
        choose("cuda:2", 0)


def test_another_kind_of_device_is_refused(gpus):
    gpus(0)
    with pytest.raises(LaunchError, match=r"^device 'meta' is not supported: use 'cpu' or 'cuda'$"):
        choose("meta", 0)


def test_another_kind_of_accelerator_than_torch_has_is_refused(gpus):
    gpus(1)
    with pytest.raises(
        LaunchError, match=r"^device 'xpu' was asked for, but the accelerator of this process is 'cuda'$"
    ):
        choose("xpu", 0)


def test_a_word_that_is_no_device_is_refused(gpus):
    gpus(0)
    with pytest.raises(LaunchError, match=r"'gpu'.*use 'cpu' or 'cuda'"):
        choose("gpu", 0)


@pytest.mark.parametrize(
    ("mine", "everyone", "threads"),
    [
        ({0, 1, 2, 3}, [{0, 1, 2, 3}], 4),
        ({0, 1, 2, 3}, [{0, 1, 2, 3}] * 2, 2),
        ({0, 1, 2}, [{0, 1, 2}] * 3, 1),
        ({0, 1}, [{0, 1}, {2, 3}], 2),
        ({0, 1, 2, 3}, [{0, 1, 2, 3}, {0, 1}], 3),
        ({0}, [{0}] * 8, 1),
        (set(range(6)), [set(range(6))] * 4, 1),
    ],
)
def test_cores_are_split_among_the_ranks_that_may_use_them(mine, everyone, threads):
    assert fair_threads(mine, everyone) == threads


@given(st.integers(1, 64), st.integers(1, 64))
def test_ranks_that_share_all_cores_never_start_more_threads_than_cores_unless_there_are_more_ranks(cores, ranks):
    everyone = [set(range(cores))] * ranks
    assert fair_threads(everyone[0], everyone) == max(1, cores // ranks)


def node_of(rank, *values):
    """The ranks of a node, of which the others say `values`."""
    return SimpleNamespace(
        rank=rank, size=len(values) + 1, allgather=lambda mine: [*values[:rank], mine, *values[rank:]]
    )


CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)


def test_a_rank_on_the_cpu_takes_its_share_of_the_cores(monkeypatch):
    chosen = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(device.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    assert device.activate(CPU) is None
    device.share_node(CPU, None, node_of(1, {0, 1, 2, 3}), exclusive=True)
    assert chosen == [2]


def test_threads_that_the_user_fixed_stay(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setattr(torch, "set_num_threads", lambda _: pytest.fail("threads were changed"))
    device.share_node(CPU, None, node_of(0), exclusive=True)


def test_the_device_of_a_rank_is_made_current(gpus, monkeypatch):
    gpus(2)
    made_current = []
    monkeypatch.setattr(accelerator, "make_current", made_current.append)
    monkeypatch.setattr(accelerator, "describe", lambda device: Hardware("H200", f"GPU-{device.index}", 1))
    with torch.autograd.set_multithreading_enabled(True):
        assert device.activate(CUDA) == "GPU-1"
        assert made_current == [CUDA]
        assert not torch._C._is_multithreading_enabled()  # backwards run on this thread, which hears signals


@pytest.mark.parametrize(
    ("uuid", "others", "exclusive"),
    [("GPU-1", ["GPU-0"], True), (None, [None, None], True), ("GPU-1", ["GPU-1"], False)],
    ids=["devices of their own", "drivers that name no hardware", "a backend that allows it"],
)
def test_ranks_that_may_share_a_node(gpus, uuid, others, exclusive):
    gpus(2)
    device.share_node(CUDA, uuid, node_of(1, *others), exclusive=exclusive)


def test_ranks_that_share_a_gpu_are_named(gpus):
    gpus(2)
    with pytest.raises(LaunchError) as caught:
        device.share_node(CUDA, "GPU-1", node_of(0, "GPU-0", "GPU-1"), exclusive=True)
    assert str(caught.value) == (
        "3 rank(s) on this node use 2 device(s): local ranks [0, 2] share one (cuda:1, GPU-1), which NCCL and its like "
        "refuse: start at most one rank for each device (srun --ntasks-per-node=N, mpirun --map-by ppr:N:node), or let "
        "each see another one (srun --gpus-per-task=1)"
    )
