"""The output of commands for malicious files."""

import io
import json
import os
import re
import sys

import numpy as np
import pytest

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.cli import printing
from hpcfsdp.cli.main import main
from tests.unit.checkpoint.hostile import make_file

EVIL = "\x1b]0;owned\x07\x1b[31m\x9b2J\u202e[red]\n$x"
EVIL_SHOWN = r"\x1b]0;owned\x07\x1b[31m\x9b2J\u202e[red]\n$x"


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


class Pipe(Terminal):
    def isatty(self):
        return False


@pytest.fixture
def run(monkeypatch):
    """``run(stream, arguments)``: exit code, stdout and stderr; on a terminal without colours."""

    def run_main(stream, *words):
        monkeypatch.setenv("COLUMNS", "400")
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("NO_COLOR", raising=False)
        monkeypatch.setattr(sys, "stdout", stream())
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        code = main([str(word) for word in words])
        return code, re.sub(r"\x1b\[[0-9;]*m", "", sys.stdout.getvalue()), sys.stderr.getvalue()

    return run_main


@pytest.fixture
def evil(tmp_path):
    """A file with control characters in all of its text."""
    name = f"model/{EVIL}".encode()

    def more(file):
        file.attrs["software_version"] = np.bytes_(EVIL.encode())
        file[f"metrics/{EVIL}/step"] = np.array([1])
        file[f"metrics/{EVIL}/value"] = np.array([1.0])
        del file[schema.LINKS]
        file[schema.LINKS] = np.array([(name + b"2", 0)], schema.table_dtype(schema.LINKS, len(name) + 1))

    groups = json.dumps([{"params": [EVIL], EVIL: "\ud800"}])
    return make_file(
        tmp_path / "evil.h5",
        more=more,
        tensors=[(name, b"uint8", 0, 1)],
        sizes=[0],
        extra__values=json.dumps({EVIL: [EVIL, "\ud800"]}),
        meta__config=json.dumps({EVIL: EVIL}),
        optim__param_groups=groups,
        optim__scalars="{}",
    )


def is_clean(text):
    return text.replace("\n", "").replace("\t", "").isprintable()


@pytest.mark.parametrize("stream", [Pipe, Terminal])
@pytest.mark.parametrize(
    "words",
    [
        ["ls"],
        ["show"],
        ["stats"],
        ["verify"],
        ["show", f"model/{EVIL}"],
        ["ls", "model/*"],
        ["show", "nothing"],
        ["ls", "x\x1b[2J"],
    ],
    ids=lambda words: " ".join(words[:1]) + str(len(words)),
)
def test_nothing_raw_reaches_the_terminal(run, evil, stream, words):
    verb, *rest = words
    code, out, err = run(stream, verb, evil, *rest)
    assert is_clean(out + err)
    assert out or err.startswith("hpcfsdp: ")
    assert code == (4 if verb == "verify" else 1 if err else 0)
    if words == ["ls"]:
        assert [line.split()[0] for line in out.splitlines()[1:]] == [f"model/{EVIL_SHOWN}", f"model/{EVIL_SHOWN}2"]
    if words == ["show"]:
        assert out.count(EVIL_SHOWN) >= 1


@pytest.mark.parametrize(
    "words", [["ls"], ["show"], ["stats"], ["verify"], ["plot", "--kind", "loss", "*"]], ids=" ".join
)
def test_json_stays_json(run, evil, words):
    verb, *rest = words
    _, out, _ = run(Pipe, verb, evil, *rest, "--json")
    assert out.isascii()
    assert is_clean(out)
    found = json.loads(out)
    if verb == "ls":
        assert [entry["name"] for entry in found] == [f"model/{EVIL}", f"model/{EVIL}2"]
    if verb == "show":
        assert found["extra"] == {EVIL: [EVIL, "\ud800"]}
        assert found["software"] == f"hpcfsdp {EVIL}"


def test_differences_are_shown_safely(run, evil, tmp_path):
    other = make_file(tmp_path / "other.h5")
    for stream in (Pipe, Terminal):
        code, out, err = run(stream, "diff", evil, other)
        assert (code, err) == (1, "")
        assert is_clean(out)
        assert EVIL_SHOWN in out
    code, _, err = run(Pipe, "diff", tmp_path / "no\nhpcfsdp: sound\x1b[2J", other)
    assert code == 2
    assert is_clean(err)
    assert "\nhpcfsdp" not in err


def test_output_of_a_verb_that_does_not_clean_it_is_safe(run, monkeypatch):
    def careless(words):
        print(EVIL)
        printing.console().print(EVIL, markup=False, style="bold")
        return 0

    monkeypatch.setattr("hpcfsdp.cli.ls.main", careless)
    _, out, _ = run(Terminal, "ls")
    assert is_clean(out.replace("\x1b[31m", ""))
    assert "\\x1b]0;owned\\x07" in out


