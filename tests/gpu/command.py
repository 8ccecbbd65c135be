"""``python -m tests.gpu.command``: the command hpcfsdp, with HPCFSDP_SIMULATED=1 on the simulated device."""

import contextlib
import os
import sys

from hpcfsdp.cli import bench_gpu, main

if __name__ == "__main__":
    bench_gpu.HPCFSDP = (sys.executable, "-m", "tests.gpu.command")
    with contextlib.ExitStack() as stack:
        if os.environ.get("HPCFSDP_SIMULATED"):
            from tests.accelerator import simulated

            stack.enter_context(simulated.unpinned_copies())  # DDP's and DCP's
        main.run()
