"""Tensors of a checkpoint by patterns of their names. Pure."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.index import CheckpointIndex
from hpcfsdp.errors import CheckpointError, nearest

_MODEL = f"{schema.MODEL}/"


def matching(index: CheckpointIndex, patterns: Iterable[str] = ()) -> list[str]:
    """Paths of the tensors, by any of their names, that match at least one pattern; not collective.

    Args:
        patterns: names in which ``*`` stands for any text, ``?`` for one character and ``[ab]`` for one of some, as in
            a shell, but ``*`` also for text with slashes. Compared with whole paths, and with those below ``model/``
            without it: "blocks.0.*", "model/blocks.0.*" and "optim/state/blocks.0.*" all can match. A name that is
            written out matches itself, whatever characters it has. None at all: everything matches.

    Returns:
        Paths in the order of the file, aliases of tied tensors (``index.links``) behind all others; each once.

    Raises:
        CheckpointError: a pattern matches nothing; names the nearest.
    """
    known = [*index.tensors, *index.links]
    patterns = list(patterns)
    if not patterns:
        return known
    found: set[str] = set()
    for pattern in patterns:
        here = hits(pattern, known)
        if not here:
            short = [path.removeprefix(_MODEL) for path in known]
            hint = nearest(pattern, short if not pattern.startswith(_MODEL) else known)
            raise CheckpointError(
                f"{index.info.path}: no tensor matches {pattern!r}{hint} (hpcfsdp ls lists what there is)"
            )
        found.update(here)
    return [path for path in known if path in found]


def tensors_matching(index: CheckpointIndex, patterns: Iterable[str] = ()) -> list[str]:
    """As ``matching``, but each tensor once, under its own path, by whichever of its names it was matched."""
    found = {index.links.get(path, path) for path in matching(index, patterns)}
    return [path for path in index.tensors if path in found]


def hits(pattern: str, paths: Iterable[str]) -> set[str]:
    """Those of some paths that one pattern matches, as ``matching`` has it."""
    like = re.compile(fnmatch.translate(pattern))

    def matches(name: str) -> bool:
        return name == pattern or like.match(name) is not None

    return {path for path in paths if matches(path) or (path.startswith(_MODEL) and matches(path.removeprefix(_MODEL)))}
