"""The index of a checkpoint file: everything but the elements of its tensors, checked before use.

Needs numpy and h5py alone. Execute nothing of a file.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import h5py
import numpy as np

from hpcfsdp.checkpoint.format import access, entry_names as names, schema, small_values as stored
from hpcfsdp.checkpoint.format.footer import Footer, packed_bytes
from hpcfsdp.checkpoint.format.plain_values import from_plain, join_arrays
from hpcfsdp.checkpoint.format.schema import CheckpointInfo, TensorSpec
from hpcfsdp.checkpoint.format.small_values import PartFile
from hpcfsdp.errors import CheckpointCorruptError, CheckpointError
from hpcfsdp.reshard.tiling import MOST_ELEMENTS, TilingError, byte_ranges, first_untiled

Number = TypeVar("Number", int, float)

_BEYOND_ANY_FILE = MOST_ELEMENTS  # bytes. Sums of two of them are exact in int64.


def merge_ranges(ranges: Iterable[tuple[Number, Number]]) -> list[tuple[Number, Number]]:
    """Merge ranges that touch or overlap; ascending."""
    found: list[tuple[Number, Number]] = []
    for begin, end in sorted(ranges):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def check_extents(
    path: Path,
    specs: dict[str, TensorSpec],
    rows: np.ndarray,
    regions: list[tuple[int, int]],
    size: int,
    part_sizes: Sequence[int] = (),
) -> dict[str, tuple[int, int]]:
    """Prove that the extents tile each tensor, stay in the files and do not overlap; return the rows of each tensor.

    `regions` are (first byte, end) of everything but tensors; `size` is of the file, `part_sizes` of those next to it.
    """
    paths, of, sizes = list(specs), rows["tensor"].astype(np.int64), np.array([size, *part_sizes], np.int64)
    with access.naming_damage(path):
        if len(rows) and (of.max() >= len(paths) or np.any(np.diff(of) < 0)):
            raise ValueError("its table of extents is out of order")
        nbytes = sum(spec.nbytes for spec in specs.values())
        if nbytes >= _BEYOND_ANY_FILE or np.any(rows["byte_offset"] >= _BEYOND_ANY_FILE):
            raise ValueError("it has sizes or places beyond any file")
        try:
            untiled = first_untiled(rows, [spec.numel for spec in specs.values()])
        except TilingError as error:
            raise ValueError(f"{paths[error.tensor]}: {error}" if error.tensor is not None else str(error)) from None
        if untiled is not None:
            raise ValueError(f"the runs of {paths[untiled]} do not tile it")
        itemsizes = np.array([spec.itemsize for spec in specs.values()], np.int64)
        lengths = rows["count"].astype(np.int64) * rows["numel"].astype(np.int64) * itemsizes[of]
        if np.any(too_long := lengths > schema.BLOCK_BYTES):  # a reader reads rows whole to verify them
            what = f"{paths[of[too_long][0]]} has an extent of {lengths[too_long][0]} bytes"
            raise ValueError(f"{what}; there are {schema.BLOCK_BYTES} at most")
        if len(rows) and rows["file"].max() >= len(sizes):
            raise ValueError("its table of extents has files that it does not name")
        ends = rows["byte_offset"].astype(np.int64) + schema.row_spans(rows) * itemsizes[of]
        if np.any(beyond := ends > sizes[rows["file"]]):
            tensor, file = paths[of[beyond][0]], int(rows["file"][beyond][0])
            where = f"part {file}'s" if file else "the file's"
            raise CheckpointCorruptError(f"{path}: truncated: {tensor} ends beyond {where} {sizes[file]} bytes")
        _check_overlaps(rows, itemsizes, regions)
    edges = np.searchsorted(of, np.arange(len(paths) + 1)).tolist()
    return {name: (edges[index], edges[index + 1]) for index, name in enumerate(paths)}


def _check_overlaps(rows: np.ndarray, itemsizes: np.ndarray, regions: list[tuple[int, int]]) -> None:
    """Raise ValueError if byte ranges of a file overlap."""
    for file in np.unique(rows["file"]).tolist():
        begins, ends = elements_in(rows, itemsizes, file)
        if not file:
            begins = np.append(begins, [begin for begin, _ in regions])
            ends = np.append(ends, [end for _, end in regions])
            order = np.argsort(begins, kind="stable")
            begins, ends = begins[order], ends[order]
        if np.any(begins[1:] < ends[:-1]):
            raise ValueError("two of its byte ranges overlap")


def elements_in(rows: np.ndarray, itemsizes: np.ndarray, file: int) -> tuple[np.ndarray, np.ndarray]:
    """Return first bytes and ends of a file's ranges of elements, ascending; `file` is its number in the table."""
    rows = rows[rows["file"] == file]
    tensors, sizes = rows["tensor"], itemsizes[rows["tensor"]]
    begins, counts = rows["byte_offset"].astype(np.int64), rows["count"].astype(np.int64)
    numels, strides = (rows[name].astype(np.int64) * sizes for name in ("numel", "stride"))
    # Elements at their distances in the tensor, from one first byte on, cannot overlap.
    base = begins - rows["start"].astype(np.int64) * sizes
    order = np.lexsort((base, tensors))
    changes = (np.diff(tensors[order].astype(np.int64), prepend=-1) != 0) | (np.diff(base[order], prepend=-1) != 0)
    owners = np.empty(len(rows), np.int64)
    owners[order] = np.cumsum(changes)
    return byte_ranges(begins, numels, counts, strides, owners)


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
            ``entry_names.StateEntry``; None for a file that it did not write.
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

    @property
    def folder(self) -> Path:
        """The folder of the parts, as HDF5 resolves it: that of the file itself, not of a link to it."""
        return Path(os.path.realpath(self.info.path)).parent

    def resolve(self, path: str) -> TensorSpec:
        """Return the tensor under a path or an alias; raise KeyError without one."""
        return self.tensors[self.links.get(path, path)]

    def rows_of(self, path: str) -> np.ndarray:
        """Return the rows of a tensor's extents, by its path or an alias."""
        first, end = self.first_rows[self.links.get(path, path)]
        return self.extents[first:end]


