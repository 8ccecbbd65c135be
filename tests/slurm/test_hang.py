"""A node that freezes: the other node reports it, and the job ends with an exit code."""

import signal

import pytest

SCRIPT = """
import time
import hpcfsdp

world = hpcfsdp.init("cpu", run_dir="run")
open(f"began-{world.rank}", "w").close()
if world.node_rank == 1:
    time.sleep(1000)
world.host.barrier()
"""


@pytest.mark.slow
def test_the_ranks_of_a_node_that_does_not_answer_are_named(srun, cluster, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    step = srun("-N2 -n4 --export=ALL,HPCFSDP_HANG_S=8", "script.py")
    step.wait_for(lambda: all((tmp_path / f"began-{rank}").exists() for rank in range(4)))
    frozen = [process for process in cluster.ranks() if process.environ().get("SLURMD_NODENAME") == "n2"]
    for process in frozen:
        process.send_signal(signal.SIGSTOP)
    assert frozen
    step.wait()
    assert step.code != 0
    (path,) = (tmp_path / "run/hang").iterdir()
    lines = path.read_text().splitlines()
    assert "4 rank(s) on 2 node(s)" in lines[0]
    assert lines[2].startswith("Ranks 0-1 wait(s) for ranks 2-3 in barrier, for ")
    assert "No answer from node(s) 1 with ranks 2-3: down, cut off, or all of its ranks stuck" in lines
    assert str(path) in step.stderr
