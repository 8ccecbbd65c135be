"""The commands that look into files, which people run on login nodes.

One test of each runs it in a process of its own, where it must load neither MPI nor torch; most run in this process.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.usefixtures("no_mpi")


def test_ls_of_a_file_lists_tensors_and_aliases(hpcfsdp, saved):
    done = hpcfsdp("ls", saved)
    assert done.code == 0, done.stderr
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert rows[0] == ["name", "shape", "dtype", "size"]
    assert ["model/0.weight", "4 x 3", "float32", "48 B"] in rows
    assert ["model/1.counts", "5", "int64", "40 B"] in rows
    assert ["model/twin.weight", "4 x 3", "float32", "= model/0.weight"] in rows
    assert ["optim/state/0.weight/step", "scalar", "float32", "4 B"] in rows


def test_ls_of_a_file_as_json(command, saved):
    entries = json.loads(command("ls", saved, "--json").stdout)
    assert {"name": "model/0.weight", "shape": [4, 3], "dtype": "float32", "bytes": 48} in entries


def test_ls_of_a_folder_and_of_its_run(command, saved, tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    shutil.copy(saved, folder / "step-00000007.h5")
    shutil.copy(saved, folder / ".step-00000009.h5.partial")
    for place in (folder, folder.parent):
        (entry,) = json.loads(command("ls", place, "--json").stdout)
        assert (entry["step"], entry["ranks"], entry["file"]) == (7, 1, str(folder / "step-00000007.h5"))


def test_ls_continues_after_a_damaged_file_and_ends_with_4(command, saved, tmp_path):
    (tmp_path / "step-00000006.h5").write_bytes(saved.read_bytes()[:3000])
    shutil.copy(saved, tmp_path / "step-00000007.h5")
    done = command("ls", tmp_path, "--json")
    damaged, good = json.loads(done.stdout)
    assert done.code == 4
    assert damaged["error"]["kind"] == "truncated"
    assert damaged["error"]["exit_code"] == 4
    assert good["step"] == 7
    assert command("ls", tmp_path).code == 4


@pytest.fixture
def with_loss(tmp_path):
    """A folder of checkpoints under any names, of other programs' files, and of none at all."""
    import h5py
    import torch

    from hpcfsdp import checkpoint

    folder = tmp_path / "mixed"
    curves = {"loss": ([1, 2], [3.0, 2.5]), "val_loss": ([2], [9.0])}
    for name, step, metrics in (("step-00000002.h5", 2, curves), ("my_model.h5", 3, curves), ("best", 1, None)):
        checkpoint.save(folder / name, model=torch.nn.Linear(1, 1), step=step, metrics=metrics)
    with h5py.File(folder / "data.h5", "w") as file:
        file["images"] = [1.0]
    (folder / "notes.txt").write_text("not looked at")
    (folder / "config.yaml").write_bytes(b"\x89HDF")
    (folder / ".hidden.h5").write_bytes(b"")
    return folder


def test_folders_show_every_checkpoint_whatever_its_name(command, with_loss):
    done = command("ls", with_loss, "--json")
    entries = json.loads(done.stdout)
    assert done.code == 0
    found = [(os.path.basename(entry["file"]), entry["step"]) for entry in entries]
    assert found == [("best", 1), ("step-00000002.h5", 2), ("my_model.h5", 3)]
    assert done.stderr == f"hpcfsdp: {with_loss}/data.h5: not a checkpoint of hpcfsdp, left out\n"
    assert [(entry.get("loss"), entry.get("loss_step")) for entry in entries] == [(None, None), (2.5, 2), (2.5, 2)]
    rows = [line.split("\t") for line in command("ls", with_loss).stdout.splitlines()]
    assert rows[0] == ["step", "file", "size", "tensors", "ranks", "loss", "date", "note"]
    assert [(row[0], row[5], row[7]) for row in rows[1:]] == [
        ("1", "", ""),
        ("2", "2.5", ""),
        ("3", "2.5", "loss of step 2"),
    ]
    done = command("verify", with_loss)
    assert (done.code, done.stdout.count(": sound: ")) == (0, 3)
    (with_loss / "my_model.h5").write_bytes((with_loss / "my_model.h5").read_bytes()[:4000])
    done = command("verify", with_loss)
    assert (done.code, done.stdout.count(": sound: ")) == (4, 2)
    assert "my_model.h5: truncated: " in done.stdout


