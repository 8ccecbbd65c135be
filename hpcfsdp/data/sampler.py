"""Batches of samples whose place in the data is one number, so that any number of ranks goes on from it."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.utils.data import Sampler

from hpcfsdp import _compat, env
from hpcfsdp.checkpoint.retention import whole_number
from hpcfsdp.data.order import Blocks, Order, order_of
from hpcfsdp.errors import DataError, UsageError
from hpcfsdp.world import current_world

TAILS = ("drop", "pad", "uneven")
_AT_ONCE = 4096  # indices that are computed together


class ResumableSampler(Sampler[list[int]]):
    """Lists of indices, one for each step of this rank: a ``batch_sampler`` for any ``DataLoader``.

    The order of an epoch depends on `seed` and the epoch, not on ranks or workers. Each step takes the next
    `global_batch` samples of it, of which each rank has a part. The place is the number of samples that all ranks have
    trained on: with the ``state_dict`` another number of ranks goes on with the next sample, in the middle of an epoch.
    A loop that is left and entered again goes on, too. What a ``DataLoader`` reads ahead in workers does not count.

    Memory does not grow with the set.

    Attributes:
        length: the number of samples of the set.
        global_batch: the samples of a step, over all ranks.
        rank, ranks: this rank, and their number.
    """

    def __init__(
        self,
        dataset_or_length: Sized | int,
        *,
        global_batch: int,
        seed: int = 0,
        shuffle: bool = True,
        tail: str = "drop",
        rank: int | None = None,
        ranks: int | None = None,
    ) -> None:
        """Not collective.

        Args:
            dataset_or_length: the set, or the number of its samples. Of an ``HDF5Dataset`` samples that are stored
                together are shuffled so that each rank reads whole chunks, once. (Another set tells the same by an
                attribute `blocks`, an ``hpcfsdp.data.order.Blocks``.)
            global_batch: samples of a step, over all ranks: a multiple of `ranks`, or with ``tail="uneven"`` any number
                from `ranks` on.
            seed: of the order.
            shuffle: False keeps the order of the set.
            tail: what becomes of the last samples of an epoch, too few for a batch: "drop" leaves them out, "pad" fills
                the batch with the first ones of the epoch, "uneven" makes a smaller batch. With "uneven" ranks may have
                batches that differ by one sample, and no sample at all in the last one: weigh losses by samples
                (``hpcfsdp.WeightedMean``).
            rank, ranks: those of the job by default. With tensor parallelism or replicas of the data give those of the
                dimension that divides batches: ``mesh.get_local_rank("dp")``, ``mesh["dp"].size()``.

        Raises:
            UsageError: a number is too small, or does not fit the others; or the ranks of the job are not known yet.
            DataError: the set has no samples, or not enough for one batch with ``tail="drop"``.
        """
        self.length = whole_number("the number of samples", _length_of(dataset_or_length), least=0)
        self.global_batch = whole_number("global_batch", global_batch, least=1)
        self._seed, self._shuffle = operator.index(seed), bool(shuffle)
        if tail not in TAILS:
            raise UsageError(f"tail must be one of {', '.join(TAILS)}, not {tail!r}")
        self._tail = tail
        if (rank is None) != (ranks is None):
            raise UsageError(f"give rank and ranks, or neither: not rank={rank}, ranks={ranks}")
        if ranks is None or rank is None:
            rank, ranks = _of_job()
        self.rank, self.ranks = whole_number("rank", rank, least=0), whole_number("ranks", ranks, least=1)
        if self.rank >= self.ranks:
            raise UsageError(f"rank must be less than ranks: {self.rank} of {self.ranks}")
        if self.global_batch < self.ranks:
            raise UsageError(
                f"global_batch={self.global_batch} has no sample for some of {self.ranks} ranks: make it at least "
                f"{self.ranks}, or use fewer ranks"
            )
        if self.global_batch % self.ranks and tail != "uneven":
            near = self.global_batch // self.ranks * self.ranks
            raise UsageError(
                f"global_batch={self.global_batch} cannot be divided among {self.ranks} ranks: take {near} or "
                f"{near + self.ranks}, another number of ranks, or tail='uneven' (batches of ranks then differ by one)"
            )
        if not self.length:
            raise DataError("the set has no samples: look at its files")
        if tail == "drop" and self.length < self.global_batch:
            raise DataError(
                f"the set has {self.length} samples, fewer than global_batch={self.global_batch}, and tail='drop' "
                "drops them all: make global_batch smaller, or take tail='pad' or 'uneven'"
            )
        blocks = getattr(dataset_or_length, "blocks", None)
        self._blocks: Blocks | None = blocks if shuffle and isinstance(blocks, Blocks) else None
        self._epoch, self._samples, self._lanes = 0, 0, self.global_batch
        self._iteration: BatchIterator | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the next sample, from 0 on."""
        return self._place()[0]

    @property
    def samples(self) -> int:
        """The samples of the epoch that all ranks together have trained on."""
        return self._place()[1]

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return _batches(self.length, self.global_batch, self._tail)

    def __iter__(self) -> BatchIterator:
        """Return the batches from the place on to the end of its epoch; they are the ones that count from now on."""
        loader = _compat.loader_that_asks()
        return self.iterate(0 if loader is None else loader.num_workers * (loader.prefetch_factor or 0))

    def iterate(self, ahead: int | None) -> BatchIterator:
        """Return what ``iter`` returns, for a reader that asks for `ahead` batches before it hands one out.

        None: the reader calls ``hand_out`` for each batch.
        """
        self._epoch, self._samples = self._place()
        if not self._samples:
            self._lanes = self.global_batch
        self._iteration = BatchIterator(self, ahead)
        return self._iteration

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch. Within this epoch it changes nothing, so a program may call it before each of its loops."""
        epoch = whole_number("epoch", epoch, least=0)
        if epoch != self.epoch:
            self._epoch, self._samples, self._iteration = epoch, 0, None

    def state_dict(self) -> dict[str, Any]:
        """Return the place, and what the order depends on; equal on all ranks."""
        return self._state(*self._place())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a place that any number of ranks has had.

        In the middle of an epoch the set, `seed` and `shuffle` must be the same; `global_batch` and `tail` may differ.

        Raises:
            DataError: they are not, or this is no state of a sampler. The place has not changed.
        """
        own = self._state(0, 0)
        if not isinstance(state, Mapping) or (lacking := own.keys() - state.keys()):
            what = f"it lacks {', '.join(sorted(lacking))}" if isinstance(state, Mapping) else f"it is {state!r}"
            raise DataError(f"this is no state of a ResumableSampler: {what}")
        for name in ("epoch", "samples", "length", "lanes"):
            if not isinstance(state[name], int) or state[name] < (name == "lanes"):
                raise DataError(f"this is no state of a ResumableSampler: {name} is {state[name]!r}")
        epoch, samples = state["epoch"], state["samples"]
        if samples:
            where = f"the state is of epoch {epoch} after {samples} of {state['length']} samples"
            remedy = f"go on with sampler.set_epoch({epoch + 1}) in place of the state"
            if state["length"] != self.length:
                raise DataError(f"{where}, and the set has {self.length} now: give it the same files, or {remedy}")
            for name, what in (("seed", "seed"), ("shuffle", "shuffle"), ("blocks", "files or chunks")):
                if state[name] != own[name]:
                    of = f"{what} are others" if name == "blocks" else f"{what} was {state[name]} and is {own[name]}"
                    raise DataError(f"{where}, and the order is another one now: {of}; take the same, or {remedy}")
        self._epoch, self._samples, self._lanes, self._iteration = epoch, samples, state["lanes"], None

    def _state(self, epoch: int, samples: int) -> dict[str, Any]:
        return {
            "epoch": epoch,
            "samples": samples,
            "length": self.length,
            "global_batch": self.global_batch,
            "lanes": self._lanes,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "blocks": None if self._blocks is None else self._blocks.digest(),
        }

    def _place(self, batches: int | None = None) -> tuple[int, int]:
        """Return epoch and samples behind so many batches of the loop; None: those that were handed out."""
        if batches is None:
            batches = 0 if self._iteration is None else self._iteration.handed_out
        samples = min(self.length, self._samples + batches * self.global_batch)
        is_over = not _batches(self.length - samples, self.global_batch, self._tail)
        return (self._epoch + 1, 0) if is_over else (self._epoch, samples)

    def _order(self) -> Order:
        if not self._shuffle:
            return lambda places: places
        return order_of(self.length, seed=self._seed, epoch=self._epoch, blocks=self._blocks, lanes=self._lanes)

    def _batches_left(self) -> int:
        return _batches(self.length - self._samples, self.global_batch, self._tail)

    def _share(self, number: int) -> np.ndarray:
        """Return places in the order of this rank's part of a batch of the loop."""
        first = self._samples + number * self.global_batch
        size = self.global_batch if self._tail == "pad" else min(self.global_batch, self.length - first)
        begin, end = (first + size * rank // self.ranks for rank in (self.rank, self.rank + 1))
        return np.arange(begin, end) % self.length


class BatchIterator(Iterator[list[int]]):
    """Batches of one epoch. It knows how many of them a reader has handed out, see ``ResumableSampler.iterate``.

    Attributes:
        handed_out: so many batches.
    """

    def __init__(self, sampler: ResumableSampler, ahead: int | None) -> None:
        self._sampler, self._ahead = sampler, ahead
        self._begin()

    def _begin(self) -> None:
        self._number, self._order = self._sampler._batches_left(), self._sampler._order()
        self._asked = self.handed_out = 0
        self._ready: list[list[int]] = []  # the next batches, the first one last

    def __next__(self) -> list[int]:
        """Return the next batch of this rank."""
        self._asked += 1
        if self._ahead is not None:
            self.handed_out = min(max(0, self._asked - self._ahead), self._number)
        if self._asked > self._number:
            raise StopIteration
        if not self._ready:
            self._compute()
        return self._ready.pop()

    def hand_out(self) -> None:
        """Count a batch."""
        self.handed_out += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the place behind the batches that were asked for, which torchdata's loader keeps for each of them."""
        return self._sampler._state(*self._sampler._place(min(self._asked, self._number)))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a place; see ``ResumableSampler.load_state_dict``."""
        self._sampler.load_state_dict(state)
        self._sampler._iteration = self
        self._begin()

    def _compute(self) -> None:
        sampler = self._sampler
        count = max(1, _AT_ONCE * sampler.ranks // sampler.global_batch)
        shares = [sampler._share(each) for each in range(self._asked - 1, self._number)[:count]]
        found = self._order(np.concatenate(shares))
        edges = np.cumsum([len(share) for share in shares])[:-1]
        self._ready = [each.tolist() for each in np.split(found, edges)][::-1]


def _batches(samples: int, global_batch: int, tail: str) -> int:
    return samples // global_batch if tail == "drop" else -(-samples // global_batch)


def _length_of(dataset_or_length: Sized | int) -> Any:
    return len(dataset_or_length) if hasattr(dataset_or_length, "__len__") else dataset_or_length


def _of_job() -> tuple[int, int]:
    world = current_world()
    if world is not None:
        return world.rank, world.size
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    launched = env.launcher_size()
    if launched is not None and launched[1] > 1:
        raise UsageError(
            f"{launched[0]} says that the job has {launched[1]} ranks, and they are not connected yet: call "
            "hpcfsdp.init() first, or give rank= and ranks="
        )
    return 0, 1
