"""What the content of a checkpoint depends on, in one quick pass: as facts, and as the tensors that hold its values.

The general way, ``state.model`` and ``state.optim``, names every tensor of a model, and the ranks that have it. A model
with equal facts gives the same names and ranks again, so their values can be copied from these tensors at once.
"""

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel as TorchFSDP

from hpcfsdp.engine.unit import TrainingState
from hpcfsdp.state.model import persistent_tensors
from hpcfsdp.state.optim.keys import StepsWholeTensors
from hpcfsdp.units.flat_unit import FlatUnit, unit_of


@dataclass(frozen=True)
class Inventory:
    """The state of a model and an optimizer at one moment. Those of equal facts list their tensors in one order."""

    # All that names, shapes, dtypes and ranks of the tensors in a checkpoint depend on, compared by value. They hold no
    # tensor and no module: objects count by their place in the model.
    facts: tuple[Any, ...]
    # Shards of flat parameters, parameters and persistent buffers that no unit shards, and the optimizer's tensors.
    tensors: tuple[torch.Tensor, ...]  # contiguous, detached


_PLAIN = {torch.Tensor, nn.Parameter, nn.Buffer}


class _Unusual(Exception):
    """Something that needs the general way."""


def take_inventory(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Inventory | None:
    """Not collective. Return None for what facts cannot describe, or what cannot be saved now.

    These are modules of ``fully_shard``, DTensors and other kinds of tensors, memory that is not contiguous, state that
    is no tensor, or of whole tensors that ranks own, and whatever the general way refuses.
    """
    taking = _Taking()
    try:
        taking.model(model)
        if optimizer is not None:
            taking.optimizer(optimizer)
    except _Unusual:
        return None
    return Inventory(tuple(taking.facts), tuple(taking.tensors))


class _Taking:
    """An inventory in the making."""

    def __init__(self) -> None:
        self.facts: list[Any] = []
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}  # of parameters and buffers, by id: all of them exist during the pass

    def model(self, model: nn.Module) -> None:
        facts, numbers = self.facts, self._numbers
        modules, places = [model], {id(model): 0}
        units: list[FlatUnit] = []
        found: list[torch.Tensor] = []
        kinds: set[type] = set()
        for module in modules:  # which grows
            kinds.add(type(module))
            facts += (type(module), tuple(module._modules), tuple(module._parameters), tuple(module._buffers))
            for child in module._modules.values():
                if child is None:
                    facts.append(None)
                    continue
                place = places.setdefault(id(child), len(modules))
                if place == len(modules):
                    modules.append(child)
                facts.append(place)
            if module._parameters or module._buffers:
                for name, tensor in persistent_tensors(module):
                    number = numbers.setdefault(id(tensor), len(found))
                    if number == len(found):
                        found.append(tensor)
                    facts += (name, number)
            if (unit := unit_of(module)) is not None:
                units.append(unit)
                facts.append(len(unit.sharded_params))
        if any(issubclass(kind, (FSDPModule, TorchFSDP)) for kind in kinds):
            raise _Unusual
        sharded: set[int] = set()
        for unit in units:
            self._unit(unit, sharded)
        self._add(tensor for tensor in found if id(tensor) not in sharded)

    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, StepsWholeTensors):
            raise _Unusual
        states, count, numbers = optimizer.state, 0, self._numbers
        for group in optimizer.param_groups:
            self.facts.append(len(group["params"]))
            for param in group["params"]:
                number, state = numbers.get(id(param)), states.get(param)
                if number is None:
                    raise _Unusual
                self.facts.append(number)
                if state is None:
                    continue
                if not isinstance(state, Mapping):
                    raise _Unusual
                count += 1
                self.facts.append(len(state))
                for key, value in state.items():
                    self.facts += (key,) if value is not None else (key, None)
                    self._add([value] if value is not None else ())
        if count != len(states):  # some of it belongs to no parameter
            raise _Unusual

    def _unit(self, unit: FlatUnit, sharded: set[int]) -> None:
        if unit.training_state is TrainingState.SUMMON:
            raise _Unusual
        for flat in unit.sharded_params:
            flat.adopt_user_data()  # which may have been assigned in place of the shard
            owned = [id(flat.parameter), *map(id, flat.leaves)]
            sharded.update(owned)
            # References are equal while both meshes are there and the same; they keep no communicator.
            self.facts += (flat.layout, weakref.ref(unit.mesh), flat.use_orig_params)
            self.facts += map(self._numbers.get, owned)
            self._add([flat.parameter])

    def _add(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_neg() or tensor.is_conj():
                raise _Unusual
            if tensor.is_meta or not tensor.is_contiguous():
                raise _Unusual
            self.facts += (tensor.shape, tensor.dtype, tensor.device)
            self.tensors.append(tensor.detach())
