"""Run a program of a user as it is: ``python -m tests.programs.program FILE ARGUMENTS``."""

import importlib.util
import os
import runpy
import sys
from pathlib import Path

import torch


def complete_torchvision():
    """Make torchvision importable where it is built for another torch, as PyPI's is for one with CUDA.

    Its library of operators does not load then. It goes on without, except that it describes two of them to the
    compiler, which fails unless they are declared. No test calls them.
    """
    found = importlib.util.find_spec("torchvision")
    try:
        for path in Path(found.origin).parent.glob("_C*.so"):
            torch.ops.load_library(path)
    except OSError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    complete_torchvision()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
