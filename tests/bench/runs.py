"""Runs of several benchmarks, each in processes of its own: a summary of their ratios, and the comparison with an
earlier run.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from hpcfsdp import accelerator, env
from hpcfsdp.bench.harness import Ratio, markdown
from hpcfsdp.cli.printing import print_note
from hpcfsdp.errors import HpcfsdpError, UsageError
from hpcfsdp.launch.together import versions
from hpcfsdp.output.figure_file import new_figure, write_figure

FORMAT = "hpcfsdp benchmarks 1"
_ROW_INCHES = 0.22
_TEXT_LINES = 60
"""Most lines that a table in Markdown shows of a part that prints none."""
_GRACE_S = 10.0
_BETTER, _WORSE = "#0072b2", "#d55e00"


class Change(NamedTuple):
    """A ratio in two runs; None in a run that does not have it."""

    part: str
    name: str
    before: Ratio | None
    now: Ratio | None

    @property
    def verdict(self) -> str:
        """ "better" or "worse" where the ranges of all rounds do not meet, otherwise "same"; "new" or "gone"."""
        if self.before is None or self.now is None:
            return "new" if self.before is None else "gone"
        if self.now.low <= self.before.high and self.before.low <= self.now.high:
            return "same"
        lower = self.now.value < self.before.value
        return "better" if lower == (self.now.better == "lower") else "worse"


def exit_code(found: Mapping[str, Any]) -> int:
    """Return 1 if a part has failed, with a note for each that has; 0 otherwise."""
    failed = failures(found)
    for title, message in failed.items():
        words = [line for line in message.splitlines() if any(map(str.isalnum, line))]  # a launcher ends with a rule
        print_note(f"bench: {title} has failed: {words[-1] if words else 'without a message'}")
    return 1 if failed else 0


def with_changes(found: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a run as JSON, with its changes against an earlier one."""
    compared = None if before is None else []
    for one in () if before is None else changes(before, found):
        sides = {side: ratio and ratio._asdict() for side, ratio in (("before", one.before), ("now", one.now))}
        compared.append({**one._asdict(), **sides, "verdict": one.verdict})
    return {**found, "changes": compared, "differs_in": before and differences(before, found)}


