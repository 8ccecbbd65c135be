"""Measurements that need a process of their own, whose memory is empty at the start."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from hpcfsdp.errors import HpcfsdpError


def measured_in_new_process(module: str, arguments: Mapping[str, Any], what: str) -> Any:
    """What ``python -m module JSON`` writes as the last line of its standard output, from JSON.

    Args:
        arguments: the JSON.
        what: is measured, for the message.

    Raises:
        HpcfsdpError: the process has failed; its messages are on standard error.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, json.dumps(arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise HpcfsdpError(f"measuring {what} failed with exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])
