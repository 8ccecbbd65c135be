"""Write a checkpoint of several files: a part for each node, and a small file that is the checkpoint.

The ranks of a node write their elements of each tensor contiguously into a part that no other node writes to. The
checkpoint has virtual datasets, so that any HDF5 tool shows whole tensors, and its table of extents has the place of
each run. Parts get their names, which are unique to a save, before the checkpoint does.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hpcfsdp import env
from hpcfsdp.checkpoint.format import disk, schema
from hpcfsdp.checkpoint.format.metadata import MetadataImage, VirtualSource, build_metadata_image
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.checkpoint.retention import part_path
from hpcfsdp.checkpoint.saving.content import Content
from hpcfsdp.checkpoint.saving.plan import SavePlan
from hpcfsdp.checkpoint.saving.temporary import BlockWriter, BytesOf, TemporaryFile, naming_write_errors
from hpcfsdp.checkpoint.saving.writer import PosixWriter
from hpcfsdp.comm import Communicator, of_rank_0, raise_together
from hpcfsdp.launch.topology import Topology

LEAST_BYTES = 1 << 16
"""Of a tensor that goes to the nodes' files. Smaller ones stay in the checkpoint itself: HDF5 opens each file that a
virtual dataset names whenever it is read."""


@dataclass(frozen=True, eq=False)
class NodePart:
    """The content of a node's part file."""

    node: int
    blocks: np.ndarray  # places in the whole plan, ascending
    plan: SavePlan  # of these blocks: for each tensor the node's elements, 1-D, in the order of the tensor
    tensors: np.ndarray  # by tensor of the part, its number in the whole plan


def divide(plan: SavePlan, topology: Topology, least_bytes: int = LEAST_BYTES) -> list[NodePart]:
    """Divide a plan into parts, one for each node that writes; scalars and smaller tensors stay in the checkpoint."""
    node_of_rank = np.array([topology.node_rank(rank) for rank in range(topology.size)], np.int64)
    # Elements that do not follow each other would have to, in a file that has nothing between them.
    in_runs = np.bincount(plan.blocks["tensor"], plan.blocks["count"] > 1, len(plan.specs)) == 0
    divided = in_runs & np.array([bool(spec.shape) and spec.nbytes >= least_bytes for spec in plan.specs], bool)
    places = np.flatnonzero(divided[plan.blocks["tensor"]])
    nodes = node_of_rank[plan.blocks["rank"][places]]
    return [_part(plan, int(node), places[nodes == node]) for node in np.unique(nodes)]


def _part(plan: SavePlan, node: int, places: np.ndarray) -> NodePart:
    blocks = plan.blocks[places]
    numels = blocks["numel"].astype(np.int64)
    tensors, first, local = np.unique(blocks["tensor"], return_index=True, return_inverse=True)
    ends = np.cumsum(numels)
    before = (ends - numels)[first]
    lengths = np.add.reduceat(numels, first).tolist()
    blocks["tensor"], blocks["start"] = local, ends - numels - before[local]
    specs = [plan.specs[tensor] for tensor in tensors.tolist()]
    own = tuple(TensorSpec(spec.path, (length,), spec.dtype) for spec, length in zip(specs, lengths, strict=True))
    return NodePart(node, places, SavePlan(own, blocks, (), plan.num_ranks), tensors)


def sources_of(plan: SavePlan, parts: Sequence[NodePart], names: Sequence[str]) -> dict[int, list[VirtualSource]]:
    """Return which runs each part has of the tensors in parts, by number; `names` are the parts' files."""
    found: dict[int, list[VirtualSource]] = {}
    for part, name in zip(parts, names, strict=True):
        whole = plan.blocks[part.blocks]
        edges = np.searchsorted(part.plan.blocks["tensor"], np.arange(len(part.tensors) + 1))
        for index, tensor in enumerate(part.tensors.tolist()):
            blocks = whole[edges[index] : edges[index + 1]]
            begins = blocks["start"].astype(np.int64)
            ends = begins + blocks["numel"].astype(np.int64)
            is_first = np.append(True, begins[1:] != ends[:-1])
            is_last = np.append(is_first[1:], True)
            runs = zip(begins[is_first].tolist(), ends[is_last].tolist(), strict=True)
            found.setdefault(tensor, []).append(VirtualSource(name, tuple(runs)))
    return found


