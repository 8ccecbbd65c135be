import pytest
import torch

from hpcfsdp.errors import CommunicationError, EngineError
from hpcfsdp.params.sharded_params import Dtypes
from tests.unit.params.gathering import reshard, unshard, values_bytes

LOWERED = Dtypes.plan(torch.float32, param=torch.bfloat16)


def test_the_shard_holds_the_values_and_zeros_between_them(make_flat):
    flat = make_flat(torch.ones(2, 3), torch.full((1,), 7.0))
    assert flat.parameter.tolist() == [1, 1, 1, 1, 1, 1, 0, 0, 7, 0, 0, 0]


def test_unshard_and_reshard_give_and_take_the_leaves_values(run_ranks, make_flat):
    def body(comm):
        flat = make_flat(torch.arange(6.0).view(2, 3), comm=comm)
        assert values_bytes(flat) == 0
        assert not flat.stays_gathered
        assert flat.parameter.tolist() == [[0, 1, 2, 3], [4, 5, 0, 0]][comm.rank]
        for _ in range(2):
            unshard(flat)
            unshard(flat)  # has no effect, and does not communicate
            assert flat.is_unsharded
            assert values_bytes(flat) == 32
            assert flat.leaves[0].tolist() == [[0, 1, 2], [3, 4, 5]]
            assert flat.full.tolist() == [0, 1, 2, 3, 4, 5, 0, 0]
            reshard(flat)
            assert not flat.is_unsharded
            assert values_bytes(flat) == 0
            assert flat.leaves[0].isnan().all()
        return "done"

    assert run_ranks(2, body) == ["done"] * 2


def test_one_rank_alone_gathers_nothing_and_hides_its_values_at_rest_all_the_same(make_flat):
    flat = make_flat(torch.arange(6.0).view(2, 3))
    assert flat.stays_gathered
    assert not flat.shares_gathered
    assert flat.leaves[0].isnan().all()
    unshard(flat)
    assert flat.leaves[0].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert flat.leaves[0].data_ptr() == flat.parameter.data_ptr()
    assert values_bytes(flat) == 0
    reshard(flat)
    assert flat.leaves[0].isnan().all()
    assert flat.parameter[:6].tolist() == [0, 1, 2, 3, 4, 5]


def test_unsharded_leaves_follow_the_shard(make_flat):
    flat = make_flat(torch.zeros(3))
    flat.parameter.data[:3] = torch.tensor([1.0, 2.0, 3.0])
    unshard(flat)
    assert flat.leaves[0].tolist() == [1, 2, 3]


def test_leaves_stay_the_parameters_they_were_and_their_views_are_made_once(run_ranks, make_flat):
    def body(comm):
        flat = make_flat(torch.ones(2, 3), torch.ones(5), comm=comm)
        leaves, places = flat.leaves, []
        for _ in range(2):
            unshard(flat)
            places.append([leaf.untyped_storage()._cdata for leaf in leaves])
            reshard(flat)
        assert flat.leaves is leaves
        return places[0] == places[1]

    assert run_ranks(2, body) == [True, True]


# Memory that ranks share


def test_ranks_that_share_memory_have_one_copy_of_all_values_and_meet_to_use_it(run_ranks, make_flat):
    def body(comm):
        flat = make_flat(torch.arange(6.0).view(2, 3), comm=comm)
        assert flat.stays_gathered
        assert flat.shares_gathered
        with torch.no_grad():
            flat.parameter.add_(10.0 * (comm.rank + 1))
        unshard(flat)
        return flat.full.data_ptr(), flat.leaves[0].tolist(), values_bytes(flat)

    first, second = run_ranks(2, body, shares_memory=True)
    assert first == second
    assert first[1:] == ([[10, 11, 12], [13, 24, 25]], 0)


def test_ranks_that_share_memory_and_meet_with_other_labels_raise(run_ranks, make_flat):
    def body(comm):
        flat = make_flat(torch.zeros(4), comm=comm)
        if comm.rank == 0:
            unshard(flat)
        else:
            comm.labelled_barrier("something else")

    errors = run_ranks(2, body, shares_memory=True)
    assert [type(error) for error in errors] == [CommunicationError] * 2


