import random

import pytest
import torch

from hpcfsdp.bench import gpu
from hpcfsdp.bench.gpu import Activity, EngineFigures, activity, exposed, length
from hpcfsdp.bench.harness import Times
from hpcfsdp.errors import UsageError

ARGUMENTS = {"layers": 1, "width": 16, "context": 8, "batch": 1, "dtype": "bf16", "repeats": 1, "imagined_ranks": 2}


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_a_machine_without_an_accelerator_is_refused():
    with pytest.raises(UsageError, match="gpu measures on an accelerator, and this process sees none"):
        gpu.measure(**ARGUMENTS)


def test_the_table_has_nothing_where_nothing_was_measured():
    times = Times((0.5, 0.25, 1.0))
    busy = Activity(10.4, 0.5, seconds=2.0, communication_s=1.0, exposed_s=0.25, idle_s=0.1)
    silent = Activity(3.0, 0.0, seconds=2.0, communication_s=0.0, exposed_s=0.0, idle_s=0.1)
    figures = {
        "floor": EngineFigures(times, 1 << 30, silent, 5.0),
        "fsdp2": EngineFigures(Times((1.0, 0.5, 2.0)), 3 << 29, busy, 4.0),
        "hpcfsdp": EngineFigures(Times(times.seconds), 1 << 29, None, 4.0),
    }
    table = gpu.table("2027-01-01, 2 x GPU.", figures, {"ddp": "no memory"})
    span = ("500.00 ms", "250.00 ms - 1000.00 ms")
    assert table.rows == [
        ("floor", *span, "", "1.00x", "1.00 GiB", "3", "0.0", "", "5.0%"),
        ("fsdp2", "1000.00 ms", "500.00 ms - 2000.00 ms", "2.00x", "0.50x", "1.50 GiB", "10", "0.5", "12.5%", "5.0%"),
        ("hpcfsdp", *span, "1.00x", "", "0.50 GiB", "", "", "", ""),
    ]
    assert (table.heading, table.notes) == ("2027-01-01, 2 x GPU.", ["ddp was skipped: no memory"])
    assert table.as_json["engines"]["fsdp2"]["hpcfsdp_ratio"] == 0.5
    assert table.as_json["engines"]["hpcfsdp"]["activity"] is None


def test_lengths_are_those_of_sets_of_points():
    draw = random.Random(0)

    def spans():
        begins = [draw.randrange(30) for _ in range(draw.randrange(6))]
        return [(begin, begin + draw.randrange(6)) for begin in begins]

    def points(spans):
        return {point for begin, end in spans for point in range(begin, end)}

    for _ in range(300):
        some, others = spans(), spans()
        assert length(some) == len(points(some))
        assert exposed(some, others) == len(points(some) - points(others))


def event(cat, name, begin_us, end_us, **more):
    return {"ph": "X", "cat": cat, "name": name, "ts": begin_us, "dur": end_us - begin_us, **more}


STEPS = [
    event("user_annotation", "hpcfsdp steps", 0, 100),
    event("gpu_user_annotation", "hpcfsdp steps", 10, 110),
    event("gpu_user_annotation", "nccl:_all_gather_base", 10, 40),
    event("cpu_op", "aten::mm", 1, 3),
    event("cuda_runtime", "cudaLaunchKernel", 2, 3),
    event("cuda_runtime", "cudaStreamSynchronize", 50, 60),
    event("cuda_driver", "cuStreamSynchronize", 61, 62),
    event("cuda_runtime", "cudaDeviceSynchronize", 101, 120),  # of the measurement, after the steps
    event("kernel", "ncclDevKernel_AllGather_RING_LL(...)", 10, 40),
    event("kernel", "gemm", 30, 60),
    event("gpu_memcpy", "Memcpy DtoD", 62, 64),
    event("kernel", "ncclDevKernel_ReduceScatter_Sum", 64, 70),
    event("gpu_memset", "Memset", 90, 110),
    {"ph": "f", "name": "ac2g", "ts": 1},
]


def test_a_trace_is_summed_up():
    found = activity(STEPS, steps=2)
    assert found == Activity(
        launches=2.5,
        synchronisations=1.0,
        seconds=pytest.approx(50e-6),
        communication_s=pytest.approx(18e-6),
        exposed_s=pytest.approx(13e-6),
        idle_s=pytest.approx(11e-6),
    )


@pytest.mark.parametrize("kinds", [(), ("cpu_op", "cuda_runtime"), ("gpu_memcpy",)])
def test_without_kernels_there_are_no_figures(kinds):
    assert activity([one for one in STEPS if one.get("cat") in kinds], steps=2) is None


def test_steps_on_the_cpu_have_none(monkeypatch):
    monkeypatch.setattr(gpu.accelerator, "synchronize", lambda device: None)
    taken = []
    assert gpu.traced(lambda: taken.append(torch.ones(3) + 1), 2, torch.device("cpu")) is None
    assert len(taken) == 2
