"""Questions and answers in the folder of a run."""

import json
import os
import threading
import time

import pytest

from hpcfsdp.cli import hang
from hpcfsdp.errors import HpcfsdpError
from hpcfsdp.hang import report
from hpcfsdp.hang.inquiry import HangRequest, Inquiry

SOUND = {"name": "q", "job": "", "reason": "x", "asked_s": 0, "ends": False}
ANSWER = {"job": "7", "node": 0, "num_nodes": 1, "size": 1, "ranks": []}
WAIT = {"since_s": 1.0, "label": "gather", "call": "save", "missing": [1], "num_missing": 1}
RANK = {
    **{"rank": 0, "host": "a", "pid": 1, "main_thread": 1, "state": "S", "wchan": "", "cpu_s": 0.5, "stacks": ""},
    **{"wait": WAIT, "events": [{"number": 1, "time_s": 1.0, "kind": "end", "text": "gather"}]},
}


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


# What others have put into the folder


def hostile(folder, **changed):
    """A request as another program may have written it."""
    (folder / "hang").mkdir(exist_ok=True)
    (folder / "hang" / "request.json").write_text(json.dumps(SOUND | changed))


@pytest.mark.parametrize(
    "changed",
    [
        *({"name": name} for name in ("", "..", "../x", "/tmp/x", "a/b", "a.b", "a\0b", "ä", "x" * 65, 5, None, ["q"])),
        *({"job": job} for job in ("8", "7", None, "../7")),
        *({"asked_s": value} for value in ("0", None, True)),
        {"ends": 1},
        {"reason": None},
        {"more": 1},
    ],
    ids=str,
)
def test_a_request_of_other_names_or_types_is_none(inquiry, tmp_path, changed):
    hostile(tmp_path, **changed)
    assert inquiry.requests("7") == inquiry.requests("") == []
    _, is_new = inquiry.ask("", "")
    assert is_new


def test_a_request_of_another_name_is_never_made_a_path(inquiry, tmp_path):
    (tmp_path / "hang").mkdir()
    request = HangRequest("../planted", "", "", 0.0)
    for call in (inquiry.claim, lambda *arguments: inquiry.answer(*arguments, {})):
        with pytest.raises(ValueError, match=r"letters, digits, - and _, not '../planted'"):
            call(request, "7", 0)
    assert os.listdir(tmp_path) == ["hang"]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["pipe", "huge", "another's", "device"])
def test_what_is_no_file_of_this_user_is_no_request_and_is_replaced(inquiry, tmp_path, give_away, kind):
    hostile(tmp_path)
    path = tmp_path / "hang" / "request.json"
    if kind == "another's":
        give_away(path)
    elif kind == "huge":
        path.write_text(json.dumps(SOUND) + " " * (1 << 20))
    else:
        path.unlink()
        os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    assert inquiry.requests("7") == []
    if kind != "another's" or os.geteuid() == 0:
        assert inquiry.ask("", "")[1]


def test_a_folder_of_another_user_is_refused_with_a_word(inquiry, tmp_path, give_away, caplog):
    hostile(tmp_path)
    assert [request.name for request in inquiry.requests("7")] == ["q"]
    give_away(tmp_path / "hang")
    assert inquiry.requests("7") == inquiry.requests("7") == []
    assert caplog.text.count("hang: questions there are not answered: belongs to the user ") == 1
    with pytest.raises(HpcfsdpError, match="hang: cannot write there: belongs to the user "):
        hang.main([str(tmp_path)])


@pytest.mark.parametrize("asked_s", [1e12, -1e12, 1e300, float("nan"), float("inf")])
def test_a_request_of_a_wrong_clock_blocks_no_other(inquiry, tmp_path, asked_s):
    hostile(tmp_path, asked_s=asked_s)
    (tmp_path / "hang" / "q").mkdir()
    request, is_new = inquiry.ask("", "")
    assert is_new and request.name != "q"
    assert not (tmp_path / "hang" / "q").exists()


def test_an_answer_is_written_through_no_link(inquiry, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    request, _ = inquiry.ask("7", "")
    assert inquiry.claim(request, "7", 0)
    for name in ("7.00000.json", ".7.00000.json.partial", "7.00001.claim"):
        (tmp_path / "hang" / request.name / name).symlink_to(victim)
    (tmp_path / "hang" / f"{request.name}-7.txt").symlink_to(victim)
    inquiry.answer(request, "7", 0, {"node": 0})
    inquiry.write_report(request, "7", "half of a pair \ud800")
    assert not inquiry.claim(request, "7", 1)
    assert inquiry.answers(request) == [{"node": 0}]
    inquiry.close(request)
    assert victim.read_text() == "precious"


def test_a_temporary_of_someone_who_was_killed_goes_with_the_next_request(inquiry):
    request, _ = inquiry.ask("7", "")
    for name, age_s in ((".old", 1000), (".young", 0)):
        (inquiry.folder / name).touch()
        os.utime(inquiry.folder / name, (time.time() - age_s,) * 2)
    inquiry.close(request)
    assert os.listdir(inquiry.folder) == [".young"]


def test_an_answer_that_nodes_give():
    assert report.is_answer(ANSWER | {"ranks": [RANK, RANK | {"wait": None}]})


ODD_ANSWERS = [
    {"ranks": [5]},
    *({"job": job} for job in ("../7", "a/b", "", None, "x" * 300)),
    *({name: value} for name in ("num_nodes", "size", "node") for value in (1 << 40, -1, None, "1", 1.5)),
    *({"ranks": [RANK | {name: {}}]} for name in RANK),
    *({"ranks": [RANK | {"wait": WAIT | {name: {}}}]} for name in WAIT),
    {"ranks": [RANK | {"rank": 1}]},
    {"ranks": [RANK | {"events": [5]}]},
]


@pytest.mark.parametrize("changed", ODD_ANSWERS, ids=str)
def test_an_odd_answer_is_none(changed):
    assert not report.is_answer(ANSWER | changed)


def test_a_report_quotes_numbers_of_any_length_and_no_control_characters():
    text = f'Thread 0x1 (most recent call first):\n  File "x", line {"9" * 5000} in f\n'
    rank = RANK | {"stacks": text, "host": "a\x1b[2J", "wait": None}
    rank |= {"events": [{"number": 1, "time_s": 1.0, "kind": "end", "text": f"{'9' * 5000} x torch.float{'3' * 5000}"}]}
    assert "\x1b" not in report.render([ANSWER | {"ranks": [rank]}], "", 0.0)


@pytest.mark.timeout(60)
def test_odd_answers_end_the_command_with_a_word(tmp_path):
    def plant():
        while not (found := list((tmp_path / "hang").glob("request.json"))):
            time.sleep(0.01)
        folder = tmp_path / "hang" / json.loads(found[0].read_text())["name"]
        folder.mkdir(exist_ok=True)
        texts = [json.dumps(ANSWER | changed) for changed in ODD_ANSWERS] + ["", "{}", "[", "5", "[" * 100_000]
        for number, text in enumerate(texts):
            (folder / f"{number}.json").write_text(text)
        os.mkfifo(folder / "pipe.json")
        (folder / "device.json").symlink_to("/dev/zero")

    thread = threading.Thread(target=plant)
    thread.start()
    with pytest.raises(HpcfsdpError, match=r"no job has answered within 1 s.*answers its user"):
        hang.main([str(tmp_path), "--wait", "1"])
    thread.join()
    assert not (tmp_path / "hang").exists()
