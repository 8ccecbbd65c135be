"""Folders of runs, as trainings leave them: for tests of reports."""

import json
import math
from datetime import datetime, timedelta, timezone
from pathlib import Path

import numpy as np

BEGIN = datetime(2026, 3, 2, 8, 0, 0, tzinfo=timezone.utc)
GIB = 1 << 30


def dated(seconds):
    """A date of a record, so long after the first start."""
    return (BEGIN + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def write_lines(path, records):
    """Write JSON lines, and make the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")
    return path


def train_record(step, seconds_since, *, ranks=8, slow_rank=5, slow=0.03, loss=None, random=None):
    """A record of one step with all fields."""
    draw = (lambda: 0.0) if random is None else random.standard_normal
    busy = 0.40 + 0.008 * draw()
    straggler = slow_rank if slow > 0.1 or step % 3 == 0 else step % ranks
    behind = abs(busy * slow * (1 + 0.2 * draw()))
    waits = 0.06 + 0.005 * abs(draw())
    seconds = busy + behind + waits
    return {
        "step": step,
        "kind": "train",
        "date": dated(seconds_since),
        "loss": loss if loss is not None else 1.9 + 8.5 / math.sqrt(step + 3) + 0.05 * draw(),
        "grad_norm": 0.8 + 6 / (step + 2) + 0.08 * abs(draw()),
        "lr": 3e-4 * min(step / 100, 1) * (0.1 + 0.9 * math.exp(-step / 3000)),
        "seconds": seconds,
        "tokens": 65536,
        "tokens_per_s": 65536 / seconds,
        "flop_utilisation": 0.2 / seconds,
        "comm_share": (waits + behind) / seconds,
        "comm_share_max": min((waits + 1.6 * behind) / seconds, 1),
        "busy_s_mean": busy,
        "busy_s_max": busy + behind,
        "straggler": {"rank": straggler, "host": f"n{straggler // 4:04d}", "behind_s": behind},
        "memory": {
            "now_bytes": 11 * GIB,
            "peak_bytes": int(30.5 * GIB + 0.2 * GIB * abs(draw())),
            "peak_rank": 3,
            "parameters_bytes": 4 * GIB,
            "gradients_bytes": 4 * GIB,
            "optimizer_bytes": 8 * GIB,
            "gathered_bytes": 3 * GIB,
        },
    }


def start_event(seconds_since, step=0, **others):
    """The event of a start on 8 ranks of 2 nodes."""
    return {
        "kind": "start",
        "date": dated(seconds_since),
        "step": step,
        "world_size": 8,
        "num_nodes": 2,
        "device": "NVIDIA H100 80GB HBM3",
        "hosts": ["n0000", "n0001"],
        "topology": "2 nodes with 4 ranks each",
        "command": ["hpcfsdp", "train", "run.yaml", "--optim.lr", "3e-4"],
        "versions": {"hpcfsdp": "0.2.0", "torch": "2.13.0", "MPI": "Open MPI 5.0.11", "Python": "3.12.4"},
        "job": "4711",
        "parameters": 1234567890,
        "flops_per_token": 7.4e9,
        "peak_flops": 9.89e14,
        "resumed_from": None,
        **others,
    }


def checkpoint_event(seconds_since, step):
    """The event of a checkpoint that was written while training went on."""
    return {
        "kind": "checkpoint",
        "date": dated(seconds_since),
        "step": step,
        "path": f"runs/mine/checkpoints/step-{step:08d}.h5",
        "bytes": 14814816280,
        "seconds": 9.5,
        "held_s": 1.1,
        "asynchronous": True,
    }


CONFIG = """\
run_dir: runs/mine
seed: 0
model:
  layers: 24
  width: 2048
optim:
  lr: 0.0003
train:
  steps: {steps}
checkpoint:
  every: {every}
  asynchronous: true
"""


def write_run(folder, steps=2000, *, every=250, total=None, slow_from=None, end="complete", restart_at=None):
    """A run on 8 ranks with checkpoints, and a restart in the middle after a signal.

    Args:
        slow_from: the step from which rank 5 is slow; None for never.
        end: outcome of the last "end" event; None for a run that has left none.
        restart_at: the step of the restart; None for the middle.
    """
    folder, random = Path(folder), np.random.default_rng(7)
    middle = steps // 2 if restart_at is None else restart_at
    records, events, now = [], [start_event(0)], 40.0
    for step in range(1, steps + 1):
        slow = 0.25 if slow_from is not None and step >= slow_from else 0.03
        record = train_record(step, now, slow=slow, random=random)
        now += record["seconds"]
        records.append({**record, "restart": int(step > middle)})
        if step % every == 0:
            events.append(checkpoint_event(now, step))
        if step == middle:
            events.append({"kind": "signal", "date": dated(now), "step": step, "reason": "SIGUSR2 from the scheduler"})
            if step % every:
                events.append(checkpoint_event(now + 2, step))
            events.append({"kind": "end", "date": dated(now + 9), "step": step, "outcome": "stopped", "message": ""})
            now += max(60.0, 0.2 * now)
            path = f"runs/mine/checkpoints/step-{step:08d}.h5"
            events.append(start_event(now, step, restart=1, resumed_from=path))
            now += 40
    if end is not None:
        message = "rank 3: CUDA out of memory" if end == "error" else ""
        events.append({"kind": "end", "date": dated(now), "step": steps, "outcome": end, "message": message})
    held = {"kind": "held_out", "unigram_bits_per_byte": 4.8, "predicted_bytes": 65536}
    for step in range(every, steps + 1, every):
        records.insert(
            next(place for place, one in enumerate(records) if one["step"] > step) if step < steps else len(records),
            {"step": step, **held, "bits_per_byte": (1.95 + 8.5 / math.sqrt(step + 3)) / math.log(2)},
        )
    write_lines(folder / "metrics.jsonl", records)
    write_lines(folder / "events.jsonl", events)
    (folder / "config.yaml").write_text(CONFIG.format(steps=total or steps, every=every))
    logs = [
        {"level": "WARNING", "topic": "hpcfsdp.comm", "message": "rank 5 has waited 12.1 s for rank 1 in all_gather"},
        {"level": "INFO", "topic": "hpcfsdp.train", "message": "step 20/2000 loss 2.3"},
    ]
    for rank in range(8):
        lines = [{"date": dated(300 + place), "rank": rank, "host": "n0000", **log} for place, log in enumerate(logs)]
        write_lines(folder / "logs" / f"rank-{rank:04d}.jsonl", lines)
    return folder
