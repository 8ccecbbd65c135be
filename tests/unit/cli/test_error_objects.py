"""What commands print where they fail: one message on stderr, and an object on stdout with --json."""

import errno
import json
import math
import os
from pathlib import Path

import h5py
import pytest

from hpcfsdp.checkpoint.format import disk
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.checkpoint.saving.writer import write_alone
from hpcfsdp.cli import ls
from hpcfsdp.cli.main import VERBS, main
from hpcfsdp.cli.printing import print_json

FAILING = {
    "bench": (["nothing"], "usage", 2),
    "ls": (["none.h5"], "missing", 1),
    "plan": (["--ranks", "8"], "usage", 2),
    "doctor": (["--timeout", "0"], "usage", 2),
    "hang": (["none"], "usage", 2),
    "show": (["none.h5"], "missing", 1),
    "export": (["none.h5", "out.pt"], "missing", 1),
    "average": (["none.h5", "-o", "out.h5"], "missing", 1),
    "import": (["none.xyz", "out.h5"], "checkpoint", 1),
    "stats": (["none.h5"], "missing", 1),
    "verify": ([], "usage", 2),
    "diff": (["none.h5", "none.h5"], "missing", 2),
    "prune": (["none"], "usage", 2),
    "report": (["none"], "usage", 2),
    "watch": (["none", "--once"], "usage", 2),
    "plot": (["none.h5", "--kind", "loss"], "missing", 1),
}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run_main(*words):
        code = main([*map(str, words)])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run_main


def test_the_table_has_every_verb_that_knows_json():
    assert set(FAILING) | {"train", "completion"} >= set(VERBS)


@pytest.mark.parametrize("verb", FAILING)
def test_every_verb_prints_an_error_object(run, verb):
    words, kind, exit_code = FAILING[verb]
    code, out, err = run(verb, *words, "--json")
    error = json.loads(out)["error"]
    assert (code, error["exit_code"], error["kind"]) == (exit_code, exit_code, kind)
    assert err == f"hpcfsdp: {error['message']}\n"
    assert error["path"] == (words[0] if kind == "missing" else error["path"])
    assert run(verb, *words)[:2] == (exit_code, "")


def test_an_error_that_is_a_fault_of_ours_is_an_object_too(monkeypatch, capsys):
    def broken(words):
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(ls, "main", broken)
    with pytest.raises(ZeroDivisionError):
        main(["ls", "--json"])
    error = json.loads(capsys.readouterr().out)["error"]
    assert error == {"message": "on purpose", "kind": "internal", "exit_code": 1, "path": None}


def test_a_missing_argument_is_named_alone_and_its_verb_is_no_path(run):
    for verb in ("ls", "stats"):
        _, out, err = run(verb, "--json")
        assert json.loads(out)["error"]["path"] is None
        assert "PATTERN" not in err


def test_a_document_that_cannot_be_json_is_printed_in_no_part(capsys):
    with pytest.raises(ValueError, match="Out of range float values"):
        print_json({"a": list(range(100_000)), "b": math.nan})
    assert capsys.readouterr().out == ""


def test_no_message_names_the_program_twice(run):
    for words in (["ls"], ["ls", "a.h5", "--nothing"], ["prune", "."], ["train", "--nothing"], ["bench"]):
        code, _, err = run(*words)
        assert code == 2
        assert err.startswith("hpcfsdp: ")
        assert not err.startswith("hpcfsdp: hpcfsdp")


def foreign(path):
    with h5py.File(path, "w") as file:
        file["x"] = [1.0]


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda path: None, "missing", "No such file or directory"),
        (lambda path: path.mkdir(), "directory", "is a directory"),
        (lambda path: path.touch(), "empty", "is empty (0 bytes)"),
        (lambda path: path.write_text("hello"), "not_hdf5", "not an HDF5 file"),
        (foreign, "not_a_checkpoint", "an HDF5 file, but not an hpcfsdp checkpoint"),
    ],
    ids=["missing", "folder", "empty", "text", "foreign"],
)
def test_kinds_of_files_that_cannot_be_read(run, tmp_path, make, kind, message):
    make(tmp_path / "a.h5")
    _, out, _ = run("show", "a.h5", "--json")
    error = json.loads(out)["error"]
    assert (error["kind"], error["path"]) == (kind, "a.h5")
    assert message in error["message"]


@pytest.mark.parametrize("words", [["prune", "a", "--keep-last", 1], ["plot", "a", "--kind", "loss"], ["ls", "a"]])
@pytest.mark.parametrize(("number", "kind"), [(errno.ENOENT, "missing"), (errno.EACCES, "permission")])
def test_kinds_of_folders_that_cannot_be_read(run, tmp_path, monkeypatch, words, number, kind):
    def refuse(self):
        raise OSError(number, os.strerror(number), str(self))

    (tmp_path / "a").mkdir()
    monkeypatch.setattr(Path, "iterdir", refuse)  # gone since the command looked, or not readable
    _, out, _ = run(*words, "--json")
    error = json.loads(out)["error"]
    assert (error["kind"], error["message"]) == (kind, f"a: {os.strerror(number)}")


def test_a_file_without_permission(run, tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(disk, "open_to_read", refuse)  # root may read every file
    _, out, _ = run("show", "a.h5", "--json")
    error = json.loads(out)["error"]
    assert (error["kind"], error["message"]) == ("permission", "a.h5: Permission denied")


def test_truncated_and_damaged_files_are_told_apart(run, tmp_path):
    spec = TensorSpec("model/w", (40_000,), "uint8")
    path = write_alone(tmp_path / "a.h5", [spec], lambda _, start, numel: bytearray(numel))
    data = path.read_bytes()
    end = int.from_bytes(data[28:36], "little")  # of HDF5's part, as its superblock has it
    for content, kind, message in (
        (data[:25_000], "truncated", f"truncated: 25.0 of {end / 1000:.1f} kB present; was the copy complete?"),
        (
            data[:100] + bytes([data[100] ^ 1]) + data[101:],
            "damaged",
            "damaged: its tables or small values do not have their checksum",
        ),
        (data[:-8] + bytes(8), "damaged", "damaged: the footer that ends a file of format 1.1 is missing"),
    ):
        path.write_bytes(content)
        code, out, _ = run("ls", "a.h5", "--json")
        error = json.loads(out)["error"]
        assert (code, error["kind"], error["message"]) == (4, kind, f"a.h5: {message}")
