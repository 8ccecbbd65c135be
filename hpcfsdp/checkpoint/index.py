"""The index of a checkpoint file: everything but the elements of its tensors, checked before it is believed.

Needs numpy and h5py alone. No byte of a file is ever executed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import h5py
import numpy as np

from hpcfsdp.checkpoint import kinds
from hpcfsdp.checkpoint.access import Room, damage, hdf5_of, opened, seal_of
from hpcfsdp.checkpoint.dcp import entry_names as names
from hpcfsdp.checkpoint.extents import check_extents, union
from hpcfsdp.checkpoint.files import Files
from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.schema import CheckpointInfo, TensorSpec
from hpcfsdp.checkpoint.format.seal import Seal, packed_bytes
from hpcfsdp.checkpoint.small import (
    Values,
    check_kind,
    read_extra,
    read_json,
    read_links,
    read_metrics,
    read_parts,
    read_small,
    read_specs,
    required,
    text,
)
from hpcfsdp.errors import CheckpointCorruptError, CheckpointError


@dataclass(frozen=True)
class PartFile:
    """A file beside the checkpoint that holds elements of tensors: its name, bytes, and the digest of its seal."""

    name: str
    nbytes: int
    digest: int


@dataclass(frozen=True)
class CheckpointIndex:
    """Everything of a checkpoint but the tensors' elements.

    Attributes:
        tensors: by path in the file ("model/<fqn>", "optim/state/<fqn>/<key>"), in file order.
        links: alias of a (tied) tensor -> its path.
        extents: the table of runs, sorted by tensor and start.
        param_groups, scalars: of the optimizer; None where none was saved.
        rng: states of random number generators by kind, one row for each rank that wrote.
        module_states: what modules keep beside tensors (``get_extra_state``), by name: ``values.plain`` of it.
        metrics: numbers that training has noted, by name: steps (int64) and values (float64), both 1-D.
        seal: of the file.
        parts: files beside this one in which elements of tensors stand; number n in `extents` is the one at n - 1.
        state_dict: where the entries of the state dict stand that ``torch.distributed.checkpoint`` has saved, see
            ``dcp.entry_names.Entry``; None for a file that it did not write.
    """

    info: CheckpointInfo
    tensors: dict[str, TensorSpec]
    links: dict[str, str]
    extents: np.ndarray
    param_groups: list[dict[str, Any]] | None
    scalars: dict[str, Any] | None
    rng: dict[str, np.ndarray]
    seal: Seal
    first_rows: dict[str, tuple[int, int]] = field(repr=False)
    """First row and end of each tensor's runs in `extents`."""
    metrics: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    module_states: dict[str, Any] = field(default_factory=dict)
    parts: tuple[PartFile, ...] = ()
    state_dict: list[dict[str, Any]] | None = None

    @property
    def keeps_module_states(self) -> bool:
        """Whether a state that is not in `module_states` is one that no module had."""
        return self.state_dict is None and bool(self.rng)

    def resolve(self, path: str) -> TensorSpec:
        """The tensor under a path or an alias of it.

        Raises:
            KeyError: there is none.
        """
        return self.tensors[self.links.get(path, path)]

    def rows_of(self, path: str) -> np.ndarray:
        """The rows of `extents` of a tensor, by a path or an alias of it."""
        first, end = self.first_rows[self.links.get(path, path)]
        return self.extents[first:end]


def open_index(path: str | os.PathLike[str], files: Files | None = None) -> CheckpointIndex:
    """Read the index of a checkpoint; not collective.

    Args:
        files: what operates on the disk, for tests that have it fail.

    Raises:
        CheckpointError: there is no such file, it cannot be opened, or it is of a newer format.
        CheckpointCorruptError: it is no checkpoint, was never finished, or is damaged.
    """
    files = files or Files()
    path = Path(path)
    with opened(files, path) as fd:
        return read_index(files, fd, path)


