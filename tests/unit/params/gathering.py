"""Flat parameters gathered and freed without an engine, and the memory that they and their gradients hold."""

from hpcfsdp.params.storage import NodeBuffer, SharedBuffer


def unshard(flat):
    """Collective over the shards."""
    if not flat.is_unsharded:
        flat.publish()
        if flat.shares_gathered:
            flat.comm.labelled_barrier("unshard")
        flat.gather()
        flat.bind()


def reshard(flat):
    flat.unbind()
    flat.free()


def buffer_bytes(buffer):
    """Bytes that this rank holds for gathered values, besides the shard."""
    if isinstance(buffer, SharedBuffer):
        return buffer.segment.numel() * buffer.segment.element_size() if buffer.is_cast else 0
    if isinstance(buffer, NodeBuffer):
        return buffer.full.numel() * buffer.full.element_size() if buffer._is_filled else 0
    return 0 if buffer.stays else buffer.full.untyped_storage().size()


def values_bytes(flat):
    return buffer_bytes(flat._buffer)


def grad_bytes(grad):
    """Bytes of full gradients that are being assembled or reduced, or are held."""
    held = (grad.buffer, grad._sent, grad.held and grad.held.whole)
    return sum(tensor.numel() * tensor.element_size() for tensor in held if tensor is not None)
