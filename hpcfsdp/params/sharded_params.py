"""What a unit's parameters of one dtype have in common, however ranks share them: the engine knows nothing else."""

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hpcfsdp import accelerator
from hpcfsdp.comm import Communicator
from hpcfsdp.comm.communicator import Work
from hpcfsdp.comm.reduce import accumulate_dtype
from hpcfsdp.errors import EngineError
from hpcfsdp.params.layout import Layout
from hpcfsdp.params.storage import Buffer, Keepers, KeptPart, NodeBuffer, SharedBuffer


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of parameters and their gradients in a step."""

    param: torch.dtype  # of the shard
    compute: torch.dtype  # of the unsharded parameters
    reduce: torch.dtype  # of gradients between ranks
    accumulate: torch.dtype  # of sums over ranks, and of gradients held by `no_sync`
    grad: torch.dtype  # of the gradient that the optimizer reads

    @property
    def itemsize(self) -> int:
        """Bytes of an element in the narrowest of them."""
        return min(self.param.itemsize, self.compute.itemsize, self.reduce.itemsize)

    @classmethod
    def plan(
        cls,
        dtype: torch.dtype,
        *,
        param: torch.dtype | None = None,
        reduce: torch.dtype | None = None,
        keep_low_precision_grads: bool = False,
    ) -> "Dtypes":
        """Return the dtypes for parameters of `dtype`, by the rules of torch's ``MixedPrecision``."""
        if not dtype.is_floating_point:  # integer and complex parameters are never cast
            return cls(dtype, dtype, dtype, accumulate_dtype(dtype), dtype)
        compute = param or dtype
        reduce = reduce or compute
        return cls(dtype, compute, reduce, accumulate_dtype(reduce), reduce if keep_low_precision_grads else dtype)


def other_in_place_of(name: str) -> EngineError:
    """Return the error for another tensor where a unit's parameter of this name should be, when the unit is called."""
    return EngineError(
        f"another tensor has taken the place of {name!r} of a sharded module during a call of the model, as "
        "torch.func.functional_call does, but the module computes with what it has sharded: call functional_call "
        "within the forward of that module, for modules inside, or shard a larger module"
    )