class SubfilesWriter(PosixWriter):
    """Each rank writes into its node's part; small tensors go into the checkpoint itself."""

    def __init__(self, comm: Communicator, temporary: TemporaryFile, content: Content) -> None:
        """Touch no disk. Collective over `comm`."""
        super().__init__(comm, temporary, content)
        topology = comm.topology or Topology.from_labels(comm.all_gather_object(env.host_name()))
        self._parts = divide(content.plan, topology, LEAST_BYTES)
        self._paths = [part_path(temporary.path, temporary.token, part.node) for part in self._parts]
        self._leaders = [topology.leaders[part.node] for part in self._parts]
        self._node_of = [topology.node_rank(rank) for rank in range(comm.size)]
        own_node = self._node_of[comm.rank]
        self._own = next((number for number, part in enumerate(self._parts) if part.node == own_node), None)
        self._leads = self._own is not None and self._leaders[self._own] == comm.rank
        self._part_temporary = None if self._own is None else TemporaryFile(self._paths[self._own], temporary.token)
        self._part_metadata_image: MetadataImage | None = None
        self._part_offsets: list[np.ndarray] = []

    def begin(self) -> None:
        """Make the checkpoint on rank 0 and the parts on their leaders, all holes; exchange the places of tensors."""
        with raise_together(self._comm), naming_write_errors(self._temporary.path):
            if self._comm.rank == 0:
                names = [path.name for path in self._paths]
                sources = sources_of(self._content.plan, self._parts, names)
                self._metadata_image = self._content.metadata_image(sources=sources, file_names=names)
                elsewhere = sum(part.plan.nbytes for part in self._parts)
                self._temporary.create(self._metadata_image.nbytes, elsewhere)
                self._offsets = self._metadata_image.offsets
            if self._leads:
                self._part_metadata_image = self._metadata_image_of(self._parts[self._own])
                if self._part_temporary.path.exists():
                    raise FileExistsError(f"{self._part_temporary.path.name} already exists")
                self._part_temporary.create(self._part_metadata_image.nbytes)
        self._offsets = self._comm.broadcast_object(self._offsets)
        mine = [] if self._part_metadata_image is None else self._part_metadata_image.offsets
        sizes = {leader: len(part.tensors) for leader, part in zip(self._leaders, self._parts, strict=True)}
        numels = [sizes.get(rank, 0) for rank in range(self._comm.size)]
        found = self._to_those_concerned(np.array(mine, np.int64), numels)
        self._part_offsets = [found[leader] for leader in self._leaders]

    @contextlib.contextmanager
    def _opened(self, bytes_of: BytesOf) -> Iterator[tuple[Callable[[np.ndarray], np.ndarray], Callable[[], None]]]:
        """Functions that write blocks, by their places in the plan, and that sync them. Not collective."""
        own = self._own
        with contextlib.ExitStack() as stack:
            fds = [stack.enter_context(self._temporary.opened())]
            here = BlockWriter(fds[0], self._content.plan, self._offsets, bytes_of)
            if own is None:
                yield here.write, lambda: disk.sync(fds[0])
                return
            part = self._parts[own]
            fds.append(stack.enter_context(self._part_temporary.opened()))
            there = BlockWriter(fds[1], part.plan, self._part_offsets[own], lambda at: bytes_of(int(part.blocks[at])))

            def write(indices: np.ndarray) -> np.ndarray:
                sums = np.zeros(len(indices), np.uint64)
                inside = np.isin(indices, part.blocks)
                sums[~inside] = here.write(indices[~inside])
                sums[inside] = there.write(np.searchsorted(part.blocks, indices[inside]))
                return sums

            def sync() -> None:
                for fd in fds:
                    disk.sync(fd)

            yield write, sync

    def finish(self) -> None:
        """Commit the parts, then the checkpoint that names them."""
        comm, path = self._comm, self._temporary.path
        counts = np.bincount(self._content.plan.blocks["rank"], minlength=comm.size)
        everyone = self._to_those_concerned(self._sums.view(np.int64), counts.tolist())
        # The checksums of other nodes are 0 on ranks that do not write them.
        sums = [own.tobytes() or bytes(8 * count) for own, count in zip(everyone, counts.tolist(), strict=True)]
        rows = self._content.plan.extent_rows(self._offsets, sums)
        with raise_together(comm) as exchange, naming_write_errors(path):
            if self._leads:
                footer = self._part_temporary.commit(self._part_metadata_image, self._rows_of(self._own, rows))
                exchange.mine = footer.file_bytes, footer.digest

        def commit() -> None:
            with naming_write_errors(path):
                names = [path.name.encode() for path in self._paths]
                table = np.zeros(len(names), schema.table_dtype(schema.FILES, max(map(len, names), default=0)))
                table["name"] = names
                for number, part in enumerate(self._parts):
                    rows["file"][part.blocks] = number + 1
                    rows["byte_offset"][part.blocks] = self._rows_of(number, rows)["byte_offset"]
                    table["nbytes"][number], table["digest"][number] = exchange.everyone[self._leaders[number]]
                self._temporary.commit(self._metadata_image, rows, table if names else None)

        of_rank_0(comm, commit)

    def discard(self) -> None:
        """Remove the files, except parts that a renamed checkpoint may need. Not collective."""
        if self._leads:
            self._part_temporary.discard()
        if self._comm.rank == 0:
            self._temporary.discard()
            if not self._temporary.has_name:
                # Only rank 0 knows that the checkpoint has not got its name, and will not.
                for path in self._paths:
                    with contextlib.suppress(OSError):
                        disk.remove(path)

    def _to_those_concerned(self, values: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
        """Return int64 values of all ranks on rank 0, else of this node's, and empty arrays; by rank. Collective."""
        comm = self._comm
        mine = torch.from_numpy(values).to(comm.device)
        is_near = [node == self._node_of[comm.rank] for node in self._node_of]
        numels = [size if comm.rank == 0 or near else 0 for size, near in zip(sizes, is_near, strict=True)]
        found = [torch.empty(numel, dtype=torch.int64, device=comm.device) for numel in numels]
        comm.all_to_all(found, [mine if rank == 0 or near else mine[:0] for rank, near in enumerate(is_near)])
        return [of_rank.cpu().numpy() for of_rank in found]

    def _metadata_image_of(self, part: NodePart) -> MetadataImage:
        of_whole = ("world_size", "software_version")
        attributes = {
            **{name: value for name, value in self._content.attributes.items() if name not in of_whole},
            "format": schema.PART_FORMAT,
            "about": schema.ABOUT_PART,
            "checkpoint": self._temporary.path.name,
            "node": np.int64(part.node),
        }
        return build_metadata_image(part.plan.specs, (), len(part.blocks), attributes, {})

    def _rows_of(self, number: int, whole: np.ndarray) -> np.ndarray:
        """Return a part's table of extents, from that of the whole."""
        part, offsets = self._parts[number], self._part_offsets[number]
        rows = whole[part.blocks]
        for name in part.plan.blocks.dtype.names:
            rows[name] = part.plan.blocks[name]
        tensors = rows["tensor"]
        rows["file"] = 0
        rows["byte_offset"] = offsets[tensors] + rows["start"].astype(np.int64) * part.plan.itemsizes[tensors]
        return rows
