import json

import pytest

from hpcfsdp.errors import UsageError
from tests.bench import suite
from tests.bench.runs import failures


def test_a_part_that_fails_does_not_stop_the_others():
    parts = [
        suite.Benchmark("wrong", ("step", "--layers", "none"), 0),
        suite.Benchmark("host", ("host", "--units", "x"), 0),
    ]
    announced = []
    found = suite.run(parts, "mpirun", 2, announced.append)
    assert [line.split(" -m ")[1] for line in announced] == [
        "hpcfsdp bench step --layers none --json",
        "tests.bench host --units x --json",
    ]
    assert "none is not a positive whole number" in failures(found)["wrong"]
    assert list(failures(found)) == ["wrong", "host"]
    json.dumps(found, allow_nan=False)


def test_a_launcher_that_is_not_there_is_named():
    with pytest.raises(UsageError, match="cannot start 'no-such-mpirun'"):
        suite.run([suite.Benchmark("step", ("step",))], "no-such-mpirun -x", 2, lambda line: None)
