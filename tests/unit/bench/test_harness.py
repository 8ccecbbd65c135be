import json
import time

import pytest

from hpcfsdp.bench import checkpoint, planned, step
from hpcfsdp.bench.harness import Times, in_turn, readable
from hpcfsdp.comm.fake import FakeCommunicator
from tests.bench import backends, collectives, host, memory, optim_state
from tests.bench.pss import Peak

WAYS = {"hpcfsdp": Times((0.001, 0.004, 0.002)), "gloo": Times((0.01, 0.01, 0.01))}


@pytest.mark.parametrize(("seconds", "text"), [(0.5e-6, "0.5 us"), (0.0015, "1.50 ms"), (2, "2000.00 ms")])
def test_times_are_readable(seconds, text):
    assert readable(seconds) == text


def test_a_collective_is_compared_with_gloo_and_with_the_floor():
    rows = collectives.table([collectives.Comparison("all_gather", 1 << 20, 0.0005, WAYS)]).rows
    assert rows == [
        ("all_gather", "1 MiB", "hpcfsdp", "2.00 ms", "1.00 ms - 4.00 ms", "5.00x", "4.00x"),
        ("all_gather", "1 MiB", "gloo", "10.00 ms", "10.00 ms - 10.00 ms", "", "20.00x"),
    ]


def test_cells_are_empty_without_gloo_and_floor():
    ways = {"hpcfsdp shared": WAYS["hpcfsdp"]}
    assert collectives.table([collectives.Comparison("zero-copy", 1 << 19, 0.0, ways)]).rows[0][-2:] == ("", "")


def test_a_backend_is_compared_with_gloo():
    assert backends.table({"ddp": WAYS}).rows[0] == ("ddp", "hpcfsdp", "2.00 ms", "1.00 ms - 4.00 ms", "5.00x")


def test_json_holds_every_run():
    (one,) = json.loads(json.dumps(collectives.table([collectives.Comparison("x", 4, 0.25, WAYS)]).as_json))
    assert one["ways"]["hpcfsdp"] == {"median_s": 0.002, "seconds": [0.001, 0.004, 0.002]}
    assert json.loads(json.dumps(backends.table({"ddp": WAYS}).as_json))["ddp"]["gloo"]["median_s"] == 0.01


STEP = step.table(
    {"floor": Times((0.001, 0.002)), "ddp": Times((0.005, 0.010)), "hpcfsdp": Times((0.002, 0.004))},
    {"floor": 5.0, "ddp": 2.0, "hpcfsdp": 2.0},
    {"hpcfsdp": step.Moved(2.0, 1.0, 0.254)},
)


def test_a_step_is_compared_with_the_floor_and_hpcfsdp_with_every_engine():
    assert STEP.rows == [
        ("floor", "1.50 ms", "1.00 ms - 2.00 ms", "1.00x", "2.00x", "", "", ""),
        ("ddp", "7.50 ms", "5.00 ms - 10.00 ms", "5.00x", "0.40x", "", "", ""),
        ("hpcfsdp", "3.00 ms", "2.00 ms - 4.00 ms", "2.00x", "", "2.00", "1.00", "0.25"),
    ]


def test_json_of_a_step_holds_ratios_and_losses():
    ddp = json.loads(json.dumps(STEP.as_json))["ddp"]
    assert ddp == {"median_s": 0.0075, "seconds": [0.005, 0.01], "loss": 2.0, "hpcfsdp_ratio": 0.4}
    assert STEP.as_json["hpcfsdp"]["moved"] == {"between_nodes": 2.0, "copied": 1.0, "gathered": 0.254}


PLANNED = planned.table(
    {"hpcfsdp": planned.Compared(Times((0.002, 0.004, 0.004)), 0.003, 11 << 20)},
    {"links": {}, "compute": {"flops": 8e10, "memory_bytes_per_s": 1.4e10}},
)


def test_a_plan_is_compared_with_time():
    assert PLANNED.rows == [("hpcfsdp", "4.00 ms", "3.00 ms", "0.75x", "11.0 MiB")]
    assert PLANNED.as_json["hpcfsdp"]["ratio"] == 0.75
    assert dict(PLANNED.facts)["facts"]["compute"]["flops"] == 8e10


HOST = host.table(
    units=10,
    times={"plain": Times((0.001, 0.002)), "fsdp2": Times((0.006, 0.007)), "hpcfsdp": Times((0.003, 0.005))},
    skipped={"hpcfsdp_orig": "not there"},
)


def test_the_overhead_of_a_unit_is_above_plain_units_of_the_same_round():
    assert HOST.rows == [
        ("plain", "150.0 us", "100.0 us - 200.0 us", "", "", ""),
        ("fsdp2", "650.0 us", "600.0 us - 700.0 us", "500.0 us", "500.0 us - 500.0 us", "0.50x"),
        ("hpcfsdp", "400.0 us", "300.0 us - 500.0 us", "250.0 us", "200.0 us - 300.0 us", ""),
    ]


def test_json_of_host_names_skipped_engines():
    found = json.loads(json.dumps(HOST.as_json))
    assert found["hpcfsdp"]["median_over_plain_s"] == pytest.approx(0.00025)
    assert found["hpcfsdp_orig"] == {"skipped": "not there"}


MIB = 1 << 20
MEMORY = memory.table(
    {
        "hpcfsdp": (200 * MIB, Peak((9 * MIB, 10 * MIB), 8 * MIB)),
        "fsdp2": (100 * MIB, Peak((20 * MIB,), 8 * MIB)),
    }
)


