"""What a run has left in its folder, for people: a page, and a view of a run that goes on. No MPI, no torch."""
