"""Parameters and buffers of modules: broadcasts of one rank's, after all have compared them, and their names."""

import hashlib
from collections.abc import Collection, Iterable, Iterator, MutableMapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hpcfsdp.comm.agree import raise_together
from hpcfsdp.comm.communicator import Communicator, check_peer
from hpcfsdp.errors import DisagreementError, EngineError
from hpcfsdp.params.storage import data_ptr_allocated
from hpcfsdp.text.terminal import ranks as ranks_text

ModuleT = TypeVar("ModuleT", bound=nn.Module)

BUCKET_BYTES = 250 << 20
_MOST_DIFFERENCES = 3  # in one message


def verify_param_shape_across_processes(comm: Communicator, named_params: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise on every rank of `comm` unless all have the same names, shapes and dtypes in the same order. Collective."""
    _agree(comm, {f"parameter {name!r}": _described(tensor) for name, tensor in named_params})


def sync_module_states(
    module: nn.Module,
    comm: Communicator,
    *,
    src: int = 0,
    bucket_bytes: int = BUCKET_BYTES,
    ignored: Collection[torch.Tensor | str] = frozenset(),
    buffers: bool = True,
) -> None:
    """Make all parameters and buffers of `module` what they are on rank `src`, bit by bit. Collective over `comm`.

    For hybrid sharding call it over the replicas and over the shards, in either order. What is `ignored`, itself or by
    one of its names, is skipped, as are `buffers` if False. The rest is as for ``sync_params_and_buffers``.
    """
    found = [(f"parameter {name!r}", name, tensor) for name, tensor in module.named_parameters(remove_duplicate=False)]
    if buffers:
        found += [(f"buffer {name!r}", name, tensor) for name, tensor in module.named_buffers(remove_duplicate=False)]
    names = {entry for entry in ignored if isinstance(entry, str)}
    left = {id(entry) for entry in ignored} | {id(tensor) for _, name, tensor in found if name in names}
    _sync(comm, {label: tensor for label, _, tensor in found if id(tensor) not in left}, bucket_bytes, src)


def sync_params_and_buffers(
    comm: Communicator, tensors: Sequence[torch.Tensor], bucket_bytes: int = BUCKET_BYTES, src: int = 0
) -> None:
    """Make all `tensors` what they are on rank `src`, bit by bit. Collective over `comm`.

    They may have any dtype and device, and strides that differ between ranks. The same memory is sent once, a wrapper
    subclass (DTensor) as the tensors within. Those of one dtype travel together up to `bucket_bytes`, larger ones
    alone, without a copy if contiguous. Before anything is changed, every rank raises a ``DisagreementError`` if ranks
    differ in number, shapes, dtypes or ties, or in arguments, and an ``EngineError`` for a tensor without memory.
    """
    _sync(comm, {f"tensor {index}": tensor for index, tensor in enumerate(tensors)}, bucket_bytes, src)


def _sync(comm: Communicator, named: dict[str, torch.Tensor], bucket_bytes: int, src: int) -> None:
    with raise_together(comm):
        check_peer("sync", comm, src)
        parts = [part for name, tensor in named.items() for part in _plain_parts(name, tensor)]
    owners: dict[object, str] = {}
    described = {"src": str(src), "bucket_bytes": str(bucket_bytes)}
    sent = []
    for name, tensor in parts:
        view: object = object()
        if tensor.numel():  # others may view the same memory in the same way
            view = tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()
        owner = owners.setdefault(view, name)
        described[name] = _described(tensor) + (f", tied to {owner}" if owner != name else "")
        if owner == name and tensor.numel():
            for dimension in _repeated_dimensions(tensor):  # torch refuses to write to elements that share memory
                tensor = tensor.narrow(dimension, 0, 1)
            sent.append(tensor)
    _agree(comm, described)
    if comm.size == 1:
        return
    for bucket in _buckets(sent, bucket_bytes):
        _broadcast(comm, bucket, src)


def _plain_parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensor, or those within a wrapper subclass. Refuses tensors without memory."""
    if hasattr(tensor, "__tensor_flatten__"):
        for attribute in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, attribute)
            if isinstance(inner, torch.Tensor):
                yield from _plain_parts(f"{name} ({attribute})", inner)
        return
    if is_lazy(tensor):
        raise EngineError(f"{name} is lazy, it has no shape yet: run the module once before")
    if tensor.layout is not torch.strided:
        raise EngineError(f"{name} is {tensor.layout}: only dense tensors can be synchronized")
    if tensor.numel() and not data_ptr_allocated(tensor):
        where = "is on the meta device: materialize it before" if tensor.is_meta else "has its memory freed"
        raise EngineError(f"{name} {where}, there is nothing to synchronize")
    yield name, tensor.detach()


def _described(tensor: torch.Tensor) -> str:
    if is_lazy(tensor):
        return f"{tensor.dtype} without a shape yet"
    repeated = _repeated_dimensions(tensor)
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}" + (f", expanded along {repeated}" if repeated else "")