def test_a_folder_of_other_programs_files_has_no_checkpoints(command, with_loss):
    for path in with_loss.iterdir():
        if path.name in ("best", "my_model.h5", "step-00000002.h5"):
            path.unlink()
    done = command("ls", with_loss)
    assert (done.code, done.stdout) == (1, "")
    assert f"hpcfsdp: {with_loss}: no checkpoints in this folder" in done.stderr
    assert "data.h5: not a checkpoint of hpcfsdp" in done.stderr


def test_ls_of_several_paths(command, with_loss, saved):
    one, other = with_loss / "best", with_loss / "my_model.h5"
    entries = json.loads(command("ls", saved, other, one, "--json").stdout)
    assert [entry["step"] for entry in entries] == [7, 3, 1]  # as they were given
    entries = json.loads(command("ls", saved, with_loss, "--json").stdout)
    assert [entry["step"] for entry in entries] == [7, 1, 2, 3]
    entries = json.loads(command("ls", one, other, "*weight", "--json").stdout)
    assert [(entry["file"], entry["name"]) for entry in entries] == [
        (str(one), "model/weight"),
        (str(other), "model/weight"),
    ]
    rows = [line.split("\t") for line in command("ls", one, other, "bias").stdout.splitlines()]
    assert rows[0] == ["file", "name", "shape", "dtype", "size"]
    assert [row[:2] for row in rows[1:]] == [[str(one), "model/bias"], [str(other), "model/bias"]]
    done = command("ls", one, "none.h5", "--json")
    assert done.code == 1
    assert json.loads(done.stdout)[1]["error"]["kind"] == "missing"


@pytest.mark.parametrize(
    ("make", "code", "message"),
    [
        (lambda path: None, 1, "o such file"),
        (lambda path: path.mkdir(), 1, "no checkpoints"),
        (lambda path: path.write_text("hello"), 4, "not an HDF5 file (5 bytes, begins with"),
    ],
    ids=["missing", "empty folder", "text"],
)
@pytest.mark.parametrize("verb", ["ls", "show"])
def test_an_unreadable_path_is_named(command, tmp_path, verb, make, code, message):
    path = tmp_path / "it.h5"
    make(path)
    done = command(verb, path)
    assert done.code == code
    assert done.stdout == ""
    assert str(path) in done.stderr
    assert message in done.stderr or (verb == "show" and "is a directory" in done.stderr)


def test_show_of_a_file(hpcfsdp, saved):
    facts = json.loads(hpcfsdp("show", saved, "--json").stdout)
    assert facts["step"] == 7
    assert facts["model_elements"] == 3 * 4 + 4 + 4 * 2 + 2 + 5
    assert facts["tied_names"] == {"model/twin.bias": "model/0.bias", "model/twin.weight": "model/0.weight"}
    assert facts["optimizer_groups"][0]["betas"] == [0.9, 0.999]
    assert facts["extra"] == {"note": "x"}


def test_show_of_a_file_with_metrics(command, tmp_path):
    import torch

    from hpcfsdp import checkpoint

    metrics = {"loss": ([10, 20], [3.0, 2.5]), "none": ([], [])}
    path = checkpoint.save(tmp_path / "a.h5", model=torch.nn.Linear(1, 1), metrics=metrics)
    facts = json.loads(command("show", path, "--json").stdout)
    assert facts["metrics"] == {
        "loss": {"values": 2, "last": 2.5, "step": 20},
        "none": {"values": 0, "last": None, "step": None},
    }
    assert facts["parts"] == []


