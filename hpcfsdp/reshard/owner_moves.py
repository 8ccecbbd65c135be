"""Values of tensors moved from their shards to the ranks that own them whole, and back."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from hpcfsdp.comm import Communicator
from hpcfsdp.reshard.cuts import Boxes, Cut
from hpcfsdp.reshard.move import batches

BATCH_NUMEL = 1 << 22
"""Elements for each rank that travel together: a few large messages, and little memory beside the tensors."""

TensorOf = Callable[[int], torch.Tensor]
"""The memory of a tensor by its number."""

Views = dict[int, list[torch.Tensor]]
"""Views by the rank that they are sent to, or received from."""

Finish = Callable[[], None]
"""Completes what has begun."""


class _Peer(NamedTuple):
    rank: int
    boxes: Boxes


class OwnerMoves:
    """The moves between shards and owners that this rank takes part in. Made without a message."""

    def __init__(self, comm: Communicator, cuts: Sequence[Cut], owners: Sequence[int]) -> None:
        """Not collective.

        Args:
            comm: the ranks, by which `cuts` and `owners` number them.
            owners: by tensor.
        """
        self.comm, self.cuts, self.owners = comm, cuts, owners
        rank = comm.rank
        self._own = [cut.boxes(rank) for cut in cuts]
        self._has = {index for index, boxes in enumerate(self._own) if boxes}
        self._senders: dict[int, list[_Peer]] = {}
        self._copies: dict[int, list[_Peer]] = {}
        self._sends: set[int] = set()
        for index, (cut, owner) in enumerate(zip(cuts, owners, strict=True)):
            if owner == rank:
                self._senders[index] = [_Peer(*pair) for pair in cut.senders(rank)]
                self._copies[index] = [_Peer(*pair) for pair in cut.copies() if pair[0] != rank]
            elif index in self._has and cut.sends(rank, owner):
                self._sends.add(index)

    def numel_here(self, index: int) -> int:
        """Elements of a tensor in this rank's shard."""
        return sum(box.numel for box in self._own[index])

    def owns(self, index: int) -> bool:
        return self.owners[index] == self.comm.rank

    def stays(self, index: int) -> bool:
        """Whether no element of a tensor moves, the same on all ranks."""
        owner = self.owners[index]
        return self.cuts[index].is_whole_on(owner) and len(self.cuts[index].shares()[0]) <= 1

    @torch.no_grad()
    def gather(
        self, chosen: Sequence[int], shard: TensorOf, whole: TensorOf, dtype: torch.dtype, *, async_op: bool = False
    ) -> Finish:
        """Collective over `comm`. Bring tensors from their shards to their owners.

        Args:
            chosen: numbers of tensors, ascending, the same on all ranks.
            shard: this rank's elements of a tensor, converted to `dtype`; called where it has some. 1-D, box after box,
                or of the shape of its only box.
            whole: memory of the whole for its owner, contiguous; called there alone. May share the memory of the shard.
            dtype: in which values travel.
            async_op: return while they travel; without it everything is done at the end.

        Returns:
            What completes the call, to be called once if `async_op` is set.
        """
        finishes = []
        for part in self._batches(chosen):
            of_shards, of_owners = self._views_by_rank(part, shard, whole, self._senders, self._sends)
            for view, own in self._kept(part, shard, whole):
                view.copy_(own)
            finishes.append(self._exchange(of_shards, of_owners, dtype, in_place=True, async_op=async_op))
        return all_of(finishes)

    @torch.no_grad()
    def scatter(
        self, chosen: Sequence[int], whole: TensorOf, shard: TensorOf, dtype: torch.dtype, *, async_op: bool = False
    ) -> Finish:
        """Collective over `comm`. Bring tensors from their owners into all shards. The rest as for ``gather``."""
        finishes = []
        for part in self._batches(chosen):
            of_shards, of_owners = self._views_by_rank(part, shard, whole, self._copies, self._has)
            for view, own in self._kept(part, shard, whole):
                own.copy_(view)
            # Shards may be in memory that ranks share: no message is received there.
            finishes.append(self._exchange(of_owners, of_shards, dtype, in_place=False, async_op=async_op))
        return all_of(finishes)

    def _views_by_rank(
        self,
        part: Sequence[int],
        shard: TensorOf,
        whole: TensorOf,
        peers: Mapping[int, Sequence[_Peer]],
        taking_part: Container[int],
    ) -> tuple[Views, Views]:
        """Views of this rank's shards by the owner, and of the tensors that it owns by the other rank.

        Args:
            peers: of tensors that this rank owns.
            taking_part: tensors of others of which its shards take part.
        """
        of_shards: Views = {}
        of_owners: Views = {}
        for index in part:
            if self.owns(index):
                for peer in peers[index]:
                    of_owners.setdefault(peer.rank, []).extend(self._views(index, whole(index), peer.boxes))
            elif index in taking_part:
                of_shards.setdefault(self.owners[index], []).extend(self._own_views(index, shard(index)))
        return of_shards, of_owners

    def _batches(self, chosen: Sequence[int]) -> Iterator[Sequence[int]]:
        limit = BATCH_NUMEL * self.comm.size
        for part in batches([self.cuts[index].numel for index in chosen], limit):
            yield chosen[part.start : part.stop]

    def _views(self, index: int, whole: torch.Tensor, boxes: Boxes) -> list[torch.Tensor]:
        seen = whole.detach().view(self.cuts[index].view)
        return [seen[box.slices] for box in boxes]

    def _own_views(self, index: int, shard: torch.Tensor) -> list[torch.Tensor]:
        boxes = self._own[index]
        if len(boxes) == 1:
            return [shard.view(boxes[0].sizes)]
        parts = shard.view(-1).split([box.numel for box in boxes])
        return [part.view(box.sizes) for part, box in zip(parts, boxes, strict=True)]

    def _kept(
        self, part: Sequence[int], shard: TensorOf, whole: TensorOf
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Views of tensors that this rank owns, and of its shards, for the same elements in different memory."""
        for index in part:
            if self.owns(index) and index in self._has:
                views = self._views(index, whole(index), self._own[index])
                for view, own in zip(views, self._own_views(index, shard(index)), strict=True):
                    if view.data_ptr() != own.data_ptr():
                        yield view, own

    def _exchange(
        self,
        out: Views,
        into: Views,
        dtype: torch.dtype,
        *,
        in_place: bool,
        async_op: bool,
    ) -> Finish:
        """Collective over `comm`. Send and receive views by rank; `in_place` where a rank receives a single one."""
        comm = self.comm
        if comm.size == 1:
            return _nothing_left
        nothing = torch.empty(0, dtype=dtype, device=comm.device)
        inputs = [_packed(out[rank], comm, dtype) if rank in out else nothing for rank in range(comm.size)]
        outputs = [nothing] * comm.size
        for rank, views in into.items():
            kind = views[0].dtype, views[0].device
            direct = in_place and len(views) == 1 and views[0].is_contiguous() and kind == (dtype, comm.device)
            numel = sum(view.numel() for view in views)
            outputs[rank] = views[0].view(-1) if direct else torch.empty(numel, dtype=dtype, device=comm.device)
        work = comm.all_to_all(outputs, inputs, async_op=async_op)

        @torch.no_grad()
        def finish() -> None:
            if work is not None:
                work.wait()
            inputs.clear()  # which had to stay until now
            for rank, views in into.items():
                values = outputs[rank]
                if views[0].data_ptr() != values.data_ptr():
                    for view, part in zip(views, values.split([view.numel() for view in views]), strict=True):
                        view.copy_(part.view(view.shape))

        if async_op:
            return finish
        finish()
        return _nothing_left


def _nothing_left() -> None:
    pass


def all_of(finishes: Iterable[Finish]) -> Finish:
    """One completion of several calls, which begin now."""
    begun = list(finishes)

    def finish() -> None:
        for each in begun:
            each()

    return finish


def _packed(views: Sequence[torch.Tensor], comm: Communicator, dtype: torch.dtype) -> torch.Tensor:
    if len(views) == 1:
        return views[0].to(comm.device, dtype).contiguous().view(-1)
    packed = torch.empty(sum(view.numel() for view in views), dtype=dtype, device=comm.device)
    for view, part in zip(views, packed.split([view.numel() for view in views]), strict=True):
        part.view(view.shape).copy_(view)
    return packed
