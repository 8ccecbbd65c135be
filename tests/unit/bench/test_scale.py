"""One rank of many: what it pays must not grow faster than the number of ranks."""

import pytest
import torch

from hpcfsdp.comm.progress import Finished
from hpcfsdp.errors import UsageError
from tests.bench import scale

KIB = 1 << 10


@pytest.fixture(scope="module")
def costs(tmp_path_factory):
    """Of the first and the last rank at two world sizes: (ranks, which) -> phase -> cost."""
    found = {}
    for ranks in (64, 512):
        folder = str(tmp_path_factory.mktemp(f"ranks-{ranks}"))
        for which, rank in (("first", 0), ("last", ranks - 1)):
            options = {"layers": 2, "width": 64, "folder": folder, "repeats": 1, "traced": True}
            found[ranks, which] = scale.costs_of(rank, ranks, **options)
    return found


@pytest.mark.slow
def test_every_phase_is_measured(costs):
    first, last = costs[64, "first"], costs[64, "last"]
    assert set(first) - set(last) == {"layout of the file, rank 0", "table of the file, rank 0"}
    assert {
        "wrap the model",
        "step",
        "full state dict",
        "sharded optimizer state dict",
        "plan of a save",
        "load",
    } <= set(last)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["first", "last"])
def test_memory_and_messages_grow_at_most_linearly(costs, which):
    few, many = costs[64, which], costs[512, which]
    for phase, cost in many.items():
        for kind in ("peak_bytes", "kept_bytes", "gathered_bytes"):
            # 64 KiB: dictionaries double their memory at some sizes.
            assert getattr(cost, kind) <= 8 * max(0, getattr(few[phase], kind)) + 64 * KIB, (phase, kind)


@pytest.mark.slow
def test_a_step_needs_no_memory_for_other_ranks(costs):
    few, many = costs[64, "last"]["step"], costs[512, "last"]["step"]
    assert many.peak_bytes <= few.peak_bytes + 16 * KIB
    assert many.gathered_bytes == 0


def test_an_imagined_communicator_pays_for_every_object():
    comm = scale.ImaginedCommunicator(1, 8)
    values = comm.all_gather_object({"a": [1]})
    assert values == [{"a": [1]}] * 8 and len({id(value) for value in values}) == 8
    assert comm.gathered_bytes > 8 * len("a")
    output = torch.ones(3)
    assert isinstance(comm._exchange("x", [output, None], [None, None], True), Finished) and not output.any()


@pytest.mark.parametrize("ranks", [4, 12])
def test_nodes_are_full(ranks):
    with pytest.raises(UsageError, match=f"--world-sizes {ranks} is no multiple of 8"):
        scale.measure(world_sizes=[ranks], layers=1, width=16, repeats=1)


@pytest.mark.slow
def test_the_table_shows_the_rank_that_pays_the_most():
    cost = scale.PhaseCost(0.5, 1 << 20, 1 << 19, 0)
    found = [
        scale.RankCosts(16, 0, {"step": cost, "table": cost}),
        scale.RankCosts(16, 15, {"step": scale.PhaseCost(0.25, 3 << 20, 0, 1 << 20)}),
    ]
    assert scale.table(found).rows == [
        ("step", "16", "500.00 ms", "3.0 MiB", "0.5 MiB", "1.0 MiB"),
        ("table", "16", "500.00 ms", "1.0 MiB", "0.5 MiB", "0.0 MiB"),
    ]
