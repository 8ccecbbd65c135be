"""Collect the content of a checkpoint: the plan of its tensors, and the small values next to them."""

import datetime
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from hpcfsdp import _compat, accelerator
from hpcfsdp._version import __version__
from hpcfsdp.checkpoint.data_place import sampler_of
from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.metadata import MetadataImage, build_metadata_image
from hpcfsdp.checkpoint.format.plain_values import leaves_of, split_arrays, to_plain
from hpcfsdp.checkpoint.loading.match import check_patterns, chosen_of, is_chosen
from hpcfsdp.checkpoint.saving import rng
from hpcfsdp.checkpoint.saving.kept_plan import BlockSources, CopiedBlocks, KeptPlan, KnownPlan, Pieces, RecalledPlan
from hpcfsdp.checkpoint.saving.plan import SavePlan, plan_save
from hpcfsdp.checkpoint.saving.same_call import all_agree, compare
from hpcfsdp.checkpoint.saving.temporary import BytesOf
from hpcfsdp.comm import Communicator, raise_together
from hpcfsdp.errors import CheckpointError
from hpcfsdp.reshard.sharded_tensors import as_bytes
from hpcfsdp.state.model import DTensorRanks, device_of, hold_shards, model_tensors, stateful_modules
from hpcfsdp.state.optim.in_file import OptimizerState, gather_state, named_groups, optimizer_state, state_elsewhere
from hpcfsdp.state.optim.keys import StepsWholeTensors
from hpcfsdp.state.shown import digest_of
from hpcfsdp.state.tensors import GatherBuffer, LocalPiece, StateTensor, buffers_of, refuse_subclasses

Metrics = Mapping[str, tuple[Sequence[int], Sequence[float]]]
"""Numbers that training has noted, by name: the steps, and as many values."""


@dataclass(frozen=True)
class Content:
    """The content of a checkpoint before it is written; see ``build_metadata_image``."""

    plan: SavePlan
    attributes: Mapping[str, Any]
    small: Mapping[str, np.ndarray | bytes]

    def metadata_image(self, **others: Any) -> MetadataImage:
        """Lay the file out, without the tensors' bytes; `others` describe other files."""
        plan = self.plan
        return build_metadata_image(plan.specs, plan.links, len(plan.blocks), self.attributes, self.small, **others)


def root_attributes(step: int, world_size: int) -> dict[str, Any]:
    """Return attributes of the root group that describe the file's origin, with the current time."""
    # 8 with those of every file. HDF5 has more in an index elsewhere, or under a limit that some readers do not expect.
    return {
        "software_version": __version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "step": np.int64(step),
        "world_size": np.int64(world_size),
    }


def small_values(
    extra: Mapping[str, Any] | None,
    config: Mapping[str, Any] | None,
    groups: Sequence[Mapping[str, Any]] | None = None,
    scalars: Mapping[str, Any] | None = None,
    metrics: Metrics | None = None,
    module_states: Mapping[str, Any] | None = None,
    data: Any = None,
) -> dict[str, np.ndarray | bytes]:
    """Return the small datasets except random number states; raise CheckpointError for an unsupported value.

    `groups` and `scalars`, the optimizer's hyper-parameters and number-valued state, are None without an optimizer.
    `data` has a ``state_dict``.
    """
    small: dict[str, np.ndarray | bytes] = {}
    if groups is not None:
        small[schema.OPTIM_SCALARS] = schema.to_json(dict(scalars or {}))
        found = [{k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in group.items()} for group in groups]
        plain, types = to_plain("param_groups", found)
        values, arrays = split_arrays(plain)
        if arrays:
            raise CheckpointError("param_groups of the optimizer hold arrays, or bytes: keep lists in their place")
        small[schema.PARAM_GROUPS] = schema.to_json(values)
        small |= {schema.GROUP_TYPES: schema.to_json(types)} if types else {}
    plain, types = to_plain("extra", dict(extra or {}))
    values, arrays = split_arrays(plain)
    small[schema.EXTRA_VALUES] = schema.to_json(values)
    types = tuple(each for each in types if each[1] != "tensor")  # which come back as arrays
    small |= {schema.EXTRA_TYPES: schema.to_json(types)} if types else {}
    if module_states:
        kept = {name: list(to_plain(f"the state {name!r}", state)) for name, state in module_states.items()}
        states, more = split_arrays(kept, first=len(arrays))
        small[schema.MODULE_STATES] = schema.to_json(states)
        arrays |= more
    if data is not None:
        state, types = to_plain("the state of data", dict(data.state_dict()))
        kept, more = split_arrays({"state": state, "types": types}, first=len(arrays))
        small[schema.DATA] = schema.to_json(kept)
        arrays |= more
    small |= {f"{schema.EXTRA_ARRAYS}/{name}": array for name, array in arrays.items()}
    try:
        small[schema.CONFIG] = schema.to_json(None if config is None else dict(config))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"config must hold JSON values only: {error}") from None
    for name, curve in (metrics or {}).items():
        small |= {f"{schema.METRICS}/{name}/{part}": array for part, array in _curve(name, curve).items()}
    return small


