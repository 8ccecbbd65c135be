"""Parameters among the same ranks, each owned whole by one of them: their gradients, updates and state moved there."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hpcfsdp import _compat, accelerator
from hpcfsdp.comm import Communicator, raise_together
from hpcfsdp.errors import EngineError, StateDictError
from hpcfsdp.optim.whole_params import WholeParam, local_grad, local_part
from hpcfsdp.reshard.owners import OwnerExchange, Sharding, TensorOf
from hpcfsdp.reshard.redistribute import Finish, all_of
from hpcfsdp.state.optim.compare import RankState, StateInfo, allgather_state_info, convert_all_state_info
from hpcfsdp.state.tensors import TensorInfo, is_whole_state, mark_whole_state
from hpcfsdp.units.unit_mesh import GroupCache

State = dict[str, Any]  # the state of one parameter

LINE = 512  # words of 8 bytes in a line of a fingerprint, which has one number for each
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
"""2**64 divided by the golden ratio, as int64: its multiples have few bits in common."""
HOST_LINES, DEVICE_LINES = 1 << 7, 1 << 14
"""That are mixed at once, in memory of their own: on CPUs in the cache, on devices in few launches."""


class Flags(NamedTuple):
    """What ranks know of each parameter, true if it is on any of them."""

    has_grad: list[bool]
    lacks_grad: list[bool]
    has_changed: list[bool]


class OwnedParams:
    """Parameters of which each has an owner among the ranks of `comm`.

    The owner has `whole` parameters with memory of their own, unless its shard has all elements: then they view the
    shard. That memory stays, so that of a step only gradients and updates move. What else changes the shards is
    noticed by a fingerprint of their values, and moves before the next step.

    `params` are in the order of the optimizer, the same on all ranks; `whole` is what the optimizer steps of each: on
    the owner, one of `owners`, ranks of `comm`, the whole parameter, elsewhere without memory.
    """

    def __init__(
        self,
        comm: Communicator,
        params: Sequence[WholeParam],
        shardings: Sequence[Sharding],
        whole: Sequence[nn.Parameter],
        owners: Sequence[int],
    ) -> None:
        self.comm, self.params, self.whole, self.owners = comm, params, whole, owners
        self._exchange = OwnerExchange(comm, shardings, owners)
        self._views_shard = [each.is_whole_on(owner) for each, owner in zip(shardings, owners, strict=True)]
        self._stays = [self._exchange.stays(index) for index in range(len(shardings))]
        self._filled: set[int] = set()
        self._seen: dict[int, torch.Tensor] = {}
        self._is_checked = False

    @cached_property
    def control(self) -> Communicator:
        """The same ranks through host memory, if there is such a communicator."""
        return (GroupCache.current().host_of(self.comm) if dist.is_initialized() else None) or self.comm

    def owns(self, index: int) -> bool:
        """Return whether this rank owns a parameter."""
        return self._exchange.owns(index)

    def shard(self, index: int) -> torch.Tensor:
        """Return this rank's elements of a parameter, in place."""
        each = self.params[index]
        local = local_part(each.param)
        if local.numel() != self._exchange.numel_here(index):
            raise EngineError(
                f"WholeTensors: rank {self.comm.rank} has {local.numel()} elements of {each.name!r} instead of its "
                f"shard of {self._exchange.numel_here(index)}: step outside of summon_full_params, after the backward"
            )
        return local

    # A step

    @_compat.outside_of_modes
    def flags(self) -> Flags:
        """Return which parameters have gradients, and which changed other than by a step. Collective over `comm`."""
        count = len(self.params)
        is_first, self._is_checked = not self._is_checked, True
        with raise_together(self.control) if is_first else contextlib.nullcontext():
            mine = torch.zeros(3, count, dtype=torch.uint8)
            for index, each in enumerate(self.params):
                if self._exchange.numel_here(index) > 0 or not each.numel:
                    mine[0, index] = each.param.grad is not None
                    mine[1, index] = each.param.grad is None
            mine[2] = self._changed()
        if self.control.size > 1:
            mine = mine.to(self.control.device)
            self.control.all_reduce(mine, "max")
        return Flags(*(row.bool().tolist() for row in mine.cpu()))

    def _changed(self) -> torch.Tensor:
        """Return which parameters this rank's owners, or its shards, have other values of than each other."""
        found = torch.zeros(len(self.params), dtype=torch.uint8)
        compared: dict[int, torch.Tensor] = {}
        for index, each in enumerate(self.params):
            if self._views_shard[index]:
                continue
            if self.owns(index) and index not in self._filled:
                found[index] = 1
            elif self._exchange.numel_here(index) and each.param.grad is not None:
                seen = self._seen.get(index)
                if seen is None:
                    found[index] = 1
                else:
                    compared[index] = (seen != _fingerprint(self.shard(index))).any()
        if compared:  # a device is read once
            found[list(compared)] = torch.stack(list(compared.values())).to("cpu", torch.uint8)
        return found

    def refresh(self, chosen: Sequence[int]) -> None:
        """Give owners the present values of the `chosen` parameters, which have changed. Collective over `comm`."""
        for index, each in enumerate(self.params):
            if self.owns(index) and self._views_shard[index]:
                self.whole[index].data = self.shard(index).view(each.shape)
        for index in chosen:
            if self.owns(index) and not self._views_shard[index] and index not in self._filled:
                each = self.params[index]
                self.whole[index].data = local_part(each.param).new_empty(each.shape)
        self._gather(chosen, self.shard, lambda index: self.whole[index].data)
        self._filled.update(chosen)
        self._note_values(chosen)

    def waves(self, chosen: Sequence[int], count: int) -> list[list[int]]:
        """Divide `chosen` parameters into `count` parts, of each owner about as many elements in each."""
        parts: list[list[int]] = [[] for _ in range(count)]
        number_of = dict.fromkeys(self.owners, 0)
        for index in sorted(chosen, key=lambda index: -self.params[index].numel):
            parts[number_of[self.owners[index]] % count].append(index)
            number_of[self.owners[index]] += 1
        return [sorted(part) for part in parts]

    def gather_grads(self, chosen: Sequence[int], *, async_op: bool = False) -> Finish:
        """Give owners gradients of `chosen` parameters, once the result is called. Collective over `comm`."""
        params = {index: self.params[index].param for index in chosen}
        here = {i: local_grad(param).to(param.dtype) for i, param in params.items() if param.grad is not None}
        grads: dict[int, torch.Tensor] = {}
        for index in chosen:
            if self.owns(index):
                whole, views = self.whole[index], self._views_shard[index]
                grads[index] = here[index].view(whole.shape) if views else torch.empty_like(whole)
        moving = [index for index in chosen if not self._views_shard[index]]
        arrive = self._gather(moving, here.__getitem__, grads.__getitem__, async_op=async_op)

        def finish() -> None:
            arrive()
            for index, grad in grads.items():
                self.whole[index].grad = grad

        return finish

    def scatter_values(self, chosen: Sequence[int], *, async_op: bool = False) -> Finish:
        """Give all shards values that owners have stepped, once the result is called. Collective over `comm`."""
        for index in chosen:
            if self.owns(index):
                self.whole[index].grad = None
        moving = self._by_dtype(index for index in chosen if not self._stays[index])
        arrive = all_of(
            self._exchange.scatter(alike, lambda index: self.whole[index].data, self.shard, dtype, async_op=async_op)
            for dtype, alike in moving
        )

        def finish() -> None:
            arrive()
            for index in chosen:
                if self._exchange.numel_here(index):
                    torch.autograd.graph.increment_version(self.params[index].param)
            self._note_values(chosen)

        return finish

    def _note_values(self, chosen: Iterable[int]) -> None:
        """Remember what owners know of this rank's shards."""
        for index in chosen:
            if self._exchange.numel_here(index) and not self._views_shard[index]:
                self._seen[index] = _fingerprint(self.shard(index))

    def _gather(self, chosen: Sequence[int], shard: TensorOf, whole: TensorOf, *, async_op: bool = False) -> Finish:
        return all_of(
            self._exchange.gather(alike, shard, whole, dtype, async_op=async_op)
            for dtype, alike in self._by_dtype(chosen)
        )

    def _by_dtype(self, chosen: Iterable[int]) -> Iterable[tuple[torch.dtype, list[int]]]:
        found: dict[torch.dtype, list[int]] = {}
        for index in chosen:
            found.setdefault(self.params[index].param.dtype, []).append(index)
        return found.items()

    # State

    def shown_state(self, states: Mapping[int, State]) -> list[State]:
        """Return the state of each parameter as that of its shard. Collective over `comm`.

        Tensors of the parameter's shape become this rank's part of them; others, on all ranks, are marked by
        ``mark_whole_state``. `states` are those of parameters that this rank owns. Raises StateDictError where a value
        cannot be sent to other ranks, or a block of a parameter has state of its own.
        """
        mine = {self.params[index].name: StateInfo.of(state) for index, state in states.items() if state}
        others = {each.name for index, each in enumerate(self.params) if not self.owns(index)}
        merged = self._merged(mine, others)
        found: list[State] = [{} for _ in self.params]
        for index, each in enumerate(self.params):
            info = merged.get(each.name, StateInfo())
            if self.owns(index):
                held = states.get(index, {})
                found[index].update((name, held[name]) for name in (*info.scalar_tensors, *info.non_tensors))
            else:
                found[index].update({name: value.clone() for name, value in info.scalar_tensors.items()})
                found[index].update(info.non_tensors)
        for (name, dtype, is_elementwise), chosen in self._by_kind(merged).items():
            if is_elementwise:
                for index, tensor in self._state_in_shards(name, dtype, chosen, states).items():
                    found[index][name] = tensor
            else:
                if block := next((self.params[index] for index in chosen if self.params[index].has_blocks), None):
                    raise StateDictError(
                        f"WholeTensors: state {name!r} of {block.name!r} is of a block of it, and tensor-parallel "
                        'ranks have different ones: it can be saved with tensor_parallel="joined"'
                    )
                for index, tensor in self._state_everywhere(name, dtype, chosen, states, merged).items():
                    found[index][name] = mark_whole_state(tensor)
        return [dict(sorted(state.items(), key=lambda item: str(item[0]))) for state in found]

    def _merged(self, mine: Mapping[str, StateInfo], empty: set[str]) -> dict[str, StateInfo]:
        """Return the state that ranks have, by name; this rank has none of those in `empty`. Collective over `comm`."""
        with raise_together(self.control) as exchange:
            names = [each.name for each in self.params]
            message = RankState([], dict(mine), empty, names=names, with_shapes=True)
            exchange.mine = message.digests
        gathered = allgather_state_info(self.control, message, exchange.everyone)
        with raise_together(self.control):
            return convert_all_state_info(gathered)

    def _by_kind(self, merged: Mapping[str, StateInfo]) -> dict[tuple[str, torch.dtype, bool], list[int]]:
        """Return numbers of parameters by name and dtype of a state tensor, and whether it has their shape."""
        found: dict[tuple[str, torch.dtype, bool], list[int]] = {}
        for index, each in enumerate(self.params):
            for name, info in merged.get(each.name, StateInfo()).tensors.items():
                found.setdefault((name, info.dtype, info.shape == _with_dim(each.shape)), []).append(index)
        return dict(sorted(found.items(), key=lambda item: (item[0][0], str(item[0][1]), item[0][2])))

    def _state_in_shards(
        self, name: str, dtype: torch.dtype, chosen: Sequence[int], states: Mapping[int, State]
    ) -> dict[int, torch.Tensor]:
        """Return this rank's part of state with one value for each element. Collective over `comm`."""
        shards: dict[int, torch.Tensor] = {}
        for index in chosen:
            local = local_part(self.params[index].param)
            if self.owns(index) and self._views_shard[index]:
                shards[index] = states[index][name].detach().contiguous().view(local.shape)
            else:
                shards[index] = torch.empty(local.shape, dtype=dtype, device=_device_of_copies(local.device))
        moving = [index for index in chosen if not self._stays[index]]
        self._exchange.scatter(moving, lambda index: states[index][name].contiguous(), shards.__getitem__, dtype)
        for index in chosen:
            if isinstance(param := self.params[index].param, DTensor):
                shards[index] = _compat.dtensor_like(param, shards[index])
        return shards

    def _state_everywhere(
        self,
        name: str,
        dtype: torch.dtype,
        chosen: Sequence[int],
        states: Mapping[int, State],
        merged: Mapping[str, StateInfo],
    ) -> dict[int, torch.Tensor]:
        """Return state of other shapes, whole on all ranks. Collective over `comm`."""
        shapes = {index: merged[self.params[index].name].tensors[name].shape for index in chosen}
        found: dict[int, torch.Tensor] = {}
        of_owner: dict[int, list[int]] = {}
        for index in chosen:
            of_owner.setdefault(self.owners[index], []).append(index)
        numels = [sum(torch.Size(shapes[i]).numel() for i in of_owner.get(r, ())) for r in range(self.comm.size)]
        outputs = [torch.empty(numel, dtype=dtype, device=self.comm.device) for numel in numels]
        own = [states[index][name].to(self.comm.device).reshape(-1) for index in of_owner.get(self.comm.rank, ())]
        self.comm.all_gather(outputs, torch.cat(own) if own else outputs[self.comm.rank])
        for rank, indices in of_owner.items():
            parts = torch.split(outputs[rank], [torch.Size(shapes[index]).numel() for index in indices])
            for index, part in zip(indices, parts, strict=True):
                if self.owns(index):
                    found[index] = states[index][name]
                else:
                    device = _device_of_copies(self.params[index].param.device)
                    found[index] = part.view(shapes[index]).to(device)
        return found

    def own_state(self, given: Sequence[State]) -> dict[int, State]:
        """Return the state that this rank owns, of state as ``shown_state`` gives it. Collective over `comm`.

        `given` may also hold whole tensors on all ranks, as the optimizer of the plain model has them. Raises
        StateDictError on all ranks where ranks have different state, or an owner lacks some.
        """
        forms = {form for form in self.control.all_gather_object(self._is_whole_form(given)) if form is not None}
        if len(forms) > 1:
            raise StateDictError(
                "WholeTensors: some ranks load state of whole tensors, others of shards: load what "
                "optim_state_dict_to_load or state_dict() returned on each rank"
            )
        is_whole = forms == {True}
        with raise_together(self.control):
            described = {}
            for index, (each, state) in enumerate(zip(self.params, given, strict=True)):
                shown = {name: self._described(index, name, value, is_whole) for name, value in state.items()}
                if shown:
                    described[each.name] = StateInfo.of(shown)
        absent = (i for i, each in enumerate(self.params) if each.numel and not self._exchange.numel_here(i))
        empty = {self.params[index].name for index in absent if not given[index]}
        merged = self._merged(described, empty)
        found: dict[int, State] = {}
        with raise_together(self.control):
            for index, each in enumerate(self.params):
                if each.name in merged and self.owns(index):
                    found[index] = self._owned_values(index, given[index], merged[each.name], is_whole)
        if is_whole:
            return found
        for (name, dtype, is_elementwise), chosen in self._by_kind(merged).items():
            if is_elementwise:
                moving = [index for index in chosen if not self._views_shard[index]]
                shards = {index: local_part(given[index][name]) for index in moving if given[index]}
                whole = {index: found[index][name] for index in moving if index in found}
                self._exchange.gather(moving, shards.__getitem__, whole.__getitem__, dtype)
        return found

    def _described(self, index: int, name: str, value: Any, is_whole: bool) -> Any:
        """Return a state as a tensor without memory, of the whole shape, for other ranks."""
        each = self.params[index]
        if not isinstance(value, torch.Tensor) or (not value.dim() and not isinstance(value, DTensor)):
            return value
        shape = tuple(value.shape)
        has_shape = is_whole_state(value) or shape == each.shape or isinstance(each.param, DTensor)
        if has_shape or (is_whole and (len(shape) > 1 or shape[0] in each.shape)):
            return TensorInfo(shape, value.dtype)
        if value.numel() == self._exchange.numel_here(index):
            return TensorInfo(_with_dim(each.shape), value.dtype)
        raise StateDictError(
            f"WholeTensors: state {name!r} of {each.name!r} has shape {shape}, and rank {self.comm.rank} has "
            f"{self._exchange.numel_here(index)} of the elements of {each.shape}: a state dict of other ranks goes "
            "through optim_state_dict and optim_state_dict_to_load"
        )

    def _is_whole_form(self, given: Sequence[State]) -> bool | None:
        """Return whether tensors are whole; None if that cannot be seen from those of this rank."""
        looks_cut = None
        for index, (each, state) in enumerate(zip(self.params, given, strict=True)):
            here = self._exchange.numel_here(index)
            for value in state.values():
                if not isinstance(value, torch.Tensor) or not value.dim() or is_whole_state(value):
                    continue
                if isinstance(value, DTensor):
                    return False
                if here == each.numel and not isinstance(each.param, DTensor):
                    continue
                if tuple(value.shape) == each.shape:
                    return True
                if isinstance(each.param, DTensor):
                    continue
                if value.dim() > 1:
                    return True
                looks_cut = False if value.numel() == here else looks_cut
        return looks_cut

    def _owned_values(self, index: int, given: State, info: StateInfo, is_whole: bool) -> State:
        """Return what this rank, the owner, has of a state; with memory for what it will receive."""
        each = self.params[index]
        found: State = {name: given.get(name, value.clone()) for name, value in info.scalar_tensors.items()}
        found.update({name: given.get(name, value) for name, value in info.non_tensors.items()})
        device = each.param.device
        for name, tensor in info.tensors.items():
            value = given.get(name)
            if tensor.shape == _with_dim(each.shape) and not is_whole:
                if self._views_shard[index] and value is not None:
                    found[name] = local_part(value).view(each.shape)
                else:
                    found[name] = torch.empty(each.shape, dtype=tensor.dtype, device=device)
            elif value is None:
                raise StateDictError(
                    f"WholeTensors: rank {self.comm.rank} owns {each.name!r} now, but the state dict that it loads "
                    f"has no {name!r} of it: it is of a run in which another rank owned it; go through "
                    "optim_state_dict and optim_state_dict_to_load"
                )
            else:
                found[name] = local_part(value)
        return found


