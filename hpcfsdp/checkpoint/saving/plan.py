"""Plan which rank writes which bytes of a checkpoint. Pure: every rank computes the same plan without communication.

Plans are made for any number of imagined ranks. Runs and blocks are arrays, for there may be millions.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.errors import CheckpointError
from hpcfsdp.params.layout import Box
from hpcfsdp.reshard.boxes import levels_of
from hpcfsdp.reshard.tiling import TilingError, first_fault, first_untiled
from hpcfsdp.state.tensors import Runs, StateTensor

SPLIT_BYTES = 1 << 20
"""Of a run that several ranks have, the least that is worth a part of its own on each of them."""

_PARTS_AT_ONCE = 1 << 14

BLOCK_DTYPE = np.dtype(
    [(name, schema.EXTENT_DTYPE[name]) for name in ("tensor", "rank", "count", "start", "numel", "stride")]
)
"""A hyperslab of a tensor that one rank writes, under one checksum: start, count, stride as in ``EXTENT_DTYPE``."""


@dataclass(frozen=True, eq=False)
class SavePlan:
    """The tensors of a checkpoint, in file order, and the blocks that tile them."""

    specs: tuple[TensorSpec, ...]
    blocks: np.ndarray  # of ``BLOCK_DTYPE``, sorted by tensor and start
    links: tuple[tuple[str, str], ...]  # (alias, path of the tensor)
    num_ranks: int

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)

    @cached_property
    def itemsizes(self) -> np.ndarray:
        """Bytes of an element of each tensor, int64."""
        return np.array([spec.itemsize for spec in self.specs], np.int64)

    def blocks_of(self, rank: int) -> np.ndarray:
        """Return the places in `blocks` of a rank's blocks."""
        return np.flatnonzero(self.blocks["rank"] == rank)

    def block_bytes(self, places: np.ndarray) -> np.ndarray:
        """Return the bytes of blocks, by their places, int64."""
        blocks = self.blocks[places]
        return blocks["numel"].astype(np.int64) * blocks["count"] * self.itemsizes[blocks["tensor"]]

    def extent_rows(self, offsets: Sequence[int], sums: Sequence[bytes]) -> np.ndarray:
        """Return the table of extents; `sums` are the bytes of each rank's checksums, in the order of its blocks."""
        rows, tensors = np.zeros(len(self.blocks), schema.EXTENT_DTYPE), self.blocks["tensor"]
        for name in BLOCK_DTYPE.names:
            rows[name] = self.blocks[name]
        starts = self.blocks["start"] * self.itemsizes.astype(np.uint64)[tensors]
        rows["byte_offset"] = np.asarray(offsets, np.uint64)[tensors] + starts
        # A stable sort by rank has each rank's blocks in the order in which it has them.
        rows["checksum"][np.argsort(self.blocks["rank"], kind="stable")] = np.frombuffer(b"".join(sums), np.uint64)
        return rows

    def fingerprint(self) -> str:
        """Return a text that is equal for equal plans."""
        digest = hashlib.blake2b(repr((self.specs, self.links, self.num_ranks)).encode(), digest_size=8)
        digest.update(np.ascontiguousarray(self.blocks))
        return digest.hexdigest()


