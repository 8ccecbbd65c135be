"""Processes that ranks start: workers of a DataLoader, pools, and programs whose script starts MPI at its top."""

import signal

import psutil
import pytest

PROGRAM = """
from mpi4py import MPI  # as on Cray systems, before torch
import multiprocessing, os, sys, time
import torch
import hpcfsdp
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 100_000
    def __getitem__(self, index):
        if index == 0:
            assert MPI.Is_initialized() == (METHOD == "fork")
        time.sleep(0.01)
        return torch.tensor(index)

def fails(_):
    try:
        hpcfsdp.init()
    except hpcfsdp.errors.LaunchError as error:
        return str(error)

METHOD = sys.argv[1]
if __name__ == "__main__":
    with hpcfsdp.preemption() as stop:
        world = hpcfsdp.init()
        if METHOD != "fork":
            with multiprocessing.get_context(METHOD).Pool(1) as pool:
                assert "keep hpcfsdp.init() behind" in pool.map(fails, [0])[0]
        loader = DataLoader(Slow(), 4, num_workers=2, multiprocessing_context=METHOD)
        for step, batch in enumerate(loader):
            if step == 3:
                open(f"begun{world.rank}", "w").close()
            if stop.requested(step):
                break
        more = iter(DataLoader(Slow(), 4, num_workers=1, multiprocessing_context=METHOD))
        assert next(more).tolist() == [0, 1, 2, 3]  # started, and ended, after the signal
        hpcfsdp.exit_requeue()
"""


@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(method, marks=pytest.mark.slow) for method in ("spawn", "forkserver"))]
)
def test_signals_to_all_processes_of_a_job_end_it_with_75(start, tmp_path, method):
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    job = start("-W", "ignore::RuntimeWarning", script, method, ranks=2)
    job.wait_for(lambda: all((tmp_path / f"begun{rank}").exists() for rank in range(2)))
    launcher = psutil.Process(job.process.pid)
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGUSR1):
        for process in launcher.children(recursive=True):
            process.send_signal(number)
    job.wait()
    assert job.code == 75, job.stderr
    assert "killed by signal" not in job.stderr
    assert "died unexpectedly" not in job.stderr


def test_a_working_directory_that_is_gone_is_named_before_any_library_fails(start, tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    program = "import os, hpcfsdp; os.rmdir(os.getcwd()); hpcfsdp.init()"
    job = start("-c", program, cwd=folder).wait()
    assert f"the working directory {folder} (deleted): No such file or directory" in job.stderr
    assert job.code == 1
