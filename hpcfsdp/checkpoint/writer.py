"""``save``: every rank writes its own bytes of one HDF5 file, which appears under its name only when it is whole."""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from hpcfsdp.checkpoint.content import Content, Given, Metrics, bytes_in_memory, collect
from hpcfsdp.checkpoint.draft import BlockWriter, BytesOf, Draft, errors_of, extent_rows
from hpcfsdp.checkpoint.files import Files
from hpcfsdp.checkpoint.format.skeleton import Skeleton
from hpcfsdp.checkpoint.same_call import Facts, GivenPath, OfFirst, enter
from hpcfsdp.checkpoint.save_plan import SavePlan
from hpcfsdp.comm import Communicator, raise_together
from hpcfsdp.errors import CheckpointError, nearest
from hpcfsdp.launch.calls import public_call
from hpcfsdp.state.model import communicator_of
from hpcfsdp.state.tensors import Staged, StateTensor, staged_of


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
    writer: str = "posix",
    files: Files | None = None,
) -> Path:
    """Collective over the model's ranks. Write model, optimizer and random number generators into one HDF5 file.

    The file is written under a temporary name beside `path`, forced to disk by every rank, and renamed: at any moment
    `path` is the previous file, the new one, or absent. A failure on any rank is raised on every rank.

    Args:
        path: of the file, on a file system that all ranks share. The directory is made if it is missing. Ranks other
            than 0 may give None.
        model: sharded by ``FullyShardedDataParallel`` or ``fully_shard``, or a plain module (then rank 0 writes it); in
            wrappers as ``DistributedDataParallel`` or not, which names in the file say nothing of.
        optimizer: built from ``model.parameters()``.
        step: number of the training step, kept in the file.
        extra: further values: nested dicts and lists of numbers, strings, arrays and tensors. Ranks other than 0 give
            the same, or None.
        config: the configuration of the run, as JSON knows it. Rank 0's is kept.
        metrics: numbers that training has noted, by name: the steps, and as many values. Rank 0's are kept.
        names: patterns of names of the model's tensors ("*.lora_A.*", see ``inspect.names.matching``): only these are
            written, and of the optimizer what it remembers of them.
        writer: "posix", each rank writes its ranges of the file; "mpio", all ranks write together through HDF5 and
            MPI-IO, the same bytes, with an h5py that was built for MPI; "subfiles", each node writes a file of its own
            beside a small one that is the checkpoint, and names them.
        files: what operates on the disk, for tests that have it fail.

    Returns:
        The path.

    Raises:
        CheckpointError: the file cannot be written, a value cannot be kept, the writer cannot be used here, or a
            pattern matches nothing.
        DifferentCallsError: a rank makes another call, as ``load``.
        DisagreementError: ranks hold different models or optimizers, or give different values.
    """
    given = Given(model, optimizer, step, extra, config, metrics, names)
    return save_given(communicator_of(model), lambda: path, given, writer, files)


def save_given(
    comm: Communicator,
    path_of: Callable[[], str | os.PathLike[str] | None],
    given: Given,
    writer: str,
    files: Files | None,
) -> Path:
    """Collective over `comm`. As ``save``.

    Args:
        path_of: may raise, on any rank; then all do.
    """
    draft = draft_of(comm, path_of, given, writer, files)
    with errors_of(draft.path):
        content, tensors = collect(comm, given)
        writing = writer_called(writer)(comm, draft, content)
    try:
        writing.begin()
        writing.write(tensors)
        writing.finish()
    except BaseException:
        writing.discard()
        raise
    return draft.path


def writer_called(name: str) -> type[PosixWriter]:
    """The class of a writer, by the name that ``save`` takes.

    Raises:
        CheckpointError: there is none of that name, or it cannot be used here.
    """
    modules = {"posix": "writer", "mpio": "mpio", "subfiles": "subfiles"}
    if name not in modules:
        known = ", ".join(modules)
        raise CheckpointError(f"there is no writer {name!r}: choose one of {known}{nearest(name, modules)}")
    module = importlib.import_module(f"hpcfsdp.checkpoint.{modules[name]}")
    found: type[PosixWriter] = getattr(module, f"{name.capitalize()}Writer")
    found.check_usable()
    return found


