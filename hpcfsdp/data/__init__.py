"""Data of a training: the order of samples, sets of HDF5 files, and a loader that reads ahead in threads."""

from hpcfsdp.data.hdf5 import HDF5Dataset
from hpcfsdp.data.loader import ThreadedLoader
from hpcfsdp.data.sampler import ResumableSampler

__all__ = ["HDF5Dataset", "ResumableSampler", "ThreadedLoader"]
