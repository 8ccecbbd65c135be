"""HDF5 checkpoints as a storage of ``torch.distributed.checkpoint``: what its ``save`` and ``load`` read and write."""
