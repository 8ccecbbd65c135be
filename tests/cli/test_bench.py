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


SMALL = ("--layers", "1", "--width", "16", "--repeats", "1")


def test_a_step_is_measured_with_every_engine_and_they_learn_the_same(hpcfsdp):
    job = hpcfsdp("bench", "step", *SMALL, "--json", ranks=2)
    assert job.code == 0, job.stderr
    measured = json.loads(job.stdout)["measured"]
    assert list(measured) == ["floor", "ddp", "fsdp1", "fsdp2", "hpcfsdp"]
    assert all(len(one["seconds"]) == 1 and one["hpcfsdp_ratio"] > 0 for one in measured.values())
    losses = [one["loss"] for engine, one in measured.items() if engine != "floor"]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-4)
    assert measured["floor"]["loss"] > losses[0]


def test_a_step_whose_layers_are_cut_over_ranks_is_measured(hpcfsdp):
    job = hpcfsdp("bench", "step", *SMALL, "--tensor", "2", "--json", ranks=4)
    assert job.code == 0, job.stderr
    measured = json.loads(job.stdout)["measured"]
    assert list(measured) == ["floor", "fsdp1", "fsdp2", "hpcfsdp"]
    losses = [one["loss"] for engine, one in measured.items() if engine != "floor"]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-4)


def test_layers_can_be_cut_over_what_divides_ranks_and_heads(hpcfsdp):
    job = hpcfsdp("bench", "step", *SMALL, "--tensor", "3", ranks=2)
    assert job.code == 2
    assert "--tensor 3 has to divide the 2 rank(s) and the 8 heads" in job.stderr


def test_a_step_is_printed_as_a_table(hpcfsdp):
    job = hpcfsdp("bench", "step", *SMALL)
    assert job.code == 0, job.stderr
    assert job.stdout.startswith("| engine | step | min-max | x floor | hpcfsdp / it |\n")


@pytest.mark.parametrize("ranks", [0, 1])
def test_the_cost_of_a_unit_is_measured_in_one_process(hpcfsdp, ranks):
    job = hpcfsdp("bench", "host", "--units", "2", "--repeats", "2", "--json", ranks=ranks)
    assert job.code == 0, job.stderr
    report = json.loads(job.stdout)
    assert (report["ranks"], report["units"]) == (8, 2)
    assert list(report["measured"])[:5] == ["plain", "fsdp1", "fsdp1_orig", "fsdp2", "hpcfsdp"]
    for one in report["measured"].values():
        assert "skipped" in one or (len(one["seconds"]) == 2 and "median_over_plain_s" in one)


def test_memory_is_measured_with_every_engine(start):
    job = start("-m", "hpcfsdp", "bench", "memory", *SMALL, "--json", ranks=2).wait(250)
    assert job.code == 0, job.stderr
    measured = json.loads(job.stdout)["measured"]
    assert list(measured) == ["hpcfsdp", "plain", "ddp", "fsdp1", "fsdp2"]
    for one in measured.values():
        assert one["baseline_bytes"] > one["peak_bytes"] > one["analytic_bytes"] // 2
        assert len(one["steps_bytes"]) == 1
        assert one["hpcfsdp_ratio"] > 0


def test_state_dicts_are_measured_with_fsdp1_and_are_the_same(start):
    shape = ("--layers", "2", "--width", "24", "--repeats", "2")
    job = start("-m", "hpcfsdp", "bench", "optim-state", *shape, "--json", ranks=3).wait(250)
    assert job.code == 0, job.stderr
    measured = json.loads(job.stdout)["measured"]
    assert measured["parameters"] == 2 * (24 * 24 + 24)
    assert len(measured["times"]) == 7
    for engines in measured["times"].values():
        assert list(engines) == ["fsdp1", "hpcfsdp"]
        assert all(len(one["seconds"]) == 2 and one["hpcfsdp_ratio"] > 0 for one in engines.values())
    kinds = [(one["way"], one["engine"], one["ranks"]) for one in measured["memory"]]
    assert len(set(kinds)) == len(kinds) == 3 * 2 * 2


