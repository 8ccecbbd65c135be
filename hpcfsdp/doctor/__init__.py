"""``hpcfsdp doctor``: what surrounds the process, and what of it would break a training.

Facts come from this process (gather.py) and from a child that starts MPI (probe.py), since that may end a process.
Pure functions turn facts into findings: software.py, launcher.py, machine.py, traffic.py. examine.py runs it all.
"""