def test_the_highest_step_is_compared_with_the_analytic_peak():
    assert MEMORY.rows == [
        ("hpcfsdp", "200.0 MiB", "10.0 MiB", "9.0 MiB - 10.0 MiB", "8.0 MiB", "1.250x", ""),
        ("fsdp2", "100.0 MiB", "20.0 MiB", "20.0 MiB - 20.0 MiB", "8.0 MiB", "2.500x", "0.50x"),
    ]


def test_json_of_memory_holds_ratios():
    fsdp2 = json.loads(json.dumps(MEMORY.as_json))["fsdp2"]
    assert (fsdp2["peak_bytes"], fsdp2["analytic_ratio"], fsdp2["hpcfsdp_ratio"]) == (20 * MIB, 2.5, 0.5)


OPTIM_STATE = optim_state.table(
    parameters=8,
    times={"show": {"fsdp1": Times((0.008, 0.030, 0.009)), "hpcfsdp": Times((0.002, 0.003, 0.003))}},
    peaks={
        ("show", "fsdp1", "rank 0"): Peak((9 * MIB, 12 * MIB), 8 * MIB),
        ("show", "hpcfsdp", "others"): Peak((-4096, 0), 8 * MIB),
    },
)


def test_a_state_dict_is_compared_with_fsdp1_in_the_same_round():
    assert OPTIM_STATE.rows == [
        ("show", "fsdp1", "9.00 ms", "8.00 ms - 30.00 ms", ""),
        ("show", "hpcfsdp", "3.00 ms", "2.00 ms - 3.00 ms", "4.00x"),
    ]


def test_peaks_of_state_dicts_have_rows_for_rank_0_and_the_others():
    assert OPTIM_STATE.second.rows == [
        ("show", "rank 0", "fsdp1", "12.0 MiB", "9.0 MiB - 12.0 MiB", "8.0 MiB", "1.500x"),
        ("show", "others", "hpcfsdp", "0.0 MiB", "0.0 MiB - 0.0 MiB", "8.0 MiB", "0.000x"),
    ]


def test_json_of_state_dicts_holds_times_and_peaks():
    found = json.loads(json.dumps(OPTIM_STATE.as_json))
    assert found["parameters"] == 8
    assert found["times"]["show"]["fsdp1"]["seconds"] == [0.008, 0.030, 0.009]
    assert found["times"]["show"]["fsdp1"]["hpcfsdp_ratio"] == 0.25
    assert found["memory"][0]["calls_bytes"] == [9 * MIB, 12 * MIB]
    assert (found["memory"][0]["peak_bytes"], found["memory"][0]["analytic_ratio"]) == (12 * MIB, 1.5)


CHECKPOINT = checkpoint.table(
    nbytes=10**9,
    tensors=300,
    found={
        "save": {"raw": Times((1.0, 2.0)), "hpcfsdp": Times((2.0, 2.0)), "dcp": Times((4.0, 8.0))},
        "in memory": {"xxh3": Times((0.2, 0.1))},
    },
)


def test_a_checkpoint_is_compared_with_raw_files_and_with_dcp():
    spread = "2000.00 ms - 2000.00 ms"
    assert CHECKPOINT.rows == [
        ("save", "raw", "1500.00 ms", "1000.00 ms - 2000.00 ms", "0.67", "", "4.00x", "0.75x"),
        ("save", "hpcfsdp", "2000.00 ms", spread, "0.50", "75%", "3.00x", ""),
        ("save", "dcp", "6000.00 ms", "4000.00 ms - 8000.00 ms", "0.17", "25%", "", "3.00x"),
        ("in memory", "xxh3", "150.00 ms", "100.00 ms - 200.00 ms", "6.67", "", "", "0.08x"),
    ]


def test_json_of_a_checkpoint_holds_every_run_and_the_size():
    found = json.loads(json.dumps(CHECKPOINT.as_json))
    assert (found["bytes"], found["tensors"]) == (10**9, 300)
    assert found["save"]["dcp"] == {"median_s": 6.0, "seconds": [4.0, 8.0]}


@pytest.mark.parametrize(
    "table",
    [
        collectives.table([collectives.Comparison("all_gather", 1 << 20, 0.0005, WAYS)]),
        backends.table({"ddp": WAYS}),
        STEP,
        PLANNED,
        HOST,
        MEMORY,
        OPTIM_STATE,
        OPTIM_STATE.second,
        CHECKPOINT,
    ],
    ids=lambda table: table.columns[0],
)
def test_every_row_has_a_cell_for_each_column(table):
    assert {len(row) for row in table.rows} == {len(table.columns)}


def test_columns():
    moved = ("between nodes", "copied", "gathered")
    assert STEP.columns == ("engine", "step", "min-max", "x floor", "hpcfsdp / it", *moved)
    assert OPTIM_STATE.columns == ("call", "engine", "median", "min-max", "fsdp1 / hpcfsdp")
    memory_columns = ("call", "ranks", "engine", "peak", "min-max of calls", "analytic", "peak / analytic")
    assert OPTIM_STATE.second.columns == memory_columns


def test_ways_are_called_in_turn_after_a_warmup_and_timed_per_call():
    called = []
    ways = {"a": lambda: called.append("a"), "b": lambda: (called.append("b"), time.sleep(0.02))}
    times = in_turn(FakeCommunicator(), ways, repeats=3, warmup=1, calls=2)
    assert "".join(called) == "ab" + "aabb" * 3
    assert [len(t.seconds) for t in times.values()] == [3, 3]
    assert min(times["b"].seconds) >= 0.02
    assert times["a"].median_s < times["b"].median_s


def test_a_ratio_is_the_median_over_rounds():
    assert Times((2.0, 30.0, 6.0)).ratio_to(Times((1.0, 10.0, 6.0))) == 2.0
