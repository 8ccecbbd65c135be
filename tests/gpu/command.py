"""``python -m tests.gpu.command``: the command hpcfsdp, with HPCFSDP_SIMULATED=1 on the simulated device.

``bench gpu-report`` is that of ``python -m tests.bench``.
"""

import contextlib
import os
import sys

from hpcfsdp.cli import main
from tests.bench import command, gpu_report

if __name__ == "__main__":
    gpu_report.HPCFSDP = (sys.executable, "-m", "tests.gpu.command")
    with contextlib.ExitStack() as stack:
        if os.environ.get("HPCFSDP_SIMULATED"):
            from tests.accelerator import simulated

            stack.enter_context(simulated.unpinned_copies())  # DDP's and DCP's
        if sys.argv[1:3] == ["bench", "gpu-report"]:
            main.VERBS["bench"] = (command.__name__, "")
        main.run()
