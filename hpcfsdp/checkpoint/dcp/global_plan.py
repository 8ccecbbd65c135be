"""The coordinator's plan of a file, from the plans of all ranks for ``torch.distributed.checkpoint.save``. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch.distributed.checkpoint.planner import SavePlan as StatePlan, WriteItem, WriteItemType

from hpcfsdp.checkpoint.dcp import columns
from hpcfsdp.checkpoint.format import entry_names as names
from hpcfsdp.checkpoint.format.entry_names import StateEntry
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.checkpoint.saving.plan import BLOCK_DTYPE, SavePlan, box_blocks, check_names, check_tiling
from hpcfsdp.errors import CheckpointError
from hpcfsdp.params.layout import Box
from hpcfsdp.reshard.tiling import find_outside


def plan_entries(plans: Sequence[StatePlan]) -> dict[str, StateEntry]:
    """Choose a place for all planned entries, by name."""
    paths: dict[str, Any] = {}
    for plan in plans:
        if isinstance(plan.planner_data, Mapping):
            paths |= plan.planner_data
    kinds: dict[str, set[bool]] = {}
    for item in (item for plan in plans for item in plan.items):
        kinds.setdefault(item.index.fqn, set()).add(item.type != WriteItemType.BYTE_IO)
    both = [name for name, found in kinds.items() if len(found) > 1]
    if both:
        raise CheckpointError(f"the state dict's {both[0]!r} is a tensor on some ranks but not on others")
    # In the order of the state dict; names that its planner does not describe come last.
    ordered = [*(name for name in paths if name in kinds), *(name for name in kinds if name not in paths)]
    known: dict[str, names.Path] = {}
    for name in ordered:  # some planners do not give the path as torch's own does
        path = paths.get(name)
        is_path = isinstance(path, tuple) and path and all(isinstance(key, (str, int)) for key in path)
        known[name] = path if is_path else (name,)
    tensors = {name: path for name, path in known.items() if kinds[name] == {True}}
    return names.place_entries(tensors, {name: path for name, path in known.items() if name not in tensors})


def plan_tensors(plans: Sequence[StatePlan], entries: Mapping[str, StateEntry]) -> tuple[SavePlan, dict[str, int]]:
    """Return the plan of all ranks' blocks, and by the name of an entry the number of its tensor."""
    specs: dict[str, TensorSpec] = {}
    found, owners, blocks = [], {}, [np.empty(0, BLOCK_DTYPE)]
    tensors = {name: number for number, name in enumerate(n for n, e in entries.items() if e.kind == names.TENSOR)}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if item.tensor_data is None:
                continue
            name, box = item.index.fqn, box_of(item)
            dtype = str(item.tensor_data.properties.dtype).removeprefix("torch.")
            spec = TensorSpec(entries[name].dataset, tuple(item.tensor_data.size), dtype)
            if specs.setdefault(name, spec) != spec:
                raise CheckpointError(
                    f"{spec.path} is {list(spec.shape)} {spec.dtype} on rank {rank}, "
                    f"{list(specs[name].shape)} {specs[name].dtype} on rank {owners[name]}"
                )
            owners.setdefault(name, rank)
            if find_outside(spec.shape, [box]) is not None:
                raise CheckpointError(
                    f"rank {rank} has a block of size {list(box.sizes)} at {list(box.offsets)} of {spec.path}, but "
                    f"its shape is {list(spec.shape)}"
                )
            found.append((spec, box, tensors[name], rank))
    ordered = tuple(specs[name] for name in tensors)
    check_names(ordered, ())
    for spec, box, tensor, rank in found:
        blocks.append(box_blocks(spec.shape, box, spec.itemsize))
        blocks[-1]["tensor"], blocks[-1]["rank"] = tensor, rank
    plan = SavePlan(ordered, np.concatenate(blocks), (), len(plans))
    check_tiling(plan)
    return plan, tensors


def plan_exchange(
    plans: Sequence[StatePlan], plan: SavePlan, tensors: Mapping[str, int]
) -> tuple[SavePlan, list[tuple[columns.ExchangeRound, ...]]]:
    """Return a plan of longer runs than that of ``plan_tensors``, and the exchanges of each rank; see ``columns``."""
    # Each rank reports the values of tensors among hyper-parameters that it writes itself.
    is_group = [spec.path.startswith(f"{names.GROUP_TENSORS}/") for spec in plan.specs]
    chosen = {tensor for tensor in columns.columns_of(plan) if not is_group[tensor]}
    parts = [
        columns.ItemBox(tensors[item.index.fqn], rank, number, box_of(item))
        for rank, of_rank in enumerate(plans)
        for number, item in enumerate(of_rank.items)
        if item.tensor_data is not None and tensors[item.index.fqn] in chosen
    ]
    return columns.plan_rounds(plan, parts)


def box_of(item: WriteItem) -> Box:
    return Box(tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))
