import pytest
import torch

from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.errors import StateDictError
from hpcfsdp.state.optim.compare import StateInfo
from hpcfsdp.state.optim.local import FlatParamState, check_state_shapes
from tests.unit.state.optim.examples import NO_SHARD, make_info

# Shapes of this rank's state


@pytest.mark.parametrize(
    ("original", "name", "shape"),
    [(False, "a", (12,)), (True, "a", (3,)), (True, "scalar", (1,)), (True, "none", (0,)), (True, "one", (0,))],
)
def test_state_has_one_value_or_one_for_each_element_that_is_stepped(original, name, shape):
    info = make_info(FakeCommunicator(1, 3), original=original)
    check_state_shapes(info, name, {"step": torch.tensor(1.0), "sum": torch.ones(shape), "kind": [1, 2]})
    for wrong in ((shape[0] + 1,), (2, 3), (1, *shape)):
        with pytest.raises(StateDictError) as caught:
            check_state_shapes(info, name, {"step": torch.tensor(1.0), "sum": torch.ones(wrong)})
        assert str(caught.value) == (
            f"optimizer state 'sum' of {name!r} has shape {wrong}, but must be a scalar or have the "
            f"shape of the parameter that the optimizer steps, {shape}"
        )


def test_state_of_a_whole_parameter_may_have_any_shape():
    info = make_info(FakeCommunicator(1, 3), original=True, strategy=NO_SHARD)
    check_state_shapes(info, "a", {"row": torch.ones(5), "column": torch.ones(3), "more": torch.ones(2, 2, 2)})
    with pytest.raises(StateDictError, match=r"has shape \(5,\), but must be"):
        check_state_shapes(make_info(FakeCommunicator(1, 3), strategy=NO_SHARD), "a", {"row": torch.ones(5)})


# What this rank has of a flat parameter's state


def test_a_flat_parameter_has_one_shard_for_all_of_its_parameters():
    info = make_info(FakeCommunicator(1, 3))
    shard, step = torch.ones(info.layout.shard_numel), torch.tensor(1.0)
    found = FlatParamState.of(info, {"a": {"avg": shard, "step": step, "kind": "mean"}}, {})
    [(kind, parts)] = found.shards.items()
    assert kind == ("avg", torch.float32)
    assert parts.whole_shard
    assert parts.present == [0, 1, 2, 3, 4]
    assert all(tensor.data_ptr() == shard.data_ptr() for tensor in parts.tensors)
    assert found.scalars == {fqn: {"step": step} for fqn in info.param_indices}
    assert found.others == {fqn: {"kind": "mean"} for fqn in info.param_indices}
    assert found.whole == {}


def test_of_what_this_rank_holds_nothing_of_it_has_what_others_have_without_elements():
    info = make_info(FakeCommunicator(1, 3), original=True)
    assert info.is_empty_on("one", 1)
    known = {"one": StateInfo.of({"max": torch.ones(1, dtype=torch.float64), "step": torch.tensor(2.0), "n": 1})}
    found = FlatParamState.of(info, {"one": {"step": torch.tensor(1.0), "n": 5, "old": torch.ones(0)}}, known)
    [(kind, parts)] = found.shards.items()
    assert kind == ("max", torch.float64)
    assert (parts.present, parts.tensors[4].numel()) == ([4], 0)
    assert (found.scalars, found.others) == ({"one": {"step": torch.tensor(2.0)}}, {"one": {"n": 1}})
    assert FlatParamState.of(info, {}, {}) == FlatParamState()


def test_a_whole_parameter_may_have_state_of_other_shapes():
    info = make_info(FakeCommunicator(1, 3), original=True, strategy=NO_SHARD)
    row = torch.ones(5)
    found = FlatParamState.of(info, {"a": {"row": row, "avg": torch.ones(5, 3)}}, {})
    assert found.whole == {"a": {"row": row}}
    assert [(key, parts.present) for key, parts in found.shards.items()] == [(("avg", torch.float32), [0])]
