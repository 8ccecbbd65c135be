"""What goes into the files of nodes, for any ranks on any nodes."""

from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.retention import is_part, part_path
from hpcfsdp.checkpoint.saving.mpio import BLOCKS_AT_ONCE, calls_by_tensor
from hpcfsdp.checkpoint.saving.plan import BLOCK_DTYPE, SavePlan, plan_save
from hpcfsdp.checkpoint.saving.subfiles import divide, sources_of
from hpcfsdp.launch.topology import Topology
from hpcfsdp.state.tensors import Runs, StateTensor


@st.composite
def plans(draw):
    """Tensors cut anywhere over ranks that lie on nodes in any way."""
    ranks = draw(st.integers(1, 6))
    labels = draw(st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks))
    tensors = []
    for number in range(draw(st.integers(0, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
        numel = int(np.prod(shape, dtype=int))
        cuts = draw(st.sets(st.integers(1, max(1, numel - 1)), max_size=5)) if numel > 1 else set()
        edges = [0, *sorted(cuts), numel] if numel else [0]
        holders = [(draw(st.integers(0, ranks - 1)),) for _ in edges[1:]]
        tensors.append(("model", StateTensor(f"t{number}", shape, torch.float32, Runs.of(edges, holders), ())))
    return plan_save(tensors, ranks, draw(st.sampled_from([4, 12, 1 << 20]))), Topology.from_labels(labels)


@given(plans(), st.sampled_from([0, 1, 40]))
def test_parts_have_every_element_of_what_is_divided_once(case, least_bytes):
    plan, topology = case
    parts = divide(plan, topology, least_bytes)
    names = [f"part{part.node}" for part in parts]
    sources = sources_of(plan, parts, names)
    divided = {i for i, spec in enumerate(plan.specs) if spec.shape and spec.numel and spec.nbytes >= least_bytes}
    assert set(sources) == divided
    held = {(name, int(tensor)): [] for part, name in zip(parts, names, strict=True) for tensor in part.tensors}
    for part, name in zip(parts, names, strict=True):
        assert {topology.node_rank(rank) for rank in part.plan.blocks["rank"].tolist()} == {part.node}
        for place, block in zip(part.blocks.tolist(), part.plan.blocks, strict=True):
            elements = held[name, int(plan.blocks[place]["tensor"])]
            assert int(block["start"]) == len(elements)  # one after the other, nothing between them
            start, numel = int(plan.blocks[place]["start"]), int(block["numel"])
            elements += range(start, start + numel)
        assert [spec.shape for spec in part.plan.specs] == [(len(held[name, int(t)]),) for t in part.tensors]
    for tensor in divided:
        mapped = {source.file: [e for run in source.runs for e in range(*run)] for source in sources[tensor]}
        assert mapped == {name: held[name, tensor] for name in names if (name, tensor) in held}
        assert sorted(chain.from_iterable(mapped.values())) == list(range(plan.specs[tensor].numel))


def test_runs_that_do_not_follow_each_other_stay_in_the_checkpoint():
    spec = schema.TensorSpec("model/x", (4, 4), "float32")
    blocks = np.array([(0, 0, 4, 0, 2, 4), (0, 1, 4, 2, 2, 4)], BLOCK_DTYPE)
    assert divide(SavePlan((spec,), blocks, (), 2), Topology.regular(2, 1), 1) == []


@pytest.mark.parametrize(("numel", "calls"), [(0, 0), (1, 1), (BLOCKS_AT_ONCE, 1), (BLOCKS_AT_ONCE + 1, 2)])
def test_all_ranks_call_as_often_as_the_one_with_the_most_blocks(numel, calls):
    tensor = StateTensor("x", (numel + 1,), torch.float32, Runs.of((0, 1, numel + 1), ((1,), (0,))), ())
    plan = plan_save([("model", tensor)] if numel else [], 2, 4)
    assert calls_by_tensor(plan).tolist() == ([calls] if numel else [])


def test_names_of_parts_are_distinguished_from_others(tmp_path):
    path = part_path(tmp_path / "step-00000003.h5", "0123abcd", 17)
    assert path.name == "step-00000003.0123abcd.node-17.h5"
    assert is_part(path)
    assert not is_part(tmp_path / "step-00000003.h5")
