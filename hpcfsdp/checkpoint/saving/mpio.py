"""All ranks write one file together, through HDF5 and MPI-IO. Needs an h5py that was built for MPI.

The file has the same bytes as with other writers: HDF5 opens a file that is complete except for the tensors, and
writes those. The commit writes again what HDF5 may have changed of the rest.
"""

import contextlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import h5py
import numpy as np

from hpcfsdp.checkpoint.format import disk, schema
from hpcfsdp.checkpoint.format.metadata import select
from hpcfsdp.checkpoint.saving.content import bytes_in_memory
from hpcfsdp.checkpoint.saving.plan import SavePlan
from hpcfsdp.checkpoint.saving.temporary import BytesOf, naming_write_errors
from hpcfsdp.checkpoint.saving.writer import PosixWriter, by_buffer
from hpcfsdp.comm import raise_together
from hpcfsdp.errors import CheckpointError
from hpcfsdp.launch.job import current_job, load_mpi
from hpcfsdp.reshard.boxes import joined_boxes
from hpcfsdp.state.tensors import StateTensor, buffers_of

BLOCKS_AT_ONCE = (64 << 20) // schema.BLOCK_BYTES
"""How many blocks of a tensor a rank hands to HDF5 in one call: they are in memory a second time."""

_TAG = 4242
"""Of the messages with which ranks make a communicator for HDF5."""

_Transfer: TypeAlias = tuple[h5py.h5s.SpaceID, h5py.h5s.SpaceID, np.ndarray]
"""Which elements of the memory go where in a dataset, and the memory."""


class MpioWriter(PosixWriter):
    """Collective writes of all ranks into one file that rank 0 lays out."""

    @classmethod
    def check_usable(cls) -> None:
        """Raise CheckpointError if this h5py does not support MPI. Not collective."""
        if not h5py.get_config().mpi:
            raise CheckpointError(
                'writer="mpio" needs an h5py that was built for MPI, which the wheels are not '
                '(docs/how-to/file-systems.md describes the build); or save with writer="posix", which writes the same '
                "bytes"
            )

    def _make(self) -> Sequence[int]:
        """Make the file: HDF5's metadata, and room for the tensors."""
        offsets = super()._make()
        with naming_write_errors(self._temporary.path), self._temporary.opened() as fd:
            # Where a collective write fails on one rank, some MPI libraries leave the others waiting.
            disk.reserve(fd, self._metadata_image.nbytes)
            for begin, data in self._metadata_image.regions:
                disk.write(fd, [memoryview(data)], begin)
            disk.sync(fd)  # another node's HDF5 reads it
        return offsets

    def write(self, tensors: Sequence[StateTensor]) -> None:
        """Write this rank's blocks and sync them."""
        # Every rank makes the same calls of HDF5 in the same order, even without data, and after a failure: errors are
        # raised when all ranks have finished a stage.
        comm, temporary, plan = self._comm, self._temporary, self._content.plan
        own = plan.blocks_of(comm.rank)
        self._sums = np.zeros(len(own), np.uint64)
        stages = by_buffer(tensors)  # the same on all ranks
        with self._hdf5() as file:
            writer = _CollectiveBlocks(plan, own, file, bytes_in_memory(plan, tensors), self._sums)
            with raise_together(comm), naming_write_errors(temporary.path):
                writer.write(stages.get(None, ()))
            for buffer in buffers_of(tensors):
                buffer.gather()
                with raise_together(comm), naming_write_errors(temporary.path):
                    writer.write(stages[buffer])
                buffer.free()
        with raise_together(comm), naming_write_errors(temporary.path), temporary.opened() as fd:
            disk.sync(fd)

    @contextlib.contextmanager
    def _hdf5(self) -> Iterator[h5py.File]:
        """Open the file on all ranks; errors of opening and closing are raised on all ranks. Collective."""
        ranks = self._comm.all_gather_object(load_mpi().COMM_WORLD.rank)
        with raise_together(self._comm), naming_write_errors(self._temporary.path):
            mpi = _mpi_of(ranks)
        file: h5py.File | None = None
        try:
            with raise_together(self._comm), naming_write_errors(self._temporary.path):
                file = h5py.File(self._temporary.partial, "r+", driver="mpio", comm=mpi, libver=schema.LIBVER)
            yield file
        except BaseException:
            with contextlib.suppress(Exception):  # the first error counts
                if file is not None:
                    file.close()
            raise
        else:
            with raise_together(self._comm), naming_write_errors(self._temporary.path):
                file.close()
        finally:
            mpi.Free()


