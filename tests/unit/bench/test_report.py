import json

import pytest

from hpcfsdp.bench import report
from hpcfsdp.bench.collectives import Measurement
from hpcfsdp.bench.timing import Times

WAYS = {"hpcfsdp": Times((0.001, 0.004, 0.002)), "gloo": Times((0.01,))}


@pytest.mark.parametrize(("seconds", "text"), [(0.5e-6, "0.5 us"), (0.0015, "1.50 ms"), (2, "2000.00 ms")])
def test_times_are_readable(seconds, text):
    assert report.readable(seconds) == text


def test_a_row_compares_the_median_with_gloo_and_with_copying():
    rows = report.collective_rows([Measurement("all_gather", 1 << 20, 0.0005, WAYS)])
    assert rows == [
        ("all_gather", "1 MiB", "hpcfsdp", "2.00 ms", "1.00 ms - 4.00 ms", "5.00x", "4.00x"),
        ("all_gather", "1 MiB", "gloo", "10.00 ms", "10.00 ms - 10.00 ms", "", "20.00x"),
    ]


def test_nothing_is_compared_that_is_not_there():
    ways = {"hpcfsdp shared": WAYS["hpcfsdp"]}
    assert report.collective_rows([Measurement("zero-copy", 1 << 19, 0.0, ways)])[0][-2:] == ("", "")


def test_steps_are_compared_with_gloo():
    assert report.backend_rows({"ddp": WAYS})[0] == ("ddp", "hpcfsdp", "2.00 ms", "1.00 ms - 4.00 ms", "5.00x")


def test_json_holds_every_run():
    (one,) = json.loads(json.dumps(report.collective_json([Measurement("x", 4, 0.25, WAYS)])))
    assert one["ways"]["hpcfsdp"] == {"median_s": 0.002, "seconds": [0.001, 0.004, 0.002]}
    assert json.loads(json.dumps(report.backend_json({"ddp": WAYS})))["ddp"]["gloo"]["median_s"] == 0.01
