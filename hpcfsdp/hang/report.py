"""The report about a job that hangs, from what each node has answered: pure functions of these answers."""

import re
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from hpcfsdp.hang import events, stacks
from hpcfsdp.text import json_input
from hpcfsdp.text.terminal import ranks as named, shown_lines

SHOWN_EVENTS = 20
_STATES = {"R": "runs", "S": "sleeps", "D": "waits in the kernel", "Z": "has ended", "": "has ended"}
_STATES |= {"T": "is stopped (SIGSTOP, or a debugger)", "t": "is stopped by a debugger"}
_BYTES_OF = {"64": 8, "32": 4, "16": 2, "8": 1, "128": 16}
_OWN_FOLDERS = re.compile(r"/(?:site-packages|dist-packages|hpcfsdp)/|/lib/python3|^<")
_JOB = re.compile(r"[\w.-]{1,200}")
_ANSWER = {
    "job": str,
    **dict.fromkeys(("node", "num_nodes", "size"), int),
    "ranks": [
        {
            **dict.fromkeys(("rank", "pid", "main_thread"), int),
            **dict.fromkeys(("host", "state", "wchan", "stacks"), str),
            "cpu_s": float,
            "wait": (None, {"since_s": float, "label": str, "call": str, "missing": [int], "num_missing": int}),
            "events": [{"number": int, "time_s": float, "kind": str, "text": str}],
        }
    ],
}


def is_answer(answer: dict[str, Any]) -> bool:
    """Return whether this is what a node answers. Its job can be part of the name of a file."""
    return json_input.fits(answer, _ANSWER) and (
        0 <= answer["node"] < answer["num_nodes"] <= answer["size"] <= 1 << 20
        and all(0 <= rank["rank"] < answer["size"] for rank in answer["ranks"])
        and _JOB.fullmatch(answer["job"]) is not None
    )


def render(answers: Sequence[dict[str, Any]], reason: str, asked_s: float, traces: str = "") -> str:
    """Return the report about one job, from the answers of one or more nodes, and `traces` of a backend."""
    one, found = answers[0], {rank["rank"]: rank for answer in answers for rank in answer["ranks"]}
    ranks = dict(sorted(found.items()))
    silent = sorted(set(range(one["num_nodes"])) - {answer["node"] for answer in answers})
    unknown = sorted(set(range(one["size"])) - set(ranks))
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(asked_s))
    lines = [f"Job {one['job']}, {one['size']} rank(s) on {one['num_nodes']} node(s), {when}: {reason}", ""]
    lines += summary(ranks, unknown, silent, asked_s)
    lines += ["", "Ranks", "-----"]
    lines += [_line_of(rank, asked_s) for rank in ranks.values()]
    lines += ["", f"Last events of each rank (time in seconds before {when})", "-" * 40]
    for rank in ranks.values():
        lines += [f"rank {rank['rank']}:"]
        lines += [f"  {_event(event, asked_s)}" for event in rank["events"][-SHOWN_EVENTS:]] or ["  none"]
    lines += ["", "Python stacks", "-------------"]
    for rank in ranks.values():
        lines += [f"rank {rank['rank']} on {rank['host']}, process {rank['pid']}:"]
        lines += [rank["stacks"].rstrip() or "  none: it has ended, is stopped, or handles SIGQUIT itself", ""]
    if traces:
        lines += ["Collectives of the backend", "--------------------------", traces]
    return shown_lines("\n".join(lines) + "\n")


def head(text: str) -> str:
    """Return the part of a report that says who waits for whom."""
    return text.partition("\n\nRanks\n")[0]


