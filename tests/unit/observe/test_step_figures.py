import math

import pytest
import torch

from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.errors import UsageError
from hpcfsdp.observe.facts import Facts
from hpcfsdp.observe.step_figures import Curves, Pipeline, Sums, check_names, flat_numbers, pack, unpack
from hpcfsdp.timeline import Interval

FACTS = Facts(0, 1, 10, 60.0, 6000.0, {0: "n1"})


def interval(seconds, waited_s):
    return Interval(0, int(seconds * 1e9), [(0, int(waited_s * 1e9))])


def record_of(sums, *, seconds=2.0, waited_s=0.5, facts=FACTS, memory=(4096, 8192)):
    pipeline = Pipeline(FakeCommunicator(), facts, lag=0)
    assert pipeline.put(7, sums, interval(seconds, waited_s), memory, 99) == []
    ((record, gathered),) = pipeline.flush()
    assert gathered == 99
    return record


def added(*steps):
    sums = Sums(keeps_on_device=False)
    for loss, tokens, lr, values in steps:
        sums.add(loss, tokens, lr, values, reduce=True)
    return sums


@pytest.mark.parametrize(("number", "rank"), [(0, 0), (5, 4_000_000), ((1 << 41) - 1, 3), (123456789, 1)])
def test_a_number_and_a_rank_in_one(number, rank):
    assert unpack(pack(number, rank)) == (number, rank)


def test_the_largest_packed_is_the_largest_number_with_its_rank():
    largest = max(pack(number, rank) for rank, number in enumerate([5, 9, 9, 2]))
    assert unpack(largest) == (9, 2)
    assert pack(1e300, 7) < 1 << 63 and pack(-1.0, 7) == 7


def test_the_record_of_a_step():
    record = record_of(added((3.0, 40, 0.1, {"grad_norm": 2.0, "mine": torch.tensor([4])})))
    assert record.pop("date").endswith("Z")
    assert record == {
        "step": 7,
        "kind": "train",
        "loss": 3.0,
        "grad_norm": 2.0,
        "mine": 4.0,
        "lr": 0.1,
        "seconds": 2.0,
        "tokens": 40,
        "tokens_per_s": 20.0,
        "flop_utilisation": 0.2,
        "comm_share": 0.25,
        "comm_share_max": 0.25,
        "busy_s_mean": 1.5,
        "busy_s_max": 1.5,
        "memory": {"now_bytes": 4096, "peak_bytes": 8192, "peak_rank": 0},
    }


def test_the_record_of_several_steps_has_their_means():
    sums = added((3.0, 10, 0.1, {"grad_norm": 1.0}), (6.0, 20, 0.2, {"grad_norm": 3.0}))
    record = record_of(sums, seconds=4.0, waited_s=1.0)
    assert (record["steps"], record["seconds"], record["tokens"], record["tokens_per_s"]) == (2, 2.0, 15, 7.5)
    assert record["loss"] == (3.0 * 10 + 6.0 * 20) / 30
    assert (record["grad_norm"], record["lr"]) == (2.0, 0.2)
    assert (record["comm_share"], record["busy_s_mean"]) == (0.25, 1.5)


def test_what_is_not_known_is_left_out():
    record = record_of(added((None, None, None, {})), facts=Facts(0, 1, None, None, 1.0, {}), memory=(0, 0))
    assert not {"loss", "tokens", "tokens_per_s", "flop_utilisation", "lr", "memory", "straggler"} & set(record)


def test_ranks_with_the_same_tokens_count_once():
    assert record_of(added((1.0, 40, None, {})), facts=Facts(0, 2, 10, 60.0, 6000.0, {}))["tokens"] == 20


def test_a_loss_that_is_the_mean_already_is_not_rounded():
    sums = Sums(keeps_on_device=False)
    sums.add(0.1 + 0.2, 7, None, {}, reduce=False)
    assert record_of(sums)["loss"] == 0.1 + 0.2


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_null_and_text(loss):
    record = record_of(added((loss, 4, 0.1, {"grad_norm": math.nan})))
    assert (record["loss"], record["grad_norm"], record["lr"]) == (None, None, 0.1)
    assert record["not_finite"] == {"loss": str(loss), "grad_norm": "nan"}


def test_waits_are_at_most_the_whole_time():
    record = record_of(added((None, None, None, {})), seconds=1.0, waited_s=1.5)
    assert (record["comm_share"], record["busy_s_max"]) == (1.0, 0.0)


def test_records_lag_behind_a_device():
    pipeline = Pipeline(FakeCommunicator(), FACTS, lag=1)
    complete = [pipeline.put(step, added((1.0, 1, None, {})), interval(1, 0), (0, 0), 0) for step in range(1, 5)]
    assert [[record["step"] for record, _ in each] for each in complete] == [[], [], [1], [2]]
    assert [record["step"] for record, _ in pipeline.flush()] == [3, 4]


@pytest.mark.parametrize("name", ["seconds", "step", "memory", "straggler"])
def test_names_of_figures_are_taken(name):
    with pytest.raises(UsageError, match=f"{name!r} is a figure of every record"):
        check_names({"fine": 1, name: 2})


@pytest.mark.parametrize(
    ("value", "text"), [("x", "loss must be a number, not str"), (torch.zeros(2), r"has the shape \(2,\)")]
)
def test_values_that_are_no_numbers_are_refused(value, text):
    with pytest.raises(UsageError, match=text):
        added((value, None, None, {}))


def test_a_series_of_records():
    series = Curves()
    series.continue_from({"loss": ([1, 2, 3], [9.0, 8.0, 7.0]), "val": ([2], [1.0])}, last=2)
    series.add({"step": 3, "loss": None, "not_finite": {"loss": "inf"}, "memory": {"peak_bytes": 5}})
    series.add({"step": 4, "loss": 6.0, "seconds": 1.0})
    assert series.curves == {
        "loss": ([1, 2, 3, 4], [9.0, 8.0, math.inf, 6.0]),
        "val": ([2], [1.0]),
        "memory_peak_bytes": ([3], [5.0]),
    }


def test_the_numbers_of_a_record_by_name():
    record = {"step": 3, "kind": "train", "loss": None, "lr": 0.5, "memory": {"now_bytes": 4}, "flag": True}
    assert flat_numbers(record) == {"lr": 0.5, "memory/now_bytes": 4}
    assert flat_numbers({"step": 1, "bits": 2}, "held_out/") == {"held_out/bits": 2}
