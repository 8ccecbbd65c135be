import types

import pytest
import torch
import torch.distributed as dist

from hpcfsdp import _compat
from hpcfsdp.comm.communicator import CommOptions
from hpcfsdp.comm.fake import FakeCommunicator


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"separate_reductions": "no"}, "separate_reductions .* not 'no'"),
        ({"sums_by": "nccl"}, "sums_by .* not 'nccl'"),
        ({"memory": "pinned"}, "memory .* not 'pinned'"),
        ({"high_priority": 3}, "high_priority .* not 3"),
        ({"max_ctas": 0}, "max_ctas .* at least 1, not 0"),
        ({"min_ctas": True}, "min_ctas .* not True"),
        ({"cga_cluster_size": 1.5}, "cga_cluster_size .* at least 0, not 1.5"),
        ({"min_ctas": 8, "max_ctas": 4}, "min_ctas=8 is more than max_ctas=4"),
    ],
)
def test_a_wrong_value_is_named(given, named):
    with pytest.raises(ValueError, match=named):
        CommOptions(**given)


def test_one_process_takes_all_options():
    assert not FakeCommunicator(0, 4).lacking(CommOptions(sums_by="backend", memory="symmetric", max_ctas=4))


def test_options_of_groups_are_given_to_nccl(monkeypatch):
    def make(is_high_priority_stream):
        config = types.SimpleNamespace(min_ctas=None, max_ctas=None)
        return types.SimpleNamespace(is_high_priority_stream=is_high_priority_stream, config=config)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", types.SimpleNamespace(Options=make), raising=False)
    made = _compat.group_options(dict(CommOptions(high_priority=True, max_ctas=4).of_group))
    assert (made.is_high_priority_stream, made.config.min_ctas, made.config.max_ctas) == (True, None, 4)
    with pytest.raises(ValueError, match="no cga_cluster_size=2: leave it out"):
        _compat.group_options({"cga_cluster_size": 2})


def test_torch_has_no_symmetric_memory_on_a_cpu():
    assert not _compat.has_symmetric_memory(None, torch.device("cpu"))