def test_state_dicts_are_printed_as_two_tables(start):
    job = start("-m", "hpcfsdp", "bench", "optim-state", *SMALL, ranks=2).wait(250)
    assert job.code == 0, job.stderr
    times, peaks = job.stdout.split("\n\n")
    assert times.startswith("| call | engine | median | min-max | fsdp1 / hpcfsdp |\n")
    assert peaks.startswith("| call | ranks | engine | peak | min-max of calls | analytic | peak / analytic |\n")
    assert (len(times.splitlines()), len(peaks.splitlines())) == (2 + 7 * 2, 2 + 3 * 2 * 2)


def test_state_dicts_are_not_measured_on_one_rank(hpcfsdp):
    job = hpcfsdp("bench", "optim-state", *SMALL)
    assert job.code == 2
    assert "optim-state compares what is sharded: start it with mpirun -n 2" in job.stderr


@pytest.mark.parametrize("ranks", [1, 2])
def test_checkpoints_are_measured_in_every_way_and_leave_nothing_behind(start, tmp_path, ranks):
    size = ("--bytes", "40KB", "--tensors", "13", "--folder", str(tmp_path))
    job = start("-m", "hpcfsdp", "bench", "checkpoint", *size, "--repeats", "2", "--json", ranks=ranks).wait(250)
    assert job.code == 0, job.stderr
    measured = json.loads(job.stdout)["measured"]
    assert measured.pop("tensors") == 13
    assert 35_000 < measured.pop("bytes") <= 40_000
    assert {task: list(ways) for task, ways in measured.items()} == {
        "save": ["raw", "hpcfsdp", "dcp", "safetensors", "h5py on rank 0"],
        "load": ["raw", "hpcfsdp", "dcp", "safetensors"],
        "load, cached": ["raw", "hpcfsdp", "dcp", "safetensors"],
        "training held": ["hpcfsdp", "memcpy"],
        "in memory": ["xxh3"],
    }
    assert all(len(one["seconds"]) == 2 and one["median_s"] > 0 for ways in measured.values() for one in ways.values())
    assert list(tmp_path.iterdir()) == []


def test_checkpoints_are_not_measured_where_there_is_no_room(hpcfsdp, tmp_path):
    job = hpcfsdp("bench", "checkpoint", "--bytes", "100TiB", "--folder", str(tmp_path), ranks=2)
    assert job.code == 1
    assert job.stdout == ""
    assert f"{tmp_path}: " in job.stderr
    assert "bytes are needed" in job.stderr
    assert "choose another --folder" in job.stderr
    assert list(tmp_path.iterdir()) == []


def test_checkpoints_are_not_measured_in_a_folder_that_is_not_there(hpcfsdp, tmp_path):
    job = hpcfsdp("bench", "checkpoint", "--folder", str(tmp_path / "none"))
    assert job.code == 1
    assert f"{tmp_path}/none: no folder can be made there: No such file or directory" in job.stderr


def test_the_cost_of_a_unit_is_not_measured_on_several_ranks(hpcfsdp):
    job = hpcfsdp("bench", "host", ranks=2)
    assert job.code == 2
    assert "host measures one process, and the launcher started 2" in job.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["nothing"],
        ["collectives", "--sizes", "-1"],
        ["collectives", "--repeats", "0"],
        ["step", "--width", "12"],
        ["checkpoint", "--bytes", "0"],
        ["checkpoint", "--bytes", "1.5GiB"],
        ["checkpoint", "--bytes", "1 Gb"],
        ["checkpoint", "--tensors", "0"],
    ],
)
def test_wrong_arguments_are_refused(command, arguments):
    job = command("bench", *arguments)
    assert job.code == 2
    assert job.stderr.startswith("hpcfsdp: hpcfsdp bench: ")
