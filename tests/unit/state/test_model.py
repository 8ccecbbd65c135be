import pytest
import torch
from torch import nn

from hpcfsdp.comm.communicator import Grid
from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.errors import CheckpointError, StateDictError
from hpcfsdp.fsdp import FullyShardedDataParallel, ShardingStrategy
from hpcfsdp.params.layout import FlatLayout
from hpcfsdp.state.model import communicator_of, flat_params, model_tensors, ranks_of_model
from hpcfsdp.state.tensors import LocalShards
from hpcfsdp.state.wrappers import clean_fqn
from hpcfsdp.wrap import ModuleWrapPolicy


def shard(module, comm=None):
    policy = ModuleWrapPolicy({nn.Linear})
    return FullyShardedDataParallel(module, process_group=comm or FakeCommunicator(), auto_wrap_policy=policy)


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("layer.weight", "layer.weight"),
        ("_fsdp_wrapped_module.layer._fsdp_wrapped_module.weight", "layer.weight"),
        ("_orig_mod.layer._checkpoint_wrapped_module.weight", "layer.weight"),
        ("my_orig_mod.weight", "my_orig_mod.weight"),
        ("_fsdp_wrapped_module", ""),
        ("", ""),
    ],
)
def test_names_of_wrappers_are_left_out(name, clean):
    assert clean_fqn(name) == clean


def test_a_plain_module_stands_alone_and_a_sharded_one_has_its_communicator():
    assert isinstance(communicator_of(nn.Linear(1, 1)), FakeCommunicator)
    comm = FakeCommunicator()
    assert communicator_of(nn.Sequential(shard(nn.Sequential(nn.Linear(2, 2)), comm))) is comm


def test_tensors_of_a_plain_module_stand_in_its_order_with_ties_and_without_scratch_buffers(make_model):
    model = make_model(0)
    found = model_tensors(model)
    assert [tensor.name for tensor in found] == [name for name in model.state_dict() if name != "head.weight"]
    by_name = {tensor.name: tensor for tensor in found}
    assert by_name["embed.weight"].aliases == ("head.weight",)
    for tensor in found:
        expected = model.state_dict()[tensor.name]
        assert (tensor.shape, tensor.dtype) == (tuple(expected.shape), expected.dtype)
        assert torch.equal(tensor.pieces[0].tensor, expected)


def test_pieces_of_a_plain_module_are_its_memory(make_model):
    model = make_model(0)
    piece = next(tensor for tensor in model_tensors(model) if tensor.name == "scale").pieces[0]
    piece.fill(torch.tensor([4.0]))
    assert model.scale.item() == 4


def test_a_sharded_model_has_the_tensors_of_the_plain_one_under_the_same_names(make_model):
    plain = {tensor.name: tensor for tensor in model_tensors(make_model(0))}
    policy = ModuleWrapPolicy({nn.BatchNorm1d})
    model = FullyShardedDataParallel(make_model(0), process_group=FakeCommunicator(), auto_wrap_policy=policy)
    found = {tensor.name: tensor for tensor in model_tensors(model)}
    assert set(found) == set(plain)
    for name, tensor in found.items():
        assert (tensor.shape, tensor.dtype, tensor.aliases) == (
            plain[name].shape,
            plain[name].dtype,
            plain[name].aliases,
        )
        values = [piece.tensor.flatten() for piece in tensor.pieces]
        assert torch.equal(
            torch.cat([torch.zeros(0, dtype=tensor.dtype), *values]), plain[name].pieces[0].tensor.flatten()
        )


