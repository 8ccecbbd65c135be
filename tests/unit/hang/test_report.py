"""The report: who waits for whom in what, and where those are who have not come."""

import pytest

from hpcfsdp.hang import report

NOW = 1_795_428_000.0
STACK = """\
Thread 0x00000000000000ab (most recent call first):
  File "/venv/lib/python3.11/threading.py", line 327 in wait

Current thread 0x00000000000000cd (most recent call first):
  File "/venv/lib/python3.11/site-packages/numpy/linalg.py", line 5 in solve
  File "/home/me/train.py", line 31 in make_batch
  File "/home/me/train.py", line 90 in <module>
"""


def rank(number, **values):
    whole = {"rank": number, "host": "n1", "pid": 100 + number, "main_thread": 0xCD, "state": "S", "wchan": ""}
    return {**whole, "cpu_s": 1.5, "wait": None, "events": [], "stacks": STACK, **values}


def waiting(number, missing=(1,), label="barrier", call="", since_s=NOW - 300):
    wait = {"since_s": since_s, "label": label, "call": call, "missing": list(missing), "num_missing": len(missing)}
    return rank(number, wait=wait)


def event(number, kind, text):
    return {"number": number, "time_s": NOW - 301, "kind": kind, "text": text}


def answer(*ranks, node=0, num_nodes=1, size=None):
    return {"job": "7", "node": node, "num_nodes": num_nodes, "size": size or len(ranks), "ranks": list(ranks)}


def head(*answers):
    return report.head(report.render(answers, "rank 0 waits", NOW)).split("\n")


def test_the_first_lines_say_who_waits_for_whom_and_where_that_one_is():
    one = waiting(0, label="all_gather_into_tensor of 8 x torch.float32", call="forward")
    other = waiting(2, label="all_gather_into_tensor of 8 x torch.float32", call="forward")
    seen = [event(1, "pass", "4"), event(2, "forward", "blocks.3"), event(3, "step", "3")]
    assert head(answer(one, rank(1, events=seen), other)) == [
        "Job 7, 3 rank(s) on 1 node(s), 2026-11-23T10:00:00Z: rank 0 waits",
        "",
        "Ranks 0, 2 wait(s) for rank 1 in forward (all_gather_into_tensor of 8 x torch.float32), for 300 s",
        "    no unit, pass or step is among its last events",
        "Rank 1 has not come: it sleeps in make_batch (/home/me/train.py:31), inside of it solve "
        "(/venv/lib/python3.11/site-packages/numpy/linalg.py:5)",
        "    step 3 is done, pass 4 through the model, the forward of blocks.3",
    ]


def test_waits_in_different_calls_are_listed_apart():
    lines = head(answer(waiting(0, [1, 2]), waiting(1, [0], "all_reduce(sum)"), waiting(2, [0], "all_reduce(sum)")))
    assert [line for line in lines if "wait(s)" in line] == [
        "Rank 0 wait(s) for ranks 1-2 in barrier, for 300 s",
        "Ranks 1-2 wait(s) for rank 0 in all_reduce(sum), for 300 s",
    ]


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ("T", "process 101 on n1 is stopped (SIGSTOP, or a debugger); kill -CONT 101 on n1 lets it go on"),
        ("", "process 101 on n1 has ended"),
        ("D", "it waits in the kernel in make_batch"),
        ("R", "it runs in make_batch"),
    ],
)
def test_the_state_of_a_process_that_has_not_come(state, text):
    assert f"Rank 1 has not come: {text}" in "\n".join(head(answer(waiting(0), rank(1, state=state))))


def test_a_process_without_stacks():
    lines = head(answer(waiting(0), rank(1, stacks="")))
    assert "Rank 1 has not come: it sleeps, and its Python stack is not known" in lines


def test_a_node_that_does_not_answer_is_named_with_its_ranks():
    lines = head(answer(waiting(0, [2, 3]), waiting(1, [2, 3]), num_nodes=2, size=4))
    assert lines[-1] == "No answer from node(s) 1 with ranks 2-3: down, cut off, or all of its ranks stuck"


def test_without_a_wait_each_rank_is_where_its_stack_says():
    lines = head(answer(rank(0), rank(1, state="R")))
    assert lines[2:] == [
        "No rank waits in a collective of hpcfsdp:",
        "rank 0: it sleeps in make_batch (/home/me/train.py:31), inside of it solve "
        "(/venv/lib/python3.11/site-packages/numpy/linalg.py:5)",
        "rank 1: it runs in make_batch (/home/me/train.py:31), inside of it solve "
        "(/venv/lib/python3.11/site-packages/numpy/linalg.py:5)",
    ]


def test_many_missing_ranks_are_counted():
    wait = {"since_s": NOW - 9, "label": "barrier", "call": "", "missing": [1, 2], "num_missing": 500}
    lines = head(answer(rank(0, wait=wait), size=501))
    assert "Rank 0 wait(s) for ranks 1-2 and 498 more in barrier, for 9 s" in lines


def test_the_rest_has_ranks_events_with_bytes_stacks_and_traces():
    seen = [event(41, "begin", "all_reduce(sum) of 1000 x torch.bfloat16")]
    text = report.render([answer(waiting(0), rank(1, events=seen, wchan="nfs_wait"))], "", NOW, traces='{"entries": 1}')
    assert "rank 0  n1  process 100  sleeps  1.5 s of CPU  waits for 300 s in barrier" in text
    assert "rank 1  n1  process 101  sleeps, in the kernel at nfs_wait  1.5 s of CPU  waits in no collective" in text
    assert "41     301.000  begin     all_reduce(sum) of 1000 x torch.bfloat16  2000 bytes" in text
    assert text.count('  File "/home/me/train.py", line 90 in <module>') == 2
    assert text.endswith('{"entries": 1}\n')


@pytest.mark.parametrize(
    ("label", "nbytes"),
    [
        ("all_reduce(sum) of 3 x torch.float64", 24),
        ("broadcast from 0 of 5 x torch.bool", 5),
        ("gradients of 'a': reduce_scatter_tensor(average) of 8 x torch.float8_e4m3fn in torch.float32", 8),
        ("x of 2 x torch.complex128", 32),
        ("barrier", None),
    ],
)
def test_bytes_of_a_label(label, nbytes):
    assert report.bytes_of(label) == nbytes
