"""Bound the objects of pickles, and read the metadata of a ``torch.distributed.checkpoint`` folder. Execute nothing.

A pickle may use an object any number of times. Forty tuples, each with the previous one twice, are a hundred bytes;
traversing, printing or hashing them never ends.
"""

import importlib
import io
import math
import os
import pickle
import pickletools
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from hpcfsdp.checkpoint.convert.torch_output import METADATA_NAME
from hpcfsdp.checkpoint.format import disk, schema
from hpcfsdp.checkpoint.format.access import LEAST_ROOM_BYTES, ROOM_PER_BYTE, MemoryBudget, open_file, read_bytes
from hpcfsdp.errors import CheckpointCorruptError, CheckpointError
from hpcfsdp.params.layout import Box
from hpcfsdp.reshard.boxes import whole_box
from hpcfsdp.reshard.tiling import find_fault, find_outside

UNFOLDED_PER_OBJECT = 100
"""Into how many objects a pickle may unfold for each that it makes, besides ``UNFOLDED_LEAST``."""

UNFOLDED_LEAST = 1 << 20

STEPS_LEAST = 1 << 20
BYTES_PER_STEP = 16
"""A pickle may have a step for so many bytes of the file, besides ``STEPS_LEAST``. Each takes torch microseconds, and
an object a hundred bytes. A tensor has about 30 steps."""

_PUTS = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE")
_GETS = ("GET", "BINGET", "LONG_BINGET")
_ADDS = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD")
"""What adds to an object that is there."""


class _SharedObject:
    """An object that a pickle uses again: `own` counts its objects that are used once, `parts` has the others."""

    def __init__(self, own: int = 1) -> None:
        self.own = own
        self.parts: list[_SharedObject] = []
        self.unfolded: int | None = None


_Object = int | _SharedObject
"""How many objects it is; or one that is used again."""


def check_pickle(stream: io.BufferedIOBase, nbytes: int = 0) -> None:
    """Raise ValueError unless the stream's next bytes are a pickle of bounded size; leave the stream behind it.

    Raise CheckpointError for more steps than the `nbytes` explain that the file, with its tensors, takes on the disk.
    """
    begin, most_steps = stream.tell(), STEPS_LEAST + nbytes // BYTES_PER_STEP
    fetched, count = set(), 0  # memo numbers, and opcodes
    for opcode, argument, _ in pickletools.genops(stream):
        count += 1
        if count > most_steps:
            raise CheckpointError(
                f"its pickle has more than {most_steps} steps, too many for the size of the file: save long lists of "
                "numbers as tensors"
            )
        if opcode.name in _GETS:
            fetched.add(argument)
    stream.seek(begin)
    most = UNFOLDED_LEAST + UNFOLDED_PER_OBJECT * count
    if _unfolded(_uses(stream, fetched, count), most) > most:
        raise ValueError("it holds lists or tuples that contain each other too often to be traversed")


def _uses(stream: io.BufferedIOBase, fetched: set[int], count: int) -> _SharedObject:
    """Return all objects that a pickle of `count` opcodes fetches from its memo, once for each fetch."""
    stack: list[_Object | None] = []  # None: a mark
    memo: dict[int, _SharedObject] = {}
    uses, places = _SharedObject(), 0
    try:
        for opcode, argument, _ in pickletools.genops(stream):
            name = opcode.name
            if name in _PUTS:
                place = places if argument is None else argument
                places += 1
                if place > count:
                    raise ValueError("it numbers objects that it does not have")  # memory for all of them would be made
                if place in fetched:
                    memo[place] = stack[-1] = _shared(stack[-1])
            elif name in _GETS:
                stack.append(memo[argument])
                uses.parts.append(memo[argument])
            elif name == "DUP":
                stack[-1] = _shared(stack[-1])
                stack.append(stack[-1])
                uses.parts.append(stack[-1])
            elif name != "STOP":
                _step(stack, opcode)
    except (IndexError, KeyError, TypeError, AttributeError):
        raise ValueError("it takes objects that it has not made") from None
    return uses


def _step(stack: list[_Object | None], opcode: Any) -> None:
    """Apply any other opcode to the stack."""
    before = opcode.stack_before
    fixed, popped = len(before), []
    if pickletools.markobject in before:
        fixed = before.index(pickletools.markobject)
        popped += iter(stack.pop, None)
    popped += [stack.pop() for _ in range(fixed)]
    if opcode.name in _ADDS:
        holder = popped.pop()  # the lowest
        stack.append(_joined(holder, popped))
        return
    for made in opcode.stack_after:
        stack.append(None if made is pickletools.markobject else _joined(1, popped))