def _curve(name: str, curve: tuple[Sequence[int], Sequence[float]]) -> dict[str, np.ndarray]:
    """Check a metric and make its datasets."""
    if not name.isprintable() or name in ("", ".", "..") or "/" in name:
        raise CheckpointError(f"metrics: {name!r} cannot be the name of a group: rename the metric")
    try:
        steps, values = (np.asarray(each.tolist() if isinstance(each, torch.Tensor) else each) for each in curve)
        if steps.ndim != 1 or steps.shape != values.shape:
            raise ValueError(f"shapes {steps.shape} and {values.shape}")
        if steps.size and not np.issubdtype(steps.dtype, np.integer):
            raise ValueError(f"steps of dtype {steps.dtype}")
        return dict(zip(schema.METRIC_PARTS, (steps.astype("<i8"), values.astype("<f8")), strict=True))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"metrics[{name!r}] must be a pair of steps and as many values: {error}") from None


@dataclass(frozen=True)
class SaveArguments:
    """The arguments of ``save`` that describe what to save."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    step: int = 0
    extra: Mapping[str, Any] | None = None
    config: Mapping[str, Any] | None = None
    metrics: Metrics | None = None
    names: Sequence[str] | None = None
    data: Any = None

    def facts(self) -> dict[str, Any]:
        """Return the values that must be equal on all ranks; raise TypeError or ValueError for wrong arguments."""
        check_patterns(self.names)
        if self.data is not None:
            sampler_of(self.data)
        return {
            "step": operator.index(self.step),
            "optimizer": "none" if self.optimizer is None else "an optimizer",
            "names": None if self.names is None else list(self.names),
            "data": "none" if self.data is None else "a place in the data",
        }


@dataclass(frozen=True)
class Collected:
    """What is to be written, and where this rank has it: `tensors` in the plan's order, none if that is recalled."""

    content: Content
    tensors: Sequence[StateTensor]
    recalled: RecalledPlan | None = None

    @property
    def is_on_accelerator(self) -> bool:
        """Whether this rank has any of it there."""
        pieces = (piece.tensor for tensor in self.tensors for piece in tensor.pieces)
        tensors = pieces if self.recalled is None else self.recalled.tensors
        return any(accelerator.is_accelerator(tensor.device) for tensor in tensors)

    def sizes(self, rank: int) -> Sequence[int]:
        """Return bytes of each copy that this rank, `rank`, makes of its blocks."""
        if self.recalled is not None:
            return self.recalled.known.sources.sizes
        return self.content.plan.block_bytes(self.content.plan.blocks_of(rank)).tolist()

    def pieces(self, blocks: np.ndarray, sources: BlockSources | None) -> Callable[[GatherBuffer | None], Pieces]:
        """Return a function to the pieces of `blocks` that are in a buffer, or in memory that is there already.

        `blocks` are places in the plan, of which this rank has the elements; `sources` are where they have been found
        in the tensors of the recalled plan, None without one.
        """
        plan, tensors = self.content.plan, self.tensors
        memory_of = memory_of_blocks(plan, tensors)
        places = by_buffer(tensors[of] for of in plan.blocks["tensor"][blocks].tolist()) if sources is None else {}

        def pieces_of(buffer: GatherBuffer | None) -> Pieces:
            if sources is not None and self.recalled is not None:
                yield from sources.pieces(self.recalled.tensors)
            for place in places.get(buffer, ()):
                yield CopiedBlocks((place,), (0,)), memory_of(int(blocks[place]))

        return pieces_of

    def gather(self, comm: Communicator, copy: Callable[[GatherBuffer], None]) -> None:
        """Fill one buffer after the other, have `copy` copy its pieces, and free it. Collective over `comm`."""
        for buffer in buffers_of(self.tensors):
            buffer.gather()
            with raise_together(comm):
                copy(buffer)
            buffer.free()


def by_buffer(tensors: Iterable[StateTensor]) -> dict[GatherBuffer | None, list[int]]:
    """Return places in a sequence of tensors, by the buffer that must be gathered before they are written."""
    places: dict[GatherBuffer | None, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tensor.buffer, []).append(place)
    return places