def _device_of_copies(device: torch.device) -> torch.device:
    """Return where copies of state are made: in host memory, where there is more of it."""
    return torch.device("cpu") if accelerator.is_accelerator(device) else device


def _with_dim(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that state of a parameter's shape has on ranks: that of a single number is a run of one."""
    return shape or (1,)


@_compat.outside_of_modes
def _fingerprint(values: torch.Tensor) -> torch.Tensor:
    """Return int64 numbers that almost surely differ if values do: sums of words, mixed by place, of each 4 KiB."""
    values = (torch.view_as_real(values) if values.is_complex() else values).contiguous()
    values = values.as_strided((values.numel(),), (1,))  # view(-1) keeps any stride of a single element
    if values.storage_offset() * values.element_size() % 8:
        values = values.clone()
    raw = values.view(torch.uint8)
    end = raw.numel() // (8 * LINE) * 8 * LINE
    rest = torch.zeros(8 * LINE, dtype=torch.uint8, device=raw.device)
    rest[: raw.numel() - end].copy_(raw[end:])
    weights = _weights(raw.device)
    lines = DEVICE_LINES if accelerator.is_accelerator(raw.device) else HOST_LINES
    parts = [part.view(torch.int64).view(-1, LINE) for part in (*torch.split(raw[:end], 8 * LINE * lines), rest)]
    sums = []
    for words in parts:
        mixed = (words ^ (words >> 31)).mul_(weights)
        mixed ^= mixed >> 29
        sums.append(mixed.mul_(weights).sum(1))
    return torch.cat(sums)


@functools.lru_cache(maxsize=4)
def _weights(device: torch.device) -> torch.Tensor:
    """Return an odd number for each place of a line."""
    return ((torch.arange(1, LINE + 1) * _GOLDEN) | 1).to(device)
