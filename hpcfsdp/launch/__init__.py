"""This process and its environment: MPI, the device, the store, signals and aborts."""
