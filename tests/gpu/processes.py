"""Python in a process of its own, outside of the job."""

import os
import subprocess
import sys
from pathlib import Path


def run_alone(*arguments, **environ):
    """``python arguments`` where this folder's modules can be imported; the process as it has ended."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "PRTE_"))}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=Path(__file__).resolve().parents[2],
        env={**ours, **environ},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
