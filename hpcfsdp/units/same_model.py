"""Comparison of the models of all ranks: the same parameters with the same initial values."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Mapping, Sequence
from itertools import zip_longest

import torch
import xxhash

from hpcfsdp.comm import Communicator
from hpcfsdp.errors import DifferentValuesWarning, DisagreementError
from hpcfsdp.params.layout import FlatLayout, ParamSlot
from hpcfsdp.reshard.sharded_tensors import checksum

_NOTHING = ("nothing", "", "", "")

Made = Sequence[tuple[str, str]]
"""The names of units, each with the label that its ranks gave it when they made it; "" for a unit of other ranks."""


def new_label(comm: Communicator) -> str:
    """Make a label of what its ranks make together. Collective over `comm`."""
    return comm.broadcast_object(uuid.uuid4().hex[:12])


def compare_units(everyone: Sequence[Made], names: Sequence[int]) -> None:
    """Raise unless all ranks call those units alike that they have made together.

    Args:
        everyone: by rank.
        names: of these ranks, for messages.
    """
    first = everyone[0]
    for rank, other in enumerate(everyone):
        if other == first:
            continue
        here, there = next((a, b) for a, b in zip_longest(first, other, fillvalue=("nothing", "")) if a != b)
        partner = repr(there[0])
        if here[0] == there[0]:
            partner = next((repr(name) for name, label in other if label == here[1]), "a unit of another model")
        raise _differing(
            f"where rank {names[0]} has made {here[0]!r}, rank {names[rank]} has made {partner}, so they would compute "
            "with each other's parameters. Make models and their units in one order on all ranks; sets, for instance, "
            "have another order in each process"
        )


def check_same_model(
    comm: Communicator,
    layouts: Sequence[FlatLayout],
    trained: Sequence[bool],
    names: Sequence[int],
    *,
    counted_fqns: Mapping[str, str] | None = None,
    values: Mapping[str, torch.Tensor] | None = None,
    inside: Made = (),
) -> tuple[str, str | None]:
    """Raise on every rank, naming the first difference, unless all have the same parameters. Collective over `comm`.

    Where ranks ignore different modules and only the numbers of these modules' siblings differ in names, it warns.

    Args:
        layouts: those of this rank's parameters.
        trained: whether the parameters of each layout require gradients.
        names: of the ranks of `comm`, for messages.
        counted_fqns: names of parameters as if ignored modules did not exist, see ``OwnParam``.
        values: tensors to compare, by their names in messages; None to compare none.
        inside: units inside of the one with these parameters.

    Returns:
        A label of the unit, the same on these ranks, and unlike that of any other; the first value that differs, with
        the ranks, for ``warn_of_values``, or None.
    """
    prints = [(layout.fingerprint(), grad) for layout, grad in zip(layouts, trained, strict=True)]
    sums = None if values is None else {name: checksum(tensor) for name, tensor in values.items()}
    digest = None if sums is None else xxhash.xxh3_64_intdigest(repr(sums).encode())
    gathered = comm.all_gather_object((prints, digest, list(inside), uuid.uuid4().hex[:12]))
    if any(other != gathered[0][0] for other, *_ in gathered):
        differs = [other != gathered[0][0] for other, *_ in gathered]
        _compare_parameters(comm, differs, layouts, trained, names, counted_fqns or {})
    compare_units([units for _, _, units, _ in gathered], names)
    digests, label = [digest for _, digest, *_ in gathered], gathered[0][-1]
    if None in digests or len(set(digests)) == 1:
        return label, None
    return label, _first_difference(comm.all_gather_object(sums), names)


def warn_of_values(difference: str, stacklevel: int) -> None:
    """Warn that ranks have different initial values, as `difference` says; `stacklevel` is that of the caller."""
    warnings.warn(
        f"{difference}: each rank keeps the shard of its own values, or its own replica. Pass "
        "sync_module_states=True to start from rank 0's values, or build the model from one seed on all ranks "
        "(torch.manual_seed). Ignore this warning if you load a state dict or a checkpoint before training",
        DifferentValuesWarning,
        stacklevel=stacklevel + 1,
    )


def _compare_parameters(
    comm: Communicator,
    differs: Sequence[bool],
    layouts: Sequence[FlatLayout],
    trained: Sequence[bool],
    names: Sequence[int],
    counted_fqns: Mapping[str, str],
) -> None:
    """Raise, or warn where only numbers in names differ. Collective over `comm`.

    Args:
        differs: by rank, whether its layouts are not those of rank 0.
    """
    mine = [
        ((slot.fqn, _described(slot), str(layout.dtype), "trained" if grad else "with requires_grad=False"), counted)
        for layout, grad in zip(layouts, trained, strict=True)
        for slot in layout.slots
        for counted in [counted_fqns.get(slot.fqn, slot.fqn)]
    ]
    everyone = comm.all_gather_object(mine)
    renamed = None
    for rank, other in enumerate(everyone):
        if not differs[rank]:
            continue
        differing = _first_pair(everyone[0], other)
        if differing is None:
            raise _differing(f"rank {names[0]} and rank {names[rank]} tie different parameters")
        index, first, second = differing
        counted = [[(name, *described[1:]) for described, name in held] for held in (everyone[0], other)]
        if counted[0] != counted[1]:
            what = "as parameter {} rank {} has {} {} {} {}, rank {} has {} {} {} {}"
            raise _differing(what.format(index, names[0], *first, names[rank], *second))
        renamed = renamed or (index, first[0], names[0], second[0], names[rank])
    if renamed is not None:
        warnings.warn(
            "parameter {} is called {!r} on rank {} and {!r} on rank {}, because these ranks ignore different "
            "modules. Training works; saving and loading need the same names on all ranks".format(*renamed),
            stacklevel=6,
        )


def _first_pair(left: list, right: list) -> tuple[int, tuple, tuple] | None:
    """Return the index of the first parameter in which two ranks differ, and both descriptions."""
    for index, ((first, _), (second, _)) in enumerate(zip_longest(left, right, fillvalue=(_NOTHING, ""))):
        if first != second:
            return index, first, second
    return None


def _first_difference(everyone: Sequence[Mapping[str, int]], names: Sequence[int]) -> str | None:
    """Return the first tensor with different checksums, of those that all ranks have."""
    for name, first in everyone[0].items():
        held = [sums.get(name) for sums in everyone]
        others = [str(names[rank]) for rank, checksum in enumerate(held) if checksum != first]
        if others and None not in held:
            ranks = f"rank{'s' if len(others) > 1 else ''} {', '.join(others)}"
            return f"{name} has other values on {ranks} than on rank {names[0]}"
    return None


def _differing(what: str) -> DisagreementError:
    error = DisagreementError(f"ranks wrap different models: {what}")
    error.raised_on_all_ranks = True
    return error


def _described(slot: ParamSlot) -> str:
    if slot.block is None:
        return str(slot.shape)
    block = slot.block
    return f"{slot.shape} at {block.box.offsets} of {block.shape}, placed as {list(block.placements)},"
