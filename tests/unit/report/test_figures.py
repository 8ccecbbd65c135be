"""Figures as SVG: which there are, that they are well-formed, described, and small."""

import re
from collections import Counter
from xml.etree import ElementTree

import pytest

from hpcfsdp.report.figures import figures_of
from hpcfsdp.report.run_folder import read_run
from tests.example_runs import write_lines, write_run

NAMESPACE = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def drawn(usual):
    return {figure.name: figure for figure in figures_of(usual)}


def test_a_whole_run_has_all_figures(drawn):
    assert list(drawn) == (
        "loss grad_norm lr tokens_per_s flop_utilisation step-time communication spread slowest memory progress".split()
    )


def test_figures_are_well_formed_and_described(drawn, usual):
    for figure in drawn.values():
        root = ElementTree.fromstring(figure.svg)
        assert root.get("role") == "img"
        ids = {element.get("id"): element for element in root.iter() if element.get("id")}
        assert [ids[name].tag for name in root.get("aria-labelledby").split()] == [
            f"{NAMESPACE}title",
            f"{NAMESPACE}desc",
        ]
        referred = set(re.findall(r'(?:url\(#|href="#)([^")]+)', figure.svg))
        assert referred <= set(ids), "a clip path or a marker is missing"
        assert figure.description and figure.caption
    last = usual.series.column("loss")[-1]
    assert f"last {last:.4g}" in drawn["loss"].description


def test_ids_of_one_page_are_unique(drawn):
    ids = [name for figure in drawn.values() for name in re.findall(r' id="([^"]+)"', figure.svg)]
    assert len(ids) == len(set(ids)) > 20


def test_colours_and_typefaces_are_those_of_the_page(drawn):
    for figure in drawn.values():
        assert "var(--ink)" in figure.svg
        assert "DejaVu" not in figure.svg
        assert not re.findall(r"#[a-f0-9]{6}\b", figure.svg), "a colour that the page cannot change"


def test_the_same_run_leads_to_the_same_figures(drawn, usual):
    assert [figure.svg for figure in figures_of(usual)] == [figure.svg for figure in drawn.values()]


def test_restarts_and_checkpoints_are_marked(drawn, tmp_path):
    run = write_run(tmp_path, 400, every=50, restart_at=0)
    (run / "events.jsonl").unlink()
    (plain,) = (figure for figure in figures_of(read_run(run)) if figure.name == "lr")
    assert len(plain.svg) < len(drawn["lr"].svg)
    paths = Counter(re.findall(r' d="([^"]+)"', drawn["lr"].svg)) - Counter(re.findall(r' d="([^"]+)"', plain.svg))
    assert sorted(path.count("M") for path in paths.elements() if "L" in path) == [1, 8], "a restart, 8 checkpoints"


@pytest.mark.parametrize("capacity", [False, True], ids=["CPU", "device"])
def test_checkpoints_in_memory_are_shown_where_the_memory_is_that_of_the_host(tmp_path, capacity):
    memory = {
        "peak_bytes": 8,
        "parameters_bytes": 2,
        "checkpoints_bytes": 4,
        **({"capacity_bytes": 9} if capacity else {}),
    }
    write_lines(tmp_path / "metrics.jsonl", [{"step": step, "loss": 2.0, "memory": memory} for step in (1, 2)])
    (drawn,) = (figure for figure in figures_of(read_run(tmp_path)) if figure.name == "memory")
    assert ("checkpoints" in drawn.svg) is not capacity


def test_long_runs_have_small_figures_that_keep_the_extremes(tmp_path):
    records = [{"step": step, "loss": 2.0, "seconds": 1.0} for step in range(1, 50_001)]
    records[31_415]["loss"] = 77.5
    write_lines(tmp_path / "metrics.jsonl", records)
    loss, times = figures_of(read_run(tmp_path))
    assert len(loss.svg) < 40_000 and len(times.svg) < 40_000
    assert "highest 77.5 in step 31416" in loss.description


def test_numbers_of_the_program_have_figures_and_their_names_are_text(tmp_path):
    hostile = "<script>alert(1)</script> $x_1^"
    write_lines(tmp_path / "metrics.jsonl", [{"step": step, hostile: step * 1.0} for step in (1, 2, 3)])
    (figure,) = figures_of(read_run(tmp_path))
    assert figure.title == hostile
    assert "<script" not in figure.svg
    ElementTree.fromstring(figure.svg)


def test_one_step_and_equal_values_can_be_drawn(tmp_path):
    record = {"loss": 1.0, "lr": 0.0, "seconds": 0.5, "comm_share": 0.0, "busy_s_mean": 0.5, "busy_s_max": 0.5}
    record |= {"memory": {"peak_bytes": 0}, "straggler": {"rank": 0, "behind_s": 0.0}, "date": "2026-01-01T00:00:00Z"}
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, **record}])
    names = [figure.name for figure in figures_of(read_run(tmp_path))]
    assert names == ["loss", "lr", "step-time", "communication", "spread", "slowest", "memory"]


def test_losses_that_are_never_finite_have_no_curve_but_the_others_do(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [{"step": step, "loss": None, "lr": 1e-3} for step in range(1, 30)])
    assert [figure.name for figure in figures_of(read_run(tmp_path))] == ["lr"]


def test_without_matplotlib_the_remedy_is_named(usual, monkeypatch):
    import sys

    from hpcfsdp.errors import HpcfsdpError

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(HpcfsdpError, match=r"pip install 'hpcfsdp\[plot\]'"):
        figures_of(usual)
