"""What torch's own tools read of a module that ``fully_shard`` has sharded: stages of ``torch.distributed.pipelining``.

A stage holds gradients back in its backwards, and then has the groups of parameters reduce theirs, and calls the final
callback of the root. Nothing else of torch's inner state is here: to ask for it is an error that names this file.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from hpcfsdp.errors import EngineError
from hpcfsdp.units.dtensor_unit import dtensor_units_in


class _Shown:
    """An object of which tools may read the attributes that it has."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # Python and its libraries ask what an object can do
            raise AttributeError(name)
        raise EngineError(
            f"a function of torch reads {name!r} of the inner state of its own fully_shard, and hpcfsdp.fully_shard "
            "has sharded this module: it shows what stages of a pipeline read (hpcfsdp/api/torch_state.py). Use "
            "torch's fully_shard for this program, or leave out that function"
        )


class ParamGroup(_Shown):
    """A group of parameters, which are reduced together."""

    def post_backward(self, *_unused: Any) -> None:
        """Do nothing: the final callback reduces the gradients of all groups, in the order of all ranks."""


class StateContext(_Shown):
    """What the states of one root have in common."""

    def __init__(self, state: FullyShardState) -> None:
        self._of = state

    @property
    def all_states(self) -> list[FullyShardState]:
        """The states of all units under the module, itself included."""
        return [FullyShardState(unit.modules[0]) for unit in dtensor_units_in(self._of.module)]


class FullyShardState(_Shown):
    """The state of one module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @property
    def _state_ctx(self) -> StateContext:
        return StateContext(self)

    @property
    def _fsdp_param_groups(self) -> list[ParamGroup]:
        return [ParamGroup()]

    def _root_post_backward_final_callback(self) -> None:
        """Reduce the gradients that earlier backwards have held back. Collective over the ranks of the mesh."""
        units = dtensor_units_in(self.module)
        if (root := units[0].root) is not None:
            root.reduce_held()
