"""Collectives on tensors behind one interface, over MPI, torch process groups, or one process; meshes."""

from hpcfsdp.comm.agree import assert_same, raise_together, raise_together_over
from hpcfsdp.comm.communicator import Communicator
from hpcfsdp.comm.select import communicator_for

__all__ = ["Communicator", "assert_same", "communicator_for", "raise_together", "raise_together_over"]
