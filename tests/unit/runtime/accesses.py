"""What a program does with memory, as torch itself tells it: nothing that code forgets to declare goes unseen."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from hpcfsdp.runtime.streams import Queue

METADATA_ONLY = {"empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full"}


class Block:
    """Memory that torch allocated: where, which queues have used it, and whether it is still there."""

    def __init__(self, storage, owner):
        self.alive = StorageWeakRef(storage)  # and the address of the storage object is not used again
        self.owner = owner
        self.strangers = set()


class Watch(TorchDispatchMode):
    """Declares every operation of torch to ``RecordingStreams``, by the memory that it really reads and writes.

    What runs within a launch is on that queue, everything else on COMPUTE; operations on host memory alone are done by
    the program itself. Memory belongs to the queue on which it was allocated. When it has been freed, the next thing
    that is allocated on that queue may get it: that has to come after all that other queues have done with it.
    """

    def __init__(self, streams):
        super().__init__()
        self.streams = streams
        self.accesses = set()
        self._names = {}
        self._host = set()
        self._blocks = {}

    def name(self, tensor, place, *, host=False):
        """Call the memory of `tensor` so. With `host` it is host memory."""
        self._names[key_of(tensor)] = place
        if host:
            self.on_host(tensor)

    def on_host(self, tensor):
        """This is host memory."""
        self._host.add(key_of(tensor))
        return tensor

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        read, written, is_view = accesses_of(func, args, kwargs)
        queue = self._queue_of(func, read, written)
        given = {key_of(tensor) for tensor in (*read, *written)}
        if not is_view:
            self._touch(queue, read, written)
        outputs = func(*args, **kwargs)
        if not is_view:
            fresh = [tensor for tensor in tensors_of(outputs) if key_of(tensor) not in given]
            for tensor in fresh:
                if queue is Queue.HOST:
                    self.on_host(tensor)
                else:
                    self._allocate(queue, tensor)
            self._touch(queue, [], fresh)
        return outputs

    def _queue_of(self, func, read, written):
        now = self.streams.current
        keys = {key_of(tensor) for tensor in (*read, *written)}
        on_host = bool(keys) and keys <= self._host
        # Within a launch, what makes something new of host memory stands for a copy to the device.
        return Queue.HOST if on_host and (now is Queue.COMPUTE or written) else now

    def _touch(self, queue, read, written):
        places = [[self._place(tensor, queue) for tensor in tensors if holds(tensor)] for tensors in (read, written)]
        for verb, used in zip(("reads", "writes"), places, strict=True):
            self.accesses |= {(queue, verb, place) for place in used}
        self.streams.touch(queue, reads=places[0], writes=places[1])

    def _place(self, tensor, queue):
        key = key_of(tensor)
        if key in self._names:
            return self._names[key]
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = Block(tensor.untyped_storage(), Queue.COMPUTE)
        if queue is not block.owner:
            block.strangers.add(queue)
        return key, "memory"

    def _allocate(self, queue, tensor):
        for key, block in list(self._blocks.items()):
            if block.owner is queue and block.strangers and block.alive.expired():
                del self._blocks[key]
                if key not in self._host:  # the allocator of host memory asks the device whether copies are done
                    self.streams.touch(queue, writes=[(key, "memory")])
        self._blocks[key_of(tensor)] = Block(tensor.untyped_storage(), queue)


def accesses_of(func, args, kwargs):
    """The tensors that an operation reads and writes, and whether it only makes another view of them."""
    read, written = [], []
    schema = func._schema
    for position, argument in enumerate(schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        (written if writes else read).extend(tensors_of(value))
    is_view = not written and any(result.alias_info is not None for result in schema.returns)
    if schema.name.split("::")[1] in METADATA_ONLY:
        read = []
    return read, written, is_view


def tensors_of(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors_of(item)]
    return []


def holds(tensor):
    """Whether there is anything to read or write."""
    return tensor.numel() > 0


def key_of(tensor):
    return tensor.untyped_storage()._cdata
