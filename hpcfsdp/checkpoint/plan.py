"""Who writes which bytes of a checkpoint. Pure: every rank computes the same plan without a message."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from hpcfsdp.checkpoint import schema
from hpcfsdp.checkpoint.schema import TensorSpec
from hpcfsdp.errors import CheckpointError
from hpcfsdp.state.tensors import StateTensor


@dataclass(frozen=True)
class Block:
    """A run of one tensor's elements that one rank writes, under one checksum."""

    tensor: int
    rank: int
    start: int
    numel: int


@dataclass(frozen=True)
class SavePlan:
    """The tensors of a checkpoint and the blocks that tile them.

    Attributes:
        specs: in file order.
        blocks: sorted by tensor and start; together every element once.
        links: (further path, path of the tensor).
    """

    specs: tuple[TensorSpec, ...]
    blocks: tuple[Block, ...]
    links: tuple[tuple[str, str], ...]

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)

    def fingerprint(self) -> str:
        """Equal on two ranks whose plans are equal."""
        return hashlib.blake2b(repr((self.specs, self.blocks, self.links)).encode(), digest_size=8).hexdigest()


def plan_save(tensors: Sequence[tuple[str, StateTensor]], block_bytes: int = schema.BLOCK_BYTES) -> SavePlan:
    """Tile each tensor with blocks of at most `block_bytes`, along the runs that ranks hold.

    Args:
        tensors: the group in the file that each goes to ("model", "optim/state"), and the tensor.

    Raises:
        CheckpointError: a name that cannot stand in a file, or a dtype that is not supported.
    """
    specs: list[TensorSpec] = []
    blocks: list[Block] = []
    links: list[tuple[str, str]] = []
    for group, tensor in tensors:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if not schema.supported(dtype):
            raise CheckpointError(f"{tensor.name!r} has dtype {tensor.dtype}, which checkpoints do not hold yet")
        spec = TensorSpec(f"{group}/{_checked(tensor.name)}", tensor.shape, dtype)
        step = max(1, block_bytes // spec.itemsize)
        for extent in tensor.extents:
            for begin in range(extent.start, extent.start + extent.numel, step):
                numel = min(step, extent.start + extent.numel - begin)
                blocks.append(Block(len(specs), extent.shard_rank, begin, numel))
        links += [(f"{group}/{_checked(alias)}", spec.path) for alias in tensor.aliases]
        specs.append(spec)
    _check_places([spec.path for spec in specs] + [path for path, _ in links])
    return SavePlan(tuple(specs), tuple(blocks), tuple(links))


def _check_places(paths: Sequence[str]) -> None:
    """Raise if a path would have to be a dataset and a group at once."""
    datasets = set(paths)
    for path in paths:
        for parent in PurePosixPath(path).parents:
            if str(parent) in datasets:
                raise CheckpointError(f"{str(parent)!r} and {path!r} cannot both stand in a file: rename one of them")


def _checked(name: str) -> str:
    parts = name.split("/")
    if not name.isprintable() or any(part in ("", ".", "..") for part in parts):
        raise CheckpointError(f"{name!r} cannot be the name of a dataset: rename the module or parameter")
    return name
