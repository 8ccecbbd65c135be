"""Collectives on tensors behind one protocol, whatever carries them; topology and meshes."""

from hpcfsdp.comm.agree import assert_same, raise_together, raise_together_over
from hpcfsdp.comm.communicator import Communicator
from hpcfsdp.comm.select import communicator_for

__all__ = ["Communicator", "assert_same", "communicator_for", "raise_together", "raise_together_over"]