def collect_content(
    comm: Communicator, given: SaveArguments, kept: KeptPlan | None = None, *, with_rng: bool = True
) -> Collected:
    """Collect the content. Collective over `comm`.

    Ranks must have compared ``given.facts()`` before. If all of them recall the plan that they have `kept`, it is not
    made again, and no rank looks at each tensor. Else the new one is kept. Rank 0's content has states of all random
    number generators, or none without `with_rng`. Raise CheckpointError for a value that cannot be stored,
    DisagreementError where ranks have different models, optimizers or values.
    """
    model, optimizer = given.model, given.optimizer
    key = None if given.names is None else tuple(given.names), comm.size, comm.rank, optimizer is None
    recalled = None if kept is None else kept.recall(model, optimizer, key)
    if kept is not None and not all(all_agree(comm, recalled is not None)):
        recalled = None
    if recalled is not None:
        known = recalled.known
        with raise_together(comm) as exchange:
            small = _small_again(given, known)
            exchange.mine, states, leaves = _to_compare(comm, given, small, known.fingerprint)
        small |= _compared(comm, exchange.everyone, states if with_rng else None, leaves)
        return Collected(Content(known.plan, root_attributes(given.step, comm.size), small), (), recalled)
    own, gathered = None, None
    if isinstance(optimizer, StepsWholeTensors):
        with raise_together(comm):
            hold_shards(model)
        own, gathered = gather_state(comm, model, optimizer, optimizer.shown_state())
    elif optimizer is not None:
        own, gathered = gather_state(comm, model, optimizer, optimizer.state)
    with raise_together(comm) as exchange:
        hold_shards(model)
        state = None if own is None else optimizer_state(own, state_elsewhere(gathered), DTensorRanks(model))
        chosen, tensors, small = _tensors_and_small(given, state)
        plan = plan_save(tensors, comm.size)
        fingerprint = plan.fingerprint()
        exchange.mine, states, leaves = _to_compare(comm, given, small, fingerprint, tensors)
    small |= _compared(comm, exchange.everyone, states if with_rng else None, leaves)
    named = [tensor for _, tensor in tensors]
    if kept is not None:
        params = None if state is None else tuple(tuple(group["params"]) for group in state.groups)
        more = {"fingerprint": fingerprint, "chosen": chosen, "params": params}
        with raise_together(comm):
            more["has_states"] = bool(stateful_modules(model))
            recalled = kept.keep(model, optimizer, key, plan, comm.rank, named, **more)
    return Collected(Content(plan, root_attributes(given.step, comm.size), small), named, recalled)


_Leaves = dict[str, dict[str, str] | None]
_Compared = tuple[str, dict[str, str | None], str]
"""Of a rank: the plan's fingerprint, digests of its values, and one of the kinds of its generators. It does not grow
with the number of tensors."""


def _to_compare(
    comm: Communicator,
    given: SaveArguments,
    small: Mapping[str, np.ndarray | bytes],
    fingerprint: str,
    tensors: Iterable[tuple[str, StateTensor]] = (),
) -> tuple[_Compared, rng.States, _Leaves]:
    """Return what ranks exchange to compare, the states of random number generators, and all values by place."""
    states, leaves = rng.capture(device_of(given.model)), _leaves(given, small) if comm.size > 1 else {}
    alike = [tensor for _, tensor in tensors if tensor.must_agree and comm.size > 1]
    if alike:
        leaves["subclasses"] = {
            tensor.name: str(schema.checksum(as_bytes(tensor.pieces[0].flat().cpu()))) for tensor in alike
        }
    kinds = [(kind, str(value.dtype), value.shape) for kind, value in sorted(states.items())]
    digests = {part: None if found is None else digest_of(sorted(found.items())) for part, found in leaves.items()}
    return (fingerprint, digests, digest_of(kinds)), states, leaves


def _compared(
    comm: Communicator, everyone: Sequence[_Compared], states: rng.States | None, leaves: _Leaves
) -> dict[str, np.ndarray]:
    """Compare plans and values of ranks; return the states of all generators on rank 0. Collective over `comm`."""
    for place, name in (
        (0, "the plan of the checkpoint (the tensors of model and optimizer)"),
        (2, "the kind of random number generators (of the device)"),
    ):
        compare("checkpoint.save", [{name: of_rank[place]} for of_rank in everyone])
    for part, found in leaves.items():
        if len({parts[part] for _, parts, _ in everyone} - {None}) > 1:
            of_ranks = comm.all_gather_object(found)  # None on ranks without values
            compare("checkpoint.save", [of_ranks[0] or {} if own is None else own for own in of_ranks])
    of_ranks = {} if states is None else rng.gather(comm, states)
    return {f"{schema.RNG}/{kind}": value for kind, value in of_ranks.items()}


