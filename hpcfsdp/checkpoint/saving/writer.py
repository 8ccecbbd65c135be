"""``save``: every rank writes its own bytes of one HDF5 file, which appears under its name only when it is whole."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from hpcfsdp.checkpoint.format import disk, schema
from hpcfsdp.checkpoint.format.catalog import new_token
from hpcfsdp.checkpoint.format.metadata import MetadataImage
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.checkpoint.saving.content import (
    Content,
    Metrics,
    SaveArguments,
    by_buffer,
    bytes_in_memory,
    collect_content,
    root_attributes,
    small_values,
)
from hpcfsdp.checkpoint.saving.plan import SavePlan, plan_alone
from hpcfsdp.checkpoint.saving.same_call import Facts, GivenPath, Rank0Value, compare_calls
from hpcfsdp.checkpoint.saving.temporary import BlockWriter, BytesOf, TemporaryFile, naming_write_errors
from hpcfsdp.comm import Communicator, of_rank_0, raise_together
from hpcfsdp.errors import CheckpointError, nearest
from hpcfsdp.hang.calls import public_call
from hpcfsdp.state.model import communicator_of
from hpcfsdp.state.tensors import StateTensor, buffers_of


@public_call("checkpoint.save")
def save(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    step: int = 0,
    extra: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    metrics: Metrics | None = None,
    names: Sequence[str] | None = None,
    data: Any = None,
    writer: str = "posix",
) -> Path:
    """Write model, optimizer and random number generators into one HDF5 file. Collective over the model's ranks.

    The file is written under a temporary name next to `path`, forced to disk by every rank, and renamed: at any moment
    `path` is the previous file, the new one, or absent. A failure on any rank is raised on every rank.

    Args:
        path: the file to write, on a file system that all ranks share. The directory is made if it is missing. Ranks
            other than 0 may give None.
        model: sharded by ``FullyShardedDataParallel`` or ``fully_shard``, or a plain module (then rank 0 writes it);
            with or without wrappers such as ``DistributedDataParallel``; names in the file do not contain them.
        optimizer: built from ``model.parameters()``.
        step: the number of the training step, stored in the file.
        extra: further values: nested dicts and lists of numbers, strings, arrays and tensors. Ranks other than 0 give
            the same, or None.
        config: the configuration of the run, made of JSON values. Rank 0's is stored.
        metrics: curves recorded during training: name -> (steps, values), two sequences of one length. Rank 0's are
            stored.
        names: patterns for the names of the model's tensors ("*.lora_A.*", see ``inspect.names.matching``): only these
            tensors are written, with their optimizer state.
        data: what the training reads, to go on at the same sample: a ``hpcfsdp.data.ResumableSampler``, a loader that
            has one, or anything with a ``state_dict`` that is equal on all ranks. Save between two batches: each one
            that was handed out counts.
        writer: "posix", each rank writes its ranges of the file; "mpio", all ranks write together through HDF5 and
            MPI-IO, the same bytes, with an h5py that was built for MPI; "subfiles", each node writes a file of its own;
            the checkpoint is a small file next to them that names them.

    Returns:
        The path.

    Raises:
        CheckpointError: the file cannot be written, a value cannot be stored, the writer cannot be used here, or a
            pattern matches nothing.
        DifferentCallsError: a rank makes another call, such as ``load``.
        DisagreementError: ranks hold different models or optimizers, or give different values.
    """
    given = SaveArguments(model, optimizer, step, extra, config, metrics, names, data)
    return save_given(communicator_of(model), lambda: path, given, writer)


def save_given(
    comm: Communicator, path_of: Callable[[], str | os.PathLike[str] | None], given: SaveArguments, writer: str
) -> Path:
    """As ``save``. `path_of` may raise on any rank; then all ranks raise. Collective over `comm`."""
    temporary = make_temporary_file(comm, path_of, given, writer)
    with naming_write_errors(temporary.path):
        collected = collect_content(comm, given)
        writing = writer_class(writer)(comm, temporary, collected.content)
    try:
        writing.begin()
        writing.write(collected.tensors)
        writing.finish()
    except BaseException:
        writing.discard()
        raise
    return temporary.path


def writer_class(name: str) -> type[PosixWriter]:
    """Return the class of a writer by its name; raise CheckpointError if it is unknown or cannot be used here."""
    modules = {"posix": "writer", "mpio": "mpio", "subfiles": "subfiles"}
    if name not in modules:
        known = ", ".join(modules)
        raise CheckpointError(f"there is no writer {name!r}: choose one of {known}{nearest(name, modules)}")
    module = importlib.import_module(f"hpcfsdp.checkpoint.saving.{modules[name]}")
    found: type[PosixWriter] = getattr(module, f"{name.capitalize()}Writer")
    found.check_usable()
    return found


def make_temporary_file(
    comm: Communicator,
    path_of: Callable[[], str | os.PathLike[str] | None],
    given: SaveArguments,
    writer: str,
    *,
    asynchronous: bool = False,
) -> TemporaryFile:
    """Return a temporary file for the path, after comparing the arguments; touch no disk. Collective over `comm`.

    Raise what is wrong with the arguments on some rank, or differs; CheckpointError if the writer cannot be used here.
    """

    def facts() -> Facts:
        path = path_of()
        writer_class(writer)
        is_first = comm.rank == 0
        return {
            # None on rank 0 is the TypeError of GivenPath.
            "path": GivenPath(cast(str, path)) if is_first or path is not None else None,
            **given.facts(),
            "writer": writer,
            "asynchronous": asynchronous,
            "token": Rank0Value(new_token() if is_first else None),
        }

    first = compare_calls(comm, "checkpoint.save", facts)
    return TemporaryFile(Path(first["path"].absolute), first["token"].value)


class PosixWriter:
    """Each rank writes into one file that rank 0 lays out. All methods but ``discard`` are collective.

    Call ``begin``, ``write`` and ``finish`` in this order; after an error in any of them, ``discard``.
    """

    def __init__(self, comm: Communicator, temporary: TemporaryFile, content: Content) -> None:
        self._comm, self._temporary, self._content = comm, temporary, content
        self._metadata_image: MetadataImage | None = None
        self._offsets: Sequence[int] = ()
        self._sums = np.zeros(0, np.uint64)

    @classmethod
    def check_usable(cls) -> None:
        """Raise CheckpointError if this writer cannot be used here. Not collective."""

    def begin(self) -> None:
        """Make the file on rank 0, all holes, and broadcast the places of tensors."""
        self._offsets = of_rank_0(self._comm, self._make)

    def _make(self) -> Sequence[int]:
        """Make the file, on rank 0; return the places of tensors."""
        with naming_write_errors(self._temporary.path):
            self._metadata_image = self._content.metadata_image()
            self._temporary.create(self._metadata_image.nbytes)
        return self._metadata_image.offsets

    def write(self, tensors: Sequence[StateTensor]) -> None:
        """Write this rank's blocks and sync them; fill, write and free one gather buffer after the other."""
        comm, temporary, plan = self._comm, self._temporary, self._content.plan
        own = plan.blocks_of(comm.rank)
        self._sums = np.zeros(len(own), np.uint64)
        places = by_buffer(tensors[of] for of in plan.blocks["tensor"][own].tolist())
        all_buffers = buffers_of(tensors)
        with contextlib.ExitStack() as stack:
            for buffer in (None, *all_buffers):
                if buffer is not None:
                    buffer.gather()
                with raise_together(comm), naming_write_errors(temporary.path):
                    if buffer is None:
                        write, sync = stack.enter_context(self._opened(bytes_in_memory(plan, tensors)))
                    now = places.get(buffer, [])
                    self._sums[now] = write(own[now])
                    if buffer is (all_buffers[-1] if all_buffers else None):
                        sync()
                        stack.close()
                if buffer is not None:
                    buffer.free()

    @contextlib.contextmanager
    def _opened(self, bytes_of: BytesOf) -> Iterator[tuple[Callable[[np.ndarray], np.ndarray], Callable[[], None]]]:
        """Functions that write blocks, by their places in the plan, and that sync them. Not collective."""
        with self._temporary.opened() as fd:
            blocks = BlockWriter(fd, self._content.plan, self._offsets, bytes_of)
            yield blocks.write, lambda: disk.sync(fd)

    def finish(self) -> None:
        """Commit the file, which then has its name."""
        everyone = gather_sums(self._comm, self._content.plan, self._sums)

        def commit() -> None:
            assert self._metadata_image is not None  # made by ``begin``, on this rank
            with naming_write_errors(self._temporary.path):
                self._temporary.commit(self._metadata_image, self._content.plan.extent_rows(self._offsets, everyone))

        of_rank_0(self._comm, commit)

    def discard(self) -> None:
        """Remove the file. Not collective."""
        if self._comm.rank == 0:
            self._temporary.discard()


