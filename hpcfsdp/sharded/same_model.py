"""Comparison of the models of all ranks: the same parameters with the same initial values."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from itertools import zip_longest

import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor

from hpcfsdp.comm import Communicator
from hpcfsdp.errors import DifferentValuesWarning, DisagreementError
from hpcfsdp.flat.layout import FlatLayout, ParamSlot
from hpcfsdp.tensor.whole import is_cut

_NOTHING = ("nothing", "", "", "")


def check_same_model(
    comm: Communicator,
    layouts: Sequence[FlatLayout],
    trained: Sequence[bool],
    names: Sequence[int],
    *,
    counted_fqns: Mapping[str, str] | None = None,
    values: Mapping[str, torch.Tensor] | None = None,
) -> str | None:
    """Collective over `comm`. Raise on every rank, naming the first difference, unless all have the same parameters.

    Where ranks ignore different modules and only the numbers of these modules' siblings differ in names, it warns.

    Args:
        trained: whether the parameters of each layout require gradients.
        names: of the ranks of `comm`, for messages.
        counted_fqns: names of parameters as if ignored modules did not exist, see ``OwnParam``.
        values: tensors to compare, by their names in messages; None to compare none.

    Returns:
        The first of `values` that differs, and the ranks, for ``warn_of_values``; None if none does.
    """
    prints = [(layout.fingerprint(), grad) for layout, grad in zip(layouts, trained, strict=True)]
    sums = None if values is None else {name: _checksum(tensor) for name, tensor in values.items()}
    digest = None if sums is None else xxhash.xxh3_64_intdigest(repr(sums).encode())
    gathered = comm.all_gather_object((prints, digest))
    if any(other != gathered[0][0] for other, _ in gathered):
        differs = [other != gathered[0][0] for other, _ in gathered]
        _compare_parameters(comm, differs, layouts, trained, names, counted_fqns or {})
    digests = [digest for _, digest in gathered]
    if None in digests or len(set(digests)) == 1:
        return None
    return _first_difference(comm.all_gather_object(sums), names)


def warn_of_values(difference: str, stacklevel: int) -> None:
    """Warn that ranks have different initial values."""
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
    """Collective over `comm`. Raise, or warn where only numbers in names differ.

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
    """The index of the first parameter in which two ranks differ, and both descriptions."""
    for index, ((first, _), (second, _)) in enumerate(zip_longest(left, right, fillvalue=(_NOTHING, ""))):
        if first != second:
            return index, first, second
    return None


def _first_difference(everyone: Sequence[Mapping[str, int]], names: Sequence[int]) -> str | None:
    """The first tensor with different checksums, of those that all ranks have."""
    for name, first in everyone[0].items():
        held = [sums.get(name) for sums in everyone]
        others = [str(names[rank]) for rank, checksum in enumerate(held) if checksum != first]
        if others and None not in held:
            ranks = f"rank{'s' if len(others) > 1 else ''} {', '.join(others)}"
            return f"{name} has other values on {ranks} than on rank {names[0]}"
    return None


def _checksum(tensor: torch.Tensor) -> int:
    """The checksum of a tensor's bits, 0 for one without plain memory."""
    if isinstance(tensor, DTensor) and not is_cut(tensor):  # if it is cut, ranks may hold different blocks
        tensor = tensor.to_local()
    plain = type(tensor) in (torch.Tensor, nn.Parameter)
    if not plain or tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        return 0
    with torch.no_grad():
        data = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    if data.device.type != "cpu":
        return int(data.sum(dtype=torch.int64))  # only a number leaves the device
    return xxhash.xxh3_64_intdigest(data.numpy())


def _differing(what: str) -> DisagreementError:
    error = DisagreementError(f"ranks wrap different models: {what}")
    error.raised_on_all_ranks = True
    return error


def _described(slot: ParamSlot) -> str:
    if slot.block is None:
        return str(slot.shape)
    block = slot.block
    return f"{slot.shape} at {block.box.offsets} of {block.shape}, placed as {list(block.placements)},"
