import json

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("step", "--layers", "1", "--width", "16", "--repeats", "1"),
        ("checkpoint", "--bytes", "40KB", "--tensors", "5", "--repeats", "1"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_measurements_between_imagined_nodes(start, tmp_path, arguments):
    where = ("--folder", str(tmp_path)) if arguments[0] == "checkpoint" else ()
    job = start("-m", "hpcfsdp", "bench", *arguments, *where, "--split-nodes", "2", "--json", ranks=2).wait(250)
    assert job.code == 0, job.stderr
    report = json.loads(job.stdout)
    assert report["topology"] == "2 node(s) of 1 rank(s)"
    if arguments[0] == "step":  # gathers and reductions send the parameters once each; the root is gathered once
        sent = {engine: one["moved"]["between_nodes"] for engine, one in report["measured"].items() if "moved" in one}
        assert sent["hpcfsdp_node"] == pytest.approx(2, rel=0.1) and sent["hpcfsdp_rows_node"] == pytest.approx(2, 0.1)
        assert 2.2 < sent["hpcfsdp"] == sent["hpcfsdp_rows"] < 3


SMALL = ("--layers", "1", "--width", "16", "--repeats", "1")


def test_bench_step_measures_every_engine_with_equal_losses(hpcfsdp):
    job = hpcfsdp("bench", "step", *SMALL, "--json", ranks=2)
    assert job.code == 0, job.stderr
    measured = json.loads(job.stdout)["measured"]
    assert list(measured) == ["floor", "ddp", "fsdp1", "fsdp2", "hpcfsdp", "hpcfsdp_rows"]
    assert all(len(one["seconds"]) == 1 and one["hpcfsdp_ratio"] > 0 for one in measured.values())
    losses = [one["loss"] for engine, one in measured.items() if engine != "floor"]
    assert losses == pytest.approx([losses[0]] * 5, rel=1e-4)
    assert measured["floor"]["loss"] > losses[0]
    assert measured["hpcfsdp"]["moved"] == {"between_nodes": 0, "copied": 0, "gathered": 0}


@pytest.mark.slow
def test_bench_step_with_tensor_parallelism(hpcfsdp):
    job = hpcfsdp("bench", "step", *SMALL, "--fused", "--tensor", "2", "--json", ranks=4)
    assert job.code == 0, job.stderr
    measured = json.loads(job.stdout)["measured"]
    assert list(measured) == ["floor", "fsdp1", "fsdp2", "hpcfsdp", "hpcfsdp_rows"]
    losses = [one["loss"] for engine, one in measured.items() if engine != "floor"]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-4)


@pytest.mark.slow
def test_bench_plan(hpcfsdp, command, tmp_path):
    job = hpcfsdp("bench", "plan", *SMALL, "--split-nodes", "2", "--json", ranks=2)
    assert job.code == 0, job.stderr
    measured = json.loads(job.stdout)["measured"]
    assert list(measured) == ["hpcfsdp", "hpcfsdp_rows", "hpcfsdp_node", "hpcfsdp_rows_node"]
    assert all(one["planned_s"] > 0 and one["planned_bytes"] > 0 for one in measured.values())
    rates = tmp_path / "machine.json"
    rates.write_text(job.stdout)
    model = ("--params", "1e7", "--layers", "2", "--sequence", "64", "--ranks", "4", "--ranks-per-node", "2")
    planned = command("plan", *model, "--device", "cpu", "--links", rates, "--json")
    assert planned.code == 0, planned.stderr
    assert "measured" in json.loads(planned.stdout)["machine"]["links"]["between"]["source"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_bench_checkpoint_measures_every_way_and_leaves_no_files(start, tmp_path, ranks):
    size = ("--bytes", "40KB", "--tensors", "13", "--folder", str(tmp_path))
    job = start("-m", "hpcfsdp", "bench", "checkpoint", *size, "--repeats", "1", "--json", ranks=ranks).wait(250)
    assert job.code == 0, job.stderr
    measured = json.loads(job.stdout)["measured"]
    assert measured.pop("tensors") == 13
    assert 35_000 < measured.pop("bytes") <= 40_000
    assert {task: list(ways) for task, ways in measured.items()} == {
        "save": ["raw", "hpcfsdp", "dcp", "safetensors", "h5py on rank 0"],
        "load": ["raw", "hpcfsdp", "hpcfsdp, fresh", "dcp", "safetensors"],
        "load, cached": ["raw", "hpcfsdp", "hpcfsdp, fresh", "dcp", "safetensors"],
        "training held": ["hpcfsdp", "memcpy"],
        "in memory": ["xxh3"],
        "save columns": ["hpcfsdp", "dcp"],
    }
    assert all(len(one["seconds"]) == 1 and one["median_s"] > 0 for ways in measured.values() for one in ways.values())
    assert list(tmp_path.iterdir()) == []


def test_bench_checkpoint_refuses_a_full_disk(hpcfsdp, tmp_path):
    job = hpcfsdp("bench", "checkpoint", "--bytes", "100TiB", "--folder", str(tmp_path), ranks=2)
    assert job.code == 1
    assert job.stdout == ""
    assert f"{tmp_path}: " in job.stderr
    assert "bytes are needed" in job.stderr
    assert "choose another --folder" in job.stderr
    assert list(tmp_path.iterdir()) == []


def test_measurements_of_one_process_refuse_several_ranks(command, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    job = command("bench", "gpu", "--imagined-ranks", "4")
    assert job.code == 2
    assert "--imagined-ranks measures one process, and the launcher started 2" in job.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["nothing"],
        ["step", "--repeats", "0"],
        ["step", "--width", "12"],
        ["gpu", "--dtype", "fp8"],
        ["gpu", "--split-nodes", "2"],  # in one process
        ["gpu"],  # without an accelerator
        ["checkpoint", "--on-devices"],
        ["checkpoint", "--bytes", "0"],
        ["checkpoint", "--bytes", "1 Gb"],
        ["checkpoint", "--tensors", "0"],
    ],
)
def test_wrong_arguments_are_refused(command, arguments):
    job = command("bench", *arguments)
    assert job.code == 2
    assert job.stderr.startswith("hpcfsdp: bench: ")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(["nothing"], "invalid choice: 'nothing'"), (["step", "--tensor", "3"], "--tensor 3 has to divide the 2 rank(s)")],
    ids=["before MPI", "within MPI"],
)
def test_ranks_print_a_wrong_argument_once(hpcfsdp, arguments, text):
    job = hpcfsdp("bench", *arguments, "--json", ranks=2)
    assert job.code == 2
    assert job.stderr.count(text) == 1
    assert text in json.loads(job.stdout)["error"]["message"]


def test_an_error_of_all_ranks_is_printed_once_without_the_class(hpcfsdp, tmp_path):
    job = hpcfsdp("bench", "checkpoint", "--bytes", "100TiB", "--folder", str(tmp_path), "--json", ranks=2)
    assert job.code == 1
    lines = [line for line in job.stderr.splitlines() if "bytes are needed" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"hpcfsdp: {tmp_path}: ")
    assert json.loads(job.stdout)["error"]["exit_code"] == 1