def test_shards_that_are_kept_in_another_dtype_than_the_shared_values_are_published(run_ranks, make_flat):
    def body(comm):
        flat = make_flat(torch.zeros(4), comm=comm, dtypes=LOWERED)
        with torch.no_grad():
            flat.parameter.fill_(257.0 + comm.rank)
        comm.barrier()
        before = flat.full.tolist()
        comm.barrier()
        unshard(flat)
        return before, flat.parameter.dtype, flat.leaves[0].dtype, flat.leaves[0].tolist()

    kept = [0] * 8
    expected = (kept, torch.float32, torch.bfloat16, [256, 256, 256, 256])
    assert run_ranks(2, body, shares_memory=True)[0] == expected


# At rest


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_leaves_read_nan_at_rest(make_flat, dtype):
    flat = make_flat(torch.ones(2, 2, dtype=dtype))
    assert flat.leaves[0].dtype == dtype
    assert flat.leaves[0].shape == (2, 2)
    assert flat.leaves[0].isnan().all()


def test_integer_leaves_read_zero_at_rest(make_flat):
    flat = make_flat(torch.ones(3, dtype=torch.int64), requires_grad=False)
    assert flat.leaves[0].tolist() == [0, 0, 0]


def test_what_is_written_to_a_leaf_at_rest_is_forgotten(make_flat):
    flat = make_flat(torch.ones(1), torch.ones(2))
    with torch.no_grad():
        flat.leaves[0].fill_(5.0)
        with pytest.raises(RuntimeError, match="single memory location"):
            flat.leaves[1].add_(5.0)
    assert flat.leaves[1].isnan().all()
    unshard(flat)
    assert flat.leaves[0].item() == 1
    reshard(flat)
    assert flat.leaves[0].isnan().all()


def test_original_parameters_hold_their_own_run_of_the_shard_at_rest(run_ranks, make_flat):
    def body(comm):
        flat = make_flat(torch.arange(6.0).view(2, 3), torch.full((1,), 7.0), comm=comm, use_orig_params=True)
        first, second = flat.leaves
        seen = [(leaf.shape, leaf.tolist()) for leaf in flat.leaves]
        with torch.no_grad():
            for leaf in flat.leaves:
                leaf.mul_(2)  # as an optimizer does
        unshard(flat)
        seen += [first.tolist(), second.tolist()]
        reshard(flat)
        assert flat.leaves == (first, second)
        return [*seen, first.tolist(), second.tolist()]

    doubled = [[[0, 2, 4], [6, 8, 10]], [14]]
    assert run_ranks(2, body) == [
        [((6,), [0, 1, 2, 3, 4, 5]), ((0,), []), *doubled, [0, 2, 4, 6, 8, 10], []],
        [((0,), []), ((1,), [7]), *doubled, [], [14]],
    ]


def test_values_that_are_replicated_are_there_at_rest_and_never_move(make_flat):
    flat = make_flat(torch.arange(6.0).view(2, 3), always_whole=True)
    leaf = flat.leaves[0]
    places = []
    for _ in range(2):
        assert leaf.tolist() == [[0, 1, 2], [3, 4, 5]]
        places.append(leaf.data_ptr())
        unshard(flat)
        places.append(leaf.data_ptr())
        reshard(flat)
    assert set(places) == {flat.parameter.data_ptr()}


def test_values_that_are_replicated_and_lowered_are_there_in_their_own_dtype_at_rest(make_flat):
    flat = make_flat(torch.full((2, 2), 257.0), always_whole=True, dtypes=LOWERED)
    assert flat.leaves[0].tolist() == [[257, 257], [257, 257]]
    unshard(flat)
    assert flat.leaves[0].dtype == torch.bfloat16
    assert flat.leaves[0].tolist() == [[256, 256], [256, 256]]
    assert values_bytes(flat) == 2 * flat.layout.padded_numel
    reshard(flat)
    assert flat.leaves[0].tolist() == [[257, 257], [257, 257]]
    assert values_bytes(flat) == 0


# What users put in the place of a shard


