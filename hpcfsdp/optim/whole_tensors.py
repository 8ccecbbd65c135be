"""An optimizer that steps whole tensors of a sharded model, each on the rank that owns it."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hpcfsdp import _compat, accelerator
from hpcfsdp.comm import Communicator, assert_same, raise_together
from hpcfsdp.errors import UsageError
from hpcfsdp.optim.muon import ELEMENT_FLOPS, Muon, newton_schulz_flops
from hpcfsdp.optim.owned import Flags, OwnedParams, State
from hpcfsdp.optim.whole_params import WholeParam, local_grad, local_part, whole_params
from hpcfsdp.reshard.owners import Sharding, choose_owners
from hpcfsdp.reshard.redistribute import all_of
from hpcfsdp.state.model import communicator_of, named_flat_params
from hpcfsdp.state.optim.keys import hyper
from hpcfsdp.state.optim.values import digest, needs_closure, picklable, states_of_first_step
from hpcfsdp.state.tensors import is_whole_state, mark_whole_state
from hpcfsdp.units.own import hidden_fqn, label

Cost = Callable[[tuple[int, ...], Mapping[str, Any]], float]
"""The floating-point operations of a step of one parameter, by its whole shape and its group."""

_WAVES = 4  # parts of a step that overlaps: enough to hide what moves, and few calls of the optimizer
HOST_FLOPS_PER_BYTE, DEVICE_FLOPS_PER_BYTE = 50.0, 2000.0
"""Operations that a rank does while one byte moves; of devices, in 16 bits, and between nodes."""


class WholeTensors(torch.optim.Optimizer):
    """Any optimizer of torch for a sharded model, with whole tensors to step, as Muon, Shampoo and Adafactor need.

    Each parameter has an owner among the ranks that share it. In a step its gradient moves from the shards to the
    owner, `optimizer_class` steps it there, and its new values move into the shards. A parameter that one rank has
    whole is stepped in place. The result is that of `optimizer_class` on the plain model. To everything around it this
    is an optimizer of the shards: for clipping, ``ShardedGradScaler``, ``no_sync``, schedulers and checkpoints::

        model = FullyShardedDataParallel(model, use_orig_params=True)
        optimizer = WholeTensors(model, model.parameters(), Muon, lr=0.02)

    The owner keeps a copy of each parameter that it has not whole in its shard: all ranks together have one more copy
    of the model. During a step they also have one more of the gradients.

    ``state`` has the state of parameters that this rank owns, in their whole shapes. ``state_dict`` and
    ``load_state_dict`` are collective, and show it as state of the shards.
    """

    _is_ready = False
    _has_stepped = _has_loaded = False

    def __init__(
        self,
        model: nn.Module,
        params: Any,
        optimizer_class: type[torch.optim.Optimizer],
        *,
        replicas: Literal["auto", "divide", "repeat"] = "auto",
        tensor_parallel: Literal["joined", "blocks"] = "joined",
        overlap: bool = False,
        cost: Cost | None = None,
        **kwargs: Any,
    ) -> None:
        """Make the optimizer. Collective over all ranks of the model.

        Args:
            model: sharded by ``FullyShardedDataParallel`` with ``use_orig_params=True``, or by ``fully_shard``, with
                tensor parallelism or without. Parameters that no unit owns are stepped by each rank.
            params: parameters of `model`, (name, parameter) pairs, or groups of either, as for `optimizer_class`.
            optimizer_class: called with whole tensors in these groups, and with `kwargs`.
            replicas: ranks that have the same shard "divide" the work and exchange results, or "repeat" it. "auto"
                chooses for each parameter what takes less time by its cost.
            tensor_parallel: "joined" steps whole parameters, as on the plain model. "blocks" has each tensor-parallel
                rank step its own block as if it were a whole parameter: less moves, but Muon then orthogonalises
                blocks, which is another optimizer.
            overlap: step parameters in four parts, while gradients of the next part and new values of the part before
                move. It calls the ``step`` of `optimizer_class` four times, and once if that changes its groups.
            cost: of a step of one parameter, to balance the work; by default that of the Newton-Schulz iteration for
                matrices of Muon, and otherwise in proportion to elements.

        Raises:
            UsageError: a parameter is not of the model, in two groups, or a flat parameter; `optimizer_class` steps
                with a closure.
            DisagreementError: ranks give different parameters.
        """
        choices = {"replicas": ("auto", "divide", "repeat"), "tensor_parallel": ("joined", "blocks")}
        for (name, known), value in zip(choices.items(), (replicas, tensor_parallel), strict=True):
            if value not in known:
                raise UsageError(f"WholeTensors: {name} is {value!r}: choose one of {', '.join(map(repr, known))}")
        if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
            raise UsageError(
                f"WholeTensors: optimizer_class is {optimizer_class!r}: give a class of torch.optim.Optimizer"
            )
        if needs_closure(optimizer_class.step):
            raise UsageError(
                f"WholeTensors: {optimizer_class.__name__} steps with a closure that computes the loss again, for "
                "which gradients would have to move each time: use an optimizer that steps without one"
            )
        self._model, self._replicas, self._joins_blocks = model, replicas, tensor_parallel == "joined"
        self._cost = cost
        self._waves = _WAVES if overlap else 1
        make: Callable[..., torch.optim.Optimizer] = optimizer_class
        self._make = functools.partial(make, **kwargs)
        self._ranks = communicator_of(model)
        self._owned: list[OwnedParams] = []
        self._alone: list[tuple[WholeParam, nn.Parameter]] = []
        self._params: dict[nn.Parameter, nn.Parameter] = {}
        """The sharded parameters by those that the inner optimizer has."""
        self._mine: set[nn.Parameter] = set()  # the parameters of the inner optimizer that this rank steps
        new = self._plan(_as_groups(params))
        self._inner = self._make(new.groups)
        self._add(new)
        super().__init__([self._shown_group(group) for group in self._inner.param_groups], self._inner.defaults)
        self._is_ready = True
        self._take_inner_state()

    def __repr__(self) -> str:
        return f"WholeTensors of {self._inner!r}"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("WholeTensors has communicators, and cannot be copied or pickled: use state_dict()")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as ``torch.optim.Optimizer.add_param_group``. Collective over all ranks of the model.

        Raises:
            UsageError: as for ``WholeTensors``; nothing is added.
        """
        if not self._is_ready:
            super().add_param_group(param_group)
            return
        self._set_inner()  # state may have been loaded since the last step
        new = self._plan(_as_groups([param_group]))
        count = len(self._inner.param_groups)
        for group in new.groups:
            self._inner.add_param_group(group)
        self._add(new)
        for group in self._inner.param_groups[count:]:
            super().add_param_group(self._shown_group(group))
        self._take_inner_state()

    @property
    def owners(self) -> dict[str, int]:
        """Not collective. The ranks that own parameters, by name; numbered among the ranks that share the parameter."""
        pairs = (pair for owned in self._owned for pair in zip(owned.params, owned.owners, strict=True))
        return {each.name: owner for each, owner in pairs}

    # What the inner optimizer steps

    def _plan(self, groups: list[dict[str, Any]]) -> _New:
        """Choose owners, and make whole parameters. Collective over all ranks of the model. The optimizer stays."""
        found = self._found(groups)
        # Optimizers complete groups, and may divide them: one without memory shows how.
        empty = [_whole_param(each, torch.device("meta")) for each in found]
        with raise_together(self._ranks):
            trial = self._make(_with_params(groups, empty))
            if any(group.get("differentiable") for group in trial.param_groups):
                raise UsageError("WholeTensors: differentiable=True would need gradients of steps through owners")
            facts = [(each.name, each.shape, str(each.param.dtype)) for each in found]
            facts_of_groups = [(len(group["params"]), _hyper_digest(group)) for group in trial.param_groups]
        assert_same(self._ranks, digest((facts, facts_of_groups)).hex(), "WholeTensors: its groups, by a hash,")
        numbers = {param: number for number, param in enumerate(empty)}
        cost = self._cost or _cost_of(trial)
        mine = set()
        costs, shardings, owners = dict[int, float](), dict[int, Sharding](), dict[int, int]()
        shared: dict[Communicator | None, tuple[Communicator, list[int]]] = {}  # a rank by itself is one communicator
        for group in trial.param_groups:
            for number in (numbers[param] for param in group["params"]):
                each = found[number]
                if each.share is None:
                    mine.add(number)
                    continue
                costs[number] = float(cost(each.shape, group))
                comm, shardings[number] = each.share(self._divides(each, costs[number]))
                shared.setdefault(comm if comm.size > 1 else None, (comm, []))[1].append(number)
        for comm, alike in shared.values():
            flops = [costs[number] for number in alike]
            assert_same(comm, digest(flops).hex(), "WholeTensors: the cost of its parameters, by a hash,")
            move_cost = max(_move_cost(found[number].param) for number in alike)
            chosen = choose_owners([shardings[number] for number in alike], flops, comm.size, move_cost)
            owners.update(zip(alike, chosen, strict=True))
            mine.update(number for number in alike if owners[number] == comm.rank)
        whole = [
            _whole_param(each, local_part(each.param).device) if number in mine else empty[number]
            for number, each in enumerate(found)
        ]
        new = _New(
            _with_params(groups, whole),
            [
                OwnedParams(
                    comm,
                    [found[number] for number in alike],
                    [shardings[number] for number in alike],
                    [whole[number] for number in alike],
                    [owners[number] for number in alike],
                )
                for comm, alike in shared.values()
            ],
            [(each, param) for each, param in zip(found, whole, strict=True) if each.share is None],
            {param: each.param for each, param in zip(found, whole, strict=True)},
            {whole[number] for number in mine},
        )
        if any(trial.state.values()):  # which may be made of the values of parameters
            _fill(new.owned, new.alone)
        return new

    def _found(self, groups: Iterable[Mapping[str, Any]]) -> list[WholeParam]:
        """Return the parameters in groups, in order. Collective over all ranks of the model, the first time."""
        known = whole_params(self._model, joins_blocks=self._joins_blocks)
        sharded_params = {flat.parameter for _, flat, _ in named_flat_params(self._model) if not flat.use_orig_params}
        taken = set(self._params.values())
        found: list[WholeParam] = []
        with raise_together(self._ranks):
            for number, group in enumerate(groups):
                for given in group["params"]:
                    each = _checked(given[1] if isinstance(given, tuple) else given, number, known, sharded_params)
                    if each.param in taken:
                        raise UsageError(f"WholeTensors: {each.name!r} is in two groups, or one twice: leave it in one")
                    taken.add(each.param)
                    found.append(each)
        return found

    def _add(self, new: _New) -> None:
        self._owned += new.owned
        self._alone += new.alone
        self._params.update(new.params)
        self._mine |= new.mine

    def _divides(self, each: WholeParam, flops: float) -> bool:
        if each.num_replicas == 1 or self._replicas == "repeat":
            return False
        return self._replicas == "divide" or flops > _move_cost(each.param) / 2 * each.numel

    def _shown_group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        return {**group, "params": [self._params[whole] for whole in group["params"]]}

    # Steps

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have gradients. Collective over all ranks of the model.

        Args:
            closure: computes the loss again, with gradients, once.

        Returns:
            The loss of `closure`.

        Raises:
            UsageError: a parameter has a gradient on some of its ranks only; the optimizer keeps state for no
                parameter, or changes its groups by what it steps. Nothing was stepped.
        """
        if _compat.is_step_for_state():
            if not (self._has_stepped or self._has_loaded):  # else ranks that own nothing are alone here
                self.state, self._has_loaded = _state_of(self.initial_state()), True
            return None
        loss = None if closure is None else torch.enable_grad()(closure)()
        count = self._waves if self._has_stepped else 1
        flags = [owned.flags() for owned in self._owned]
        # Later, ranks of other replicas would wait in the next backward.
        with contextlib.nullcontext() if self._has_stepped else raise_together(self._ranks):
            for owned, found in zip(self._owned, flags, strict=True):
                _check_grads(owned, found)
        chosen = []
        for owned, found in zip(self._owned, flags, strict=True):
            with_grads = [index for index, has in enumerate(found.has_grad) if has]
            owned.refresh([index for index in with_grads if found.has_changed[index]])
            chosen.append((owned, owned.waves(with_grads, count)))
        for each, whole in self._alone:
            whole.data = local_part(each.param)
            whole.grad = None if each.param.grad is None else local_grad(each.param)
        self._set_inner()
        is_async = count > 1
        arrive = all_of(owned.gather_grads(waves[0], async_op=is_async) for owned, waves in chosen)
        leave = []
        for number in range(count):
            arrive()
            if number + 1 < count:
                arrive = all_of(owned.gather_grads(waves[number + 1], async_op=is_async) for owned, waves in chosen)
            if self._has_stepped:
                self._inner.step()
            else:
                self._step_first()
            for each, whole in self._alone:
                if whole.grad is not None:
                    torch.autograd.graph.increment_version(each.param)
                whole.grad = None
            leave.append(all_of(owned.scatter_values(waves[number], async_op=is_async) for owned, waves in chosen))
        all_of(leave)()
        for group, own in zip(self._inner.param_groups, self.param_groups, strict=True):
            own.update(hyper(group))
        self._take_inner_state()
        return loss

    def _step_first(self) -> None:
        """Take a step that all ranks undo if it fails on one. Collective over all ranks of the model."""
        inner = self._inner
        stepped = [whole for whole in self._mine if whole.grad is not None]
        before = [(whole, _on_host(whole), _on_host(dict(inner.state.get(whole, {})))) for whole in stepped]
        hypers = [_hyper_digest(group) for group in inner.param_groups]
        try:
            with raise_together(self._ranks):
                try:
                    inner.step()
                except (RuntimeError, NotImplementedError) as error:
                    if "meta tensor" not in str(error):
                        raise
                    raise UsageError(  # those of other owners are there
                        f"WholeTensors: {type(inner).__name__} looks at parameters without gradients, which other "
                        f"ranks own ({error}): use an optimizer that steps each parameter for itself"
                    ) from error
                strange = next((key for key in inner.state if key not in self._params), None)
                if strange is not None:
                    raise UsageError(
                        f"WholeTensors: {type(inner).__name__} keeps state {strange!r} that is of no parameter, so no "
                        "rank owns it: use an optimizer that keeps all of its state by parameter"
                    )
            after = [_hyper_digest(group) for group in inner.param_groups]
            changes = self._ranks.all_gather_object(after if after != hypers else None)
            if any(change != changes[0] for change in changes):
                raise UsageError(
                    f"WholeTensors: {type(inner).__name__} changes its groups by the parameters that it steps, and "
                    "ranks step different ones: use an optimizer that steps each parameter for itself"
                )
        except BaseException:
            for whole, values, state in before:
                whole.detach().copy_(values)
                whole.grad = None
                _restore(inner.state[whole], state)
            raise
        self._has_stepped = True
        if changes[0] is not None:  # as a count of steps
            self._waves = 1

    def _set_inner(self) -> None:
        """Give the inner optimizer the groups and the state, which schedulers and checkpoints may have changed."""
        for group, own in zip(self._inner.param_groups, self.param_groups, strict=True):
            group.update(hyper(own))
        self._inner.state = collections.defaultdict(dict)
        for whole in self._mine:
            if self._params[whole] in self.state:
                self._inner.state[whole] = self.state[self._params[whole]]

    def _take_inner_state(self) -> None:
        """Show the state of the inner optimizer as that of this one."""
        for whole, param in self._params.items():
            if whole in self._mine and whole in self._inner.state:
                self.state[param] = self._inner.state[whole]

    # State

    def initial_state(self) -> dict[nn.Parameter, State]:
        """Return the state before a first step of what this rank owns. Collective over all ranks of the model."""
        _fill(self._owned, self._alone)
        with raise_together(self._ranks):
            self._set_inner()
            made = states_of_first_step(self._inner, self._mine)
        return {self._params[whole]: state for whole, state in made.items()}

    def shown_state(self) -> dict[nn.Parameter, State]:
        """Return the state of all parameters as that of this rank's shards. Collective over all ranks of the model.

        Tensors with one value for each element are this rank's part of them; other tensors are whole on each rank.
        """
        found: dict[nn.Parameter, State] = {}
        for owned in self._owned:
            held = [(index, each.param) for index, each in enumerate(owned.params) if owned.owns(index)]
            shown = owned.shown_state({index: self.state[param] for index, param in held if param in self.state})
            found.update({each.param: state for each, state in zip(owned.params, shown, strict=True) if state})
        for each, _ in self._alone:
            if each.param in self.state:
                found[each.param] = {name: _like(each.param, value) for name, value in self.state[each.param].items()}
        return found

    def load_shown_state(self, given: Mapping[Any, State]) -> None:
        """Replace the state by `given`, as ``shown_state`` returns it. Collective over all ranks of the model.

        Raises StateDictError on all ranks if they have different state, or an owner lacks some; nothing has changed.
        """
        found: dict[nn.Parameter, State] = {}
        for owned in self._owned:
            own = owned.own_state([given.get(each.param, {}) for each in owned.params])
            found.update({owned.params[index].param: state for index, state in own.items()})
        for each, _ in self._alone:
            if each.param in given:
                found[each.param] = {name: _compat.local_of(value) for name, value in given[each.param].items()}
        self.state, self._has_loaded = _state_of(found), True

    def state_dict(self) -> dict[str, Any]:
        """Return groups, and state as ``shown_state`` has it. Collective over all ranks of the model.

        "whole_state" lists the tensors that are whole on each rank.
        """
        own, self.state = self.state, _state_of(self.shown_state())
        try:
            found = super().state_dict()
        finally:
            self.state = own
        marked = _marked(found["state"])
        return {**found, "whole_state": marked} if marked else found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` gave, on each rank its own. Collective over all ranks of the model.

        Also that of `optimizer_class` on the plain model, on all ranks.

        Raises:
            StateDictError: as ``load_shown_state``.
            ValueError: it has other groups.
        """
        state, groups = self.state, [dict(group) for group in self.param_groups]
        try:
            super().load_state_dict(dict(state_dict))
            # Mark what was marked before torch has cast it.
            keys = [key for group in state_dict["param_groups"] for key in group["params"]]
            params = [param for group in self.param_groups for param in group["params"]]
            param_of = dict(zip(keys, params, strict=True))
            for key, name in (*_marked(state_dict["state"]), *state_dict.get("whole_state", ())):
                if key in param_of and name in self.state[param_of[key]]:
                    mark_whole_state(self.state[param_of[key]][name])
            self.load_shown_state(self.state)
        except BaseException:
            self.state, self.param_groups = state, groups
            raise


