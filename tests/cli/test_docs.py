"""The examples in the documentation run as they stand."""

import re

import pytest

from tests.cli.conftest import ROOT


def blocks(name, language):
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / name).read_text(), re.MULTILINE | re.DOTALL)


def test_the_readmes_example_trains_saves_and_loads(start, tmp_path):
    (code,) = blocks("README.md", "python")
    assert len([line for line in code.splitlines() if line.strip()]) <= 30
    (tmp_path / "my_model.py").write_text(code)
    for _ in range(2):  # the second start resumes
        job = start("my_model.py", ranks=2).wait()
        assert job.code == 0, job.stderr
    assert (tmp_path / "my_model.h5").exists()
    assert re.search(r"step 40 ", job.stdout), job.stdout


@pytest.mark.parametrize("index", range(len(blocks("docs/quickstart.md", "python"))))
def test_quickstart(start, tmp_path, saved, index):
    (tmp_path / "step-00000007.h5").write_bytes(saved.read_bytes())
    (tmp_path / "example.py").write_text(blocks("docs/quickstart.md", "python")[index])
    job = start("example.py").wait()
    assert job.code == 0, job.stderr


@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize("index", range(len(blocks("docs/communication.md", "python"))))
def test_communication(start, tmp_path, index, ranks):
    (tmp_path / "example.py").write_text(blocks("docs/communication.md", "python")[index])
    job = start("example.py", ranks=ranks).wait()
    assert job.code == 0, job.stderr