def _joined(holder: _Object, parts: list[_Object]) -> _Object:
    """Return an object with others inside."""
    if isinstance(holder, int) and any(isinstance(part, _SharedObject) for part in parts):
        holder = _shared(holder)
    for part in parts:
        if isinstance(holder, int):
            holder += part
        elif isinstance(part, int):
            holder.own += part
        else:
            holder.parts.append(part)
    return holder


def _shared(found: _Object) -> _SharedObject:
    return found if isinstance(found, _SharedObject) else _SharedObject(found)


def _unfolded(whole: _SharedObject, most: int) -> int:
    """Return the number of objects, each counted once for each use, up to `most` + 1; raise ValueError for a cycle."""
    path: list[tuple[_SharedObject, Iterator[_SharedObject]]] = [(whole, iter(whole.parts))]
    inside = {id(whole)}
    while path:
        found, parts = path[-1]
        part = next((part for part in parts if part.unfolded is None), None)
        if part is None:
            found.unfolded = min(most + 1, found.own + sum(inner.unfolded or 0 for inner in found.parts))
            inside.discard(id(found))
            path.pop()
        elif id(part) in inside:
            raise ValueError("it holds a list that contains itself")
        else:
            inside.add(id(part))
            path.append((part, iter(part.parts)))
    return whole.unfolded or 0


def first_line(error: BaseException) -> str:
    """Return the reason of an error of reading damaged bytes, which may quote much of them."""
    if isinstance(error, MemoryError):
        return "it asks for more memory than there is"
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


_MOST_CORNERS = 1 << 22
"""Of the pieces of a tensor, that are compared: hundreds of megabytes. Torch cuts along few dimensions."""

_MOST_COMPRESSED = 1000
"""Bytes that one compressed byte can become: about zstd's factor for repeated numbers."""


def read_metadata(folder: Path) -> Metadata:
    """Read and check the metadata of a folder, or raise CheckpointError, for damage CheckpointCorruptError."""
    path = folder / METADATA_NAME
    try:
        with open_file(path) as fd:
            nbytes = disk.size(fd)
            MemoryBudget.of_file(fd).claim(2 * nbytes)
            stream = io.BytesIO(read_bytes(fd, path, 0, nbytes))
        check_pickle(stream, sum(info.stat().st_blocks * 512 for info in os.scandir(folder)))
        stream.seek(0)
        found = _MetadataUnpickler(stream).load()
        _check(found, folder)
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # damaged bytes lead pickle to any kind of error
        raise CheckpointCorruptError(f"{path}: damaged: {first_line(error)}") from error
    return found


