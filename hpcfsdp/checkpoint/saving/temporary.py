"""A checkpoint file before it gets its name: all ranks write to it, then it is committed or discarded."""

import contextlib
import itertools
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from hpcfsdp.checkpoint.format import disk, schema
from hpcfsdp.checkpoint.format.catalog import partial_path
from hpcfsdp.checkpoint.format.disk import reason
from hpcfsdp.checkpoint.format.footer import Footer
from hpcfsdp.checkpoint.format.metadata import MetadataImage
from hpcfsdp.checkpoint.retention import owned_parts, remove_abandoned, remove_parts
from hpcfsdp.checkpoint.saving.plan import SavePlan
from hpcfsdp.errors import CheckpointError

BytesOf = Callable[[int], np.ndarray]
"""Of a block, by its place in the plan: its bytes, uint8, 1-D, the runs one after the other."""


class TemporaryFileGoneError(CheckpointError):
    """This rank does not find the file that the checkpoint is being written to."""


class TemporaryFile:
    """A file that ``commit`` turns into a checkpoint. Not collective: one rank creates, commits or discards it.

    It is called `partial` until it gets its name, `path`. The `token` is unique to this save, so that two jobs that
    save to one path write to two files.
    """

    def __init__(self, path: Path, token: str) -> None:
        self.path, self.token, self.partial = path, token, partial_path(path, token)
        self.has_name = False

    def create(self, nbytes: int, elsewhere: int = 0) -> None:
        """Make the file, all holes, if there is room for it and `elsewhere` bytes; remove what saves have abandoned."""
        folder = self.path.parent
        missing = list(itertools.takewhile(lambda each: not each.exists(), (folder, *folder.parents)))
        folder.mkdir(parents=True, exist_ok=True)
        for each in missing:
            disk.sync_folder(each.parent)
        if self.path.is_dir():
            raise IsADirectoryError("there is a directory of that name")
        remove_abandoned(self.path)
        free = shutil.disk_usage(folder).free
        if free < nbytes + elsewhere:
            raise CheckpointError(f"{nbytes + elsewhere} bytes are needed, {free} are free on that file system")
        try:
            disk.close(disk.create(self.partial, nbytes))
        except BaseException:
            self.discard()
            raise

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        """Yield a descriptor to write with and sync; raise TemporaryFileGoneError where there is no file."""
        try:
            fd = disk.open_to_write(self.partial)
        except FileNotFoundError as error:
            raise TemporaryFileGoneError(
                f"{self.partial.name} is gone, or this rank does not see the folder of rank 0: save to a file system "
                "that all ranks share"
            ) from error
        try:
            yield fd
        except BaseException:
            with contextlib.suppress(OSError):  # the first error counts
                disk.close(fd)
            raise
        disk.close(fd)  # some file systems report failed writes only here

    def commit(self, metadata_image: MetadataImage, rows: np.ndarray, parts: np.ndarray | None = None) -> Footer:
        """Write everything but the tensors, which are synced already; sync and rename the file; return its footer.

        The tables are `rows` of extents, and of `parts`, which have their names already. Parts of a replaced checkpoint
        are removed, unless other files may need them. Raise OSError if the file did not get its name, CheckpointError
        if it did but the name could not be synced.
        """
        regions, footer = metadata_image.with_footer(rows, parts)
        with self.opened() as fd:
            for begin, data in regions:
                disk.write(fd, [memoryview(data)], begin)
            packed = footer.pack()
            disk.write(fd, [memoryview(packed)], footer.file_bytes - len(packed))
            disk.sync(fd)
        replaced = owned_parts(self.path)
        disk.rename(self.partial, self.path)
        self.has_name = True
        try:
            disk.sync_folder(self.path.parent)
        except OSError as error:
            raise CheckpointError(
                f"the new {self.path.name} is in place, but its name could not be forced to the disk: {reason(error)}. "
                "If the machine crashes now, the previous file may be back"
            ) from error
        with contextlib.suppress(OSError):  # the checkpoint is there; who saves next finds them as abandoned
            remove_parts(self.path.parent, replaced)
        return footer

    def discard(self) -> None:
        """Remove the file, if possible."""
        with contextlib.suppress(OSError):
            disk.remove(self.partial)


@contextlib.contextmanager
def naming_write_errors(path: Path) -> Iterator[None]:
    """Add the file's name to all errors, also those of the operating system and of HDF5."""
    try:
        yield
    except CheckpointError as error:
        if str(error).startswith(f"{path}: "):
            raise
        is_missing = isinstance(error, TemporaryFileGoneError)  # a kind that other ranks do not know
        raise (CheckpointError if is_missing else type(error))(f"{path}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot write the checkpoint: {reason(error)}") from error


class BlockWriter:
    """Write blocks of a plan, whose tensors begin at `offsets`; adjacent blocks go to the system in one call."""

    AT_ONCE = 4 << 20  # so many bytes and one block are in memory until they are written
    SYNC_EVERY = 32 << 20

    def __init__(self, fd: int, plan: SavePlan, offsets: Sequence[int], bytes_of: BytesOf) -> None:
        self._fd, self._plan, self._bytes_of = fd, plan, bytes_of
        self._offsets = np.asarray(offsets, np.int64)
        self._buffers: list[memoryview] = []
        self._begin = self._end = 0
        self._dirty = sys.maxsize

    def write(self, indices: np.ndarray) -> np.ndarray:
        """Write these blocks, by their places in the plan; return their checksums, uint64, in the same order."""
        blocks = self._plan.blocks[indices]
        itemsizes = self._plan.itemsizes[blocks["tensor"]]
        begins = self._offsets[blocks["tensor"]] + blocks["start"].astype(np.int64) * itemsizes
        strides = (blocks["stride"].astype(np.int64) * itemsizes).tolist()
        counts = blocks["count"].tolist()
        sums = np.zeros(len(blocks), np.uint64)
        order = np.argsort(begins).tolist()
        begins = begins.tolist()
        for place in order:
            data = self._bytes_of(int(indices[place]))
            sums[place] = schema.checksum(data)
            begin, spanned = begins[place], strides[place] * counts[place]
            is_whole = counts[place] == 1 or spanned == data.nbytes
            follows = is_whole and self._buffers and begin == self._end and begin - self._begin < self.AT_ONCE
            if not follows:
                self._flush()
                self._begin = begin
            if is_whole:
                self._buffers.append(memoryview(data))
                self._end = begin + data.nbytes
            else:
                disk.write_runs(self._fd, memoryview(data), counts[place], begin, strides[place])
                self._end = begin + spanned
                self._note_dirty()
        self._flush()
        return sums

    def _flush(self) -> None:
        if self._buffers:
            disk.write(self._fd, self._buffers, self._begin)
            self._buffers = []
            self._note_dirty()

    def _note_dirty(self) -> None:
        self._dirty = min(self._dirty, self._begin)
        if self._end - self._dirty >= self.SYNC_EVERY:  # the disk has something to do while checksums are computed
            disk.start_sync(self._fd, self._dirty, self._end - self._dirty)
            self._dirty = self._end
