"""Copy an optimizer's state off a device on a stream of its own, while the next iteration computes.

The optimizer's next step waits for it on the device. Nothing else is copied so: memory of the forward and the backward
is written at once, and programs write parameters, through ``.data`` too (to evaluate averaged weights right after a
save), which nothing can notice.
"""

import functools
import weakref
from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hpcfsdp import accelerator
from hpcfsdp._compat import local_of
from hpcfsdp.errors import CheckpointError
from hpcfsdp.state.optim.keys import StepsWholeTensors, get_param_to_fqns

stream_of = functools.cache(accelerator.new_stream)
"""Return the stream of a device on which state is copied."""

_PLAIN = {torch.Tensor, nn.Parameter}

_under_way: list["StateReads"] = []


def await_reads() -> None:
    """Have the current streams wait for all copies under way: what comes next may write state. Returns at once."""
    for reads in tuple(_under_way):
        reads.await_copies()


@functools.cache
def _await_in_steps() -> None:
    """Have each step of each optimizer call ``await_reads``, from now on."""
    hook = torch.compiler.disable(lambda optimizer, args, kwargs: await_reads())  # else after a compiled step
    register_optimizer_step_pre_hook(hook)


class StateReads:
    """The state of an optimizer that a save copies in the background, from ``begin`` until ``end``."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Not collective. Find the memory that the steps of `optimizer` write, and nothing else; there may be none.

        Steps that can be captured in a graph call no hook when it is replayed, and owners of whole tensors gather their
        state for a save: both have none.
        """
        self._model = weakref.ref(model)
        self._is_awaited = False
        self._changed: str | None = None
        self._storages: set[int | None] = set()
        # Tensors, their versions, and what they are. The memory is not kept: the program may free it.
        self._noted: list[tuple[weakref.ref[torch.Tensor], int, weakref.ref[torch.Tensor], str]] = []
        if optimizer is None or isinstance(optimizer, StepsWholeTensors):
            return
        if any(group.get("capturable") for group in optimizer.param_groups):
            return
        params = [param for group in optimizer.param_groups for param in group["params"]]
        device = next((param.device for param in params if accelerator.is_accelerator(param.device)), None)
        if device is None:
            return
        self._device, self._stream = device, stream_of(device)
        shared: set[int | None] = {None}  # state may be in the memory of one of these
        shared.update(self._storage_of(tensor) for param in params for tensor in (param, param.grad))
        for param, state in optimizer.state.items():
            owner = weakref.ref(param)
            for key, value in state.items() if isinstance(state, Mapping) else ():
                storage = self._storage_of(value)
                if storage not in shared:
                    self._storages.add(storage)
                    self._noted.append((weakref.ref(value), value._version, owner, key))
                    if (local := local_of(value)) is not value:
                        self._noted.append((weakref.ref(local), local._version, owner, key))

    def begin(self) -> None:
        """Have later steps wait."""
        if self._storages:
            _await_in_steps()
            _under_way.append(self)

    def has(self, memory: torch.Tensor) -> bool:
        """Return whether memory is such state, and not a copy of it."""
        return bool(self._storages) and memory.untyped_storage().data_ptr() in self._storages

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Event]:
        """Begin to copy into each first tensor the second, such memory, as it is now on the current stream.

        Return the events that each is done, in order.
        """
        stream = self._stream
        stream.wait_stream(accelerator.current_stream(self._device))
        events = []
        with accelerator.on(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
                source.record_stream(stream)  # freed memory is not used again before
                events.append(accelerator.record(stream))
        return events

    def await_copies(self) -> None:
        """Have the current stream wait for the copies: it writes the state next."""
        if accelerator.is_capturing(self._device):  # which writes nothing
            return
        accelerator.current_stream(self._device).wait_stream(self._stream)
        if not self._is_awaited:
            self._changed, self._is_awaited = self._find_changed(), True

    def end(self) -> str | None:
        """When the copies are done: return which state was changed before anything waited for them; None if none was.

        In any thread, any number of times.
        """
        if self in _under_way:
            _under_way.remove(self)
        changed = self._find_changed()  # first: a step that begins now waits, and changes state after that
        return self._changed if self._is_awaited else changed

    def check(self, path: object) -> None:
        """``end``, and raise a CheckpointError if state was changed."""
        if (changed := self.end()) is not None:
            raise CheckpointError(
                f"{path}: {changed} was changed in place after save() and before the optimizer's next step, while it "
                "was being copied: change it before save(), or call wait() of the CheckpointManager first"
            )

    def _storage_of(self, value: object) -> int | None:
        """Return the address of a tensor's memory, if it is plain and on the device."""
        if type(value) not in _PLAIN:
            value = local_of(value) if isinstance(value, torch.Tensor) else None
        if type(value) not in _PLAIN or value.device != self._device or value.layout is not torch.strided:
            return None
        return None if value.is_inference() else value.untyped_storage().data_ptr()

    def _find_changed(self) -> str | None:
        for noted, version, param, key in self._noted:
            if (tensor := noted()) is not None and tensor._version != version:
                model, owner = self._model(), param()
                names = () if model is None or owner is None else get_param_to_fqns(model).get(owner, ())
                return f"optimizer state {key!r} of {', '.join(map(repr, names)) or 'a parameter'}"
        return None