class _MetadataUnpickler(pickle.Unpickler):
    """Find only the classes that metadata of torch.distributed.checkpoint consist of."""

    _MODULES = (
        "torch.distributed.checkpoint.metadata",
        "torch.distributed.checkpoint.filesystem",
        "torch.distributed.checkpoint.planner",
    )
    _NAMES = (
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
        ("pathlib._local", "PosixPath"),
        ("builtins", "set"),
        ("builtins", "frozenset"),
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._NAMES:
            return getattr(importlib.import_module(module), name)
        if module in self._MODULES:
            found = getattr(importlib.import_module(module), name, None)
            # Records alone: a reader or writer there could open files.
            is_own_class = isinstance(found, type) and found.__module__ == module
            if is_own_class and (hasattr(found, "__dataclass_fields__") or hasattr(found, "__members__")):
                return found
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise CheckpointError(
            f"{METADATA_NAME} asks for {module}.{name}, which torch.distributed.checkpoint does not write: hpcfsdp "
            "executes no code from a file"
        )


def _check(found: Any, folder: Path) -> None:
    """Raise unless all parts have the types that torch writes. Only checked parts are used afterwards."""
    if not isinstance(found, Metadata) or not isinstance(found.state_dict_metadata, Mapping):
        raise ValueError("it describes no state dict")
    storage = found.storage_data
    if not isinstance(storage, Mapping):
        raise ValueError("it does not list its files")
    lengths: dict[str, int] = {}
    compressed: set[str] = set()
    for index, info in storage.items():
        name = getattr(info, "relative_path", None)
        if not isinstance(index, MetadataIndex) or not isinstance(index.fqn, str):
            raise ValueError("its list of files is not by names of entries")
        sizes = getattr(info, "offset", None), getattr(info, "length", None)
        if not (isinstance(name, str) and all(type(size) is int and 0 <= size < 1 << 62 for size in sizes)):
            raise ValueError(f"it does not list the file and bytes of {index.fqn!r}")
        lengths[name] = lengths.get(name, 0) + info.length
        if getattr(info, "transform_descriptors", None):
            compressed.add(name)
    for name, nbytes in lengths.items():
        _check_file(folder, name, nbytes)
    _check_places(found.planner_data)
    for key, described in found.state_dict_metadata.items():
        if not isinstance(key, str):
            raise ValueError("the name of an entry is no text")
        if isinstance(described, TensorStorageMetadata):
            _check_tensor(key, described, storage, compressed)
        elif not isinstance(described, torch_metadata.BytesStorageMetadata):
            raise ValueError(f"{key!r} is described by a {type(described).__name__}")


def _check_file(folder: Path, name: str, nbytes: int) -> None:
    """Raise unless the name stays in the folder, and the file there has about as many bytes as the metadata claim."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\0" in name:
        raise ValueError(f"it names the file {name!r}, which is not in its folder")
    if os.path.lexists(folder / name):  # files that are not needed may be missing
        with open_file(folder / name) as fd:
            MemoryBudget.of_file(fd).claim(nbytes)


def _check_places(places: Any) -> None:
    """Raise unless these are paths into a state dict, by entry name, if they are any."""
    for key, place in places.items() if isinstance(places, Mapping) else ():
        keys = place if isinstance(place, tuple) else ()
        if not 0 < len(keys) <= schema.MOST_LEVELS or not all(type(part) in (str, int) for part in keys):
            raise ValueError(f"{key if isinstance(key, str) else type(key)!r} has no path into a state dict")


def _check_tensor(
    key: str, described: TensorStorageMetadata, storage: Mapping[MetadataIndex, Any], compressed: set[str]
) -> None:
    """Raise unless a tensor has about as many bytes in files as the metadata claim, and its pieces tile it."""
    size, chunks = described.size, described.chunks
    if not isinstance(size, torch.Size) or not isinstance(chunks, list):
        raise ValueError(f"{key!r} is described by no sizes and pieces")
    if len(size) > schema.MOST_DIMENSIONS or not isinstance(getattr(described.properties, "dtype", None), torch.dtype):
        raise ValueError(f"{key!r} has {len(size)} dimensions and no dtype; there are {schema.MOST_DIMENSIONS} at most")
    if any(length < 0 for length in size):
        raise ValueError(f"{key!r} has the sizes {list(size)}")
    infos = {id(info): info for info in _infos(key, size, chunks, storage)}.values()
    stored = sum(info.length * (_MOST_COMPRESSED if info.relative_path in compressed else 1) for info in infos)
    nbytes = math.prod(size) * described.properties.dtype.itemsize
    if nbytes > LEAST_ROOM_BYTES + ROOM_PER_BYTE * stored:
        raise ValueError(f"{key!r} of {list(size)} would have {nbytes} bytes, and {stored} are in its files")
    _check_pieces(key, size, [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks])


def _check_pieces(key: str, size: torch.Size, boxes: list[Box]) -> None:
    """Raise unless the pieces with elements tile the tensor: torch would leave gaps uninitialized."""
    boxes = [box for box in boxes if 0 not in box.sizes]
    if boxes == [whole_box(size)]:
        return
    outside = find_outside(size, boxes)
    if outside is not None:
        raise ValueError(f"{key!r} has a piece, {_placed(boxes[outside])}, that is not within {list(size)}")
    if len(boxes) << len(size) > _MOST_CORNERS:
        return
    fault = find_fault(size, boxes)
    if fault is not None and not fault.blocks:
        raise ValueError(f"{key!r} of {list(size)} has no piece with element {list(fault.element)}")
    if fault is not None:
        one, other = (_placed(boxes[number]) for number in fault.blocks)
        raise ValueError(f"pieces of {key!r}, {one} and {other}, overlap: both have element {list(fault.element)}")


def _placed(box: Box) -> str:
    return f"{list(box.sizes)} from {list(box.offsets)} on"


def _infos(key: str, size: torch.Size, chunks: list[Any], storage: Mapping[MetadataIndex, Any]) -> Iterator[Any]:
    """Yield the storage records of a tensor's pieces."""
    for chunk in chunks:
        if not (
            isinstance(chunk, torch_metadata.ChunkStorageMetadata)
            and isinstance(chunk.offsets, torch.Size)
            and isinstance(chunk.sizes, torch.Size)
            and len(chunk.offsets) == len(chunk.sizes) == len(size)
        ):
            raise ValueError(f"{key!r} has a piece that is described by no offsets and sizes")
        info = storage.get(MetadataIndex(key, chunk.offsets))
        if info is not None:
            yield info
