from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, strategies as st

from hpcfsdp import accelerator
from hpcfsdp.accelerator import Hardware
from hpcfsdp.errors import LaunchError
from hpcfsdp.launch import device
from hpcfsdp.launch.device import Place, choose, fair_threads


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


MY_CORES = frozenset({0, 1, 2, 3})
CARDS = tuple(Hardware("H200", f"GPU-{n}", 1, f"0000:{n:02x}:00.0") for n in range(8))


def on_device(*devices, cores=MY_CORES, near=(), index=None):
    return Place(cores, index, devices, tuple(near) or (frozenset(),) * len(devices))


def spread(groups, cores_of, device_order, cards=8):
    """Places of ranks with the cores of `groups`; the card ``device_order[n]`` is next to the cores ``cores_of[n]``."""
    near = [frozenset()] * cards
    for n, number in enumerate(device_order):
        near[number] = frozenset(cores_of[n])
    return [on_device(*CARDS[:cards], cores=frozenset(group), near=near) for group in groups]


L3_BY_NUMA = [range(16 * (n // 2), 16 * (n // 2 + 1)) for n in range(8)]
SOCKETS = [range(56 * (n // 4), 56 * (n // 4 + 1)) for n in range(8)]
FRONTIER = [4, 5, 2, 3, 6, 7, 0, 1]  # the GCDs by region of L3; Linux knows the NUMA domain, two regions


@pytest.mark.parametrize(
    ("places", "numbers"),
    [
        (spread([range(8 * n + 1, 8 * n + 8) for n in range(8)], L3_BY_NUMA, FRONTIER), FRONTIER),  # and LUMI
        (spread([range(16 * n + 1, 16 * n + 16) for n in range(4)], L3_BY_NUMA, FRONTIER), [4, 2, 6, 0]),
        (spread([range(64)] * 8, L3_BY_NUMA, FRONTIER), list(range(8))),  # not bound
        (spread([range(14 * n, 14 * n + 14) for n in range(8)], SOCKETS, range(8)), list(range(8))),  # a DGX
        (
            spread([range(56 * (n % 2), 56 * (n % 2) + 8) for n in range(8)], SOCKETS, range(8)),
            [0, 4, 2, 5, 1, 6, 3, 7],
        ),
        (spread([range(8)] * 6, SOCKETS, range(8)), [0, 1, 2, 3, 4, 5]),  # more ranks than cards at their socket
        (spread([range(60, 64), range(4)], SOCKETS, range(8)), [4, 1]),
        ([on_device(*CARDS[:2], near=[MY_CORES, MY_CORES])] * 2, [0, 1]),
        ([on_device(*CARDS[:2], near=[frozenset(), MY_CORES])] * 3, [0, 1, 0]),  # more ranks than devices
        ([on_device(CARDS[n], near=[frozenset({9})]) for n in range(3)], [0, 0, 0]),
        ([on_device(*CARDS[:4], index=n, near=[MY_CORES] * 4) for n in (3, 1)], [3, 1]),
        ([on_device(*CARDS[:4]), on_device(*CARDS[1:4])], [0, 1]),
        ([Place(MY_CORES)] * 3, [0, 0, 0]),
    ],
)
def test_ranks_use_the_nearest_devices_and_different_ones(places, numbers):
    assert device.assign(places) == numbers


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(
    st.lists(st.sets(st.integers(0, 5), min_size=1), min_size=n, max_size=n),
    st.lists(st.sets(st.integers(0, 5)), min_size=n, max_size=8),
)))  # fmt: skip
def test_no_two_ranks_use_one_device_wherever_there_are_enough(case):
    groups, near = case
    cards = CARDS[: len(near)]
    numbers = device.assign([on_device(*cards, cores=frozenset(g), near=map(frozenset, near)) for g in groups])
    assert len(set(numbers)) == len(groups)
    assert set(numbers) <= set(range(len(cards)))


def test_the_cores_next_to_a_device_are_those_that_linux_names(tmp_path, monkeypatch):
    monkeypatch.setattr(device, "_PCI", tmp_path)
    (tmp_path / "0000:c1:00.0").mkdir()
    (tmp_path / "0000:c1:00.0" / "local_cpulist").write_text("0-1,64\n")
    assert device.near_cores("0000:c1:00.0") == {0, 1, 64}
    assert device.near_cores("0000:c2:00.0") == device.near_cores(None) == frozenset()


def test_a_rank_looks_at_all_devices_that_it_sees(gpus, monkeypatch):
    gpus(2)
    module = SimpleNamespace(
        get_device_properties=lambda device: SimpleNamespace(
            name="MI250X", uuid="same", total_memory=8, pci_domain_id=1, pci_bus_id=0xC0 + device.index, pci_device_id=0
        )
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(device, "near_cores", {"0001:c0:00.0": frozenset({1}), "0001:c1:00.0": frozenset({2})}.get)
    monkeypatch.setattr(device.os, "sched_getaffinity", lambda _: {1, 2})
    cards = tuple(Hardware("MI250X", "same", 8, f"0001:c{n}:00.0") for n in range(2))
    assert device.look(CUDA, named=False) == Place(frozenset({1, 2}), None, cards, (frozenset({1}), frozenset({2})))
    assert device.look(CUDA, named=True).index == 1
    assert device.look(CPU, named=False) == Place(frozenset({1, 2}))


@pytest.mark.parametrize(
    ("numbers", "local_ranks"),
    [([4, 5, 2, 3, 0, 1], [4, 5, 2, 3, 0, 1]), ([0, 0, 0], [0, 1, 2]), ([2, 3], [0, 1]), ([1, 0], [1, 0])],
)
def test_local_rank_is_the_number_of_the_device_where_one_rank_of_the_node_has_0(numbers, local_ranks):
    assert [device.local_rank(numbers, place) for place in range(len(numbers))] == local_ranks


CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("devices", "cores", "others", "threads"),
    [
        ((), 4, 2, 2),
        (CARDS[:2], 8, 2, 3),  # one core is left to NCCL's proxy thread
        (CARDS[:2], 2, 2, 1),
        (CARDS[:2], 8, 1, 7),
    ],
)
def test_a_rank_takes_its_share_of_the_cores(monkeypatch, devices, cores, others, threads):
    chosen = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    places = [on_device(*devices, cores=frozenset(range(cores)))] * others
    device.share_node(places, range(others), 0, exclusive=True)
    assert chosen == [threads]


def test_threads_that_the_user_fixed_stay(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setattr(torch, "set_num_threads", lambda _: pytest.fail("threads were changed"))
    device.share_node([Place(MY_CORES)], [0], 0, exclusive=True)


def test_the_device_of_a_rank_is_made_current(gpus, monkeypatch):
    gpus(2)
    made_current = []
    monkeypatch.setattr(accelerator, "make_current", made_current.append)
    with torch.autograd.set_multithreading_enabled(True):
        assert device.activate("cpu", 0) == CPU
        assert torch._C._is_multithreading_enabled()
        assert device.activate("cuda", 1) == CUDA
        assert made_current == [CUDA]
        assert not torch._C._is_multithreading_enabled()  # backwards run on this thread, which hears signals


UNKNOWN = Hardware("H200", None, 1)
GCDS = [Hardware("MI250X", "same", 1, f"0000:c{n}:00.0") for n in range(2)]
MIGS = [Hardware("H100 MIG", f"MIG-{n}", 1, "0000:c0:00.0") for n in range(2)]
XCDS = [Hardware("MI300X", "same", 1, "0000:c0:00.0")] * 2


@pytest.mark.parametrize(
    ("places", "numbers", "lowest"),
    [
        ([on_device(CARDS[0]), on_device(CARDS[1])], [0, 0], [0, 1]),
        ([on_device(CARDS[0]), on_device(CARDS[0])], [0, 0], [0, 0]),
        ([on_device(*CARDS[:2]), on_device(CARDS[1])], [1, 0], [0, 0]),
        ([on_device(GCDS[0]), on_device(GCDS[1])], [0, 0], [0, 1]),
        ([on_device(MIGS[0]), on_device(MIGS[1])], [0, 0], [0, 1]),
        ([on_device(*XCDS)] * 3, [0, 1, 1], [0, 1, 1]),
        ([on_device(UNKNOWN)] * 2, [0, 0], [0, 1]),
        ([on_device(Hardware("Max 1550", "a", 1)), on_device(Hardware("Max 1550", "a", 1))], [0, 0], [0, 0]),
    ],
    ids=["two", "one", "seen differently", "equal UUIDs", "equal PCI addresses", "both equal", "unknown", "no address"],
)
def test_devices_are_the_same_if_all_that_is_known_is_equal(places, numbers, lowest):
    assert device.owners(places, numbers) == lowest


def test_ranks_that_share_a_gpu_are_named_unless_the_backend_allows_it():
    places = [on_device(CARDS[1]), on_device(CARDS[0]), on_device(CARDS[1])]
    device.share_node(places, [0, 0, 0], 0, exclusive=False)
    device.share_node(places, [0, 0, 0], 1, exclusive=True)
    with pytest.raises(LaunchError) as caught:
        device.share_node(places, [0, 0, 0], 2, exclusive=True)
    assert str(caught.value) == (
        "3 rank(s) on this node use 2 device(s): local ranks [0, 2] share one (number 0, GPU-1, 0000:01:00.0), which "
        "NCCL and its like refuse: start at most one rank for each device (srun --ntasks-per-node=N, mpirun --map-by "
        "ppr:N:node), or let each see another one (srun --gpus-per-task=1)"
    )


@pytest.mark.parametrize(
    ("cuda", "remedy"),
    [
        (None, "built for the CPU, sees no device: install a torch"),
        ("13.0", "built for CUDA 13.0, sees no device: ask the"),
    ],
)
def test_a_driver_without_devices_is_named_with_the_build_of_torch(monkeypatch, tmp_path, cuda, remedy):
    driver = tmp_path / "kfd"
    monkeypatch.setattr(accelerator, "_DRIVER_FILES", (str(tmp_path / "nvidiactl"), str(driver)))
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(accelerator, "device_type", lambda: None)
    assert accelerator.unseen_driver() is None
    driver.touch()
    assert accelerator.unseen_driver().startswith(f"{driver} is there, but torch {torch.__version__}, {remedy}")
    monkeypatch.setattr(accelerator, "device_type", lambda: "cuda")
    assert accelerator.unseen_driver() is None
