import pytest
import torch

from hpcfsdp.bench import gpu
from hpcfsdp.bench.gpu import Figures, Measurement
from hpcfsdp.bench.timing import Times
from hpcfsdp.bench.trace import Activity
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
        "floor": Figures(times, 1 << 30, silent, 5.0),
        "fsdp2": Figures(Times((1.0, 0.5, 2.0)), 3 << 29, busy, 4.0),
        "hpcfsdp": Figures(Times(times.seconds), 1 << 29, None, 4.0),
    }
    table = gpu.table(Measurement("2027-01-01, 2 x GPU.", figures, {"ddp": "no memory"}))
    span = ("500.00 ms", "250.00 ms - 1000.00 ms")
    assert table.rows == [
        ("floor", *span, "", "1.00x", "1.00 GiB", "3", "0.0", "", "5.0%"),
        ("fsdp2", "1000.00 ms", "500.00 ms - 2000.00 ms", "2.00x", "0.50x", "1.50 GiB", "10", "0.5", "12.5%", "5.0%"),
        ("hpcfsdp", *span, "1.00x", "", "0.50 GiB", "", "", "", ""),
    ]
    assert (table.heading, table.notes) == ("2027-01-01, 2 x GPU.", ["ddp was skipped: no memory"])
    assert table.as_json["engines"]["fsdp2"]["hpcfsdp_ratio"] == 0.5
    assert table.as_json["engines"]["hpcfsdp"]["activity"] is None
