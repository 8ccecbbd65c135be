"""This process and its surroundings: MPI, the device, the way to a store, signals and aborts."""
