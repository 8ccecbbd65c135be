"""Questions and answers in the folder of a run."""

import json
import time

import pytest

from hpcfsdp.hang.inquiry import Inquiry


@pytest.fixture
def inquiry(tmp_path):
    return Inquiry(tmp_path)


def test_without_a_request_there_is_none_and_no_folder(inquiry, tmp_path):
    assert inquiry.requests("7") == []
    assert list(tmp_path.iterdir()) == []


def test_one_asks_and_the_others_find_it(inquiry, tmp_path):
    request, is_new = inquiry.ask("7", "rank 0 waits")
    again, is_new_again = Inquiry(tmp_path).ask("7", "rank 1 waits")
    assert (is_new, is_new_again) == (True, False)
    assert [request] == [again] == inquiry.requests("7")


def test_one_process_of_a_node_answers(inquiry):
    request, _ = inquiry.ask("7", "")
    assert [inquiry.claim(request, "7", 0), inquiry.claim(request, "7", 0), inquiry.claim(request, "7", 1)] == [
        True,
        False,
        True,
    ]
    inquiry.answer(request, "7", 1, {"node": 1})
    inquiry.answer(request, "7", 0, {"node": 0})
    assert inquiry.answers(request) == [{"node": 0}, {"node": 1}]


def test_the_report_stays_and_the_rest_goes(inquiry, tmp_path):
    request, _ = inquiry.ask("7", "")
    inquiry.claim(request, "7", 0)
    path = inquiry.write_report(request, "7", "text")
    inquiry.close(request)
    assert path.read_text() == "text"
    assert list((tmp_path / "hang").iterdir()) == [path]
    assert inquiry.requests("7") == []


def test_the_latest_report_of_a_job(inquiry):
    assert inquiry.latest_report("7", 0.0) is None
    for job in ("7", "8"):
        request, _ = inquiry.ask(job, "")
        inquiry.write_report(request, job, "text")
        inquiry.close(request)
    assert inquiry.latest_report("7", time.time() - 60).name.endswith("-7.txt")
    assert inquiry.latest_report("7", time.time() + 60) is None
    assert inquiry.latest_report("9", 0.0) is None


def test_nothing_stays_without_an_answer(inquiry, tmp_path):
    request, _ = inquiry.ask("", "")
    inquiry.close(request)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"name": 1}'])
def test_a_damaged_request_is_replaced(inquiry, text):
    request, _ = inquiry.ask("7", "")
    (inquiry.folder / "request-7.json").write_text(text)
    assert inquiry.requests("7") == []
    other, is_new = inquiry.ask("7", "")
    assert is_new and other != request


def test_a_forgotten_request_is_replaced(inquiry):
    inquiry.ask("7", "")
    path = inquiry.folder / "request-7.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "asked_s": time.time() - 1000}))
    assert inquiry.ask("7", "")[1]
    assert not inquiry.ask("7", "")[1]


def test_jobs_in_one_folder_leave_each_others_requests_alone(inquiry):
    (first, _), (second, is_new) = inquiry.ask("7", ""), inquiry.ask("8", "")
    everyone, all_is_new = inquiry.ask("", "")
    assert is_new and all_is_new
    inquiry.close(second)
    assert inquiry.requests("7") == [first, everyone]
    inquiry.close(everyone)
    assert inquiry.requests("7") == [first]


def test_a_request_for_all_jobs_serves_each(inquiry):
    inquiry.ask("", "")
    assert not inquiry.ask("7", "")[1]


def test_a_folder_that_cannot_be_written_raises(tmp_path):
    (tmp_path / "hang").write_text("a file")
    with pytest.raises(OSError):
        Inquiry(tmp_path).ask("7", "")
