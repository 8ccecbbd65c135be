"""A loader that reads ahead in threads of the rank: no process is forked or spawned beside MPI."""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import default_collate

from hpcfsdp import accelerator
from hpcfsdp.checkpoint.retention import whole_number
from hpcfsdp.data.hdf5 import HDF5Dataset
from hpcfsdp.data.sampler import BatchIterator, ResumableSampler
from hpcfsdp.engine.nested import apply_to_tensors
from hpcfsdp.errors import DataError, UsageError

_Task = tuple[Sequence[int], "Future[Any]"]


class ThreadedLoader(Iterable[Any]):
    """Batches of a set, in the order of its sampler, which threads read ahead.

    Reading and decoding have to be done outside of Python's lock for that to help, as h5py's own, numpy's and torch's
    functions do it, and ``HDF5Dataset``. The first batch comes as soon as it is read. An error comes with its batch,
    and names the sample. Threads end with the loop, and do not hold up the end of the process.

    Attributes:
        dataset, batch_sampler: as given.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_sampler: Iterable[Sequence[int]],
        threads: int = 2,
        ahead: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Not collective.

        Args:
            dataset: with ``__getitem__``, which threads call at the same time; ``__getitems__`` where it has one. Of an
                ``HDF5Dataset`` whole batches are read, without `collate_fn`.
            batch_sampler: lists of indices, for example a ``ResumableSampler``.
            threads: how many read.
            ahead: batches that are read before they are asked for, which is what memory holds; twice the threads by
                default.
            collate_fn: makes a batch of a list of samples, in the threads; torch's by default. A list without samples
                (of ``tail="uneven"``) gives it sample 0, and an empty part of each tensor.
            device: where tensors are moved in the threads, through pinned memory and on a stream of their own, if it is
                an accelerator. None: they stay on the CPU.

        Raises:
            UsageError: a number is no whole number, or too small.
        """
        self.dataset, self.batch_sampler = dataset, batch_sampler
        self._threads = whole_number("threads", threads, least=1)
        self._ahead = 2 * self._threads if ahead is None else whole_number("ahead", ahead, least=1)
        self._device = None if device is None else torch.device(device)
        on_device = self._device is not None and accelerator.is_accelerator(self._device)
        if on_device and self._device.index is None:
            self._device = accelerator.current_device()
        stream = accelerator.new_stream(self._device) if on_device else None
        self._fetch = _Fetch(dataset, collate_fn, self._device, stream)

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return len(self.batch_sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """Return batches up to the end of the epoch."""
        sampler = self.batch_sampler
        batches = sampler.iterate(None) if isinstance(sampler, ResumableSampler) else iter(sampler)
        return _Reading(batches, self._fetch, self._threads, self._ahead)

    def state_dict(self) -> dict[str, Any]:
        """Return the place of the sampler: after the batches that were handed out."""
        return self._stateful().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give the sampler a place; loops that begin from now on go on there."""
        self._stateful().load_state_dict(state)

    def _stateful(self) -> Any:
        if not hasattr(self.batch_sampler, "state_dict"):
            kind = type(self.batch_sampler).__name__
            raise UsageError(f"the batch sampler, a {kind}, has no state: use a ResumableSampler")
        return self.batch_sampler


@dataclass(frozen=True)
class _Fetch:
    """Makes a batch of indices, in any thread."""

    dataset: Any
    collate_fn: Callable[[list[Any]], Any] | None
    device: torch.device | None
    stream: torch.Stream | None

    def __call__(self, indices: Sequence[int]) -> tuple[Any, torch.Event | None]:
        """Return the batch, and the event that it is on the device."""
        batch = self._batch(indices)
        if self.device is None or self.stream is None:
            return (batch if self.device is None else apply_to_tensors(lambda each: each.to(self.device), batch)), None
        accelerator.make_current(self.device)
        with accelerator.on(self.stream):
            # Pinned memory is used again only after the copy from it: torch notes the stream.
            batch = apply_to_tensors(lambda each: each.pin_memory().to(self.device, non_blocking=True), batch)
            return batch, accelerator.record(self.stream)

    def _batch(self, indices: Sequence[int]) -> Any:
        if self.collate_fn is None and isinstance(self.dataset, HDF5Dataset):
            return self.dataset.batch(indices)
        collate = self.collate_fn or default_collate
        if not len(indices):
            return apply_to_tensors(lambda each: each[:0], collate([self._sample(0)]))
        return collate(self._samples(indices))

    def _samples(self, indices: Sequence[int]) -> list[Any]:
        if not hasattr(self.dataset, "__getitems__"):
            return [self._sample(index) for index in indices]
        try:
            return list(self.dataset.__getitems__(indices))
        except DataError:
            raise
        except Exception as error:
            raise _unreadable(f"one of the samples {list(indices)}", error) from error

    def _sample(self, index: int) -> Any:
        try:
            return self.dataset[index]
        except DataError:
            raise
        except Exception as error:
            raise _unreadable(f"sample {index}", error) from error


def _unreadable(what: str, error: Exception) -> DataError:
    return DataError(f"{what} cannot be read: {type(error).__name__}: {error}")


class _Reading(Iterator[Any]):
    """One loop over the batches."""

    def __init__(self, batches: Iterator[Sequence[int]], fetch: _Fetch, threads: int, ahead: int) -> None:
        self._batches, self._ahead, self._fetch = batches, ahead, fetch
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._waiting: deque[Future[Any]] = deque()
        # They know the queue, and not this object: they end when nobody has it any more.
        for number in range(threads):
            name = f"hpcfsdp-data-{number}"
            threading.Thread(target=_work, args=(self._tasks, fetch), name=name, daemon=True).start()
        self.close = weakref.finalize(self, _end, self._tasks, threads)
        self._submit()

    def __next__(self) -> Any:
        """Return the next batch; raise what its thread has raised."""
        if not self._waiting or not self.close.alive:
            self.close()
            raise StopIteration
        try:
            batch, event = self._waiting[0].result()
        except BaseException:  # also a signal's: nothing is read any more
            self.close()
            raise
        self._waiting.popleft()
        self._submit()
        if event is not None:
            stream = accelerator.current_stream(event.device)
            stream.wait_event(event)
            apply_to_tensors(lambda each: each.record_stream(stream) or each, batch)
        if isinstance(self._batches, BatchIterator):
            self._batches.hand_out()
        return batch

    def _submit(self) -> None:
        while len(self._waiting) < self._ahead:
            indices = next(self._batches, None)
            if indices is None:
                return
            self._waiting.append(Future())
            self._tasks.put((indices, self._waiting[-1]))


def _work(tasks: queue.SimpleQueue[_Task | None], fetch: _Fetch) -> None:
    while (task := tasks.get()) is not None:
        indices, future = task
        try:
            future.set_result(fetch(indices))
        except BaseException as error:
            future.set_exception(error)
        del task, indices, future  # a batch that nobody has any more is not kept until the next one


def _end(tasks: queue.SimpleQueue[_Task | None], threads: int) -> None:
    while not tasks.empty():
        tasks.get()
    for _ in range(threads):
        tasks.put(None)