def gather_sums(comm: Communicator, plan: SavePlan, sums: np.ndarray) -> list[bytes]:
    """Return the bytes of the checksums of blocks, by rank, on rank 0, which alone writes them. Collective."""
    mine = torch.from_numpy(sums.view(np.int64)).to(comm.device)
    counts = np.bincount(plan.blocks["rank"], minlength=comm.size).tolist()
    if comm.rank:
        comm.gather(None, mine, 0)
        return []
    received = [torch.empty(count, dtype=torch.int64, device=comm.device) for count in counts]
    comm.gather(received, mine, 0)
    return [of_rank.cpu().numpy().tobytes() for of_rank in received]


def write_alone(
    path: str | os.PathLike[str],
    specs: Sequence[TensorSpec],
    read: schema.Elements,
    *,
    links: Sequence[tuple[str, str]] = (),
    step: int = 0,
    extra: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    groups: Sequence[Mapping[str, Any]] | None = None,
    scalars: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint file, in whose order `read` gives elements, each once; not collective.

    A few blocks are in memory at a time. Raise CheckpointError where it cannot be written, or a name or value cannot be
    stored. `links` are (alias, path of the tensor); for `groups` and `scalars` see ``small_values``.
    """
    target = Path(os.path.abspath(os.path.expanduser(path)))
    temporary = TemporaryFile(target, new_token())
    with naming_write_errors(target):
        plan = plan_alone(specs, links)
        content = Content(plan, root_attributes(step, 1), small_values(extra, config, groups, scalars))
        metadata_image = content.metadata_image()
        temporary.create(metadata_image.nbytes)
        try:
            with temporary.opened() as fd:

                def bytes_of(index: int) -> np.ndarray:
                    tensor, start, numel = plan.blocks[["tensor", "start", "numel"]][index].item()
                    return np.ascontiguousarray(read(plan.specs[tensor], start, numel)).view(np.uint8)

                sums = BlockWriter(fd, plan, metadata_image.offsets, bytes_of).write(np.arange(len(plan.blocks)))
                disk.sync(fd)
            temporary.commit(metadata_image, plan.extent_rows(metadata_image.offsets, [sums.tobytes()]))
        except BaseException:
            temporary.discard()
            raise
    return target
