"""Bytes that collectives on CPUs have moved, of this process, since its start."""


class Traffic:
    """The count: a caller reads it before and after what it measures."""

    def __init__(self) -> None:
        self.sent_to_nodes = 0  # payload of messages to ranks of other nodes
        self.copied = 0  # in collectives that use the node's memory: into it, to be sent, or after they were received


count = Traffic()
