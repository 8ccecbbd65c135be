"""The end of this job, as its scheduler knows it."""

from __future__ import annotations

import contextlib
import datetime
import json
import shutil
import subprocess
import time
from collections.abc import Callable

from hpcfsdp import env

ANSWER_S = 10.0
"""How long a scheduler's command may take."""


def job_end() -> float | None:
    """When the scheduler ends this job, in seconds since the epoch; None without a scheduler, limit or answer.

    SLURM's own variable says it (``SLURM_JOB_END_TIME``). Older versions, PBS and Flux are asked by their commands,
    which containers may lack.
    """
    known_s = env.slurm_job_end()
    if known_s is not None:
        return known_s
    for name, ask in _QUESTIONS.items():
        job = env.job_of(name)
        if job:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, subprocess.SubprocessError):
                return ask(job)
    return None


def _slurm(job: str) -> float:
    return _local_time(_answer("squeue", "--noheader", "--jobs", job, "--format=%e"), "%Y-%m-%dT%H:%M:%S")


def _pbs(job: str) -> float:
    (found,) = json.loads(_answer("qstat", "-f", "-F", "json", job))["Jobs"].values()
    hours, minutes, seconds = map(int, found["Resource_List"]["walltime"].split(":"))
    return _local_time(found["stime"], "%a %b %d %H:%M:%S %Y") + 3600 * hours + 60 * minutes + seconds


def _flux(job: str) -> float | None:
    del job  # the one around this process
    left_s = float(_answer("flux", "job", "timeleft"))
    return time.time() + left_s if left_s < float("inf") else None


_QUESTIONS: dict[str, Callable[[str], float | None]] = {
    "SLURM_JOB_ID": _slurm,
    "PBS_JOBID": _pbs,
    "FLUX_JOB_ID": _flux,
}
"""The scheduler's variable with the job, and how to ask for its end."""


def _local_time(text: str, form: str) -> float:
    return datetime.datetime.strptime(text.strip(), form).astimezone().timestamp()


def _answer(*command: str) -> str:
    found = shutil.which(command[0])
    if found is None:
        raise FileNotFoundError(command[0])
    done = subprocess.run([found, *command[1:]], capture_output=True, text=True, timeout=ANSWER_S, check=True)
    return done.stdout
