"""Empty figures of matplotlib, which is an extra, and the files that they are written to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from hpcfsdp.errors import HpcfsdpError, needs_extra

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float, dpi: int = 120) -> Figure:
    """Return an empty figure, sizes in inches, without a window system. An HpcfsdpError: there is no matplotlib."""
    with needs_extra("plot", "a picture"):
        from matplotlib.figure import Figure
    return Figure(figsize=(width, height), dpi=dpi, layout="constrained")


def write_figure(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a figure in the format of the name's suffix: png, pdf, svg. Raise an HpcfsdpError if that fails."""
    path = Path(path)
    formats = figure.canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        endings = ", ".join(f".{name}" for name in sorted(formats))
        raise HpcfsdpError(f"{path}: unknown image format; the name has to end with one of {endings}")
    import matplotlib

    try:
        with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text: small, and readable by programs
            figure.savefig(path)
    except OSError as error:
        raise HpcfsdpError(f"{path}: cannot be written: {error.strerror or error}") from error
    return path
