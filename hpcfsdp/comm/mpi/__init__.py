"""Collectives over MPI: messages between any ranks, memory that the ranks of a node share."""
