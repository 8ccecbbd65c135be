"""Go on in the same processes after ranks were lost.

``run`` has the public function. ``survivors`` knows which processes live, and has them agree on it. Deaths are noticed
by every wait (hang/lost.py); the communicators of such a job outlive them (comm/mpi/part_comm.py).
"""