def test_the_pieces_of_all_ranks_are_the_parameter(run_ranks):
    torch.manual_seed(0)
    weight = torch.randn(5, 7)

    def body(comm):
        module = nn.Linear(7, 5)
        module.weight.data.copy_(weight)
        tensor = next(t for t in model_tensors(shard(nn.Sequential(module), comm)) if t.name == "0.weight")
        return tensor.runs, [(piece.start, piece.tensor.clone()) for piece in tensor.pieces]

    results = run_ranks(3, body)
    assert len({(tuple(runs.edges), tuple(runs.ranks.flat)) for runs, _ in results}) == 1
    pieces = [piece for _, pieces in results for piece in pieces]
    assert [start for start, _ in pieces] == results[0][0].edges[:-1].tolist()
    assert torch.equal(torch.cat([values for _, values in pieces]).view(5, 7), weight)


def test_flat_params_come_with_names_of_the_whole_model():
    model = nn.ModuleDict({"net": shard(nn.Sequential(nn.Linear(2, 2), nn.PReLU()))})
    assert [[slot.fqn for slot in layout.slots] for _, layout, _ in flat_params(model)] == [
        ["net.1.weight"],
        ["net.0.weight", "net.0.bias"],
    ]


def test_pieces_view_the_shard_and_are_missing_where_the_rank_has_nothing():
    layout = FlatLayout.plan([("a", (6,), ()), ("b", (0,), ()), ("c", (2,), ())], torch.float32, 3)
    shard = torch.arange(4.0)
    pieces = LocalShards.of_shard(layout, shard).pieces(1)
    assert {index: (piece.start, piece.tensor.tolist()) for index, piece in pieces.items()} == {0: (4, [0, 1])}
    pieces[0].fill(torch.tensor([8.0, 9.0]))
    assert shard.tolist() == [8, 9, 2, 3]


def test_a_pair_of_groups_that_is_not_the_world_has_no_checkpoint():
    pair = FakeCommunicator(0, 2), FakeCommunicator(1, 3)
    hybrid = ShardingStrategy.HYBRID_SHARD
    model = FullyShardedDataParallel(nn.Linear(2, 2), process_group=pair, sharding_strategy=hybrid)
    assert communicator_of(model) is pair[0]
    with pytest.raises(CheckpointError, match="a pair of process groups that do not cover all ranks of the job"):
        model_tensors(model)


def wrap(module, comm, **options):
    return FullyShardedDataParallel(module, process_group=comm, **options)


def test_the_ranks_of_a_model_are_those_of_its_largest_unit():
    large, small = FakeCommunicator(1, 4), FakeCommunicator(0, 2)
    assert ranks_of_model(wrap(nn.Linear(2, 2), large)) is large
    model = nn.ModuleList([wrap(nn.Linear(2, 2), small), nn.Sequential(wrap(nn.Linear(2, 2), large))])
    assert ranks_of_model(model) is large
    assert ranks_of_model(wrap(nn.Linear(2, 2), large, sharding_strategy=ShardingStrategy.NO_SHARD)) is large


def test_a_pair_of_groups_counts_as_many_ranks_as_it_has_together(run_grid):
    def body(shard, replicate):
        pair = wrap(nn.Linear(2, 2), (shard, replicate), sharding_strategy=ShardingStrategy.HYBRID_SHARD)
        ranks = ranks_of_model(nn.ModuleList([wrap(nn.Linear(2, 2), FakeCommunicator(0, 5)), pair]))
        return type(ranks), ranks.rank

    assert run_grid(body) == [(Grid, rank) for rank in range(6)]


def test_a_group_of_ones_own():
    comm = FakeCommunicator(1, 3)
    assert ranks_of_model(wrap(nn.Linear(2, 2), FakeCommunicator(0, 2)), comm) is comm


@pytest.mark.parametrize("group", [None, FakeCommunicator()], ids=["no group", "a group"])
def test_a_model_that_is_not_sharded(group):
    with pytest.raises(StateDictError) as caught:
        ranks_of_model(nn.Linear(2, 2), group)
    assert str(caught.value) == (
        "there is no FullyShardedDataParallel in this Linear: wrap the model first, or use the optimizer's own "
        "state_dict and load_state_dict"
    )
