"""Search a checkpoint file for all kinds of damage."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from hpcfsdp.checkpoint.format import disk, schema
from hpcfsdp.checkpoint.format.access import open_file, open_hdf5, read_bytes, read_file_footer, read_file_regions
from hpcfsdp.checkpoint.format.footer import Footer, packed_bytes
from hpcfsdp.checkpoint.format.index import CheckpointIndex, elements_in, open_index
from hpcfsdp.checkpoint.format.reader import BlockReader
from hpcfsdp.checkpoint.format.small_values import odd_hyper_parameters
from hpcfsdp.checkpoint.inspect.stats import Advance, ignore, iter_pieces
from hpcfsdp.errors import CheckpointCorruptError, CheckpointError, CheckpointReplacedError

_TRIES = 5  # to look at a file that other ones replace


@dataclass(frozen=True)
class Damage:
    """Damage of a file: what it is, and where: the path of a tensor, group or dataset; empty for the file itself."""

    where: str
    what: str


@dataclass(frozen=True)
class Report:
    """The result of a verification: no `faults` if every byte is as it was written."""

    path: Path
    faults: tuple[Damage, ...]
    tensors: int = 0
    nbytes: int = 0  # of the file and its parts; 0, as the number of checked tensors, without a readable index

    @property
    def sound(self) -> bool:
        """Whether there are no faults."""
        return not self.faults


def verify_file(path: str | os.PathLike[str], advance: Advance = ignore) -> Report:
    """Check every byte of a checkpoint; not collective. A few blocks are in memory at a time.

    Check the footer, all tables and small values, HDF5's metadata of each tensor against the tables, aliases of tied
    tensors, the checksum of every run of elements, and that the bytes in between are zero.

    Args:
        advance: called with the number of bytes of tensors that were checked.

    Raises:
        CheckpointError: the file cannot be checked: it is missing, unreadable, or of a newer format. Damage is no
            error: it is reported.
    """
    path = Path(path)
    for attempt in range(_TRIES):
        try:
            index = open_index(path)
            with open_file(path, index.footer) as fd:
                faults = [*_structure_faults(index, fd), *_gap_faults(index, 0, index.footer, fd)]
                nbytes = disk.size(fd) + sum(part.nbytes for part in index.parts)
            faults += _data_faults(index, advance)
            return Report(path, tuple(faults), len(index.tensors), nbytes)
        except CheckpointReplacedError:
            if attempt == _TRIES - 1:
                raise
        except CheckpointCorruptError as error:  # its index cannot be read, or it has lost bytes since then
            return Report(path, (Damage("", _without(path, error)),))
    raise AssertionError("not reached")


def _without(path: Path, error: Exception) -> str:
    return str(error).removeprefix(f"{path}: ")


def _structure_faults(index: CheckpointIndex, fd: int) -> list[Damage]:
    """Compare HDF5's metadata with the tables."""
    try:
        with open_hdf5(fd, index.info.path, index.footer) as file:
            return list(_differences(index, file))
    except CheckpointError:
        raise
    except Exception as error:  # h5py raises half a dozen types on damaged files
        if isinstance(error, OSError) and error.errno:
            raise CheckpointError(f"{index.info.path}: cannot be read: {disk.reason(error)}") from error
        return [Damage("", f"HDF5 cannot read it: {str(error) or type(error).__name__}")]


def _differences(index: CheckpointIndex, file: h5py.File) -> Iterator[Damage]:
    if schema.attribute(file, "committed") != 1:
        yield Damage("", "is not marked as committed")
    found = {
        f"{top}/{path}": item for top in (schema.MODEL, schema.OPTIM_STATE) for path, item in _datasets_below(file, top)
    }
    for path in [path for path, item in found.items() if item is None]:
        yield Damage(path, "is a link to something else, no dataset")
        del found[path]
    others = {path: file.get(path) for path in [*index.tensors, *index.links] if path not in found}
    found |= {path: item for path, item in others.items() if isinstance(item, h5py.Dataset)}
    for path, spec in index.tensors.items():
        if path not in found:
            yield Damage(path, "is in the table of tensors, but there is no such dataset")
        else:
            yield from _tensor_differences(index, spec, found[path])
    addresses = {path: h5py.h5o.get_info(item.id).addr for path, item in found.items()}
    for alias, path in index.links.items():
        if path in found and addresses.get(alias) != addresses[path]:
            yield Damage(alias, f"should be an alias of {path}, but is not")
    for path in found:
        if path not in index.tensors and path not in index.links:
            yield Damage(path, "is a dataset that is not in the table of tensors")
    for name in (*index.tensors, *index.links, *index.metrics):
        if not name.isprintable():
            yield Damage(name, "has characters in its name that cannot be printed")
    for what in odd_hyper_parameters(index.param_groups):
        yield Damage(schema.PARAM_GROUPS, what)