def test_a_shard_that_was_replaced_is_taken_over_into_the_memory_that_ranks_know(make_flat):
    flat = make_flat(torch.zeros(4))
    place = flat.parameter.data_ptr()
    flat.parameter.data = torch.arange(4.0)
    flat.adopt_user_data()
    unshard(flat)
    assert flat.leaves[0].tolist() == [0, 1, 2, 3]
    assert flat.parameter.data_ptr() == place


def test_a_run_that_was_replaced_is_taken_over_when_its_size_is_right(run_ranks, make_flat):
    def body(comm):
        flat = make_flat(torch.zeros(2, 3), torch.zeros(3), comm=comm, use_orig_params=True)
        for leaf in flat.leaves:
            leaf.data = torch.full_like(leaf, comm.rank + 1.0)
        flat.adopt_user_data()
        unshard(flat)
        flat.adopt_user_data()  # has nothing to do while they are whole
        return [leaf.tolist() for leaf in flat.leaves]

    assert run_ranks(2, body) == [[[[1, 1, 1], [1, 1, 1]], [2, 2, 2]]] * 2


@pytest.mark.parametrize(
    ("use_orig_params", "what"), [(False, "the data of the flat parameter"), (True, "the data of 'p0'")]
)
def test_a_replacement_of_another_size_is_named(make_flat, use_orig_params, what):
    flat = make_flat(torch.zeros(4), use_orig_params=use_orig_params)
    replaced = flat.leaves[0] if use_orig_params else flat.parameter
    replaced.data = torch.zeros(5)
    with pytest.raises(EngineError) as caught:
        flat.adopt_user_data()
    assert str(caught.value) == (
        f"rank 0: {what} was replaced by a tensor of shape (5,), but this rank's shard of it has 4 element(s): assign "
        "values for the shard, or assign whole parameters within FullyShardedDataParallel.summon_full_params(model)"
    )


# Views


def test_owns_memory_of_its_gathered_values_alone(run_ranks, make_flat):
    def body(comm):
        flat = make_flat(torch.ones(4), comm=comm)
        assert not flat.owns_memory_of(flat.leaves[0])
        unshard(flat)
        assert flat.owns_memory_of(flat.leaves[0][1:])
        assert not flat.owns_memory_of(flat.parameter)
        assert not flat.owns_memory_of(flat.leaves[0].clone())
        assert not flat.owns_memory_of(torch.eye(2).to_sparse())
        reshard(flat)
        return "done"

    assert run_ranks(2, body) == ["done"] * 2


def test_a_view_of_values_that_never_move_is_no_danger(make_flat):
    flat = make_flat(torch.ones(4), always_whole=True)
    unshard(flat)
    assert not flat.owns_memory_of(flat.leaves[0])


def test_a_tensor_laid_out_like_the_whole_is_cut_into_parameters(make_flat):
    flat = make_flat(torch.zeros(2, 3), torch.zeros(()), torch.zeros(0, 4), torch.zeros(2))
    first, scalar, empty, last = flat.views(torch.arange(16.0))
    assert first.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (scalar.item(), scalar.shape) == (8, ())
    assert empty.shape == (0, 4)
    assert last.tolist() == [12, 13]
    assert all(view.is_contiguous() for view in (first, scalar, empty, last))
    offset = torch.arange(20.0)[4:]
    assert flat.views(offset)[0].tolist() == [[4, 5, 6], [7, 8, 9]]


def test_a_tensor_laid_out_like_the_shard_is_cut_into_runs_or_parameters(run_ranks, make_flat):
    def body(comm):
        flat = make_flat(torch.zeros(2, 3), torch.zeros(3), comm=comm, use_orig_params=True)
        return [part.tolist() for part in flat.shard_views(torch.arange(8.0))]

    assert run_ranks(2, body) == [[[0, 1, 2, 3, 4, 5], []], [[], [0, 1, 2]]]
    whole = make_flat(torch.zeros(2, 3), always_whole=True)
    assert whole.shard_views(torch.arange(8.0))[0].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_it_requires_gradients_as_long_as_one_of_its_leaves_does(make_flat):
    flat = make_flat(torch.zeros(2), torch.zeros(2))
    flat.leaves[0].requires_grad_(False)
    assert flat.requires_grad
    flat.leaves[1].requires_grad_(False)
    assert not flat.requires_grad