class _CollectiveBlocks:
    """Write this rank's blocks, `own`, and fill in their checksums. All ranks make the same number of calls."""

    def __init__(self, plan: SavePlan, own: np.ndarray, file: h5py.File, bytes_of: BytesOf, sums: np.ndarray) -> None:
        self._plan, self._own, self._file, self._bytes_of, self._sums = plan, own, file, bytes_of, sums
        self._first = np.searchsorted(plan.blocks["tensor"][own], np.arange(len(plan.specs) + 1))
        self._calls = calls_by_tensor(plan)
        self._together = h5py.h5p.create(h5py.h5p.DATASET_XFER)
        self._together.set_dxpl_mpio(h5py.h5fd.MPIO_COLLECTIVE)

    def write(self, tensors: Sequence[int]) -> None:
        """Write this rank's blocks of these tensors; raise the first error at the end. Collective."""
        problems: list[Exception] = []
        for tensor in tensors:
            dataset = self._file[self._plan.specs[tensor].path].id
            kind = dataset.get_type()  # nothing is to be converted: numpy has no bfloat16
            edges = self._first[tensor] + np.arange(self._calls[tensor] + 1) * BLOCKS_AT_ONCE
            edges = np.minimum(edges, self._first[tensor + 1]).tolist()
            for begin, end in pairwise(edges):
                transfer = h5py.h5s.create_simple((1,)), dataset.get_space(), np.zeros(1, f"V{kind.get_size()}")
                for space in transfer[:2]:  # a rank may have no data
                    space.select_none()
                if begin < end and not problems:
                    with _kept(problems):
                        transfer = self._blocks(tensor, dataset, begin, end)
                with _kept(problems):
                    dataset.write(*transfer, kind, self._together)
        if problems:
            raise problems[0]

    def _blocks(self, tensor: int, dataset: h5py.h5d.DatasetID, begin: int, end: int) -> _Transfer:
        """Return the transfer of some of this rank's blocks; store their checksums. Not collective."""
        spec, places = self._plan.specs[tensor], self._own[begin:end]
        data = [self._bytes_of(int(place)) for place in places]
        self._sums[begin:end] = [schema.checksum(block) for block in data]
        blocks = self._plan.blocks[places]
        there = dataset.get_space()
        if spec.shape:
            starts = blocks["start"].astype(np.int64)
            ends = starts + blocks["numel"].astype(np.int64)
            select(there, joined_boxes(spec.shape, zip(starts.tolist(), ends.tolist(), strict=True)))
        values = np.concatenate(data).view(schema.numpy_dtype(spec.dtype))
        return h5py.h5s.create_simple((len(values),)), there, values


@contextlib.contextmanager
def _kept(problems: list[Exception]) -> Iterator[None]:
    """Keep an error for later: the other ranks wait for this one in the next call."""
    try:
        yield
    except Exception as error:
        problems.append(error)


def calls_by_tensor(plan: SavePlan) -> np.ndarray:
    """Return for each tensor the number of HDF5 calls that the rank with the most blocks needs."""
    keys = plan.blocks["tensor"].astype(np.int64) * plan.num_ranks + plan.blocks["rank"]
    keys, counts = np.unique(keys, return_counts=True)
    most = np.zeros(len(plan.specs), np.int64)
    np.maximum.at(most, keys // plan.num_ranks, counts)
    return -(-most // BLOCKS_AT_ONCE)


def _mpi_of(ranks: Sequence[int]) -> Any:
    """Return an MPI communicator of these ranks, in order. Collective over them. Raise CheckpointError without MPI."""
    if len(set(ranks)) < len(ranks):
        raise CheckpointError('writer="mpio" needs ranks that mpirun or srun has started; save with writer="posix"')
    from hpcfsdp.comm.mpi.part_comm import PartComm  # starts MPI

    if isinstance(current_job().comm, PartComm):  # no communicator of MPI is safe to be made
        raise CheckpointError('writer="mpio" does not work in hpcfsdp.resilient; save with writer="posix"')
    world = load_mpi().COMM_WORLD
    group = world.Get_group()
    members = group.Incl(list(ranks))
    try:
        return world.Create_group(members, _TAG)
    finally:
        members.Free()
        group.Free()
