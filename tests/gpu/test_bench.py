"""``hpcfsdp bench gpu`` on the devices of all ranks; no test depends on a time. test_report.py: in one process."""

import contextlib

import pytest
import torch
import torch.distributed as dist

from hpcfsdp.bench import gpu
from hpcfsdp.bench.step import training_step
from tests.gpu.conftest import simulated

SHAPE = {"layers": 3, "width": 64, "context": 32, "batch": 2}
DTYPE = "bf16"


@pytest.fixture(autouse=True)
def lenient():
    """DDP copies memory that is not pinned, and says so nowhere."""
    with contextlib.nullcontext() if simulated is None else simulated.unpinned_copies():
        yield


@pytest.mark.ranks(2)
def test_all_engines_do_the_same_work(world):
    if dist.get_backend() == "hpcmpi":
        pytest.skip("a comparison of the ways over the devices' own backend")
    table = gpu.measure(world, **SHAPE, dtype=DTYPE, repeats=1, imagined_ranks=1)
    engines, skipped = table.as_json["engines"], table.as_json["skipped"]
    assert set(engines) | set(skipped) == {"floor", "ddp", "fsdp1", "fsdp2", "hpcfsdp", "hpcfsdp_rows"}
    assert {"floor", "ddp", "fsdp2", "hpcfsdp", "hpcfsdp_rows"} <= set(engines), skipped
    trained = [one for engine, one in engines.items() if engine != "floor"]
    assert [one["loss"] for one in trained] == pytest.approx([trained[0]["loss"]] * len(trained), rel=2e-2)
    assert engines["floor"]["loss"] > trained[0]["loss"]
    assert engines["hpcfsdp"]["peak_bytes"] <= engines["fsdp2"]["peak_bytes"]
    activities = [one["activity"] is not None for one in engines.values()]
    assert (world.device.type == "cuda") <= all(activities)
    assert all(len(row) == len(table.columns) for row in table.rows)
    assert f"2 x {torch.get_device_module().get_device_properties(world.device).name}" in table.heading


@pytest.mark.ranks(2, 4)
def test_a_step_launches_no_more_than_one_of_torch_and_waits_for_nothing(world):
    if simulated is None or dist.get_backend() == "hpcmpi":
        pytest.skip("counted on the simulated device alone")
    counted = {}
    for engine in ("fsdp2", "hpcfsdp", "hpcfsdp_rows"):
        shape = {**SHAPE, "rank": world.rank, "ranks": world.size, "device": world.device}
        step = training_step(engine, dist.group.WORLD, **shape)
        for _ in range(3):
            step()
        torch.accelerator.synchronize()
        simulated.reset_counts()
        step()
        counted[engine] = simulated.launches(), simulated.waits()
    assert counted["hpcfsdp"][0] <= counted["fsdp2"][0]
    assert counted["hpcfsdp_rows"][0] <= counted["fsdp2"][0]
    assert counted["hpcfsdp"][1] == counted["hpcfsdp_rows"][1] == {}
