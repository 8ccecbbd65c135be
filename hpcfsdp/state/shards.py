"""What a rank holds of tensors that are laid out like a flat parameter: its parameters, or their optimizer state.

Every sink takes them from here and every source fills them: ``state.transfer`` for state dicts, ``in_file`` for files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hpcfsdp.flat.layout import FlatLayout, Run
from hpcfsdp.sharded.unit_mesh import UnitMesh
from hpcfsdp.state.blocks import Blocks, FileStaging
from hpcfsdp.state.tensors import LocalPiece, Runs, StateTensor


@dataclass(frozen=True)
class LocalShards:
    """A rank's memory of tensors that are sharded as a layout says.

    Attributes:
        layout: whose slots the tensors are.
        tensors: 1-D, one for each slot; None for slots that are left out, on all ranks alike.
        whole_shard: whether each of them is the whole shard, or this rank's run of its own parameter.
    """

    layout: FlatLayout
    tensors: Sequence[torch.Tensor | None]
    whole_shard: bool

    @classmethod
    def of_shard(cls, layout: FlatLayout, shard: torch.Tensor) -> LocalShards:
        """All slots in one tensor that is laid out like the shard."""
        return cls(layout, [shard] * len(layout.slots), whole_shard=True)

    @classmethod
    def of_runs(cls, layout: FlatLayout, runs: Sequence[torch.Tensor | None]) -> LocalShards:
        """Each slot in a tensor of its own, which may be empty."""
        return cls(layout, runs, whole_shard=False)

    @property
    def present(self) -> list[int]:
        """The slots that are not left out."""
        return [index for index, tensor in enumerate(self.tensors) if tensor is not None]

    @property
    def nbytes(self) -> int:
        """Of the memory."""
        return sum({id(tensor): tensor.nbytes for tensor in self.tensors if tensor is not None}.values())

    def runs(self, rank: int) -> list[Run]:
        """The runs of a rank, at their places in its tensors."""
        found = self.layout.runs(rank, apart=not self.whole_shard)
        return [run for run in found if self.tensors[run.index] is not None]

    def pieces(self, rank: int) -> dict[int, LocalPiece]:
        """The runs of a rank whose memory this is, as views, by slot."""
        return {
            run.index: LocalPiece(run.start, self.tensors[run.index][run.offset : run.offset + run.numel])
            for run in self.runs(rank)
        }

    def assembled(self, rank: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """One tensor laid out like the shard; what no slot owns may be anything."""
        if self.whole_shard:
            return self.tensors[self.present[0]].to(device, dtype).contiguous()
        shard = torch.empty(self.layout.shard_numel, dtype=dtype, device=device)
        for run in self.layout.runs(rank):
            if self.tensors[run.index] is not None:
                shard[run.offset : run.offset + run.numel].copy_(self.tensors[run.index])
        return shard

    def in_file(
        self, mesh: UnitMesh, names: Sequence[str], *, with_aliases: bool = False, are_read_by_others: bool = False
    ) -> list[StateTensor]:
        """The slots that are not left out as a file has them; not collective.

        Args:
            mesh: the ranks that have the slots.
            names: of all slots.
            with_aliases: whether the slots' aliases are names, too.
            are_read_by_others: the memory is shared by the ranks of a node.
        """
        staging = FileStaging(Blocks(mesh, self.layout, self.whole_shard), are_read_by_others=are_read_by_others)
        pieces = self.pieces(min(mesh.shard.rank, self.layout.num_shards - 1))
        found = []
        for index in self.present:
            slot, tensor = self.layout.slots[index], self.tensors[index]
            aliases = slot.aliases if with_aliases else ()
            if slot.is_cut:
                staging.add(index, tensor)
                found.append(staging.state_tensor(index, names[index], aliases))
                continue
            runs, own = _held_runs(self.layout, slot.fqn, mesh), pieces.get(index)
            own = () if own is None else (own,)
            found.append(StateTensor(names[index], slot.shape, tensor.dtype, runs, own, aliases))
        return found


def _held_runs(layout: FlatLayout, fqn: str, mesh: UnitMesh) -> Runs:
    """The runs of a parameter, with the ranks that have their shards."""
    first, edges = layout.of_tensor_rank(0).param_edges(fqn)
    return Runs(edges, mesh.copies[first : first + len(edges) - 1])
