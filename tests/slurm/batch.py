"""Jobs that tests submit with the scripts of jobs/."""

import contextlib
import time
from pathlib import Path

import psutil

UNFINISHED = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")


class Job:
    """A job of a script in `folder`/jobs, submitted from there without its options about GPUs, which the nodes lack."""

    def __init__(self, cluster, folder, script, options=(), arguments=(), *, edit=lambda text: text):
        self._cluster, self.folder = cluster, folder
        path = folder / "jobs" / script
        lines = path.read_text().splitlines(keepends=True)
        path.write_text(edit("".join(line for line in lines if not line.startswith("#SBATCH --gpus"))))
        common = ["--parsable", "--cpus-per-task=1", f"--chdir={folder}", "--export=ALL,HPC_SRUN_MPI=pmi2"]
        if not any("--output" in option for option in options):
            common.append("--output=log")
        self.id = cluster.run("sbatch", *common, *options, path, *arguments, cwd=folder)

    @property
    def log(self):
        path = self.folder / "log"
        return path.read_text() if path.exists() else ""

    def field(self, name, job=None):
        fields = self._cluster.run("scontrol", "show", "job", job or self.id).split()
        return dict(pair.split("=", 1) for pair in fields if "=" in pair)[name]

    @property
    def state(self):
        return self.field("JobState")

    def wait_for(self, condition, timeout=120):
        until = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < until, f"{self.state}\n{self.log[-3000:]}"
            time.sleep(0.05)

    def wait(self, timeout=120):
        """Until it has ended; its final state."""
        self.wait_for(lambda: self.state not in UNFINISHED, timeout)
        return self.state

    def start_again(self):
        """Let it begin now that it is back in the queue: SLURM would wait for two minutes."""
        self.wait_for(lambda: self.state == "PENDING")
        # Not at once: slurmd refuses credentials of the second in which the job was ended.
        self._cluster.run("scontrol", "update", f"JobId={self.id}", "StartTime=now+2")
        self.wait_for(lambda: self.state != "PENDING")

    def ranks(self):
        """The processes of its ranks, by rank."""
        found = {}
        for process in self._cluster.ranks():
            with contextlib.suppress(psutil.Error):
                mine = process.environ().get("SLURM_JOB_ID") == self.id
                if mine and process.name().startswith("python"):
                    found[int(process.environ()["SLURM_PROCID"])] = process
        return dict(sorted(found.items()))


def train_steps(run_dir):
    """Records of steps in the metrics of a run, but for one that is being written."""
    path = Path(run_dir, "metrics.jsonl")
    return path.read_text().count("\n") if path.exists() else 0
