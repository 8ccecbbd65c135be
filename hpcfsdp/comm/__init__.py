"""Collectives on tensors behind one interface, over MPI, torch process groups, or one process; meshes."""

from hpcfsdp.comm.agree import assert_same, of_rank_0, raise_together, raise_together_over
from hpcfsdp.comm.communicator import Communicator
from hpcfsdp.comm.torch_group import communicator_for

__all__ = ["Communicator", "assert_same", "communicator_for", "of_rank_0", "raise_together", "raise_together_over"]
