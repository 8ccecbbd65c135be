"""The page: its text, its safety, how it is written. tests/report opens it in a browser."""

import json
import os
import re
from html.parser import HTMLParser

import pytest

from hpcfsdp.errors import HpcfsdpError
from hpcfsdp.report.page import page_of, write_page
from hpcfsdp.report.problems import problems_of
from hpcfsdp.report.run_folder import read_run
from hpcfsdp.report.summary import summarize
from tests.example_runs import start_event, write_lines, write_run


class Reading(HTMLParser):
    """The tags, attributes and text of a page; checks that tags are closed."""

    VOID = ("meta", "link", "path", "use", "wbr")

    def __init__(self, page):
        super().__init__()
        self.tags, self.open, self.attributes, self.text = [], [], [], ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def page(run):
    summary = summarize(run)
    return page_of(run, summary, problems_of(run, summary))


@pytest.fixture(scope="module")
def usual_page(usual):
    return page(usual)


def test_the_page_shows_the_facts(usual_page):
    text = Reading(usual_page).text
    for fact in (
        "complete",
        "NVIDIA H100 80GB HBM3",
        "step-00000400.h5",
        "SIGUSR2 from the scheduler",
        "checkpoint.every",
    ):
        assert fact in text
    for version in ("Open MPI 5.0.11", "2.13.0", "hpcfsdp train run.yaml --optim.lr 3e-4"):
        assert version in text
    assert "comm: rank 5 has waited 12.1 s for rank 1 in all_gather" in text
    assert "The run was restarted once." in text


def test_the_page_needs_nothing_else(usual_page):
    reading = Reading(usual_page)
    assert not {"script", "iframe", "object", "form", "img"} & set(reading.tags)
    assert not [name for name, _ in reading.attributes if name.startswith("on")]
    targets = [value for name, value in reading.attributes if name in ("href", "src", "xlink:href", "action")]
    assert targets and all(target.startswith(("#", "data:,")) for target in targets)
    assert not re.search(r"@import|url\((?!#)", usual_page)
    policy = dict(reading.attributes)["content"] and [
        value for _, value in reading.attributes if "default-src" in (value or "")
    ]
    assert policy == [
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    ]


def test_links_lead_to_parts_of_the_page(usual_page):
    reading = Reading(usual_page)
    ids = [value for name, value in reading.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert {value[1:] for name, value in reading.attributes if name == "href" and value.startswith("#")} <= set(ids)


HOSTILE = "<script>alert(1)</script>\x1b[31m\u202e&\"'"


def test_texts_of_files_stay_texts(tmp_path):
    """Names and messages in a folder, from whoever wrote there, are neither tags nor control characters."""
    run = write_run(tmp_path / "run <b>", 60, every=20, slow_from=1)
    record = {"step": 61, "loss": 1.0, HOSTILE: 5.0, "straggler": {"rank": 5, "host": HOSTILE, "behind_s": 0.5}}
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps(record) + "\n")
    events = [
        start_event(0, device=HOSTILE, command=[HOSTILE], versions={HOSTILE: HOSTILE}, hosts=[HOSTILE], job=HOSTILE),
        {"kind": "signal", "step": 5, "reason": HOSTILE},
        {"kind": "checkpoint", "step": 5, "path": HOSTILE},
        {"kind": "end", "step": 61, "outcome": "error", "message": HOSTILE},
    ]
    write_lines(run / "events.jsonl", events)
    (run / "config.yaml").write_text('"<script>": "<img src=x>"\n')
    log = {"level": "ERROR", "message": HOSTILE, "topic": HOSTILE, "traceback": HOSTILE}
    write_lines(run / "logs" / "rank-0000.jsonl", [log])
    (run / "hang").mkdir()
    (run / "hang" / "x-1.txt").write_text(HOSTILE)
    text = page(read_run(run))
    assert not {"script", "img", "b"} & set(Reading(text).tags)
    assert not re.search("[\x00-\x08\x0b-\x1f\u202e]", text)
    assert text.count("&lt;script&gt;") >= 8


def test_a_run_without_steps_and_one_without_events_have_pages(tmp_path):
    write_lines(tmp_path / "one" / "events.jsonl", [start_event(0)])
    assert "No step has been recorded yet." in page(read_run(tmp_path / "one"))
    write_lines(tmp_path / "two" / "metrics.jsonl", [{"step": 1, "loss": 1.5}])
    text = Reading(page(read_run(tmp_path / "two"))).text
    assert "Environment" not in text and "1.5" in text


def test_a_configuration_that_cannot_be_parsed_is_shown_as_it_is(tmp_path):
    run = write_run(tmp_path, 5, every=5)
    (run / "config.yaml").write_text("lr: [0.1,")
    assert "lr: [0.1," in Reading(page(read_run(run))).text


def test_the_page_of_a_long_run_is_small(tmp_path):
    run = write_run(tmp_path, 20_000, every=20)  # 1000 checkpoints
    assert len(page(read_run(run)).encode()) < 600_000


def test_the_page_is_replaced_at_once(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("old")

    def fail(*_arguments, **_options):
        assert path.read_text() == "old"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(HpcfsdpError, match=r"cannot be written: No space left on device; --out FILE"):
        write_page("new", path)
    assert os.listdir(tmp_path) == ["report.html"] and path.read_text() == "old"
    monkeypatch.undo()
    write_page("half of a pair \ud800", path)
    assert path.read_text() == "half of a pair \\ud800"