def plan_save(
    tensors: Sequence[tuple[str, StateTensor]], num_ranks: int, block_bytes: int = schema.BLOCK_BYTES
) -> SavePlan:
    """Tile each tensor, given with its group in the file, with blocks of at most `block_bytes`, along the ranks' runs.

    Ranks with copies share the work: all of them split long runs equally; fewer ranks, those with the least to write
    so far, split shorter ones. Raise CheckpointError as ``check_names`` and ``check_tiling``.
    """
    specs: list[TensorSpec] = []
    links: list[tuple[str, str]] = []
    for group, tensor in tensors:
        specs.append(TensorSpec(f"{group}/{tensor.name}", tensor.shape, str(tensor.dtype).removeprefix("torch.")))
        links += [(f"{group}/{alias}", specs[-1].path) for alias in tensor.aliases]
    check_names(specs, links)
    runs, loads = [tensor.runs for _, tensor in tensors], np.zeros(num_ranks, np.int64)
    parts = [(each.edges, each.ranks) for each in runs]
    ways = [_num_writers(each, spec.itemsize) for each, spec in zip(runs, specs, strict=True)]
    # Runs that all ranks with a copy write come first: the others then even out the loads.
    for index in sorted(range(len(specs)), key=lambda index: ways[index] < runs[index].ranks.shape[1]):
        edges, writers = parts[index]
        if ways[index] < writers.shape[1]:
            lightest = np.argsort(loads[writers], axis=1, kind="stable")[:, : ways[index]]
            writers = np.take_along_axis(writers, lightest, axis=1)
        edges, writers = parts[index] = _split(edges, ways[index]), writers.reshape(-1)
        np.add.at(loads, writers, (edges[1:] - edges[:-1]) * specs[index].itemsize)
    plan = SavePlan(tuple(specs), _cut(specs, parts, block_bytes), tuple(links), num_ranks)
    check_tiling(plan)
    return plan


def check_tiling(plan: SavePlan) -> None:
    """Raise CheckpointError unless the blocks of a plan tile its tensors; name a tensor, an element and its ranks."""
    try:
        untiled = first_untiled(plan.blocks, [spec.numel for spec in plan.specs])
    except TilingError as error:
        raise CheckpointError(f"{plan.specs[error.tensor].path} cannot be saved with this sharding: {error}") from None
    if untiled is not None:
        spec = plan.specs[untiled]
        raise CheckpointError(
            f"the parts on {plan.num_ranks} rank(s) do not cover each element of {spec.path}, {list(spec.shape)}, "
            f"exactly once{_first_fault(spec, plan.blocks[plan.blocks['tensor'] == untiled])}: save with all ranks "
            "that own a part of it"
        )


def _first_fault(spec: TensorSpec, blocks: np.ndarray) -> str:
    """Describe the first gap or overlap of one tensor's blocks, if each of them is one run."""
    begins = blocks["start"].astype(np.int64)[:, None]
    ends = begins + blocks["numel"].astype(np.int64)[:, None]
    if np.any(blocks["count"] != 1) or np.any(ends > spec.numel):
        return ""
    fault = first_fault(np.array([spec.numel]), begins, ends)
    if fault is None:  # a block is empty
        return ""
    place = list(map(int, np.unravel_index(fault.element[0], spec.shape)))
    if not fault.blocks:
        return f" (no rank has element {place})"
    ranks = " and ".join(str(rank) for rank in blocks["rank"][list(fault.blocks)])
    return f" (element {place} is written by the ranks {ranks})"


