"""HDF5 checkpoints as a storage of ``torch.distributed.checkpoint``: a reader and a writer."""
