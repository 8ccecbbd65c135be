"""Measurements in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from hpcfsdp.errors import HpcfsdpError


def measured_in_new_process(module: str, arguments: Mapping[str, Any], what: str) -> Any:
    """Return what ``python -m module JSON`` prints as its last line, from JSON: its memory is empty at the start.

    Raise an HpcfsdpError that names `what` if it fails; its own messages are on standard error.
    """
    command = [sys.executable, "-m", module, json.dumps(arguments)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise HpcfsdpError(f"measuring {what} failed with exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])
