"""Looking into checkpoint files: one process, neither MPI nor torch, never a whole tensor in memory."""
