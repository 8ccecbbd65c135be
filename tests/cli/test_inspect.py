"""ls and show, which people run on login nodes."""

import json
import shutil

import pytest


@pytest.fixture(autouse=True)
def no_mpi(tmp_path, monkeypatch):
    """MPI and torch that end the process when they are loaded."""
    folder = tmp_path / "forbidden"
    folder.mkdir()
    for name in ("mpi4py", "torch"):
        (folder / f"{name}.py").write_text(f"raise SystemExit('{name} was loaded')")
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_ls_of_a_file_lists_tensors_and_their_further_names(hpcfsdp, saved):
    done = hpcfsdp("ls", saved)
    assert done.code == 0, done.stderr
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert rows[0] == ["name", "shape", "dtype", "size"]
    assert ["model/0.weight", "4 x 3", "float32", "48 B"] in rows
    assert ["model/1.counts", "5", "int64", "40 B"] in rows
    assert ["model/twin.weight", "4 x 3", "float32", "= model/0.weight"] in rows
    assert ["optim/state/0.weight/step", "scalar", "float32", "4 B"] in rows


def test_ls_of_a_file_as_json(hpcfsdp, saved):
    entries = json.loads(hpcfsdp("ls", saved, "--json").stdout)
    assert {"name": "model/0.weight", "shape": [4, 3], "dtype": "float32", "bytes": 48} in entries


def test_ls_of_a_folder_and_of_its_run(hpcfsdp, saved, tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    shutil.copy(saved, folder / "step-00000007.h5")
    shutil.copy(saved, folder / ".step-00000009.h5.partial")
    for place in (folder, folder.parent):
        (entry,) = json.loads(hpcfsdp("ls", place, "--json").stdout)
        assert (entry["step"], entry["ranks"], entry["file"]) == (7, 1, str(folder / "step-00000007.h5"))


def test_ls_goes_on_after_a_damaged_file_and_ends_with_4(hpcfsdp, saved, tmp_path):
    (tmp_path / "step-00000006.h5").write_bytes(saved.read_bytes()[:3000])
    shutil.copy(saved, tmp_path / "step-00000007.h5")
    done = hpcfsdp("ls", tmp_path, "--json")
    damaged, good = json.loads(done.stdout)
    assert done.code == 4
    assert "damaged" in damaged["error"]
    assert good["step"] == 7
    assert hpcfsdp("ls", tmp_path).code == 4


@pytest.mark.parametrize(
    ("make", "code", "message"),
    [
        (lambda path: None, 1, "o such file"),
        (lambda path: path.mkdir(), 1, "no checkpoints"),
        (lambda path: path.write_text("hello"), 4, "damaged, or not an HDF5 file"),
    ],
    ids=["missing", "empty folder", "text"],
)
@pytest.mark.parametrize("verb", ["ls", "show"])
def test_what_cannot_be_shown_is_named(hpcfsdp, tmp_path, verb, make, code, message):
    path = tmp_path / "it.h5"
    make(path)
    done = hpcfsdp(verb, path)
    assert done.code == code
    assert done.stdout == ""
    assert str(path) in done.stderr
    assert message in done.stderr or (verb == "show" and "is a directory" in done.stderr)


def test_show_tells_what_a_file_is(hpcfsdp, saved):
    facts = json.loads(hpcfsdp("show", saved, "--json").stdout)
    assert facts["step"] == 7
    assert facts["model elements"] == 3 * 4 + 4 + 4 * 2 + 2 + 5
    assert facts["tied names"] == {"model/twin.bias": "model/0.bias", "model/twin.weight": "model/0.weight"}
    assert facts["optimizer group 0"]["betas"] == [0.9, 0.999]
    assert facts["extra"] == {"note": "x"}


@pytest.mark.parametrize("name", ["1.counts", "model/1.counts"])
def test_show_of_a_tensor_gives_its_numbers(hpcfsdp, saved, name):
    facts = json.loads(hpcfsdp("show", saved, name, "--json").stdout)
    assert (facts["name"], facts["shape"], facts["dtype"]) == ("model/1.counts", [5], "int64")
    assert facts["first values"] == [0, 1, 2, 3, 4]
    assert (facts["min"], facts["max"], facts["mean"], facts["nan"]) == (0, 4, 2, 0)
    assert facts["norm"] == pytest.approx(30**0.5)


def test_show_of_an_unknown_tensor_suggests_the_nearest(hpcfsdp, saved):
    done = hpcfsdp("show", saved, "0.wieght")
    assert done.code == 2
    assert "no tensor '0.wieght'; did you mean '0.weight'?" in done.stderr


def test_a_reader_that_has_seen_enough_is_no_error(start, saved):
    import subprocess
    import sys

    command = f'"{sys.executable}" -m hpcfsdp ls "{saved}" | head -1'
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], check=False, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
