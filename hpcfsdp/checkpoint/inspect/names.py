"""Patterns of tensor names. Pure."""

import fnmatch
import re
from collections.abc import Iterable

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.index import CheckpointIndex
from hpcfsdp.errors import CheckpointError, nearest

_MODEL = f"{schema.MODEL}/"


def matching(index: CheckpointIndex, patterns: Iterable[str] = ()) -> list[str]:
    """Return paths of the tensors, by any of their names, that match at least one pattern; not collective.

    Args:
        patterns: names with shell wildcards ``*``, ``?`` and ``[ab]``; ``*`` also matches slashes. Compared with whole
            paths, and with those below ``model/`` without it: "blocks.0.*", "model/blocks.0.*" and
            "optim/state/blocks.0.*" all can match. A literal name matches itself, whatever characters it has. Without
            patterns everything matches.

    Returns:
        Paths in the order of the file, then aliases of tied tensors (``index.links``); each once.

    Raises:
        CheckpointError: a pattern matches nothing; names the nearest.
    """
    known = [*index.tensors, *index.links]
    patterns = list(patterns)
    if not patterns:
        return known
    found: set[str] = set()
    for pattern in patterns:
        here = match_names(pattern, known)
        if not here:
            hint = nearest(pattern, known if pattern.startswith(_MODEL) else [n.removeprefix(_MODEL) for n in known])
            what = f"no tensor matches {pattern!r}{hint} (hpcfsdp ls lists what there is)"
            raise CheckpointError(f"{index.info.path}: {what}")
        found |= here
    return [path for path in known if path in found]


def tensors_matching(index: CheckpointIndex, patterns: Iterable[str] = ()) -> list[str]:
    """As ``matching``, but each tensor once, by its own path, if any of its names matches."""
    found = {index.links.get(path, path) for path in matching(index, patterns)}
    return [path for path in index.tensors if path in found]


def match_names(pattern: str, paths: Iterable[str]) -> set[str]:
    """Return the paths that one pattern matches, see ``matching``."""
    like = re.compile(fnmatch.translate(pattern))

    def matches(name: str) -> bool:
        return name == pattern or like.match(name) is not None

    return {path for path in paths if matches(path) or (path.startswith(_MODEL) and matches(path.removeprefix(_MODEL)))}