def _leaves(given: SaveArguments, small: Mapping[str, np.ndarray | bytes]) -> _Leaves:
    """Return values that rank 0 writes for all ranks, by place; equal on all ranks that give them."""
    arrays = {path.removeprefix(f"{schema.EXTRA_ARRAYS}/"): value for path, value in small.items()}
    found: _Leaves = {"optimizer": {}, "extra": None, "data": {}}
    if schema.DATA in small:
        found["data"] = leaves_of("data", schema.from_json(small[schema.DATA])["state"], arrays)
    if schema.PARAM_GROUPS in small:
        groups = schema.from_json(small[schema.PARAM_GROUPS])
        for group in groups:
            group["params"] = f"{len(group['params'])} parameters, {digest_of(group['params'])}"
        state = schema.from_json(small[schema.OPTIM_SCALARS])
        found["optimizer"] = leaves_of("param_groups", groups, {}) | leaves_of("state", state, {})
    if given.extra is not None:
        found["extra"] = leaves_of("extra", schema.from_json(small[schema.EXTRA_VALUES]), arrays)
        found["extra"]["the types in extra"] = str(small.get(schema.EXTRA_TYPES))
    return found


def _tensors_and_small(
    given: SaveArguments, state: OptimizerState | None
) -> tuple[frozenset[str] | None, list[tuple[str, StateTensor]], dict[str, np.ndarray | bytes]]:
    """Return names of the chosen tensors (None: all), tensors with their groups in the file, and small datasets."""
    model, found, chosen = given.model, model_tensors(given.model), None
    modules = stateful_modules(model)
    if given.names is not None:
        found, modules, names = chosen_of(found, modules, given.names)
        chosen = frozenset(names)
        state = None if state is None else state.only(chosen)
    refuse_subclasses(found)
    tensors = [(schema.MODEL, tensor) for tensor in found]
    if state is not None:
        tensors += [(schema.OPTIM_STATE, tensor) for tensor in state.tensors]
    return chosen, tensors, _small_of(given, state, modules)


def _small_of(
    given: SaveArguments, state: OptimizerState | None, modules: Mapping[str, nn.Module]
) -> dict[str, np.ndarray | bytes]:
    """Return the small datasets that are equal on all ranks. `modules` have extra state."""
    groups, scalars = (None, None) if state is None else (state.groups, state.scalars)
    states = {name: module.get_extra_state() for name, module in modules.items()}
    data = None if given.data is None else sampler_of(given.data)
    return small_values(given.extra, given.config, groups, scalars, given.metrics, states, data)


def _small_again(given: SaveArguments, known: KnownPlan) -> dict[str, np.ndarray | bytes]:
    """Return the same, for a known plan: all of its state is in tensors."""
    state, modules = None, {}
    if given.optimizer is not None and known.params is not None:
        state = OptimizerState([], {}, named_groups(given.optimizer, known.params))
        state = state if known.chosen is None else state.only(known.chosen)
    if known.has_states:
        modules = stateful_modules(given.model)
    if given.names is not None:
        modules = {n: module for n, module in modules.items() if is_chosen(n, given.names)}
    return _small_of(given, state, modules)


def memory_of_blocks(plan: SavePlan, tensors: Sequence[StateTensor]) -> Callable[[int], torch.Tensor]:
    """Return a function from a block's place in the plan to its memory here: uint8, 1-D, on the tensor's device."""
    flat: tuple[LocalPiece, torch.Tensor] | None = None
    of, starts, numels = (plan.blocks[name] for name in ("tensor", "start", "numel"))

    def memory_of(index: int) -> torch.Tensor:
        nonlocal flat
        start, tensor = starts.item(index), tensors[of.item(index)]
        piece = tensor.piece_of(start)
        whole = flat[1] if flat is not None and flat[0] is piece else piece.flat()  # a copy unless it is contiguous
        flat = (piece, whole) if tensor.buffer is None else None  # the memory of a buffer would outlive ``free``
        return whole.narrow(0, start - piece.start, numels.item(index)).view(torch.uint8)

    return memory_of


def bytes_in_memory(plan: SavePlan, tensors: Sequence[StateTensor]) -> BytesOf:
    """Return a function for ``BlockWriter`` that reads blocks from this rank's memory."""
    memory_of = memory_of_blocks(plan, tensors)

    @_compat.outside_of_modes
    def bytes_of(index: int) -> np.ndarray:
        memory = memory_of(index)
        if accelerator.is_accelerator(memory.device):
            # A device copies faster to pinned memory, which torch keeps for the next block.
            memory = torch.empty(memory.shape, dtype=memory.dtype, pin_memory=True).copy_(memory)
        return as_bytes(memory)

    return bytes_of
