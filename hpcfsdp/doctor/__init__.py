"""``hpcfsdp doctor``: checks the surroundings of a process for faults that would break a training.

Facts come from this process (installed.py) and from a child that starts MPI (probe.py), since MPI may end a process.
Pure functions turn facts into findings: findings.py, rank_findings.py. examine.py runs it all.
"""