class ShardedParams(abc.ABC):
    """Parameters of one dtype and device, of which each rank stores a shard, and that are gathered together."""

    layout: Any  # a FlatLayout or a DTensorLayout
    leaves: Sequence[nn.Parameter]  # what modules compute with, and autograd adds gradients to, by slot of the layout
    home: torch.device  # where the shard is
    steps_leaves = False  # whether the optimizer steps the leaves themselves
    steps_each = True  # whether it steps a tensor for each leaf, and not one for all
    changes_kind = False  # whether leaves have another dtype or device when unsharded: autograd makes new nodes then
    may_change_before_backward = False  # whether a backward computes with what was changed since its forward
    hides_whole_norm = True  # whether functions of torch see a rank's shard of a gradient as if it were the whole
    shows_held = True  # whether `grad` shows the gradients that `no_sync` holds
    keepers: Keepers | None = None  # who keeps the unsharded parameters from a forward to its backward, once freed
    _buffer: Buffer
    _kept: KeptPart

    def __init__(
        self,
        layout: Layout,
        comm: Communicator,
        *,
        device: torch.device,
        reduce_comm: Communicator | None,
        replicas: Communicator | None,
        dtypes: Dtypes | None,
    ) -> None:
        self.layout = layout
        self.comm = comm  # the ranks that hold the shards
        self.reduce_comm = reduce_comm or comm  # the same ranks, where reductions are to wait for no gather
        self.replicas = replicas  # ranks that hold the same shard as this one; None without any
        self.dtypes = dtypes or Dtypes.plan(layout.dtype)
        self.device = device  # of the computation
        self.is_unsharded = False  # whether the leaves hold their full data

    @property
    def requires_grad(self) -> bool:
        return any(leaf.requires_grad for leaf in self.leaves)

    @property
    def is_differentiable(self) -> bool:
        """Whether the dtype can have gradients."""
        return self.layout.dtype.is_floating_point or self.layout.dtype.is_complex

    @property
    @abc.abstractmethod
    def stepped(self) -> Sequence[nn.Parameter]:
        """The parameters that the optimizer steps."""

    @property
    def versions(self) -> list[int]:
        """The version of each of ``stepped``. In-place changes increment it; those through ``.data`` do not."""
        return [param._version for param in self.stepped]

    @property
    def stays_gathered(self) -> bool:
        """Whether no gather is needed."""
        return self._buffer.stays

    @property
    def shares_gathered(self) -> bool:
        """Whether ranks share the memory of the unsharded parameters; then barriers must enclose its use."""
        return isinstance(self._buffer, SharedBuffer)

    @property
    def is_in_node_memory(self) -> bool:
        """Whether the ranks of a node share memory for unsharded parameters that come from other nodes, too."""
        return isinstance(self._buffer, NodeBuffer)

    @property
    def is_offloaded(self) -> bool:
        """Whether the shard is on another device than the computation."""
        return self.home != self.device

    @property
    def full(self) -> torch.Tensor:
        """The unsharded parameters, 1-D; without memory at rest unless it stays."""
        return self._buffer.full

    @abc.abstractmethod
    def follow_requires_grad(self, unit: str) -> None:
        """Follow changes of ``requires_grad`` of the parameters that the optimizer steps. `unit`: for messages."""

    @abc.abstractmethod
    def adopt_user_data(self) -> None:
        """Copy data that a user has assigned to parameters into the shard, at rest."""

    def pop_copied(self) -> bool:
        """Return whether the shard was written since the last call, other than by ``adopt_user_data``."""
        return False

    @abc.abstractmethod
    def publish(self) -> None:
        """Copy the shard into this rank's part of shared memory, if there is any; a barrier must follow."""

    @abc.abstractmethod
    def gather(self, async_op: bool = False) -> Work | None:
        """Gather all shards; ``bind`` may follow when the returned work is done. Collective over `comm`."""

    @property
    def finish_gather(self) -> Callable[[], None] | None:
        """What is left to do on this rank when the work of ``gather`` is done, on the same stream."""
        return None

    @abc.abstractmethod
    def bind(self) -> None:
        """Have modules compute with the unsharded parameters."""

    @abc.abstractmethod
    def unbind(self) -> None:
        """Have modules hold what they hold at rest."""

    def free(self, *, after_forward: bool = False) -> None:
        """Free the memory of the unsharded parameters, unless it stays. `after_forward`, ``keepers`` keep them."""
        if not after_forward:
            self._kept.drop()
        self._buffer.free(self.keepers if after_forward else None)

    def owns_memory_of(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` views the unsharded parameters, which ``free`` releases."""
        if tensor.layout is not torch.strided or not self.is_unsharded or not tensor.numel():
            return False
        return tensor.untyped_storage().data_ptr() == self._buffer.full.untyped_storage().data_ptr()

    def _zeros_for_shard(self, *, pin_memory: bool = True) -> torch.Tensor:
        """Memory for a shard; where it is offloaded from an accelerator, pinned for faster copies."""
        pinned = pin_memory and self.is_offloaded and accelerator.is_accelerator(self.device)
        return torch.zeros(self.layout.shard_numel, dtype=self.layout.dtype, device=self.home, pin_memory=pinned)

    # Gradients: assembled in a buffer of all shards, 1-D, ``layout.padded_numel`` elements

    @abc.abstractmethod
    def targets(self, buffer: torch.Tensor) -> Sequence[Sequence[torch.Tensor]]:
        """Return for each leaf its places in a buffer of gradients, as views."""

    @abc.abstractmethod
    def sources(self, index: int, grad: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the parts of a leaf's gradient that belong at its ``targets``."""

    @abc.abstractmethod
    def gaps(self, buffer: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return views of the elements of a buffer of gradients that belong to no leaf."""

    def fill(self, buffer: torch.Tensor, grads: Sequence[torch.Tensor | None]) -> bool:
        """Write a whole buffer of gradients at once: those of all leaves, zeros for None, and zeros in the gaps.

        Return False, with nothing written, where leaf by leaf is as fast.
        """
        del buffer, grads
        return False

    @abc.abstractmethod
    def grads_of(self, reduced: torch.Tensor, used: Sequence[bool]) -> list[tuple[nn.Parameter, Any]]:
        """Return the parameters that are stepped, if `used`, with their parts of what was `reduced`, like the shard."""
