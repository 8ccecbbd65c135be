"""The end of this job, as its scheduler knows it. ``env.SCHEDULERS`` has the variables of each."""

import contextlib
import datetime
import json
import shutil
import subprocess
import time

from hpcfsdp import env

ANSWER_S = 10.0  # how long a scheduler's command may take


def job_end() -> float | None:
    """Return when the scheduler ends this job, in seconds since the epoch; None without a scheduler, limit or answer.

    A variable may say it. Otherwise the scheduler's command is asked, which containers may lack.
    """
    for job in env.scheduler_jobs():
        if job.end_s is not None:
            return job.end_s
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, subprocess.SubprocessError):
            return _ask(job.scheduler, job.number)
    return None


def _ask(scheduler: str, job: str) -> float | None:
    """Return the end of a job as its scheduler's command says it. PALS, a launcher within PBS, does not know it."""
    if scheduler == "SLURM":
        return _local_time(_answer("squeue", "--noheader", "--jobs", job, "--format=%e"), "%Y-%m-%dT%H:%M:%S")
    if scheduler == "PBS":
        (found,) = json.loads(_answer("qstat", "-f", "-F", "json", job))["Jobs"].values()
        hours, minutes, seconds = map(int, found["Resource_List"]["walltime"].split(":"))
        return _local_time(found["stime"], "%a %b %d %H:%M:%S %Y") + 3600 * hours + 60 * minutes + seconds
    if scheduler == "LSF":
        left, kind = _answer("bjobs", "-noheader", "-o", "time_left", job).split()  # hours:minutes, and L for a limit
        hours, minutes = map(int, left.split(":"))
        return time.time() + 3600 * hours + 60 * minutes if kind == "L" else None
    if scheduler == "Flux":
        left_s = float(_answer("flux", "job", "timeleft"))  # of the job around this process
        return time.time() + left_s if left_s < float("inf") else None
    raise KeyError(scheduler)


def _local_time(text: str, form: str) -> float:
    return datetime.datetime.strptime(text.strip(), form).astimezone().timestamp()


def _answer(*command: str) -> str:
    found = shutil.which(command[0])
    if found is None:
        raise FileNotFoundError(command[0])
    done = subprocess.run([found, *command[1:]], capture_output=True, text=True, timeout=ANSWER_S, check=True)
    return done.stdout