def _repeated_dimensions(tensor: torch.Tensor) -> tuple[int, ...]:
    if tensor.layout is not torch.strided:
        return ()
    strides = enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    return tuple(dimension for dimension, (size, stride) in strides if stride == 0 and size > 1)


def _agree(comm: Communicator, described: dict[str, str]) -> None:
    """Raise on every rank unless all have the same descriptions. Collective over `comm`."""
    digest = hashlib.blake2b(repr(list(described.items())).encode(), digest_size=16).digest()
    if len(set(comm.all_gather_object(digest))) == 1:
        return
    raise DisagreementError(_difference(comm.all_gather_object(described))).on_all_ranks()


def _difference(everyone: Sequence[dict[str, str]]) -> str:
    """Return the differences between the descriptions of all ranks."""
    found = []
    for name in dict.fromkeys(name for described in everyone for name in described):
        message = _by_value(name, [described.get(name, "missing") for described in everyone])
        if message:
            found.append(message)
    if not found:  # all have the same, in another order
        orders = zip(*everyone, strict=True)
        found = [_by_value(f"number {place + 1} of them", list(names)) for place, names in enumerate(orders)]
        found = [message for message in found if message][:1]
    more = f"; and {len(found) - _MOST_DIFFERENCES} more" if len(found) > _MOST_DIFFERENCES else ""
    return "; ".join(found[:_MOST_DIFFERENCES]) + more


def _by_value(name: str, values: Sequence[str]) -> str:
    """Return which ranks have which value; "" if all have the same."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    if len(ranks) == 1:
        return ""
    return f"{name} differs: " + ", ".join(f"{value} on {ranks_text(held)}" for value, held in ranks.items())


def _buckets(tensors: Iterable[torch.Tensor], bucket_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Buckets of tensors of one dtype; the same on all ranks."""
    filling: dict[torch.dtype, tuple[list[torch.Tensor], int]] = {}
    for tensor in tensors:
        size_bytes = tensor.numel() * tensor.element_size()
        if size_bytes >= bucket_bytes:
            yield [tensor]
            continue
        bucket, held_bytes = filling.get(tensor.dtype, ([], 0))
        if held_bytes + size_bytes > bucket_bytes:
            yield bucket
            bucket, held_bytes = [], 0
        bucket.append(tensor)
        filling[tensor.dtype] = bucket, held_bytes + size_bytes
    for bucket, _ in filling.values():
        yield bucket


def _broadcast(comm: Communicator, bucket: Sequence[torch.Tensor], src: int) -> None:
    first = bucket[0]
    is_here = first.is_contiguous() and first.device.type == comm.device.type
    if len(bucket) == 1 and is_here and not (first.is_conj() or first.is_neg()):  # which are not in the memory
        comm.broadcast(first.view(-1), src)  # flat on each rank, as on ranks that send a copy
        return
    numels = [tensor.numel() for tensor in bucket]
    flat = torch.empty(sum(numels), dtype=first.dtype, device=comm.device)
    places = [place.view(tensor.shape) for place, tensor in zip(flat.split(numels), bucket, strict=True)]
    if comm.rank == src:
        for place, tensor in zip(places, bucket, strict=True):
            place.copy_(tensor)
    comm.broadcast(flat, src)
    if comm.rank != src:
        for place, tensor in zip(places, bucket, strict=True):
            tensor.copy_(place)


def replace_by_prefix(state_dict: MutableMapping[str, Any], old_prefix: str, new_prefix: str) -> None:
    """Rename the keys that begin with `old_prefix` to begin with `new_prefix`, in place. Their order is kept.

    Refuses equal prefixes, and two entries that would get the same name, before anything is changed.
    """
    if old_prefix == new_prefix:
        raise ValueError(f"the old and the new prefix are both {old_prefix!r}: nothing would change")
    renamed: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for key, value in state_dict.items():
        name = new_prefix + key[len(old_prefix) :] if key.startswith(old_prefix) else key
        if name in renamed:
            raise ValueError(
                f"{origin[name]!r} and {key!r} would both be {name!r} with {new_prefix!r} for {old_prefix!r}"
            )
        renamed[name], origin[name] = value, key
    if any(name != key for name, key in origin.items()):
        state_dict.clear()  # unlike one by one, this keeps the order; attributes of the mapping stay
        state_dict.update(renamed)


def get_root_modules(modules: Iterable[ModuleT]) -> list[ModuleT]:
    """Return those of `modules` that no other of them contains, in the order given. Visits each module once."""
    given, contained, seen = list(modules), set[nn.Module](), set[nn.Module]()
    for start in given:
        pending: list[nn.Module] = [start]
        while pending:
            module = pending.pop()
            if module not in seen:
                seen.add(module)
                children = list(module.children())
                contained.update(child for child in children if child is not start)
                pending += children
    return [module for module in given if module not in contained]