def _tensor_differences(index: CheckpointIndex, spec: schema.TensorSpec, dataset: h5py.Dataset) -> Iterator[Damage]:
    if dataset.shape != spec.shape:
        yield Damage(spec.path, f"has shape {dataset.shape} in HDF5, and {spec.shape} in the table of tensors")
        return
    marked = schema.attribute(dataset, schema.DTYPE_ATTRIBUTE)
    marked = None if marked is None else bytes(marked).decode(errors="replace")
    if marked != (spec.dtype if schema.needs_mark(spec.dtype) else None):
        yield Damage(spec.path, f"is marked as {marked} in HDF5, and {spec.dtype} in the table of tensors")
    if dataset.id.get_type() != schema.hdf5_type(spec.dtype):
        yield Damage(spec.path, f"has another type in HDF5 than {spec.dtype} is written as")
    properties = dataset.id.get_create_plist()
    if properties.get_nfilters() or properties.get_layout() not in (h5py.h5d.CONTIGUOUS, h5py.h5d.VIRTUAL):
        yield Damage(spec.path, "is chunked, compact or filtered in HDF5: its bytes are not at the place in the table")
        return
    rows = index.rows_of(spec.path)
    own = rows[rows["file"] == 0]
    offset = dataset.id.get_offset() if properties.get_layout() == h5py.h5d.CONTIGUOUS else None
    if len(own) and offset is None:
        yield Damage(spec.path, "has no place in the file for HDF5, and one in the table of extents")
    elif len(own):
        expected = np.uint64(offset) + own["start"] * np.uint64(spec.itemsize)
        if np.any(own["byte_offset"] != expected):
            place = int(np.flatnonzero(own["byte_offset"] != expected)[0])
            what = f"has its element {int(own['start'][place])} at byte {int(expected[place])} for HDF5, and at "
            yield Damage(spec.path, f"{what}{int(own['byte_offset'][place])} in the table of extents")


def _gap_faults(index: CheckpointIndex, number: int, footer: Footer, fd: int) -> Iterator[Damage]:
    """Yield nonzero bytes that belong to nothing, the first of each gap; `number` as in the table of extents."""
    path = index.folder / index.parts[number - 1].name if number else index.info.path
    regions = np.array(footer.regions, np.int64).reshape(-1, 2)
    itemsizes = np.array([spec.itemsize for spec in index.tensors.values()], np.int64)
    run_begins, run_ends = elements_in(index.extents, itemsizes, number)
    end = footer.file_bytes - packed_bytes(len(footer.regions))
    begins = np.concatenate([regions[:, 0], run_begins, [end]])
    order = np.argsort(begins, kind="stable")
    ends = np.concatenate([regions.sum(axis=1), run_ends, [end]])[order]
    after, before = begins[order], np.append(0, np.maximum.accumulate(ends)[:-1])
    gaps = after > before
    for first, last in zip(before[gaps].tolist(), after[gaps].tolist(), strict=True):
        start: int | None = first
        while (start := disk.next_data(fd, start)) is not None and start < last:  # a hole may have any size
            data = read_bytes(fd, path, start, min(schema.BLOCK_BYTES, last - start))
            if data.count(0) != len(data):
                where = int(np.flatnonzero(np.frombuffer(data, np.uint8))[0])
                of = f" of {index.parts[number - 1].name}" if number else ""
                yield Damage("", f"byte {start + where}{of} belongs to nothing, and is {data[where]} instead of 0")
                break
            start += len(data)


def _data_faults(index: CheckpointIndex, advance: Advance) -> Iterator[Damage]:
    """Yield parts that differ from what was written, and runs of elements without their checksum."""
    with BlockReader(index) as reader:
        lost = []
        for number in range(1, len(index.parts) + 1):
            try:
                reader.check_part(number)
            except CheckpointReplacedError:
                raise
            except CheckpointError as error:  # a checkpoint that lacks a part is not whole
                lost.append(number)
                yield Damage("", str(error))
            else:
                yield from _part_faults(index, number)
        for path in index.tensors:
            if not np.isin(index.rows_of(path)["file"], lost).any():
                yield from (Damage(path, what) for what in _tensor_faults(index, reader, path, advance))


def _part_faults(index: CheckpointIndex, number: int) -> Iterator[Damage]:
    """Yield damage in a part outside of its elements."""
    path = index.folder / index.parts[number - 1].name
    with open_file(path) as fd:
        footer = read_file_footer(fd, path)
        if footer is None:
            raise CheckpointReplacedError(f"{path}: has been replaced since it was opened")
        try:
            read_file_regions(fd, path, footer)
        except CheckpointCorruptError as error:
            yield Damage("", f"{path.name}: {_without(path, error)}")
        try:
            yield from _gap_faults(index, number, footer, fd)
        except CheckpointCorruptError as error:
            yield Damage("", f"{path.name}: {_without(path, error)}")


def _tensor_faults(index: CheckpointIndex, reader: BlockReader, path: str, advance: Advance) -> Iterator[str]:
    def problems(advance: Advance, **size: int) -> Iterator[str]:
        for start, numel in iter_pieces(index, path, **size):
            try:
                advance(reader.read(path, start, numel).nbytes)
            except CheckpointCorruptError as error:
                yield _without(index.info.path, error)

    if first := next(problems(advance), None):
        found = dict.fromkeys(problems(ignore, at_least=0))  # one row is part of several pieces where runs interleave
        yield from found or [f"{first}; read a second time it was sound: the disk or the memory is not to be trusted"]


def _datasets_below(file: h5py.File, top: str) -> Iterator[tuple[str, h5py.Dataset | None]]:
    """Yield all datasets below a group, by all of their paths; None for soft and external links."""
    # Not h5py's visit: it passes over the aliases of a dataset.
    start = file.get(top) if isinstance(file.get(top, getlink=True), h5py.HardLink) else None
    waiting = [("", start)] if isinstance(start, h5py.Group) else []
    seen: dict[int, str] = {}
    while waiting:
        prefix, group = waiting.pop()
        address = h5py.h5o.get_info(group.id).addr
        if address in seen:
            one, other = (f"{top}/{path}".rstrip("/") for path in (seen[address], prefix))
            raise ValueError(f"{one} and {other} are one group")  # that contain each other have endless paths
        seen[address] = prefix
        inner = []
        for name in group:
            item = group[name] if isinstance(group.get(name, getlink=True), h5py.HardLink) else None
            if isinstance(item, h5py.Group):
                inner.append((f"{prefix}{name}/", item))
            else:
                yield f"{prefix}{name}", item
        waiting += reversed(inner)
