"""A SLURM of two nodes on this machine, with its own configuration, ports, key and folder."""

import contextlib
import os
import pwd
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

NODES = ("n1", "n2")
# slurmctld, slurmd and munged live where only root's PATH looks.
SEARCH = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
TOOLS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "sinfo")

# Nothing here needs cgroups, which few containers offer. %n is the name of a node. The scheduler runs often, and
# KillWait is short, so that ranks that ignore SIGTERM end within the time of a test.
CONFIGURATION = """\
ClusterName=hpcfsdp
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
TmpFS={folder}/%n
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,sched_min_interval=100000
FirstJobId={first_job}
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=pmi2
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=3
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def find(tool):
    """The path of a program, None where it is not installed."""
    return shutil.which(tool, path=SEARCH)


def missing_tools():
    return [tool for tool in TOOLS if find(tool) is None]


def nodes_can_have_names():
    """Whether a daemon can have another host name (a UTS namespace), which few containers allow."""
    tool = find("unshare")
    return (
        tool is not None and subprocess.run([tool, "--uts", "true"], capture_output=True, check=False).returncode == 0
    )


def processes_of(folder):
    """All processes of the cluster in `folder`."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and _belongs(process, folder):
                found.append(process)
        except psutil.Error:  # gone, or of another user
            continue
    return found


def _belongs(process, folder):
    if process.name() == "slurmstepd":  # it writes its title over its environment
        return any(file.path.startswith(f"{folder}/") for file in process.open_files())
    return process.environ().get("SLURM_CONF") == f"{folder}/slurm.conf"


def end_all(folder):
    """Kill all processes of the cluster in `folder`, and remove it."""
    while left := processes_of(folder):
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=1)
    shutil.rmtree(folder)


class Cluster:
    """The daemons and their processes, for a ``with`` statement.

    At its end a guard, another process, kills those that are left. It does the same if pytest is killed.
    """

    def __enter__(self):
        # Not pytest's folder: it is closed to others, which munged refuses, and too long for the name of a socket.
        self.folder = Path(tempfile.mkdtemp(prefix="hpcfsdp-slurm-"))
        self.folder.chmod(0o755)
        self.named = nodes_can_have_names()
        self._daemons = []
        guard = [sys.executable, __file__, self.folder]
        self._guard = subprocess.Popen(guard, stdin=subprocess.PIPE, start_new_session=True)
        try:
            self._configure()
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self._guard.stdin.close()
        for process in (*self._daemons, self._guard):
            process.wait(timeout=30)

    @property
    def environ(self):
        """The environment of commands: without the traces of a launcher or job that pytest itself may run in."""
        foreign = ("SLURM", "SBATCH", "SRUN", "PMI", "OMPI", "HYDRA", "HPCFSDP_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        return {**kept, "PATH": SEARCH, "SLURM_CONF": str(self.folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}

    def run(self, tool, *arguments, cwd=None):
        """The output of one of SLURM's commands."""
        command = [find(tool), *map(str, arguments)]
        done = subprocess.run(
            command, cwd=cwd, env=self.environ, capture_output=True, text=True, timeout=30, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"{command} ended with {done.returncode}: {done.stderr}")
        return done.stdout.strip()

    def speaks_pmix(self):
        """Whether SLURM's PMIx plug-in finds the library that it loads."""
        step = [find("srun"), "--mpi=pmix", "-n1", "true"]
        done = subprocess.run(step, env=self.environ, capture_output=True, timeout=30, check=False)
        return done.returncode == 0

    def ranks(self):
        """The processes of steps and jobs."""
        found = []
        for process in processes_of(self.folder):
            with contextlib.suppress(psutil.Error):
                found += [process] if "SLURM_PROCID" in process.environ() else []
        return found

    def _configure(self):
        for name in ("state", *NODES):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(1 + len(NODES))]
        text = CONFIGURATION.format(
            host=socket.gethostname().split(".")[0],
            user=pwd.getpwuid(os.getuid()).pw_name,
            folder=self.folder,
            # MPICH names its shared memory after the job: several such clusters may run at a time.
            first_job=1 + secrets.randbelow(1 << 25),
            ports=[open_socket.getsockname()[1] for open_socket in sockets],
        )
        for open_socket in sockets:
            open_socket.close()
        (self.folder / "slurm.conf").write_text(text)

    def _start(self):
        at = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid", "seed-file": "munged.seed"}
        options = [f"--{option}={self.folder}/{name}" for option, name in at.items()]
        self._daemon("munged", "--foreground", "--force", *options)
        self._wait_until("munged made its socket", (self.folder / "munge.socket").exists)
        self._daemon("slurmctld", "-D")
        for node in NODES:
            rename = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', node] if self.named else []
            self._daemon("slurmd", "-D", "-N", node, prefix=rename)
        self._wait_until("both nodes were idle", self._idle)

    def _idle(self):
        try:
            return self.run("sinfo", "--noheader", "--Node", "--format=%T").split() == ["idle"] * len(NODES)
        except RuntimeError:  # slurmctld does not listen yet
            return False

    def _daemon(self, tool, *arguments, prefix=()):
        command = [*prefix, find(tool), *arguments]
        with open(self.folder / f"{tool}.out", "a") as output:
            self._daemons.append(
                subprocess.Popen(command, env=self.environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
            )

    def _wait_until(self, what, condition, timeout=30):
        until = time.monotonic() + timeout
        while not condition():
            ended = [daemon for daemon in self._daemons if daemon.poll() is not None]
            if ended or time.monotonic() > until:
                output = "".join(f"\n-- {path.name}\n{path.read_text()}" for path in self.folder.glob("*.out"))
                raise RuntimeError(
                    f"SLURM did not start: {'a daemon ended' if ended else 'time was up'} before {what}{output}"
                )
            time.sleep(0.05)


if __name__ == "__main__":  # the guard: reads until its parent closes the pipe or ends
    sys.stdin.buffer.read()
    end_all(sys.argv[1])
