"""The index of a checkpoint file: everything but the elements of its tensors, checked before use.

Needs numpy and h5py alone. Executes nothing of a file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcfsdp.checkpoint.format import entry_names as names, json_types, schema
from hpcfsdp.checkpoint.format.access import MemoryBudget, naming_damage, open_file, open_hdf5, read_file_footer
from hpcfsdp.checkpoint.format.extents import check_extents, merge_ranges
from hpcfsdp.checkpoint.format.extra import join_arrays
from hpcfsdp.checkpoint.format.file_kind import refuse_incomplete
from hpcfsdp.checkpoint.format.footer import Footer, packed_bytes
from hpcfsdp.checkpoint.format.plain_values import from_plain
from hpcfsdp.checkpoint.format.schema import CheckpointInfo, TensorSpec
from hpcfsdp.checkpoint.format.small_values import (
    Values,
    attribute_text,
    check_kind,
    read_extra,
    read_json,
    read_links,
    read_metrics,
    read_parts,
    read_small,
    read_specs,
    required_attribute,
)
from hpcfsdp.errors import CheckpointCorruptError, CheckpointError


@dataclass(frozen=True)
class PartFile:
    """A file next to the checkpoint that stores elements of tensors: its name, bytes, and the digest of its footer."""

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
        param_groups, scalars: of the optimizer; None where none was saved. `group_types` are the types of the former.
        rng: states of random number generators by kind, one row for each rank that wrote.
        extra: that of `info`, as ``plain_values.to_plain`` gives it.
        module_states: extra states of modules (``get_extra_state``), by name, likewise, with their types.
        metrics: numbers that training has noted, by name: steps (int64) and values (float64), both 1-D.
        footer: of the file.
        parts: files next to this one that store elements of tensors; number n in `extents` is the one at n - 1.
        state_dict: the places of a state dict's entries, as ``torch.distributed.checkpoint`` has saved it, see
            ``dcp.entry_names.Entry``; None for a file that it did not write.
    """

    info: CheckpointInfo
    tensors: dict[str, TensorSpec]
    links: dict[str, str]
    extents: np.ndarray
    param_groups: list[dict[str, Any]] | None
    scalars: dict[str, Any] | None
    rng: dict[str, np.ndarray]
    footer: Footer
    first_rows: dict[str, tuple[int, int]] = field(repr=False)
    """First row and end of each tensor's runs in `extents`."""
    metrics: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    group_types: Sequence[Any] = ()
    extra: dict[str, Any] = field(default_factory=dict)
    module_states: dict[str, Any] = field(default_factory=dict)
    parts: tuple[PartFile, ...] = ()
    state_dict: list[dict[str, Any]] | None = None

    def resolve(self, path: str) -> TensorSpec:
        """The tensor under a path or an alias; raises KeyError without one."""
        return self.tensors[self.links.get(path, path)]

    def rows_of(self, path: str) -> np.ndarray:
        """The rows of a tensor's extents, by its path or an alias."""
        first, end = self.first_rows[self.links.get(path, path)]
        return self.extents[first:end]


def open_index(path: str | os.PathLike[str]) -> CheckpointIndex:
    """Read the index of a checkpoint; not collective.

    Args:

    Raises:
        CheckpointError: there is no such file, it cannot be opened, or it is of a newer format.
        CheckpointCorruptError: it is no checkpoint, was never finished, or is damaged.
    """
    path = Path(path)
    with open_file(path) as fd:
        return read_index(fd, path)


def read_index(fd: int, path: Path) -> CheckpointIndex:
    """Reads the index of an open file, see ``open_index``. HDF5 only parses bytes with a verified checksum."""
    footer = read_file_footer(fd, path)
    try:
        if footer is None:
            refuse_incomplete(fd, path)
        with open_hdf5(fd, path, footer) as file:
            version = check_kind(path, file)
            if footer is None and not required_attribute(file, "committed", int):
                raise CheckpointCorruptError(
                    f"{path}: was never finished: its writer stopped before the commit mark"
                ).of_kind("unfinished")
            if footer is None:
                raise CheckpointCorruptError(
                    f"{path}: damaged: the footer that ends a file of format {version} is missing"
                )
            with naming_damage(path):
                budget = MemoryBudget.of_file(fd)
            return _read_sealed(path, file, footer, budget)
    except CheckpointError:
        raise
    except Exception as error:  # h5py raises half a dozen types on damaged files
        problem = error.args[0] if isinstance(error, KeyError) and error.args else str(error) or type(error).__name__
        raise CheckpointCorruptError(f"{path}: damaged: HDF5 cannot read it ({problem})") from error


def _read_sealed(path: Path, file: h5py.File, footer: Footer, budget: MemoryBudget) -> CheckpointIndex:
    regions = [(begin, begin + nbytes) for begin, nbytes in footer.regions]
    values = Values(path, file, footer.file_bytes - packed_bytes(len(regions)), budget)
    small = read_small(values)
    specs = read_specs(small[schema.TENSORS], small[schema.SHAPES])
    links = read_links(small[schema.LINKS], specs)
    rows = values.read(schema.EXTENTS, regions)
    if rows.ndim != 1 or rows.dtype != schema.EXTENT_DTYPE:
        raise ValueError(f"{schema.EXTENTS} is no table of extents")
    parts = tuple(PartFile(*part) for part in read_parts(values, regions))
    used = merge_ranges([*regions, *values.places])
    first_rows = check_extents(path, specs, rows, used, footer.file_bytes, [part.nbytes for part in parts])
    extra, config = read_extra(small, schema.EXTRA_VALUES), read_json(small, schema.CONFIG)
    groups, scalars, state_dict = (
        read_json(small, name) if name in small else None
        for name in (schema.PARAM_GROUPS, schema.OPTIM_SCALARS, schema.STATE_DICT)
    )
    types, group_types = (read_json(small, n) if n in small else [] for n in (schema.EXTRA_TYPES, schema.GROUP_TYPES))
    states = read_extra(small, schema.MODULE_STATES) if schema.MODULE_STATES in small else {}
    if config is not None:
        json_types.check_type(config, dict, schema.CONFIG)
    json_types.check_optimizer(groups, scalars, named=schema.STATE_DICT not in small)
    groups = join_arrays(groups, {})
    json_types.check_types(extra, types, schema.EXTRA_VALUES)
    json_types.check_types(groups, group_types, schema.PARAM_GROUPS)
    json_types.check_module_states(states)
    if schema.STATE_DICT in small:
        by_kind = {names.GROUP: groups, names.SCALAR: scalars, names.EXTRA: extra}
        json_types.check_entries(state_dict, {**specs, **links}, by_kind)
    attributes = {name: required_attribute(file, name, int) for name in ("step", "world_size")}
    texts = ("date", "software_version", "format_version")
    attributes |= {name: required_attribute(file, name, attribute_text) for name in texts}
    info = CheckpointInfo(path=path, **attributes, extra=from_plain(extra, types), config=config)
    return CheckpointIndex(
        info=info,
        tensors=specs,
        links=links,
        extents=rows,
        param_groups=groups,
        group_types=group_types,
        scalars=scalars,
        rng={name.rsplit("/", 1)[1]: value for name, value in small.items() if name.startswith(f"{schema.RNG}/")},
        first_rows=first_rows,
        metrics=read_metrics(small),
        extra=extra,
        module_states=states,
        footer=footer,
        parts=parts,
        state_dict=state_dict,
    )