@dataclass
class _New:
    """Parameters for the inner optimizer."""

    groups: list[dict[str, Any]]  # of whole parameters; those that other ranks own are on the meta device
    # owned, alone: the parameters that have owners, and that each rank steps, with what is stepped
    owned: list[OwnedParams]
    alone: list[tuple[WholeParam, nn.Parameter]]
    # the sharded parameters by what is stepped; `mine` is stepped by this rank
    params: dict[nn.Parameter, nn.Parameter]
    mine: set[nn.Parameter]


def _fill(owned: Iterable[OwnedParams], alone: Iterable[tuple[WholeParam, nn.Parameter]]) -> None:
    """Give whole parameters their values. Collective over all ranks of the model."""
    for each in owned:
        each.refresh(range(len(each.params)))
    for single, whole in alone:
        whole.data = local_part(single.param)


def _whole_param(each: WholeParam, device: torch.device) -> nn.Parameter:
    """Return what the inner optimizer has for a parameter; its memory comes with its values."""
    data = torch.zeros((), dtype=each.param.dtype, device=device).expand(each.shape)
    whole = nn.Parameter(data, requires_grad=each.param.requires_grad)
    label(whole, each.name, each.shape)
    return whole


def _with_params(groups: Iterable[Mapping[str, Any]], params: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Return groups with other parameters, in the same order."""
    new, found = iter(params), []
    for group in groups:
        given = [(each[0], next(new)) if isinstance(each, tuple) else next(new) for each in group["params"]]
        found.append({**group, "params": given})
    return found


def _marked(states: Mapping[Any, Any]) -> list[tuple[Any, str]]:
    """Return the keys and names of tensors that are whole on each rank."""
    return [(key, name) for key, state in states.items() for name, value in state.items() if is_whole_state(value)]


def _like(param: torch.Tensor, value: Any) -> Any:
    """Return state of a parameter that is no other rank's, as a ``DTensor`` if the parameter is one."""
    if isinstance(param, DTensor) and isinstance(value, torch.Tensor) and value.shape == local_part(param).shape:
        return _compat.dtensor_like(param, value)
    return value


def _check_grads(owned: OwnedParams, flags: Flags) -> None:
    for each, has, lacks in zip(owned.params, flags.has_grad, flags.lacks_grad, strict=True):
        if has and lacks:
            raise UsageError(
                f"WholeTensors: {each.name!r} has a gradient on some of its ranks and none on others (on rank "
                f"{owned.comm.rank}: {'none' if each.param.grad is None else 'one'}): set all to None, or none of them"
            )


def _as_groups(params: Any) -> list[dict[str, Any]]:
    """Return groups of parameters, or of (name, parameter) pairs, each with a list of them."""
    if isinstance(params, torch.Tensor):
        raise TypeError("WholeTensors: params is a tensor: give a list of parameters, or groups of them")
    entries = list(params)
    if not entries:
        raise ValueError("WholeTensors: params is empty: give model.parameters()")
    groups = entries if all(isinstance(entry, Mapping) for entry in entries) else [{"params": entries}]
    found = []
    for group in groups:
        given = group["params"]
        if isinstance(given, set):
            raise TypeError("WholeTensors: parameters in a set have no order, which ranks need: give a list")
        found.append({**group, "params": [given] if isinstance(given, torch.Tensor) else list(given)})
    return found


def _checked(param: Any, number: int, known: Mapping[Any, WholeParam], sharded_params: Collection[Any]) -> WholeParam:
    """Return the parameter of the model that is in group `number`."""
    if not isinstance(param, torch.Tensor):
        raise TypeError(f"WholeTensors: a parameter in group {number} is of {type(param).__name__}: give tensors")
    if param in sharded_params:
        raise UsageError(
            f"WholeTensors: group {number} has a flat parameter, which has no whole tensors to step: wrap the model "
            "with use_orig_params=True"
        )
    hidden = hidden_fqn(param) if isinstance(param, nn.Parameter) else None
    if hidden is not None:
        raise UsageError(
            f"WholeTensors: group {number} has {hidden!r} as it was before the model was sharded: take "
            "model.parameters() afterwards"
        )
    if param not in known:
        raise UsageError(
            f"WholeTensors: group {number} has a parameter of shape {tuple(param.shape)} that is none of the model's: "
            "take the parameters of the sharded model"
        )
    return known[param]


def _cost_of(optimizer: torch.optim.Optimizer) -> Cost:
    """Return the default cost of an optimizer's steps."""
    if isinstance(optimizer, Muon):
        return optimizer.step_flops
    if isinstance(optimizer, torch.optim.Muon):
        return lambda shape, group: newton_schulz_flops(shape, group["ns_steps"])
    return lambda shape, _group: ELEMENT_FLOPS * torch.Size(shape).numel()


def _move_cost(param: torch.Tensor) -> float:
    """Return the operations in the time in which an element moves to its owner and back."""
    on_device = accelerator.is_accelerator(local_part(param).device)
    return 2 * param.dtype.itemsize * (DEVICE_FLOPS_PER_BYTE if on_device else HOST_FLOPS_PER_BYTE)


def _state_of(found: Mapping[nn.Parameter, State]) -> Any:
    """Return state in the form of ``Optimizer.state``, whose type knows tensors alone as keys."""
    return collections.defaultdict(dict, found)


def _hyper_digest(group: Mapping[str, Any]) -> bytes:
    """Return a digest of hyper-parameters; of values that cannot be pickled their type counts."""
    return digest({key: picklable(value) for key, value in hyper(group).items() if key != "param_names"})


def _on_host(value: Any) -> Any:
    """Return a copy of a tensor, or of a state: in host memory, where there is room."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    return {key: _on_host(inner) for key, inner in value.items()} if type(value) is dict else copy.deepcopy(value)


def _restore(state: dict[str, Any], before: Mapping[str, Any]) -> None:
    """Give a state its values again, in its own memory."""
    for name in state.keys() - before.keys():
        del state[name]
    for name, value in before.items():
        state[name] = state[name].copy_(value) if isinstance(value, torch.Tensor) else value