def open_index(path: str | os.PathLike[str]) -> CheckpointIndex:
    """Read the index of the checkpoint at `path`; not collective.

    Raises:
        CheckpointError: there is no such file, it cannot be opened, or it is of a newer format.
        CheckpointCorruptError: it is no checkpoint, was never finished, or is damaged.
    """
    path = Path(path)
    with access.open_file(path) as fd:
        return read_index(fd, path)


def read_index(fd: int, path: Path) -> CheckpointIndex:
    """Read the index of an open file, see ``open_index``. HDF5 only parses bytes with a verified checksum."""
    footer = access.read_file_footer(fd, path)
    try:
        if footer is None:
            access.refuse_incomplete(fd, path)
        with access.open_hdf5(fd, path, footer) as file:
            version = stored.check_kind(path, file)
            if footer is None:
                if stored.required_attribute(file, "committed", int):
                    what = f"damaged: the footer that ends a file of format {version} is missing"
                    raise CheckpointCorruptError(f"{path}: {what}")
                what = "was never finished: its writer stopped before the commit mark"
                raise CheckpointCorruptError(f"{path}: {what}").of_kind("unfinished")
            with access.naming_damage(path):
                budget = access.MemoryBudget.of_file(fd)
            return _read_checked(path, file, footer, budget)
    except CheckpointError:
        raise
    except Exception as error:  # h5py raises half a dozen types on damaged files
        problem = error.args[0] if isinstance(error, KeyError) and error.args else str(error) or type(error).__name__
        raise CheckpointCorruptError(f"{path}: damaged: HDF5 cannot read it ({problem})") from error


def _read_checked(path: Path, file: h5py.File, footer: Footer, budget: access.MemoryBudget) -> CheckpointIndex:
    regions = [(begin, begin + nbytes) for begin, nbytes in footer.regions]
    values = stored.SmallDatasets(path, file, footer.file_bytes - packed_bytes(len(regions)), budget)
    small = stored.read_small(values)
    specs = stored.read_specs(small[schema.TENSORS], small[schema.SHAPES])
    links = stored.read_links(small[schema.LINKS], specs)
    rows = values.read(schema.EXTENTS, regions)
    if rows.ndim != 1 or rows.dtype != schema.EXTENT_DTYPE:
        raise ValueError(f"{schema.EXTENTS} is no table of extents")
    parts = stored.read_parts(values, regions)
    used = merge_ranges([*regions, *values.places])
    first_rows = check_extents(path, specs, rows, used, footer.file_bytes, [part.nbytes for part in parts])
    texts = dict.fromkeys(("date", "software_version", "format_version"), stored.attribute_text)
    kinds: dict[str, Any] = {"step": int, "world_size": int, **texts}
    attributes = {name: stored.required_attribute(file, name, kind) for name, kind in kinds.items()}
    tables: dict[str, Any] = {"tensors": specs, "links": links, "extents": rows, "first_rows": first_rows}
    return make_index(small, {"path": path, **attributes}, footer=footer, parts=parts, **tables)


def make_index(small: dict[str, Any], attributes: dict[str, Any], **more: Any) -> CheckpointIndex:
    """Return the index with these small datasets, attributes of ``CheckpointInfo``, and `more` of ``CheckpointIndex``.

    Raise ValueError where the small datasets are not as they are written.
    """
    extra, config = stored.read_extra(small, schema.EXTRA_VALUES), stored.read_json(small, schema.CONFIG)
    of_optimizer = schema.PARAM_GROUPS, schema.OPTIM_SCALARS, schema.STATE_DICT
    groups, scalars, state_dict = (stored.read_json(small, n) if n in small else None for n in of_optimizer)
    of_types = schema.EXTRA_TYPES, schema.GROUP_TYPES
    types, group_types = (stored.read_json(small, n) if n in small else [] for n in of_types)
    states = stored.read_extra(small, schema.MODULE_STATES) if schema.MODULE_STATES in small else {}
    if config is not None:
        stored.check_type(config, dict, schema.CONFIG)
    stored.check_optimizer(groups, scalars, named=schema.STATE_DICT not in small)
    groups = join_arrays(groups, {})
    stored.check_types(extra, types, schema.EXTRA_VALUES)
    stored.check_types(groups, group_types, schema.PARAM_GROUPS)
    stored.check_module_states(states)
    data = stored.read_place(small)
    if schema.STATE_DICT in small:
        by_kind = {names.GROUP: groups, names.SCALAR: scalars, names.EXTRA: extra}
        stored.check_entries(state_dict, {**more["tensors"], **more["links"]}, by_kind)
    return CheckpointIndex(
        info=CheckpointInfo(**attributes, extra=from_plain(extra, types), config=config, data=data),
        param_groups=groups,
        group_types=group_types,
        scalars=scalars,
        rng={name.rsplit("/", 1)[1]: value for name, value in small.items() if name.startswith(f"{schema.RNG}/")},
        metrics=stored.read_metrics(small),
        extra=extra,
        module_states=states,
        state_dict=state_dict,
        **more,
    )
