"""The place in the data of a training, as checkpoints have it: the state of a sampler or loader."""

import contextlib
from collections.abc import Iterator
from typing import Any

from hpcfsdp.errors import UsageError


def sampler_of(data: Any) -> Any:
    """Return what has the state: a sampler or loader, that in a ``DataLoader``; raise UsageError without one."""
    for found in (data, getattr(data, "batch_sampler", None), getattr(data, "sampler", None)):
        if hasattr(found, "state_dict") and hasattr(found, "load_state_dict"):
            return found
    what = f"data must be a sampler or loader that has a state_dict, not a {type(data).__name__}"
    raise UsageError(f"{what}: use hpcfsdp.data.ResumableSampler as its batch_sampler")


@contextlib.contextmanager
def as_before_on_failure(data: Any) -> Iterator[Any]:
    """Give a sampler its place back if the block raises; a block that gets None has nothing to load into."""
    if data is None:
        yield None
        return
    sampler = sampler_of(data)
    before = sampler.state_dict()
    try:
        yield sampler
    except BaseException:
        sampler.load_state_dict(before)
        raise
