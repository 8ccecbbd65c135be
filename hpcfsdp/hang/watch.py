"""The thread of a rank that answers for its node when a job hangs, and the report that a waiting rank asks for."""

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpcfsdp.hang import events, lost, report, stacks
from hpcfsdp.hang.inquiry import HangRequest, Inquiry

log = logging.getLogger("hpcfsdp.hang")

_TICK_S = 1.0
_ASK_EVERY_S = 5.0
"""How often the first rank of a node looks for requests in the folder; the others, in case it is stuck, less often."""
_ANSWER_S = 20.0  # how long to wait for the answers of other nodes: longer than it takes their second rank to look

_MOST_S = 60.0  # how long a report may take at most
_BEAT_S = 0.1  # how often a rank that waits for a report shows that it does not hang itself

Probe = Callable[[float], tuple[float, str] | None]
"""How long, in seconds, a device has waited, and where; None if it does not, or no longer than the given seconds."""


@dataclass(frozen=True)
class Seat:
    """A rank in its job."""

    job: str  # its name, usable as the name of a file
    rank: int  # of the world
    nodes: Sequence[Sequence[int]]  # for each its ranks
    node: int  # that of this rank
    memory: memoryview  # the rings of the node's ranks, ``events.NBYTES`` each
    host: str


class Watcher:
    """Answers requests as a thread, from creation until ``close``."""

    def __init__(
        self, seat: Seat, run_dir: Path, limit_s: float, *, end_job: Callable[..., Any], traces: Callable[[], str] = str
    ) -> None:
        """Not collective. Touches no disk. A wait of `limit_s` is a hang; 0: never.

        `end_job` ends all processes, with a message: for waits in which the main thread does not run Python. `traces`
        returns what a backend knows about its collectives.
        """
        self.limit_s = limit_s
        self._seat, self._inquiry, self._end_job, self._traces = seat, Inquiry(run_dir), end_job, traces
        self._local = seat.nodes[seat.node].index(seat.rank)
        self._answered: set[str] = set()
        self._ends_until_s = 0.0  # until when this rank ends processes of its node that hang
        self._began_s = time.time()  # a report from before is of another world, in which ranks were lost
        self._probes: list[weakref.WeakMethod[Probe]] = []
        self._watches_devices = False
        self._fd = stacks.arm()
        self._written = stacks.size(os.getpid(), self._fd)
        mine = seat.memory[self._local * events.NBYTES : (self._local + 1) * events.NBYTES]
        events.ring.move_to(mine)
        events.ring.own(os.getpid(), stacks.start_of(os.getpid()), self._fd, threading.main_thread().ident or 0)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hpcfsdp-hang", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Not collective. End the thread."""
        self._ended.set()
        self._thread.join(5.0)
        events.ring.own(os.getpid(), stacks.start_of(os.getpid()), -1, threading.main_thread().ident or 0)
        stacks.disarm(self._fd)
        events.ring.leave()

    def add_probe(self, probe: weakref.WeakMethod[Probe]) -> None:
        """Not collective. Also watch a device: the main thread may wait for it in C code, or not yet."""
        self._probes.append(probe)
        if not self._watches_devices:
            self._watches_devices = True
            # Not the thread that looks into the folder: a file system may stall.
            threading.Thread(target=self._watch_devices, name="hpcfsdp-devices", daemon=True).start()

    def explain(self, reason: str, *, anew: bool = False) -> Path | None:
        """Not collective. Write a report, or wait for the one that another rank writes.

        Takes up to 20 seconds; a folder that does not answer, the same file system for which a rank may wait, up to 60.
        Not `anew`: a report that another rank has written a moment ago does. Returns its path, None if it cannot be
        written.
        """
        found: list[Path | None] = []
        # A thread, that it can be left: this one must end the job though the folder is on a file system that stalls.
        worker = threading.Thread(target=lambda: found.append(self._explain(reason, anew)), daemon=True)
        worker.start()
        until_s = time.monotonic() + _MOST_S
        while worker.is_alive() and time.monotonic() < until_s:
            worker.join(_BEAT_S)
            if lost.current is not None:
                lost.current.beat()
        if not found:
            log.error("no report about a hang: %s does not answer within %d s", self._inquiry.folder, _MOST_S)
        return found[0] if found else None

    def _explain(self, reason: str, anew: bool) -> Path | None:
        seat, is_new = self._seat, False
        try:
            written = (
                None if anew else self._inquiry.latest_report(seat.job, max(self._began_s, time.time() - _ANSWER_S))
            )
            if written is not None:
                return written
            request, is_new = self._inquiry.ask(seat.job, f"rank {seat.rank} {reason}", ends=not anew)
            path = self._inquiry.report_path(request, seat.job)
            self._answer(request)
            until_s = time.monotonic() + _ANSWER_S
            while time.monotonic() < until_s and len(self._answers(request)) < len(seat.nodes) and not path.exists():
                time.sleep(0.05)
            if is_new:
                answers = self._answers(request)
                if not answers:
                    log.error("the job hangs, and no rank on any node answers questions about it")
                    return None
                text = report.render(answers, request.reason, request.asked_s, self._trace())
                path = self._inquiry.write_report(request, seat.job, text)
                log.error("the job hangs: %s\n%s", path, report.head(text))
                return path
            until_s += _ANSWER_S
            while time.monotonic() < until_s and not path.exists():
                time.sleep(0.05)
            return path if path.exists() else None
        except OSError as error:
            log.error("a report about a hang cannot be written to %s: %s", self._inquiry.folder, error)
        except Exception:  # whatever it is, the wait that asked must end
            log.exception("a report about a hang could not be made")
        finally:
            if is_new:
                self._inquiry.close(request)
        return None

    def _trace(self) -> str:
        try:
            return self._traces()
        except Exception as error:
            return f"(the backend could not be asked: {error})"

    def _run(self) -> None:
        look_s = 0.0
        while not self._ended.wait(_TICK_S):
            with contextlib.suppress(Exception):  # watching must end no training
                if time.monotonic() < self._ends_until_s and lost.current is not None:
                    # Ranks that wait for a device show it only when their own thread has found that.
                    slack_s = 2 * _TICK_S if self._watches_devices else 0.0
                    lost.current.end_hung(self.limit_s + slack_s)
                if time.monotonic() >= look_s:
                    look_s = time.monotonic() + _ASK_EVERY_S * (1 + min(self._local, 5))
                    for request in self._inquiry.requests(self._seat.job):
                        self._answer(request)
                written = stacks.size(os.getpid(), self._fd)
                if written != self._written:
                    self._written = written
                    if time.time() - events.ring.asked_s > 2 * stacks.ANSWER_S:
                        self.explain(f"got {stacks.SIGNAL.name}", anew=True)

    def _watch_devices(self) -> None:
        while not self._ended.wait(_TICK_S):
            for reference in tuple(self._probes):
                with contextlib.suppress(Exception):  # a device that has failed raises
                    self._look_at(reference)

    def _look_at(self, reference: weakref.WeakMethod[Probe]) -> None:
        """Ask one device. Between two looks nothing keeps it alive."""
        probe = reference()
        if probe is None:
            self._probes.remove(reference)
            return
        found = probe(self.limit_s) if self.limit_s > 0 else None
        if found is not None:
            reason = f"has waited {found[0]:.0f} s for {found[1]}"
            path = self.explain(reason)
            if not self._is_over(reference):
                self._end_job(f"{reason}: see {path}" if path else reason)

    def _is_over(self, reference: weakref.WeakMethod[Probe]) -> bool:
        """Return whether this world ends, or a device's wait, once ranks that hang have been ended."""
        if lost.current is None:
            return self._ended.is_set()
        until_s = time.monotonic() + self.limit_s + lost.REPORTED_WITHIN_S
        while not self._ended.wait(_BEAT_S) and time.monotonic() < until_s:
            lost.current.beat()
            probe = reference()
            if lost.current.lost() or probe is None or probe(self.limit_s) is None:
                return True
        return self._ended.is_set()

    def _answer(self, request: HangRequest) -> None:
        """Answer for this node, unless another of its ranks does."""
        seat, is_known = self._seat, request.name in self._answered
        self._answered.add(request.name)
        if not is_known and self._inquiry.claim(request, seat.job, seat.node):
            self._inquiry.answer(request, seat.job, seat.node, self._look_at_node())
            if request.ends and lost.current is not None:
                # Some may hang for less than the limit yet: they waited after who asks had begun to.
                self._ends_until_s = time.monotonic() + self.limit_s + lost.REPORTED_WITHIN_S

    def _look_at_node(self) -> dict[str, Any]:
        seat, local = self._seat, self._seat.nodes[self._seat.node]
        rings = [seat.memory[n * events.NBYTES : (n + 1) * events.NBYTES] for n in range(len(local))]
        records = [events.read(memory) for memory in rings]
        processes = [stacks.process(record.pid, record.started) for record in records]
        for memory in rings:
            events.note_question(memory)
        asked = [process.state in ("R", "S", "D") for process in processes]
        pids = [(record.pid, record.stacks_fd if yes else -1) for record, yes in zip(records, asked, strict=True)]
        texts = stacks.ask_all(pids)
        ranks = [
            {
                **{"rank": rank, "host": seat.host, "pid": record.pid, "main_thread": record.main_thread},
                **asdict(process),
                "wait": None if record.wait is None else asdict(record.wait),
                "events": [asdict(event) for event in record.events[-report.SHOWN_EVENTS * 4 :]],
                "stacks": text,
            }
            for rank, record, process, text in zip(local, records, processes, texts, strict=True)
        ]
        size = sum(map(len, seat.nodes))
        return {"job": seat.job, "node": seat.node, "num_nodes": len(seat.nodes), "size": size, "ranks": ranks}

    def _answers(self, request: HangRequest) -> list[dict[str, Any]]:
        answers = filter(report.is_answer, self._inquiry.answers(request))
        return [answer for answer in answers if answer["job"] == self._seat.job]


watcher: Watcher | None = None  # that of this process, from ``hpcfsdp.init`` to ``finalize``


def stop() -> None:
    """Not collective. End the watch of this process."""
    global watcher
    ended, watcher = watcher, None
    if ended is not None:
        ended.close()