def summary(
    ranks: dict[int, dict[str, Any]], unknown: Sequence[int], silent: Sequence[int], asked_s: float
) -> list[str]:
    """Say who waits for whom in what, and where those are who have not come."""
    lines, waits = [], defaultdict(list)
    for number, rank in ranks.items():
        wait = rank["wait"]
        if wait is not None:
            where = events.described(wait["call"], wait["label"])
            waits[where, tuple(wait["missing"]), wait["num_missing"]].append(number)
    for (where, missing, count), members in waits.items():
        longest_s = max(asked_s - ranks[number]["wait"]["since_s"] for number in members)
        more = f" and {count - len(missing)} more" if count > len(missing) else ""
        whom = f"{named(missing)}{more}" if missing else "others"
        lines.append(f"{named(members).capitalize()} wait(s) for {whom} in {where}, for {longest_s:.0f} s")
        lines += [f"    {_progress(ranks[members[0]])}"]
    blamed = {number for _, missing, _ in waits for number in missing}
    for number in sorted(blamed):
        if number in ranks and ranks[number]["wait"] is None:
            lines.append(f"Rank {number} has not come: {_where(ranks[number])}")
            lines += [f"    {_progress(ranks[number])}"]
    if not waits:
        lines.append("No rank waits in a collective of hpcfsdp:")
        lines += [f"rank {number}: {_where(rank)}" for number, rank in ranks.items()]
    if unknown:
        nodes = ", ".join(map(str, silent))
        lines.append(f"No answer from node(s) {nodes} with {named(unknown)}: down, cut off, or all of its ranks stuck")
    return lines


def _where(rank: dict[str, Any]) -> str:
    state = rank["state"]
    if state not in ("R", "S", "D"):
        hint = f"; kill -CONT {rank['pid']} on {rank['host']} lets it go on" if state in ("T", "t") else ""
        return f"process {rank['pid']} on {rank['host']} {_STATES.get(state, state)}{hint}"
    frames = stacks.main_frames(rank["stacks"], rank["main_thread"])
    if not frames:
        return f"it {_STATES[state]}, and its Python stack is not known"
    own = next((frame for frame in frames if not _OWN_FOLDERS.search(frame[0])), None)
    innermost = _frame(frames[0])
    inside = f", inside of it {innermost}" if own is not None and own != frames[0] else ""
    return f"it {_STATES[state]} in {_frame(own or frames[0])}{inside}"


def _frame(frame: tuple[str, int, str]) -> str:
    file, line, function = frame
    return f"{function} ({file}:{line})"


def _progress(rank: dict[str, Any]) -> str:
    """Say which unit and step a rank has reached."""
    unit = step = passing = ""
    for event in rank["events"]:
        if event["kind"] == "pass":
            passing, unit = f"pass {event['text']} through the model", "no unit so far"
        elif event["kind"] in ("forward", "backward"):
            unit = f"the {event['kind']} of {event['text'] or 'the root'}"
        elif event["kind"] == "step":
            step = f"step {event['text']} is done"
    return ", ".join(part for part in (step, passing, unit) if part) or "no unit, pass or step is among its last events"


def _line_of(rank: dict[str, Any], asked_s: float) -> str:
    wait = rank["wait"]
    waits = f"waits for {asked_s - wait['since_s']:.0f} s in {wait['label']}" if wait else "waits in no collective"
    kernel = f", in the kernel at {rank['wchan']}" if rank["wchan"] else ""
    return (
        f"rank {rank['rank']}  {rank['host']}  process {rank['pid']}  {_STATES.get(rank['state'], rank['state'])}"
        f"{kernel}  {rank['cpu_s']:.1f} s of CPU  {waits}"
    )


def _event(event: dict[str, Any], asked_s: float) -> str:
    nbytes = bytes_of(event["text"])
    size = f"  {nbytes} bytes" if nbytes is not None else ""
    return f"{event['number']:8d}  {asked_s - event['time_s']:10.3f}  {event['kind']:8}  {event['text']}{size}"


def bytes_of(label: str) -> int | None:
    """Return the bytes of the tensor in the label of a collective, None where it names none."""
    found = re.search(r"(\d{1,18}) x torch\.(\w+)", label)
    if found is None:
        return None
    width = re.search(r"\d{1,3}", found[2])
    return int(found[1]) * (_BYTES_OF.get(width[0], 1) if width else 1)