def draft_of(
    comm: Communicator,
    path_of: Callable[[], str | os.PathLike[str] | None],
    given: Given,
    writer: str,
    files: Files | None,
    *,
    asynchronous: bool = False,
) -> Draft:
    """Collective over `comm`. A new file for the path, once all ranks give the same; touches no disk.

    Raises:
        TypeError, ValueError: an argument is not what it has to be. Other ranks raise an HpcfsdpError.
        CheckpointError: the writer cannot be used here.
        DifferentCallsError, DisagreementError: see ``calls.enter``.
    """

    def facts() -> Facts:
        path = path_of()
        writer_called(writer)
        is_first = comm.rank == 0
        return {
            "path": GivenPath(path) if is_first or path is not None else None,
            **given.facts(),
            "writer": writer,
            "asynchronous": asynchronous,
            "token": OfFirst(secrets.token_hex(4) if is_first else None),
        }

    first = enter(comm, "checkpoint.save", facts)
    return Draft(files or Files(), Path(first["path"].absolute), first["token"].value)


class PosixWriter:
    """Plain writes of each rank into one file that rank 0 lays out. All methods but ``discard`` are collective.

    ``begin``, ``write`` and ``finish`` are called in this order; after an error in any of them, ``discard``.
    """

    def __init__(self, comm: Communicator, draft: Draft, content: Content) -> None:
        """Touches no disk.

        Args:
            comm: the ranks of the plan.
        """
        self._comm, self._draft, self._content = comm, draft, content
        self._skeleton: Skeleton | None = None
        self._offsets: Sequence[int] = ()
        self._sums = np.zeros(0, np.uint64)

    @classmethod
    def check_usable(cls) -> None:
        """Not collective. Raise a CheckpointError if this writer cannot be used here."""

    def begin(self) -> None:
        """Make the file on rank 0, all holes; every rank then knows where each tensor begins."""
        with raise_together(self._comm), errors_of(self._draft.path):
            if self._comm.rank == 0:
                self._skeleton = self._content.skeleton()
                self._draft.create(self._skeleton.nbytes)
                self._offsets = self._skeleton.offsets
        self._offsets = self._comm.broadcast_object(self._offsets)

    def write(self, tensors: Sequence[StateTensor]) -> None:
        """Write this rank's blocks, and force them to the disk.

        What has to be put together first is put together, written and forgotten one after the other.

        Args:
            tensors: as the plan has them.
        """
        comm, draft, plan = self._comm, self._draft, self._content.plan
        own = plan.blocks_of(comm.rank)
        self._sums = np.zeros(len(own), np.uint64)
        places = places_by_stage(plan, tensors, own)
        with contextlib.ExitStack() as stack:
            with raise_together(comm), errors_of(draft.path):
                write, sync = stack.enter_context(self._opened(bytes_in_memory(plan, tensors)))
                first = places.get(None, [])
                self._sums[first] = write(own[first])
            for staged in staged_of(tensors):
                staged.gather()
                with raise_together(comm), errors_of(draft.path):
                    now = places.get(staged, [])
                    self._sums[now] = write(own[now])
                staged.free()
            with raise_together(comm), errors_of(draft.path):
                sync()
                stack.close()

    @contextlib.contextmanager
    def _opened(self, bytes_of: BytesOf) -> Iterator[tuple[Callable[[np.ndarray], np.ndarray], Callable[[], None]]]:
        """Not collective. What writes blocks, given their places in the plan, and what forces them to the disk."""
        with self._draft.opened() as fd:
            blocks = BlockWriter(self._draft.files, fd, self._content.plan, self._offsets, bytes_of)
            yield blocks.write, lambda: self._draft.files.sync(fd)

    def finish(self) -> None:
        """Commit: after this the file has its name."""
        everyone = self._comm.all_gather_object(self._sums.tobytes())
        with raise_together(self._comm), errors_of(self._draft.path):
            if self._skeleton is not None:
                self._draft.commit(self._skeleton, extent_rows(self._content.plan, self._offsets, everyone))

    def discard(self) -> None:
        """Not collective. Remove what there is of the file."""
        if self._comm.rank == 0:
            self._draft.discard()


def places_by_stage(plan: SavePlan, tensors: Sequence[StateTensor], own: np.ndarray) -> dict[Staged | None, list[int]]:
    """Places in `own`, which are blocks of the plan, by what has to be gathered before they can be written."""
    return by_stage(tensors[tensor] for tensor in plan.blocks["tensor"][own].tolist())


def by_stage(tensors: Iterable[StateTensor]) -> dict[Staged | None, list[int]]:
    """Places in a row of tensors, by what has to be gathered before they can be written. Pure."""
    places: dict[Staged | None, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tensor.staged, []).append(place)
    return places