def lines(found: Mapping[str, Any], before: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield the summary, the comparison, and the table of each part."""
    wanted = {"lower": "< 1", "higher": "> 1"}
    rows = [(title, one.name, f"{one.value:.2f}", _range(one), wanted[one.better]) for title, one in ratios(found)]
    yield from (about(found), "", *markdown(("benchmark", "ratio", "median", "min-max", "better if"), rows))
    if before is not None:
        yield from ("", f"Compared with {about(before)}", "")
        if others := differences(before, found):
            yield from (f"The runs differ in {', '.join(others)}: a verdict may come from that alone.", "")
        rows = []
        for one in changes(before, found):
            sides = (f"{side.value:.2f} ({_range(side)})" if side else "" for side in (one.before, one.now))
            rows.append((one.part, one.name, *sides, one.verdict))
        yield from markdown(("benchmark", "ratio", "before", "now", "verdict"), rows)
    for title, part in found["parts"].items():
        yield from ("", f"## {title}", "", f"`{' '.join(part['command'])}`", "")
        yield from part["text"].splitlines() if "text" in part else ()
        yield from ("", "failed:", "", "```text", part["error"]["message"], "```") if "error" in part else ()


def _range(ratio: Ratio) -> str:
    return f"{ratio.low:.2f} - {ratio.high:.2f}"


def now() -> str:
    """Return the time in UTC."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def new_run(ranks: int) -> dict[str, Any]:
    """Return a run on this machine that has no parts yet."""
    return {
        "format": FORMAT,
        "date": now(),
        "ranks": ranks,
        "hardware": hardware(),
        "versions": software(),
        "parts": {},
    }


def result_of(
    command: Sequence[str],
    files: Path,
    *,
    limit_s: float | None = None,
    environ: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run a benchmark; return the JSON that it prints, or its last lines as a "text", with an "error" if it fails.

    Its output is kept in `files` with the suffixes .out and .err. After `limit_s` seconds it is ended, and has failed.
    """
    with contextlib.ExitStack() as stack:
        paths = (files.with_suffix(suffix) for suffix in (".out", ".err"))
        stdout, stderr = (stack.enter_context(path.open("w+", errors="replace")) for path in paths)
        try:
            process = psutil.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=environ)
        except OSError as error:
            raise UsageError(f"bench: cannot start {command[0]!r}: {error.strerror}; give --mpirun a command") from None
        try:
            code = process.wait(limit_s)
        except psutil.TimeoutExpired:
            code = None
        finally:
            _end(process)
        printed, messages = ((file.seek(0), file.read())[1] for file in (stdout, stderr))
    try:
        found: dict[str, Any] = dict(json.loads(printed))
    except (ValueError, TypeError):
        found = {"text": "\n".join(("```text", *printed.splitlines()[-_TEXT_LINES:], "```"))}
    if code is None:
        where = f"{files.name}.out and {files.name}.err"
        found["error"] = {"message": f"it did not end within {limit_s} s; its output is in {where}"}
    elif (code or not printed) and "error" not in found:
        last = (messages or printed).splitlines()[-20:]
        found["error"] = {"message": "\n".join((f"exit code {code}", *last))}
    return found


def _end(process: psutil.Popen) -> None:
    """End a process that still runs, and what it has started: a launcher ends its ranks itself, if it gets the time."""
    with contextlib.suppress(psutil.NoSuchProcess):
        started = [process, *process.children(recursive=True)]
        if process.poll() is None:
            process.terminate()
        for left in psutil.wait_procs(started, _GRACE_S)[1]:
            left.kill()
        process.wait()


def hardware() -> dict[str, Any]:
    """Return this machine: processor, cores, memory in bytes, accelerators."""
    processor = platform.processor()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
        processor = next(names, platform.machine())
    found: dict[str, Any] = {
        "host": env.host_name(),
        "processor": processor,
        "cores": len(psutil.Process().cpu_affinity()),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
    }
    if accelerator.device_count():
        found["accelerator"] = accelerator.describe(accelerator.current_device()).name
        found["accelerators"] = accelerator.device_count()
    return found


def software() -> dict[str, str]:
    """Return versions of hpcfsdp, of what it stands on, and of safetensors, a peer."""
    found = {name: version for name, version in versions().items() if version}
    with contextlib.suppress(metadata.PackageNotFoundError):
        found["safetensors"] = metadata.version("safetensors")
    return found


def about(found: Mapping[str, Any]) -> str:
    """Return a line about a run: when, on what, with which software."""
    machine = found["hardware"]
    text = f"{found['date'][:10]}: {machine['processor']}, {machine['cores']} cores, "
    text += f"{machine['memory_bytes'] / (1 << 30):.0f} GiB"
    if "accelerator" in machine:
        text += f", {machine['accelerators']} x {machine['accelerator']}"
    software = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return f"{text}; {software}; {found['ranks']} ranks"


def ratios(found: Mapping[str, Any]) -> Iterator[tuple[str, Ratio]]:
    """Yield (title of the part, ratio) for all ratios of a run."""
    for title, part in found["parts"].items():
        yield from ((title, Ratio(**ratio)) for ratio in part.get("ratios", ()))


def failures(found: Mapping[str, Any]) -> dict[str, str]:
    """Return the messages of parts that failed, by title."""
    return {title: str(part["error"]["message"]) for title, part in found["parts"].items() if "error" in part}


def load(path: Path) -> dict[str, Any]:
    """Read an earlier run. Raise a UsageError if ``save`` has not written it, or it cannot be read."""
    try:
        found = json.loads(path.read_text())
        numbers = [number for _, ratio in ratios(found) for number in (ratio.value, ratio.low, ratio.high)]
        if found["format"] != FORMAT or not all(isinstance(number, (int, float)) for number in numbers):
            raise ValueError
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"{path}: this file is no report of benchmarks, or another version has written it") from None
    return found


def save(path: Path, found: Mapping[str, Any]) -> None:
    """Write a run to a file."""
    try:
        path.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise HpcfsdpError(f"{path}: cannot write there: {error.strerror}") from error


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what else differs in two runs than hpcfsdp itself: ranks, hardware, versions."""
    one, other = (
        {"ranks": run.get("ranks"), **dict(run.get("hardware", {})), **dict(run.get("versions", {}))}
        for run in (before, now)
    )
    names = dict.fromkeys(name for name in (*one, *other) if name not in ("host", "hpcfsdp"))
    return [name for name in names if one.get(name) != other.get(name)]


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Return all ratios of two runs, those of `now` first."""
    old, new = ({(title, ratio.name): ratio for title, ratio in ratios(run)} for run in (before, now))
    return [Change(*key, old.get(key), new.get(key)) for key in {**new, **old}]


def draw_ratios(found: Sequence[tuple[str, Ratio]], path: Path, title: str) -> None:
    """Draw (part, ratio) pairs into `path`, in the format of its name, the ratio inverted where higher is better."""
    figure = new_figure(9.0, 1.2 + _ROW_INCHES * len(found))
    axes = figure.add_subplot()
    for row, (_, ratio) in enumerate(found):
        value, low, high = ratio.value, ratio.low, ratio.high
        if ratio.better == "higher":
            value, low, high = 1 / value, 1 / high, 1 / low
        colour = _BETTER if value <= 1 else _WORSE
        axes.plot([low, high], [row, row], color=colour, linewidth=1.2, alpha=0.6)
        axes.plot([value], [row], marker="o" if value <= 1 else "D", color=colour, markersize=5)
        axes.annotate(f"{value:.2f}", (high, row), (6, 0), textcoords="offset points", va="center", fontsize=7)
    axes.set_yticks(range(len(found)), [f"{part} | {ratio.name}" for part, ratio in found], fontsize=7)
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _place: f"{value:g}")
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.grid(axis="x", linewidth=0.3)
    cost = "cost of hpcfsdp / that of its peer: left of 1 hpcfsdp is better"
    figure.supxlabel(f"{cost}. Mark: median, line: all rounds", fontsize=8)
    axes.set_title(title, fontsize=8, loc="left", wrap=True)
    write_figure(figure, path)
