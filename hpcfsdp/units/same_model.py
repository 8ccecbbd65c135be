"""Comparison of the models of all ranks: the same parameters with the same initial values."""

import uuid
import warnings
from collections.abc import Mapping, Sequence
from itertools import zip_longest

import torch
import xxhash

from hpcfsdp.comm import Communicator
from hpcfsdp.comm.communicator import CommOptions
from hpcfsdp.errors import DifferentValuesWarning, DisagreementError
from hpcfsdp.params.layout import FlatLayout, ParamSlot
from hpcfsdp.reshard.sharded_tensors import checksum

# The names of units, each with the label that its ranks gave it when they made it; "" for a unit of other ranks.
Made = Sequence[tuple[str, str]]


def compare_units(everyone: Sequence[Made], names: Sequence[int]) -> None:
    """Raise unless all ranks, called `names` in messages, call those units alike that they have made together."""
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
    options: CommOptions | None = None,
) -> tuple[str, str | None]:
    """Raise on every rank, naming the first difference, unless all have the same parameters. Collective over `comm`.

    Where ranks ignore different modules and only the numbers of these modules' siblings differ in names, it warns.

    Args:
        names: of the ranks of `comm`, for messages.
        counted_fqns: names of parameters as if ignored modules did not exist, see ``OwnParam``.
        values: tensors to compare, by their names in messages; None to compare none.
        inside: units inside of the one with these parameters.
        options: how these ranks communicate.

    Returns:
        A label of the unit that no other has; the first value that differs, with the ranks, for ``warn_of_values``.
    """
    prints = [(layout.fingerprint(), grad) for layout, grad in zip(layouts, trained, strict=True)]
    sums = None if values is None else {name: checksum(tensor) for name, tensor in values.items()}
    digest = None if sums is None else xxhash.xxh3_64_intdigest(repr(sums).encode())
    gathered = comm.all_gather_object((prints, digest, list(inside), options, uuid.uuid4().hex[:12]))
    differs = [other != gathered[0][0] for other, *_ in gathered]
    if any(differs):
        mine = [
            (
                (slot.fqn, _described(slot), str(layout.dtype), "trained" if grad else "with requires_grad=False"),
                counted,
            )
            for layout, grad in zip(layouts, trained, strict=True)
            for slot in layout.slots
            for counted in [(counted_fqns or {}).get(slot.fqn, slot.fqn)]
        ]
        _compare_parameters(comm.all_gather_object(mine), differs, names)
    compare_units([units for _, _, units, *_ in gathered], names)
    for name, (*_, others, _label) in zip(names, gathered, strict=True):
        if others != gathered[0][3]:
            text = f"comm_options differ: rank {names[0]} passes {gathered[0][3]}, rank {name} passes {others}"
            raise DisagreementError(f"{text}; pass the same on all ranks").on_all_ranks()
    digests, label = [digest for _, digest, *_ in gathered], gathered[0][-1]
    if None in digests or len(set(digests)) == 1:
        return label, None
    everyone = comm.all_gather_object(sums)
    for name, first in everyone[0].items():  # of the tensors that all ranks have
        held = [sums.get(name) for sums in everyone]
        others = [str(names[rank]) for rank, found in enumerate(held) if found != first]
        if others and None not in held:
            ranks = f"rank{'s' if len(others) > 1 else ''} {', '.join(others)}"
            return label, f"{name} has other values on {ranks} than on rank {names[0]}"
    return label, None


def warn_of_values(difference: str, stacklevel: int) -> None:
    """Warn that ranks have different initial values, as `difference` says; `stacklevel` is that of the caller."""
    warnings.warn(
        f"{difference}: each rank keeps the shard of its own values, or its own replica. Pass "
        "sync_module_states=True to start from rank 0's values, or build the model from one seed on all ranks "
        "(torch.manual_seed). Ignore this warning if you load a state dict or a checkpoint before training",
        DifferentValuesWarning,
        stacklevel=stacklevel + 1,
    )


def _compare_parameters(everyone: Sequence[list], differs: Sequence[bool], names: Sequence[int]) -> None:
    """Raise, or warn where only numbers in names differ. `differs`: by rank, whether its layouts are not rank 0's."""
    renamed = None
    for rank, other in enumerate(everyone):
        if not differs[rank]:
            continue
        pairs = enumerate(zip_longest(everyone[0], other, fillvalue=(("nothing", "", "", ""), "")))
        found = ((index, first, second) for index, ((first, _), (second, _)) in pairs if first != second)
        if (differing := next(found, None)) is None:
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


def _differing(what: str) -> DisagreementError:
    return DisagreementError(f"ranks wrap different models: {what}").on_all_ranks()


def _described(slot: ParamSlot) -> str:
    if slot.block is None:
        return str(slot.shape)
    block = slot.block
    return f"{slot.shape} at {block.box.offsets} of {block.shape}, placed as {list(block.placements)},"
