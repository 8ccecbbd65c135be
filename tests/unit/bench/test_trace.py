import random

import pytest
import torch

from hpcfsdp.bench import trace
from hpcfsdp.bench.trace import Activity, activity, exposed, length, merged


def test_spans_that_meet_become_one():
    assert merged([(5, 6), (0, 2), (1, 3), (3, 4), (7, 7)]) == [(0, 4), (5, 6)]
    assert merged([]) == []


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
    monkeypatch.setattr(trace.accelerator, "synchronize", lambda device: None)
    taken = []
    assert trace.traced(lambda: taken.append(torch.ones(3) + 1), 2, torch.device("cpu")) is None
    assert len(taken) == 2
