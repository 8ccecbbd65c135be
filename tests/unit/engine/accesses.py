"""What a program does with memory, as torch reports it, whether or not code declares it."""

from itertools import count

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from hpcfsdp.engine.streams import Stream
from tests.unit.engine.recording import RecordingStreams

RECORDS_ACCESSES = True
"""Places in this file are not where anything is done."""
METADATA_ONLY = {"empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full"}
_numbers = count()


class Block:
    """Memory that torch allocated.

    Attributes:
        place: its name.
        owner: the queue on which it was allocated.
        on_host: whether it is host memory.
        strangers: the other queues that have used it.
        alive: shows when it is gone, and until it is asked keeps the storage's key from being used again.
    """

    def __init__(self, tensor, owner, place=None, *, on_host=False):
        self.alive = StorageWeakRef(tensor.untyped_storage())
        self.place = place or (next(_numbers), f"memory of a {tuple(tensor.shape)}")
        self.owner, self.on_host = owner, on_host
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
        self._blocks = {}

    def name(self, tensor, place, *, on_host=False):
        """Call the memory of `tensor` so."""
        self._blocks[key_of(tensor)] = Block(tensor, Stream.COMPUTE, place, on_host=on_host)

    def on_host(self, tensor):
        """This is host memory."""
        self._block_of(tensor).on_host = True
        return tensor

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        read, written, is_view = accesses_of(func, args, kwargs)
        queue = self._queue_of(read, written)
        given = {key_of(tensor) for tensor in (*read, *written)}
        if not is_view:
            self._touch(queue, read, written)
        outputs = func(*args, **kwargs)
        if not is_view:
            fresh = [tensor for tensor in tensors_of(outputs) if key_of(tensor) not in given]
            for tensor in fresh:
                self._allocate(queue, tensor)
            self._touch(queue, [], fresh)
        return outputs

    def _queue_of(self, read, written):
        now, used = self.streams.current, [*read, *written]
        on_host = bool(used) and all(self._block_of(tensor).on_host for tensor in used)
        # Within a launch, what makes something new of host memory stands for a copy to the device.
        return Stream.HOST if on_host and (now is Stream.COMPUTE or written) else now

    def _touch(self, queue, read, written):
        places = []
        for tensors in (read, written):
            blocks = [self._block_of(tensor) for tensor in tensors if tensor.numel()]
            for block in blocks:
                if queue is not block.owner:
                    block.strangers.add(queue)
            places.append([block.place for block in blocks])
        for verb, used in zip(("reads", "writes"), places, strict=True):
            self.accesses |= {(queue, verb, place) for place in used}
        RecordingStreams.touch(self.streams, queue, reads=places[0], writes=places[1])

    def _block_of(self, tensor):
        block = self._blocks.get(key_of(tensor))
        if block is None:
            block = self._blocks[key_of(tensor)] = Block(tensor, Stream.COMPUTE)
        return block

    def _allocate(self, queue, tensor):
        for key, block in list(self._blocks.items()):
            if block.owner is queue and block.strangers and block.alive.expired():
                del self._blocks[key]
                if not block.on_host:  # the allocator of host memory asks the device whether copies are done
                    RecordingStreams.touch(self.streams, queue, writes=[block.place])
        self._blocks[key_of(tensor)] = Block(tensor, queue, on_host=queue is Stream.HOST)


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


def key_of(tensor):
    return tensor.untyped_storage()._cdata
