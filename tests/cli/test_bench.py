import json

import pytest


def test_collectives_are_measured_in_every_way(hpcfsdp):
    job = hpcfsdp("bench", "collectives", "--sizes", "0.01", "1", "--repeats", "2", "--json", ranks=2)
    assert job.code == 0, job.stderr
    report = json.loads(job.stdout)
    assert (report["ranks"], len(report["measured"])) == (2, 8)
    for one in report["measured"]:
        assert {"hpcfsdp shared", "gloo"} & set(one["ways"])
        assert all(len(way["seconds"]) == 2 and way["median_s"] > 0 for way in one["ways"].values())


def test_backends_are_measured_with_every_engine_of_torch(hpcfsdp):
    job = hpcfsdp("bench", "backends", "--layers", "1", "--width", "16", "--repeats", "2", ranks=2)
    assert job.code == 0, job.stderr
    rows = [line.split(" | ")[:2] for line in job.stdout.splitlines()[2:]]
    assert rows == [[f"| {engine}", way] for engine in ("ddp", "fsdp1", "fsdp2") for way in ("gloo", "hpcmpi")]


@pytest.mark.parametrize(
    "arguments", [["nothing"], ["collectives", "--sizes", "-1"], ["collectives", "--repeats", "0"]]
)
def test_wrong_arguments_are_refused(hpcfsdp, arguments):
    job = hpcfsdp("bench", *arguments)
    assert job.code == 2
    assert job.stderr.startswith("hpcfsdp: hpcfsdp bench: ")
