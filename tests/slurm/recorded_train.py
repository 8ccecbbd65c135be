"""``hpcfsdp train``, with a file for each rank of the samples that it took.

A line for each step: when, in which run of the job (its number, and its restarts), which step, which samples.
"""

import json
import os
import sys
import time

from hpcfsdp.cli.main import run
from hpcfsdp.examples.gpt import data

_share = data.share


def _recorded_share(batch, accumulation, rank, size):
    parts = _share(batch, accumulation, rank, size)
    step = sys._getframe(1).f_locals["self"].step  # of the trainer
    names = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT")
    record = {"time": time.time(), "run": [int(os.environ.get(name, "0")) for name in names], "step": step + 1}
    with open(f"samples-{rank}.jsonl", "a") as file:
        file.write(json.dumps({**record, "samples": [sample for part in parts for sample in part]}) + "\n")
    return parts


data.share = _recorded_share
run()