def test_an_ascii_terminal_gets_ascii_only(run, tmp_path):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    path = make_file(tmp_path / "a.h5", tensors=[("model/é漢".encode(), b"uint8", 0, 1)], sizes=[0])
    stream.getvalue = lambda: stream.buffer.getvalue().decode()
    code, out, err = run(lambda: stream, "ls", path)
    assert (code, err) == (0, "")
    assert r"model/\xe9\u6f22" in out


@pytest.mark.parametrize("picture", ["curves", "norms", "histogram"])
def test_names_in_pictures_are_not_parsed_as_mathematics(run, tmp_path, picture):
    pytest.importorskip("matplotlib")
    name = b"model/$\\frac{\x1b$.w"

    def more(file):
        for metric in ("$\\frac{ loss", "_loss"):
            file[f"metrics/{metric}/step"] = np.array([1, 2])
            file[f"metrics/{metric}/value"] = np.array([1.0, 2.0])

    path = make_file(tmp_path / "$a$b.h5", more=more, tensors=[(name, b"uint8", 0, 1)], sizes=[0])
    options = {"curves": ["--kind", "loss"], "norms": ["--kind", "norms"], "histogram": ["--kind", "histogram", "*"]}
    code, _, err = run(Pipe, "plot", path, *options[picture], "--out", tmp_path / "a.svg")
    assert (code, err) == (0, "")
    assert (tmp_path / "a.svg").stat().st_size > 1000


@pytest.mark.parametrize(
    "words",
    [
        ["ls", "PIPE"],
        ["show", "PIPE"],
        ["stats", "PIPE"],
        ["verify", "PIPE"],
        ["diff", "PIPE", "PIPE"],
        ["plot", "PIPE", "--kind", "norms"],
        ["export", "PIPE", "out.safetensors"],
        ["import", "PIPE", "out.h5", "--format", "pt"],
        ["import", "PIPE", "out.h5", "--format", "safetensors"],
        ["import", "PIPE", "out.h5", "--format", "dcp"],
        ["import", "FOLDER", "out.h5", "--format", "safetensors"],
        ["import", "FOLDER", "out.h5", "--format", "dcp"],
    ],
    ids=" ".join,
)
def test_every_verb_refuses_a_pipe_at_once(run, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("PIPE")
    os.mkdir("FOLDER")
    os.mkfifo("FOLDER/model.safetensors")
    os.mkfifo("FOLDER/.metadata")
    code, out, err = run(Pipe, *words)
    assert code == (2 if words[0] == "diff" else 1)
    assert "is not a regular file" in (out if words[0] == "verify" else err)
    assert sorted(os.listdir()) == ["FOLDER", "PIPE"]


def test_patterns_of_ls(run, tmp_path):
    path = make_file(
        tmp_path / "a.h5",
        tensors=[(b"model/a.0", b"uint8", 0, 1), (b"model/a.1", b"uint8", 0, 1), (b"model/b[0]", b"uint8", 0, 1)],
        sizes=[0],
    )

    def names(*patterns):
        return [line.split("\t")[0] for line in run(Pipe, "ls", path, *patterns)[1].splitlines()[1:]]

    assert names() == ["model/a.0", "model/a.1", "model/b[0]"]
    assert names("a.*") == names("model/a.?") == names("a.[01]") == ["model/a.0", "model/a.1"]
    assert names("b[0]", "a.1") == ["model/a.1", "model/b[0]"]
    assert run(Pipe, "ls", path, "c")[0] == 1
    code, _, err = run(Pipe, "ls", tmp_path, "c")
    assert (code, err) == (2, f"hpcfsdp: {tmp_path}: is a folder, and patterns match tensors in a file\n")


def test_what_needs_a_package_of_an_extra_prints_nothing_before_the_error(run, evil, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert run(Pipe, "show", evil) == (1, "", "hpcfsdp: hpcfsdp show needs yaml: pip install 'hpcfsdp[cli]'\n")


def test_ls_long_and_show_have_the_place_in_the_data(run, tmp_path):
    import torch

    from hpcfsdp import checkpoint
    from hpcfsdp.data import ResumableSampler

    sampler = ResumableSampler(50, global_batch=8, rank=0, ranks=1)
    for _ in zip(range(3), sampler, strict=False):
        pass
    checkpoint.save(tmp_path / "step-00000003.h5", model=torch.nn.Linear(2, 2), step=3, data=sampler)
    checkpoint.save(tmp_path / "step-00000004.h5", model=torch.nn.Linear(2, 2), step=4)
    code, out, _ = run(Pipe, "ls", "--long", tmp_path)
    columns, *rows = [line.split("\t") for line in out.splitlines()]
    places = [tuple(row[columns.index(name)] for name in ("step", "epoch", "samples")) for row in rows]
    assert (code, places) == (0, [("3", "0", "24"), ("4", "", "")])
    assert "epoch" not in run(Pipe, "ls", tmp_path)[1]
    found = json.loads(run(Pipe, "ls", tmp_path, "--json")[1])
    assert [entry.get("samples") for entry in found] == [24, None]
    shown = json.loads(run(Pipe, "show", tmp_path / "step-00000003.h5", "--json")[1])
    assert (shown["data"]["length"], shown["data"]["samples"]) == (50, 24)