def test_show_and_diff_shorten_long_lists_but_not_in_json(command, tmp_path):
    import torch

    from hpcfsdp import checkpoint

    model = torch.nn.Linear(1, 1)
    extras = [{"seen": list(range(count)), "few": [1, 2], "phases": [{"end": 0}] * 9} for count in (100, 200)]
    a, b = (checkpoint.save(tmp_path / f"{len(e['seen'])}.h5", model=model, extra=e) for e in extras)
    shown = command("show", a).stdout
    assert "seen: '100 values from 0 to 99; all of them: --json'\n" in shown
    assert "few:\n  - 1\n  - 2\n" in shown
    assert shown.count("- end: 0") == 9
    assert json.loads(command("show", a, "--json").stdout)["extra"]["seen"] == list(range(100))
    (row,) = [line for line in command("diff", a, b).stdout.splitlines() if "extra.seen" in line]
    assert row.split("\t")[2] == (
        "100 values from 0 to 99; all of them: --json -> 200 values from 0 to 199; all of them: --json"
    )
    (value,) = json.loads(command("diff", a, b, "--json").stdout)["values"]
    assert (value["a"], value["b"]) == (list(range(100)), list(range(200)))


def test_show_gives_the_configuration_as_yaml(command, tmp_path):
    import torch
    import yaml

    from hpcfsdp import checkpoint

    config = {"train": {"lr": 0.1, "betas": [0.9, 0.95]}, "note": "a: b\nc", "clip": float("inf")}
    path = checkpoint.save(tmp_path / "a.h5", model=torch.nn.Linear(1, 1), config=config, extra={"epoch": 3})
    table, _, text = command("show", path).stdout.partition("\n\n")
    assert "model elements\t2" in table.splitlines()
    assert yaml.safe_load(text) == {"extra": {"epoch": 3}, "config": config}


@pytest.mark.parametrize("name", ["1.counts", "model/1.counts"])
def test_show_of_a_tensor_gives_its_numbers(hpcfsdp, saved, name):
    facts = json.loads(hpcfsdp("show", saved, name, "--json").stdout)
    assert (facts["name"], facts["shape"], facts["dtype"]) == ("model/1.counts", [5], "int64")
    assert facts["first_values"] == [0, 1, 2, 3, 4]
    assert (facts["min"], facts["max"], facts["mean"], facts["nan"]) == (0, 4, 2, 0)
    assert facts["norm"] == pytest.approx(30**0.5)


def test_show_of_an_unknown_tensor_suggests_the_nearest(command, saved):
    done = command("show", saved, "0.wieght")
    assert done.code == 1
    assert "no tensor '0.wieght'; did you mean '0.weight'?" in done.stderr


def test_show_of_a_pattern_names_the_verbs_that_take_one(command, saved):
    done = command("show", saved, "0.*")
    assert done.code == 2
    assert "'0.*' is a pattern, and show takes one name: give the pattern to ls or stats" in done.stderr


def test_a_reader_that_closes_the_pipe_early_is_not_an_error(start, saved):
    command = f'"{sys.executable}" -m hpcfsdp ls "{saved}" | head -1'
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], check=False, capture_output=True, timeout=120)
    assert (done.stdout, done.stderr) == (b"name\tshape\tdtype\tsize\n", b"")
    assert done.returncode in (0, 141)  # it is chance whether all was written by then, as with any other program