def read_index(files: Files, fd: int, path: Path) -> CheckpointIndex:
    """The index of an open file, see ``open_index``. HDF5 gets to see what has its checksum, and nothing else."""
    seal = seal_of(files, fd, path)
    try:
        with hdf5_of(files, fd, path, seal) as file:
            if seal is None:
                _refuse_unsealed(path, file)
            with damage(path):
                room = Room.of(files, fd)
            return _read_sealed(path, file, seal, room)
    except CheckpointError:
        raise
    except Exception as error:  # h5py raises half a dozen types on damaged files
        what = error.args[0] if isinstance(error, KeyError) and error.args else str(error) or type(error).__name__
        raise CheckpointCorruptError(f"{path}: damaged, or not an HDF5 file ({what})") from error


def _read_sealed(path: Path, file: h5py.File, seal: Seal, room: Room) -> CheckpointIndex:
    check_kind(path, file)
    regions = [(begin, begin + nbytes) for begin, nbytes in seal.regions]
    values = Values(path, file, seal.file_bytes - packed_bytes(len(regions)), room)
    small = read_small(values)
    specs = read_specs(small[schema.TENSORS], small[schema.SHAPES])
    links = read_links(small[schema.LINKS], specs)
    rows = values.read(schema.EXTENTS, regions)
    if rows.ndim != 1 or rows.dtype != schema.EXTENT_DTYPE:
        raise ValueError(f"{schema.EXTENTS} is no table of extents")
    parts = tuple(PartFile(*part) for part in read_parts(values, regions))
    taken = union([*regions, *values.places])
    first_rows = check_extents(path, specs, rows, taken, seal.file_bytes, [part.nbytes for part in parts])
    return _index(path, file, small, specs, links, rows, first_rows, seal, parts)


def _refuse_unsealed(path: Path, file: h5py.File) -> NoReturn:
    """Say what a file without a seal is."""
    version = check_kind(path, file)
    if not required(file, "committed", int):
        raise CheckpointCorruptError(f"{path}: was never finished: its writer stopped before the commit mark")
    raise CheckpointCorruptError(f"{path}: damaged: the seal that ends a file of format {version} is missing")


def _index(
    path: Path,
    file: h5py.File,
    small: dict[str, Any],
    specs: dict[str, TensorSpec],
    links: dict[str, str],
    rows: np.ndarray,
    first_rows: dict[str, tuple[int, int]],
    seal: Seal,
    parts: tuple[PartFile, ...],
) -> CheckpointIndex:
    extra, config = read_extra(small, schema.EXTRA_VALUES), read_json(small, schema.CONFIG)
    groups, scalars, state_dict = (
        read_json(small, name) if name in small else None
        for name in (schema.PARAM_GROUPS, schema.OPTIM_SCALARS, schema.STATE_DICT)
    )
    states = read_extra(small, schema.MODULE_STATES) if schema.MODULE_STATES in small else {}
    kinds.check_object(config, schema.CONFIG)
    kinds.check_optimizer(groups, scalars, named=schema.STATE_DICT not in small)
    kinds.check_module_states(states)
    if schema.STATE_DICT in small:
        by_kind = {names.GROUP: groups, names.SCALAR: scalars, names.EXTRA: extra}
        kinds.check_entries(state_dict, {**specs, **links}, by_kind)
    info = CheckpointInfo(
        path=path,
        step=required(file, "step", int),
        world_size=required(file, "world_size", int),
        date=required(file, "date", text),
        software_version=required(file, "software_version", text),
        format_version=required(file, "format_version", text),
        extra=extra,
        config=config,
    )
    return CheckpointIndex(
        info=info,
        tensors=specs,
        links=links,
        extents=rows,
        param_groups=groups,
        scalars=scalars,
        rng={name.rsplit("/", 1)[1]: value for name, value in small.items() if name.startswith(f"{schema.RNG}/")},
        first_rows=first_rows,
        metrics=read_metrics(small),
        module_states=states,
        seal=seal,
        parts=parts,
        state_dict=state_dict,
    )