def _split(edges: np.ndarray, ways: int) -> np.ndarray:
    """Return the edges of as many parts of each run. Shorter runs have shorter parts, perhaps empty ones."""
    if ways == 1:
        return edges
    sizes = np.diff(edges)[:, None]
    offsets = np.minimum(np.arange(ways) * -(-sizes // ways), sizes)
    return np.append((edges[:-1, None] + offsets).reshape(-1), edges[-1])


def _num_writers(runs: Runs, itemsize: int) -> int:
    """Return the number of ranks that split a run. All runs of a tensor, which are about equal, are split alike."""
    copies = runs.ranks.shape[1]
    longest = int(np.diff(runs.edges).max(initial=0)) * itemsize if copies > 1 else 0
    return max(1, min(copies, longest // SPLIT_BYTES))


def _cut(specs: Sequence[TensorSpec], parts: Sequence[tuple[np.ndarray, np.ndarray]], block_bytes: int) -> np.ndarray:
    """Cut all tensors into blocks; `parts` has edges and writers by tensor."""
    found, first = [np.empty(0, BLOCK_DTYPE)], 0
    while first < len(parts):  # many tensors of few parts, or few of many: there is memory for some of them at a time
        end, count = first, 0
        while end < len(parts) and (end == first or count + len(parts[end][1]) <= _PARTS_AT_ONCE):
            count += len(parts[end][1])
            end += 1
        steps = [max(1, block_bytes // spec.itemsize) for spec in specs[first:end]]
        found.append(_blocks(first, parts[first:end], steps))
        first = end
    return np.concatenate(found)


def _blocks(first: int, parts: Sequence[tuple[np.ndarray, np.ndarray]], steps: Sequence[int]) -> np.ndarray:
    """Cut some tensors, from number `first` on, into blocks of at most `steps` elements each."""
    numbers = [len(ranks) for _, ranks in parts]
    starts = np.concatenate([edges[:-1] for edges, _ in parts])
    sizes = np.concatenate([edges[1:] for edges, _ in parts]) - starts
    step = np.repeat(np.array(steps), numbers)
    counts = -(-sizes // step)
    part = np.repeat(np.arange(len(sizes)), counts)
    within = (np.arange(len(part)) - (np.cumsum(counts) - counts)[part]) * step[part]
    found = np.empty(len(part), BLOCK_DTYPE)
    found["tensor"] = np.repeat(np.arange(first, first + len(parts)), numbers)[part]
    found["rank"] = np.concatenate([ranks for _, ranks in parts])[part]
    found["start"], found["numel"] = starts[part] + within, np.minimum(step[part], sizes[part] - within)
    found["count"], found["stride"] = 1, found["numel"]
    return found


def plan_alone(
    specs: Sequence[TensorSpec], links: Sequence[tuple[str, str]] = (), block_bytes: int = schema.BLOCK_BYTES
) -> SavePlan:
    """Return the plan of one process that writes everything; raise CheckpointError as ``check_names``."""
    check_names(specs, links)
    parts = [(np.array((0, spec.numel)), np.zeros(1, np.int64)) for spec in specs]
    return SavePlan(tuple(specs), _cut(specs, parts, block_bytes), tuple(links), 1)


def box_blocks(shape: Sequence[int], box: Box, itemsize: int, block_bytes: int = schema.BLOCK_BYTES) -> np.ndarray:
    """Return the blocks of a box in the order of its elements. Each spans at most `block_bytes`; rank, tensor are 0."""
    if not box.numel:
        return np.empty(0, BLOCK_DTYPE)
    levels = levels_of(shape, box)
    most = max(1, block_bytes // itemsize)
    if levels.numel > most or not levels.repeated:
        starts = levels.starts(len(levels.repeated))
        cuts = np.arange(0, levels.numel, most)
        blocks = np.zeros(len(starts) * len(cuts), BLOCK_DTYPE)
        blocks["start"] = (starts[:, None] + cuts).reshape(-1)
        blocks["numel"] = np.tile(np.minimum(most, levels.numel - cuts), len(starts))
        blocks["count"], blocks["stride"] = 1, blocks["numel"]
    else:
        count, stride = levels.repeated[-1]
        starts = levels.starts(len(levels.repeated) - 1)
        cuts = np.arange(0, count, max(1, most // stride))  # the same for adjacent boxes
        blocks = np.zeros(len(starts) * len(cuts), BLOCK_DTYPE)
        blocks["start"] = (starts[:, None] + cuts * stride).reshape(-1)
        blocks["count"] = np.tile(np.diff(cuts, append=count), len(starts))
        blocks["numel"] = levels.numel
        blocks["stride"] = np.where(blocks["count"] > 1, stride, levels.numel)
    return blocks


def check_names(specs: Sequence[TensorSpec], links: Sequence[tuple[str, str]]) -> None:
    """Raise CheckpointError for an invalid name or an unsupported dtype."""
    for spec in specs:
        if not schema.supported(spec.dtype):
            raise CheckpointError(f"{spec.path!r} has dtype {spec.dtype}, which checkpoints do not support: convert it")
    paths = [spec.path for spec in specs] + [path for path, _ in links]
    datasets, groups = set(paths), set()
    for path in paths:
        if not path.isprintable() or not {"", ".", ".."}.isdisjoint(path.split("/")):
            raise CheckpointError(f"{path!r} cannot be the name of a dataset: rename the module or parameter")
        parent = path.rpartition("/")[0]
        while parent and parent not in groups:
            if parent in datasets:
                raise CheckpointError(f"{parent!r} and {path!r} cannot both be in a file: rename one of them")
            groups.add(parent)
            parent = parent.rpartition("/")[0]
