"""What is wrong with a run, or slow, in plain sentences with a remedy."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hpcfsdp.report.run_folder import RunFolder
from hpcfsdp.report.series import Series
from hpcfsdp.report.summary import Summary, rate_column, save_interval, segments
from hpcfsdp.text.terminal import counted, readable_bytes, readable_count, readable_duration, readable_share

WINDOW = 200  # steps that count as recent
FEW = 20  # with fewer steps there is no finding about trends, or about a slow rank
FIRST_STEPS = 5  # steps in which libraries load and memory fills: they count for no trend
HIGH_COMM_SHARE = 0.3
HIGH_MEMORY_SHARE = 0.92
STRAGGLES_OFTEN = 0.5
FAR_BEHIND = 0.05
SLOWER = 0.8
LONG_HELD = 0.05

ORDER = ("bad", "warning", "note")  # severities: results are wrong, or work is lost; slow, or at risk; good to know


@dataclass(frozen=True)
class Problem:
    """A finding."""

    severity: str  # one of ``ORDER``
    topic: str  # one word for programs
    title: str  # one short sentence
    text: str  # what was found, with numbers
    remedy: str = ""  # what to do, or ""
    page: str = ""  # of the documentation, in docs/; "" without one


_bad, _warning, _note = (functools.partial(Problem, severity) for severity in ORDER)


def problems_of(run: RunFolder, summary: Summary) -> list[Problem]:
    """Return all findings, the worst first."""
    found = [
        *_ends(run, summary),
        *_loss(run.series),
        *_checkpoints(run, summary),
        *_memory(run),
        *_stragglers(run.series, summary),
        *_communication(run.series),
        *_slowdown(run.series),
        *_restarts(run),
        *_logs_and_files(run),
    ]
    return sorted(found, key=lambda problem: ORDER.index(problem.severity))


def _ends(run: RunFolder, summary: Summary) -> Iterator[Problem]:
    if summary.status == "failed":
        text = summary.message or "The run left no message."
        remedy = "Look up the message in the reference. The traceback of each rank is in the output of the job, and in "
        remedy += "logs/ of hpcfsdp train."
        yield _bad("failed", "The run ended with an error.", text, remedy, "reference/errors.md")
    elif summary.status == "hung":
        title = "The run hung: ranks waited for each other without an end."
        remedy = "The report below names the rank that did not come, and its line."
        yield _bad("hung", title, summary.message, remedy, "how-to/hangs.md")
    elif summary.status == "ended" and run.events_of("start"):
        text = "It does not run any more, and has recorded no end: it was killed (SIGKILL, out of memory, the end of "
        text += "the job), a node has failed, or a rank has ended outside of the observed run."
        remedy = "Look at the end of the job's own output, and start the same command again: it resumes from the last "
        remedy += "checkpoint."
        title = "The run has ended without a record of the cause."
        yield _warning("ended", title, text, remedy, "reference/exit-codes.md")


def _loss(series: Series) -> Iterator[Problem]:
    if len(series.not_finite):
        count, first = len(series.not_finite), int(series.not_finite[0])
        title = f"The loss was not finite{f' from step {first} on' if series.ends_not_finite else ''}."
        text = f"NaN or infinite in {count} of {len(series)} steps, first in step {first}."
        remedy = "Resume from a checkpoint before that step with a lower learning rate, a longer warm-up, or clipped "
        remedy += "gradients. hpcfsdp stats FILE finds the tensors that are not finite."
        yield _bad("not_finite", title, text, remedy, "how-to/looking-into-files.md")
    steps, losses = series.points("loss")
    if len(losses) < 4 * FEW or series.ends_not_finite:
        return
    windows = np.array_split(np.arange(len(losses)), min(40, len(losses) // FEW))
    medians = np.array([np.median(losses[window]) for window in windows])
    spreads = np.array([np.median(np.abs(losses[window] - np.median(losses[window]))) for window in windows])
    lowest = int(np.argmin(medians))
    rise = medians[-1] - medians[lowest]
    if rise > 0.25 * abs(medians[lowest]) and rise > 6 * max(spreads[lowest], spreads[-1]):
        since = int(steps[windows[lowest][0]])
        text = f"From {medians[lowest]:.4g} around step {since} to {medians[-1]:.4g} now (medians)."
        remedy = "Lower the learning rate, or resume from a checkpoint before the rise with other data."
        yield _bad("diverged", "The loss has risen.", text, remedy)


def _checkpoints(run: RunFolder, summary: Summary) -> Iterator[Problem]:
    present = [one for one in run.checkpoints if one.present]
    damaged = [one for one in present if one.fault]
    if damaged:
        newest = damaged[-1] is present[-1]
        title = f"{len(damaged)} checkpoint(s) cannot be loaded{', also the newest one' if newest else ''}."
        remedy = "hpcfsdp verify RUN_DIR lists all faults; resume from an older file."
        found = _bad if newest else _warning
        yield found("damaged_checkpoint", title, damaged[-1].fault, remedy, "how-to/checkpoints.md")
    step, last = summary.step, summary.last_checkpoint_step
    if step and last is None:
        text = f"After {step} steps nothing has been saved: whatever ends the run loses them."
        remedy = "Set checkpoint.every; or in your own loop call hpcfsdp.checkpoint.save."
        yield _warning("no_checkpoint", "There is no checkpoint.", text, remedy, "how-to/checkpoints.md")
    elif run.checkpoints and not present:
        title = "No checkpoint of this run is where it was written."
        text = f"The newest was {run.checkpoints[-1].path}."
        remedy = "If the folder was copied without them, all is well; to resume, the run needs its newest file."
        yield _note("gone_checkpoints", title, text, remedy)
    usual = save_interval(run)
    if step and last is not None and usual and step - last > 2 * usual:
        text = f"{step - last} steps are not saved; before, there was one every {usual} steps."
        remedy = "Look for errors of the file system in the log."
        yield _warning("late_checkpoint", f"No checkpoint since step {last}.", text, remedy, "how-to/file-systems.md")
    held = sum(one.held_s or 0.0 for one in run.checkpoints)
    if summary.trained_s and held > LONG_HELD * (held + summary.trained_s):
        title = f"Checkpoints hold up training for {readable_share(held / (held + summary.trained_s))} of the time."
        text = f"{readable_duration(held)} in all, for {len(run.checkpoints)} checkpoints."
        remedy = "Save less often, or while training goes on: checkpoint.asynchronous true."
        yield _warning("held", title, text, remedy, "how-to/checkpoints.md")


def _memory(run: RunFolder) -> Iterator[Problem]:
    series = run.series
    steps, peaks = series.points("memory.peak_bytes")
    _, capacities = series.points("memory.capacity_bytes")
    if len(peaks) and len(capacities) and peaks.max() > HIGH_MEMORY_SHARE * capacities[-1] > 0:
        place, whole = int(np.argmax(peaks)), float(capacities[-1])
        peak, step = float(peaks[place]), int(steps[place])
        rank = series.column("memory.peak_rank")[np.searchsorted(series.steps, step)]
        text = f"{readable_bytes(peak)} of {readable_bytes(whole)} in step {step}"
        text += f"{f' on rank {int(rank)}' if math.isfinite(rank) else ''}: a longer sequence may not fit."
        remedy = "Use more ranks, a smaller batch, activation checkpointing, or CPU offload."
        title = f"Memory was {readable_share(peak / whole)} full."
        yield _warning("memory", title, text, remedy, "how-to/sharding.md")
    later = peaks[FIRST_STEPS:]
    if len(later) >= 4 * FEW:
        quarters = [float(np.median(part)) for part in np.array_split(later, 4)]
        grows = all(after > 1.01 * before for before, after in itertools.pairwise(quarters))
        if grows and quarters[3] > 1.1 * quarters[0]:
            text = f"The peak rose from {readable_bytes(quarters[0])} to {readable_bytes(quarters[3])} (medians of the "
            text += "first and the last quarter)."
            remedy = "Something keeps tensors of earlier steps: losses that are summed without .item() or .detach(), "
            remedy += "or outputs in a list."
            yield _warning("memory_grows", "Memory grows from step to step.", text, remedy)


def _stragglers(series: Series, summary: Summary) -> Iterator[Problem]:
    ranks, behind, busy = (series.column(name) for name in ("straggler.rank", "straggler.behind_s", "busy_s_mean"))
    times_of_steps = np.where(np.isfinite(busy), busy, series.column("seconds"))

    def lateness(steps: np.ndarray) -> float:
        base = times_of_steps[steps]
        return float(np.nanmedian(behind[steps] / base)) if np.isfinite(base).any() else math.nan

    known = np.flatnonzero(np.isfinite(ranks) & np.isfinite(behind))[FIRST_STEPS:][-WINDOW:]
    if len(known) < FEW or (summary.world_size or 2) < 2:
        return
    (rank, times), *_ = Counter(ranks[known].astype(int).tolist()).most_common(1)
    host = series.hosts.get(rank, "")
    who = f"Rank {rank}" + (f" on {host}" if host else "")
    often, share = times / len(known), lateness(known[ranks[known] == rank])
    # Of two equal ranks, one is last in half of the steps.
    enough = max(STRAGGLES_OFTEN, 1.5 / (summary.world_size or 2))
    if not (often > enough and share > FAR_BEHIND):
        hosts = [series.hosts.get(int(one), "") for one in ranks[known]]
        (host, times), *others = Counter(hosts).most_common()
        if not (host and others) or (summary.num_nodes or 2) < 2:
            return
        who, often = f"A rank on {host}", times / len(known)
        share = lateness(known[[one == host for one in hosts]])
    if often > enough and share > FAR_BEHIND:
        text = f"It was the slowest in {readable_share(often)} of the last {len(known)} steps, and computed "
        text += f"{readable_share(share)} longer than the mean of all ranks: all others wait for it."
        remedy = "If it has no more work than the others (longer batches, data that loads slowly), look at the node: "
        remedy += "other processes, heat, a slow device. hpcfsdp doctor measures each rank; SLURM leaves a node out "
        remedy += f"with --exclude={host or 'NODE'}."
        yield _warning("straggler", f"{who} holds up the others.", text, remedy, "how-to/report.md")


def _communication(series: Series) -> Iterator[Problem]:
    _, shares = series.points("comm_share")
    recent = shares[FIRST_STEPS:][-WINDOW:]
    if len(recent) >= FEW and float(np.median(recent)) > HIGH_COMM_SHARE:
        title = f"Ranks wait for communication in {readable_share(float(np.median(recent)))} of a step."
        text = f"Median of the last {len(recent)} steps. Waiting for a rank that is slow counts, too: see the spread "
        text += "over ranks."
        remedy = "A larger batch on each rank, gradient accumulation, sharding within nodes only (HYBRID_SHARD), or "
        remedy += "the right network interface."
        yield _warning("communication", title, text, remedy, "how-to/networks.md")


def _slowdown(series: Series) -> Iterator[Problem]:
    name, unit = rate_column(series)
    if not name:
        return
    steps, rates = series.points(name)
    steps, rates = steps[FIRST_STEPS:], rates[FIRST_STEPS:]
    if len(rates) < 4 * FEW:
        return
    windows = np.array_split(np.arange(len(rates)), min(20, len(rates) // FEW))
    medians = [float(np.median(rates[window])) for window in windows]
    best = int(np.argmax(medians))
    if medians[-1] < SLOWER * medians[best]:
        text = f"From {readable_count(medians[best])} {unit} around step {int(steps[windows[best][0]])} to "
        text += f"{readable_count(medians[-1])} {unit} now (medians)."
        remedy = "Compare the spread over ranks and the communication share before and after; look for a change of "
        remedy += "node, of sequence length, or a file system that is busy."
        yield _warning("slower", "Training has become slower.", text, remedy)


def _restarts(run: RunFolder) -> Iterator[Problem]:
    parts = segments(run)
    if len(parts) < 2:
        return
    silent = sum(part.start is not None and part.end is None for part in parts[:-1])
    outcomes = [part.end.text("outcome") for part in parts[:-1] if part.end is not None]
    errors, losses, lost = outcomes.count("error"), outcomes.count("lost"), 0
    for part, following in itertools.pairwise(parts):
        if part.end is not None and part.end.step is not None and following.start is not None:
            lost += max(0, part.end.step - (following.start.step or 0))
    text = f"It was started {_times(len(parts))}"
    text += f"; it had ended with an error {_times(errors)}" if errors else ""
    text += f"; it had lost ranks {_times(losses)}, and went on without them" if losses else ""
    text += f"; it had been killed, or its node had failed, {_times(silent)}" if silent else ""
    text += f"; {counted(lost, 'step')} had to be trained again" if lost else ""
    text = f"{text}." if errors or losses or silent or lost else "Each time it went on where it had stopped."
    title, remedy = f"The run was restarted {_times(len(parts) - 1)}.", "A checkpoint more often loses fewer steps."
    found = _warning if errors or losses or silent else _note
    yield found("restarts", title, text, remedy if lost else "", "how-to/preemption.md")


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def _logs_and_files(run: RunFolder) -> Iterator[Problem]:
    errors = run.notes.counts.get("ERROR", 0) + run.notes.counts.get("CRITICAL", 0)
    if errors:
        text = "The latest are listed under warnings and errors."
        yield _warning("errors", f"Ranks have logged {counted(errors, 'error')}.", text, page="reference/errors.md")
    for name, tally in run.tallies.items():
        if tally.damaged:
            text = f"They are left out; the first one is line {tally.first_damaged}. {tally.sound} others are sound."
            remedy = "A full disk or a node that failed cuts lines; two trainings in one folder mix them."
            yield _warning("damaged_lines", f"{name}: {counted(tally.damaged, 'damaged line')}.", text, remedy)
    for failure in run.unreadable:
        yield _warning("unreadable", "A part of the folder cannot be read.", f"{failure}.")