@pytest.fixture
def shell(tmp_path):
    """Run a command line of bash in which ``hpcfsdp`` is ours; its exit code and stderr."""

    def run(line):
        define = f'hpcfsdp() {{ "{sys.executable}" -m hpcfsdp "$@"; }}; '
        done = subprocess.run(["bash", "-c", define + line], check=False, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stderr

    return run


CLOSED = "| (exec 0<&-; sleep 0.1); exit ${PIPESTATUS[0]}"


@pytest.mark.parametrize(
    ("verb", "buffered"),
    [(verb, "PYTHONUNBUFFERED=") for verb in ("ls", "show --json", "stats", "verify", "ls --help")]
    + [(verb, "PYTHONUNBUFFERED=1") for verb in ("ls", "show --json")],
)
def test_a_closed_pipe_ends_with_141_and_no_message(shell, saved, verb, buffered):
    # The first byte of the output waits until the other side has closed the pipe.
    assert shell(f'(sleep 0.5; {buffered} hpcfsdp {verb} "{saved}") {CLOSED}') == (141, "")


def test_a_damaged_file_never_ends_with_0_on_a_closed_pipe(shell, damaged):
    assert shell(f'(sleep 0.5; hpcfsdp verify "{damaged}") {CLOSED}') == (141, "")
    code, errors = shell(f'(sleep 0.5; hpcfsdp stats "{damaged}") {CLOSED}')
    assert code == 4
    assert "damaged" in errors
    assert shell(f'(sleep 0.5; hpcfsdp stats "{damaged}" 2>&1) {CLOSED}') == (4, "")


@pytest.mark.parametrize(
    ("verb", "buffered"),
    [(verb, "PYTHONUNBUFFERED=") for verb in ("ls", "verify", "show --json", "--version")]
    + [(verb, "PYTHONUNBUFFERED=1") for verb in ("ls", "show --json")],
)
def test_a_full_disk_under_the_output_is_reported_in_one_line(shell, saved, verb, buffered):
    code, errors = shell(f'{buffered} hpcfsdp {verb} "{saved}" > /dev/full')
    assert (code, errors) == (1, "hpcfsdp: cannot write to stdout: No space left on device\n")


def test_the_exit_code_is_right_without_a_stdout(shell, saved, damaged):
    assert shell(f'hpcfsdp verify "{saved}" >&-') == (0, "")
    assert shell(f'hpcfsdp verify "{damaged}" >&-') == (4, "")


def test_json_has_no_bare_nan(command, tmp_path):
    import numpy as np

    from hpcfsdp.checkpoint.format.schema import TensorSpec
    from hpcfsdp.checkpoint.saving.writer import write_alone

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    group = {"params": ["w"], "lr": float("nan"), "clip": [1.0, float("inf")]}
    for name, more in (("a.h5", {"groups": [group], "scalars": {}}), ("b.h5", {})):
        spec = TensorSpec("model/w", (2,), "float32")
        write_alone(tmp_path / name, [spec], lambda _, start, numel: np.ones(numel, np.float32), **more)
    facts = json.loads(command("show", tmp_path / "a.h5", "--json").stdout, parse_constant=refuse)
    assert facts["optimizer_groups"] == [{"params": 1, "lr": "nan", "clip": [1.0, "inf"]}]
    done = command("diff", tmp_path / "a.h5", tmp_path / "b.h5", "--json")
    assert '"nan"' in done.stdout
    json.loads(done.stdout, parse_constant=refuse)


@pytest.fixture
def damaged(saved, tmp_path):
    """A copy with a flipped bit in an element of ``model/1.counts``."""
    from hpcfsdp.checkpoint import open_index

    path = tmp_path / "step-00000008.h5"
    data = bytearray(saved.read_bytes())
    data[int(open_index(saved).rows_of("model/1.counts")["byte_offset"][0])] ^= 1
    path.write_bytes(data)
    return path


@pytest.fixture
def changed(saved, tmp_path):
    """A copy with another last element of ``model/1.counts``, of step 8."""
    from hpcfsdp.checkpoint import open_index
    from hpcfsdp.checkpoint.format.reader import BlockReader
    from hpcfsdp.checkpoint.saving.writer import write_alone

    index = open_index(saved)

    def read(spec, start, numel):
        values = reader.read(spec.path, start, numel).copy()
        if spec.path == "model/1.counts" and start + numel == spec.numel:
            values[-1] += 3
        return values

    with BlockReader(index) as reader:
        return write_alone(
            tmp_path / "changed.h5",
            list(index.tensors.values()),
            read,
            links=list(index.links.items()),
            step=8,
            extra=index.info.extra,
            config=index.info.config,
            groups=index.param_groups,
            scalars=index.scalars,
        )


def test_stats_of_the_tensors_that_match(command, saved):
    done = command("stats", saved, "1.c*", "--json", "twin.bias")
    assert done.code == 0, done.stderr
    first, second = json.loads(done.stdout)
    assert (first["name"], second["name"]) == ("model/0.bias", "model/1.counts")  # twin is a further name of 0
    assert second == {
        "name": "model/1.counts",
        "shape": [5],
        "dtype": "int64",
        "min": 0,
        "max": 4,
        "mean": 2.0,
        "norm": pytest.approx(30**0.5),
        "nan": 0,
        "inf": 0,
    }


def test_stats_of_everything_as_a_table(command, saved):
    done = command("stats", saved)
    assert done.code == 0, done.stderr
    assert done.stderr == ""  # no progress without a terminal
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert rows[0] == ["name", "shape", "dtype", "min", "max", "mean", "norm", "nan", "inf"]
    assert ["model/1.counts", "5", "int64", "0", "4", "2", "5.47723", "0", "0"] in rows
    assert len(rows) == 1 + 5 + 4 * 3


@pytest.mark.parametrize(
    ("code", "arguments"),
    [(1, ("stats", "1.conts")), (2, ("diff", "FILE", "1.conts")), (1, ("plot", "1.conts", "--kind", "norms"))],
)
def test_a_pattern_that_matches_nothing_is_an_error_with_a_suggestion(command, saved, code, arguments):
    verb, *rest = (saved if word == "FILE" else word for word in arguments)
    done = command(verb, saved, *rest)
    assert (done.code, done.stdout) == (code, "")
    assert "no tensor matches '1.conts'; did you mean '1.counts'?" in done.stderr


@pytest.mark.parametrize("verb", [("stats",), ("plot", "--kind", "histogram"), ("show", "1.counts")])
def test_damage_that_a_verb_reads_ends_with_4(command, damaged, verb):
    name, *rest = verb
    done = command(name, damaged, *rest)
    assert done.code == 4
    assert "elements 0 to 5 of model/1.counts" in done.stderr


def test_verify_of_a_sound_file(command, saved):
    done = command("verify", saved)
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{saved}: sound: 17 tensors, ")


def test_verify_of_a_folder_lists_all_faults_of_all_files(command, saved, damaged):
    shutil.copy(saved, damaged.with_name("step-00000007.h5"))
    damaged.with_name("step-00000009.h5").write_text("hello")
    done = command("verify", damaged.parent, "--json")
    assert done.code == 4
    one, two, three = json.loads(done.stdout)
    assert (one["sound"], one["faults"], one["tensors"]) == (True, [], 17)
    assert [fault["where"] for fault in two["faults"]] == ["model/1.counts"]
    assert [fault["where"] for fault in three["faults"]] == [""]
    assert "not an HDF5 file" in three["faults"][0]["what"]
    lines = command("verify", damaged.parent).stdout.splitlines()
    assert len(lines) == 3
    assert lines[1].startswith(f"{damaged}: model/1.counts: damaged: elements 0 to 5 ")


def test_verify_continues_after_a_missing_file(command, saved, damaged, tmp_path):
    done = command("verify", tmp_path / "none.h5", saved, "--json")
    assert done.code == 1
    none, good = json.loads(done.stdout)
    assert (none["error"]["message"], good["sound"]) == ("No such file or directory", True)
    assert command("verify", tmp_path / "none.h5", damaged).code == 4
    assert command("verify", tmp_path.parent / "nowhere").code == 1


def test_diff_of_the_same(hpcfsdp, command, saved):
    done = hpcfsdp("diff", saved, saved)
    assert (done.code, done.stdout, done.stderr) == (0, "", "")
    assert json.loads(command("diff", saved, saved, "--json").stdout)["same"] is True


def test_diff_lists_changes_and_ends_with_1(command, saved, changed):
    done = command("diff", saved, changed, "--json")
    assert done.code == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["changed"] == [
        {"name": "model/1.counts", "elements": 5, "different": 1, "largest": 3, "where": [4], "nan": 0}
    ]
    assert {"name": "step", "a": 7, "b": 8} in found["values"]
    assert [found[what] for what in ("same", "added", "removed", "reshaped", "retied")] == [False, [], [], [], []]
    rows = [line.split("\t") for line in command("diff", saved, changed).stdout.splitlines()]
    assert ["changed", "model/1.counts", "largest 3 at [4], 1 of 5 elements"] in rows
    assert ["value", "step", "7 -> 8"] in rows
    assert command("diff", saved, changed, "0.*").code == 0


def test_diff_begins_with_a_summary_which_may_come_alone(command, saved, changed):
    rows = [line.split("\t") for line in command("diff", saved, changed).stdout.splitlines()]
    assert rows[1] == ["summary", "tensors", "1 of 17 have other elements"]
    assert [row[0] for row in rows[1:]] == sorted(
        (row[0] for row in rows[1:]), key=["summary", "value", "changed"].index
    )
    done = command("diff", saved, changed, "--summary")
    assert done.code == 1
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert ["largest", "model/1.counts", "largest 3 at [4], 1 of 5 elements"] in rows
    assert ["value", "step", "7 -> 8"] in rows
    found = json.loads(command("diff", saved, changed, "--summary", "--json").stdout)
    assert (found["changed"], found["compared"], found["added"]) == (1, 17, 0)
    assert [entry["name"] for entry in found["largest"]] == ["model/1.counts"]
    assert command("diff", saved, saved, "--summary").stdout == ""


def test_diff_describes_arrays_by_their_elements(command, saved, tmp_path):
    import torch

    from hpcfsdp import checkpoint

    paths = []
    for number in range(2):
        torch.manual_seed(number)
        metrics = {"loss": ([1, 2], [3.0, 2.5 + number])}
        model = torch.nn.Linear(1, 1, bias=False)
        model.weight.data.fill_(1 + 1e-6 * number)
        paths.append(checkpoint.save(tmp_path / f"{number}.h5", model=model, metrics=metrics))
    rows = [line.split("\t") for line in command("diff", *paths).stdout.splitlines()]
    assert ["value", "metrics.loss.values", "largest 1, 1 of 2 elements"] in rows
    assert any(row[1].startswith("random numbers") and " elements" in row[2] for row in rows)
    assert not any(" -> array" in row[2] for row in rows)
    values = json.loads(command("diff", *paths, "--json").stdout)["values"]
    (loss,) = (value for value in values if value["name"] == "metrics.loss.values")
    assert loss == {
        "name": "metrics.loss.values",
        "a": {"shape": [2], "dtype": "float64"},
        "b": {"shape": [2], "dtype": "float64"},
        "elements": 2,
        "different": 1,
        "largest": 1.0,
    }
    for options, code in (([], 1), (["--atol", "1e-5"], 0), (["--rtol", "1e-5"], 0), (["--atol", "1e-7"], 1)):
        assert command("diff", *paths, "model/*", *options).code == code
    for options, code in ((["--atol", "0.5"], True), (["--atol", "1"], False)):
        values = json.loads(command("diff", *paths, "--json", *options).stdout)["values"]
        assert any(value["name"] == "metrics.loss.values" for value in values) == code
    assert "is not a number of at least 0" in command("diff", *paths, "--rtol", "-1").stderr


def test_diff_has_other_exit_codes_for_unreadable_files(command, saved, damaged, tmp_path):
    assert command("diff", saved, tmp_path / "none.h5").code == 2
    assert command("diff", saved).code == 2
    assert command("diff", saved, damaged).code == 4


def test_plot_writes_a_picture(hpcfsdp, command, saved, tmp_path):
    done = hpcfsdp("plot", saved, "--kind", "norms")
    assert (done.code, done.stdout) == (0, "step-00000007-norms.png\n"), done.stderr
    assert (tmp_path / "step-00000007-norms.png").read_bytes().startswith(b"\x89PNG")
    out = tmp_path / "h.svg"
    done = command("plot", saved, "--kind", "histogram", "*.weight", "--out", out)
    assert (done.code, done.stdout) == (0, f"{out}\n"), done.stderr
    assert b"<svg" in out.read_bytes()


def test_plot_of_several_files_and_folders(command, with_loss, tmp_path):
    one = with_loss / "step-00000002.h5"
    done = command("plot", one, with_loss, "--kind", "loss", "--smooth", "0.5", "--json", "loss")
    assert done.code == 0, done.stderr
    first, second = json.loads(done.stdout)
    assert (first["file"], second["file"]) == ("step-00000002.h5", "my_model.h5")  # the newest in the folder
    assert (first["values"], first["smoothed"][0]) == ([3.0, 2.5], 3.0)
    done = command("plot", one, with_loss / "best", "--kind", "norms")
    assert (done.code, done.stdout) == (0, "step-00000002-norms.png\n"), done.stderr
    assert "--smooth is for --kind loss" in command("plot", one, "--kind", "norms", "--smooth", "0.5").stderr
    assert command("plot", one, "--kind", "loss", "--smooth", "1").code == 2


def test_plot_gives_the_numbers(command, saved, tmp_path):
    done = command("plot", saved, "--kind", "histogram", "1.counts", "--json")
    (found,) = json.loads(done.stdout)
    assert (found["name"], sum(found["counts"]), found["edges"][0], found["edges"][-1]) == ("model/1.counts", 5, 0, 4)
    (whole,) = json.loads(command("plot", saved, "--kind", "histogram", "--json").stdout)
    assert sum(whole["counts"]) == 3 * 4 + 4 + 4 * 2 + 2 + 5
    norms = json.loads(command("plot", saved, "--kind", "norms", "--json").stdout)
    assert [layer["name"] for layer in norms] == ["0", "1"]
    assert not list(tmp_path.glob("*.png"))


def test_plot_without_its_data_is_an_error(hpcfsdp, command, saved, tmp_path):
    done = command("plot", saved, "--kind", "loss")
    assert done.code == 1
    assert "holds no metrics" in done.stderr
    (tmp_path / "forbidden" / "matplotlib.py").write_text("raise ImportError('none here')")
    done = hpcfsdp("plot", saved, "--kind", "norms")
    assert done.code == 1
    assert "pip install 'hpcfsdp[plot]'" in done.stderr
    assert hpcfsdp("plot", saved, "--kind", "norms", "--json").code == 0  # the numbers need none


@pytest.mark.parametrize("verb", [("stats",), ("verify",), ("show",), ("plot", "--kind", "norms", "--json")])
def test_files_of_the_first_version_can_be_looked_into(hpcfsdp, verb):
    from tests.cli.conftest import ROOT

    name, *rest = verb
    done = hpcfsdp(name, ROOT / "tests" / "golden" / "format-1.0.h5", *rest)
    assert done.code == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("verb", [("verify",), ("stats",), ("diff", "FILE"), ("plot", "--kind", "norms", "--json")])
def test_progress_is_shown_on_a_terminal_and_leaves_the_output_as_it_is(command, saved, verb):
    name, *rest = (saved if word == "FILE" else word for word in verb)
    expected = command(name, saved, *rest).stdout
    master, slave = os.openpty()
    try:
        words = [sys.executable, "-m", "hpcfsdp", name, saved, *rest]
        terminal = {**os.environ, "TERM": "xterm"}
        done = subprocess.run(words, check=False, stdout=subprocess.PIPE, stderr=slave, env=terminal, timeout=120)
        seen = os.read(master, 1 << 16).decode()
    finally:
        os.close(master)
        os.close(slave)
    assert (done.returncode, done.stdout.decode()) == (0, expected)
    assert {"verify": "verify", "stats": "stats", "diff": "diff", "plot": "norms"}[name] in seen


PEAK = """
import resource, sys
from hpcfsdp.cli.main import main
code = main(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.parametrize(
    "verb",
    [("verify",), ("stats",), ("diff", "FILE"), ("plot", "--kind", "histogram", "--json")],
    ids=lambda verb: verb[0],
)
def test_memory_is_needed_for_some_blocks_not_for_the_file(start, saved, large, verb):
    peaks_mib = []
    for path in (saved, large):
        name, *rest = (path if word == "FILE" else word for word in verb)
        done = start("-c", PEAK, name, path, *rest).wait()
        assert done.code == 0, done.stderr
        peaks_mib.append(int(done.stderr))
    assert large.stat().st_size > 256 << 20
    assert peaks_mib[1] - peaks_mib[0] < 128


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    import numpy as np

    from hpcfsdp.checkpoint.format.schema import TensorSpec
    from hpcfsdp.checkpoint.saving.writer import write_alone

    path = tmp_path_factory.mktemp("large") / "a.h5"
    yield write_alone(
        path, [TensorSpec("model/a", (64 << 20,), "float32")], lambda spec, start, numel: np.ones(numel, np.float32)
    )
    path.unlink()
