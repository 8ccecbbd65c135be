import pytest
import torch

from hpcfsdp.errors import CommunicationError, EngineError
from hpcfsdp.params.gradient import ShardedGrad
from hpcfsdp.params.sharded_params import Dtypes
from tests.unit.params.gathering import grad_bytes, reshard, unshard

F32, BF16 = torch.float32, torch.bfloat16
NAN = float("nan")


def put_together(grad, values, buffer=None):
    """A backward in which leaves get these gradients, by index, one after the other."""
    flat = grad.params
    grad.prepare()
    unshard(flat)
    if buffer is None:
        buffer = torch.full((flat.layout.padded_numel,), NAN, dtype=flat.dtypes.reduce)
    grad.begin(buffer)
    for index, value in values:
        flat.leaves[index].grad = torch.as_tensor(value, dtype=flat.dtypes.compute)
        grad.move_from_leaf(index)
    return buffer


def reduce(grad, *, own_buffer=True, label="gradients"):
    grad.complete()
    grad.reduce(label, async_op=False)
    if grad.has_replicas:
        grad.reduce_over_replicas(label)
    reshard(grad.params)
    grad.finish_reduce(own_buffer=own_buffer)


def backward(grad, *values):
    with torch.no_grad():
        put_together(grad, values)
        reduce(grad)
        grad.store(grad.used)


def test_gradients_of_leaves_add_up_in_the_shard_and_missing_ones_count_as_zero(make_flat):
    flat = make_flat(torch.zeros(2), torch.zeros(2))
    grad = ShardedGrad(flat)
    for _ in range(2):
        backward(grad, (1, [1.0, 2.0]), (1, [10.0, 10.0]))
    assert flat.leaves[1].grad is None
    assert flat.parameter.grad.tolist() == [0, 0, 0, 0, 22, 24, 0, 0]
    assert grad_bytes(grad) == 0


def test_gradients_are_averaged_over_ranks_and_each_gets_its_part(run_ranks, make_flat):
    def body(comm):
        flat = make_flat(torch.zeros(6), comm=comm)
        backward(ShardedGrad(flat), (0, torch.arange(6.0) + 10 * comm.rank))
        return flat.parameter.grad.tolist()

    assert run_ranks(2, body) == [[5, 6, 7, 8], [9, 10, 0, 0]]


def test_replicas_average_over_each_other_too(run_ranks, make_flat):
    def alone(comm):
        flat = make_flat(torch.zeros(2), replicas=comm)
        backward(ShardedGrad(flat), (0, [comm.rank, 10.0]))
        return flat.parameter.grad.tolist()

    assert run_ranks(2, alone) == [[0.5, 10, 0, 0]] * 2

    def grid(comm):
        # Two ranks shard; a rank alone stands for its replicas, which have the same.
        other = type("Replicas", (type(comm),), {})(0, 1, None, {})
        other.all_reduce = lambda tensor, op, **_: tensor.mul_(3)
        flat = make_flat(torch.zeros(4), comm=comm, replicas=other)
        backward(ShardedGrad(flat), (0, [1.0, 2.0, 3.0, 4.0]))
        return flat.parameter.grad.tolist()

    assert run_ranks(2, grid) == [[3, 6, 9, 12], [0, 0, 0, 0]]


def test_one_rank_alone_does_not_communicate(make_flat):
    flat = make_flat(torch.zeros(4))
    grad = ShardedGrad(flat)
    flat.comm.all_reduce = flat.comm.reduce_scatter_tensor = None
    buffer = put_together(grad, [(0, [1.0, 2.0, 3.0, 4.0])])
    reduce(grad)
    grad.store([True])
    assert flat.parameter.grad.data_ptr() == buffer.data_ptr()  # nothing is copied either


def test_a_buffer_that_others_will_use_is_not_kept(make_flat):
    flat = make_flat(torch.zeros(4))
    grad = ShardedGrad(flat)
    buffer = put_together(grad, [(0, [1.0, 2.0, 3.0, 4.0])])
    reduce(grad, own_buffer=False)
    grad.store([True])
    buffer.fill_(NAN)
    assert flat.parameter.grad.tolist() == [1, 2, 3, 4]


def test_memory_that_was_not_cleared_leaves_no_trace(make_flat):
    flat = make_flat(torch.zeros(3), torch.zeros(2), torch.zeros(1))
    backward(ShardedGrad(flat), (1, [1.0, 2.0]))
    assert flat.parameter.grad.tolist() == [0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 0, 0]


def test_a_gradient_is_handed_over_as_soon_as_every_leaf_has_had_one(make_flat):
    flat = make_flat(torch.zeros(4), torch.zeros(4))
    grad = ShardedGrad(flat)
    put_together(grad, [(0, [1.0] * 4)])
    reduce(grad)
    assert flat.parameter.grad is None
    assert grad.used == [True, False]
    put_together(grad, [(1, [2.0] * 4)])
    assert flat.parameter.grad is None
    reduce(grad)
    assert flat.parameter.grad.tolist() == [1] * 4 + [2] * 4
    grad.store([True, True])
    assert flat.parameter.grad.tolist() == [1] * 4 + [2] * 4
    assert not any(grad.used)


def test_gradients_that_come_before_there_is_a_buffer_wait_on_their_leaves(make_flat):
    flat = make_flat(torch.zeros(4), torch.zeros(4), torch.zeros(4), dtypes=Dtypes.plan(F32, param=BF16))
    grad = ShardedGrad(flat)
    grad.prepare()
    unshard(flat)
    assert not grad.has_waiting
    flat.leaves[1].grad = torch.ones(4, dtype=BF16)
    assert grad.has_waiting
    put_together(grad, [(2, [2.0] * 4), (1, [3.0] * 4)])
    assert not grad.has_waiting
    reduce(grad)
    grad.store([False, True, True])
    found = [flat.parameter.grad[slot.offset : slot.end].tolist() for slot in flat.layout.slots]
    assert found == [[0] * 4, [4] * 4, [2] * 4]


def test_unused_leaves_get_no_gradient(make_flat):
    flat = make_flat(torch.zeros(4))
    grad = ShardedGrad(flat)
    put_together(grad, [])
    reduce(grad)
    grad.store([False])
    assert flat.parameter.grad is None
    put_together(grad, [])
    reduce(grad)
    grad.store([True])  # another rank did
    assert flat.parameter.grad.tolist() == [0, 0, 0, 0]


# Dtypes


def test_gradients_travel_in_the_wire_dtype_are_summed_wide_and_arrive_in_that_of_the_parameter(run_ranks, make_flat):
    def body(comm):
        flat = make_flat(torch.zeros(4), comm=comm, dtypes=Dtypes.plan(F32, param=BF16))
        grad, sent = ShardedGrad(flat), []
        original = comm.reduce_scatter_tensor
        comm.reduce_scatter_tensor = lambda output, full, *args, **how: (
            sent.append((full.dtype, output.dtype, how["accumulate"])),
            original(output, full, *args, **how),
        )[1]
        backward(grad, (0, [256.0 if comm.rank == 0 else 1.0] * 4))
        return sent, flat.parameter.grad.dtype, flat.parameter.grad.tolist()

    expected = ([(BF16, F32, F32)], F32)
    assert run_ranks(2, body) == [(*expected, [128.5] * 4), (*expected, [0.0] * 4)]


def test_reducing_in_a_wider_dtype_casts_on_the_way_into_the_buffer(make_flat):
    flat = make_flat(torch.zeros(4), dtypes=Dtypes.plan(F32, param=BF16, reduce=F32))
    grad = ShardedGrad(flat)
    backward(grad, (0, [256.0] * 4), (0, [1.0] * 4))
    assert flat.parameter.grad.tolist() == [257] * 4


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_gradients_may_stay_in_the_dtype_in_which_they_travelled(make_flat, use_orig_params):
    dtypes = Dtypes.plan(F32, param=BF16, keep_low_precision_grads=True)
    flat = make_flat(torch.zeros(4), dtypes=dtypes, use_orig_params=use_orig_params)
    grad = ShardedGrad(flat)
    stepped = flat.leaves[0] if use_orig_params else flat.parameter
    for turn in (1, 2):
        backward(grad, (0, [1.0, 2.0, 3.0, 4.0]))
        assert stepped.dtype == F32
        assert stepped.grad.dtype == BF16
        assert stepped.grad.tolist() == [turn * value for value in (1, 2, 3, 4)]


# Without synchronisation


@pytest.mark.parametrize("reduced", [None, BF16])
def test_gradients_that_wait_are_added_up_without_being_rounded(run_ranks, make_flat, reduced):
    def body(comm):
        flat = make_flat(torch.zeros(4), comm=comm, dtypes=Dtypes.plan(F32, reduce=reduced))
        grad = ShardedGrad(flat)
        for value in (256.0, 1.0, 1.0):
            put_together(grad, [(0, [value] * 4)])
            grad.keep_back()
            reshard(flat)
            assert grad.buffer is None
            assert grad_bytes(grad) == 4 * flat.layout.padded_numel
            assert grad.used == [True]
        backward(grad, (0, [2.0 * comm.rank] * 4))
        assert grad_bytes(grad) == 0
        return flat.parameter.grad.tolist()

    # 258 + 0 and 258 + 2; the sum is rounded once, and both are bfloat16.
    assert run_ranks(2, body) == [[259] * 4, [0] * 4]


def test_keeping_back_nothing_changes_nothing(make_flat):
    grad = ShardedGrad(make_flat(torch.zeros(4)))
    grad.keep_back()
    assert grad_bytes(grad) == 0


# Original parameters


def test_original_parameters_get_the_gradient_of_their_run(run_ranks, make_flat):
    def body(comm):
        flat = make_flat(torch.zeros(2, 3), torch.zeros(4), torch.zeros(2), comm=comm, use_orig_params=True)
        grad = ShardedGrad(flat)
        for _ in range(2):
            backward(grad, (0, [[1.0, 2, 3], [4, 5, 6]]), (1, [7.0 + 2 * comm.rank] * 4))
        return [None if leaf.grad is None else (leaf.shape, leaf.grad.tolist()) for leaf in flat.leaves]

    first, second = run_ranks(2, body)
    # There is none for a parameter without elements on the rank, and none for an unused one.
    assert first == [((6,), [2, 4, 6, 8, 10, 12]), None, None]
    assert second == [None, ((4,), [16] * 4), None]


def test_what_original_parameters_had_is_out_of_the_way_meanwhile(make_flat):
    flat = make_flat(torch.zeros(4), torch.zeros(4), use_orig_params=True)
    grad = ShardedGrad(flat)
    for leaf in flat.leaves:
        leaf.grad = torch.ones_like(leaf)
    put_together(grad, [])
    assert [leaf.grad for leaf in flat.leaves] == [None, None]
    flat.leaves[0].grad = torch.full((4,), 2.0)
    grad.move_from_leaf(0)
    reduce(grad)
    grad.store(grad.used)
    assert [leaf.grad.tolist() for leaf in flat.leaves] == [[3] * 4, [1] * 4]


def test_gradients_come_to_original_parameters_when_these_are_at_rest(make_flat):
    flat = make_flat(torch.zeros(2, 2), use_orig_params=True)
    grad = ShardedGrad(flat)
    put_together(grad, [(0, [[1.0, 2.0], [3.0, 4.0]])])
    grad.complete()
    grad.reduce("g", async_op=False)
    grad.finish_reduce(own_buffer=True)
    assert flat.leaves[0].shape == (2, 2)
    assert flat.leaves[0].grad is None
    reshard(flat)
    grad.store([True])
    assert flat.leaves[0].grad.tolist() == [1, 2, 3, 4]


def test_original_parameters_keep_what_they_had_when_gradients_wait(make_flat):
    flat = make_flat(torch.zeros(4), use_orig_params=True)
    grad = ShardedGrad(flat)
    flat.leaves[0].grad = torch.ones(4)
    put_together(grad, [(0, [2.0] * 4)])
    grad.keep_back()
    reshard(flat)
    grad.restore_grads()
    assert flat.leaves[0].grad.tolist() == [1] * 4
    backward(grad, (0, [3.0] * 4))
    assert flat.leaves[0].grad.tolist() == [6] * 4


def test_replicated_original_parameters_get_gradients_of_their_shape(run_ranks, make_flat):
    def body(comm):
        flat = make_flat(torch.zeros(2, 2), replicas=comm, use_orig_params=True, always_whole=True)
        backward(ShardedGrad(flat), (0, [[1.0, 2.0], [3.0, 4.0 + 2 * comm.rank]]))
        return flat.leaves[0].grad.tolist()

    assert run_ranks(2, body) == [[[1, 2], [3, 5]]] * 2


# Hooks


def test_a_hook_reduces_instead_and_gets_its_state(run_ranks, make_flat):
    def body(comm):
        flat = make_flat(torch.zeros(4), torch.zeros(4), comm=comm, dtypes=Dtypes.plan(F32, reduce=BF16))
        grad, seen = ShardedGrad(flat), []

        def hook(state, full, output):
            seen.append((state, full.dtype, full.tolist(), output.shape))
            output.fill_(comm.rank + 5.0)

        grad.comm_hook = ("state", hook)
        backward(grad, (0, [1.0, 2.0, 3.0, 4.0]))
        return seen, flat.parameter.grad.dtype, flat.parameter.grad.tolist()

    seen = [("state", BF16, [1, 2, 3, 4, 0, 0, 0, 0], (4,))]
    assert run_ranks(2, body) == [(seen, F32, [5] * 4), (seen, F32, [6] * 4)]


def test_a_hook_of_replicated_parameters_works_in_place(run_ranks, make_flat):
    def body(comm):
        flat = make_flat(torch.zeros(4), replicas=comm, always_whole=True)
        grad = ShardedGrad(flat)
        grad.comm_hook = (None, lambda _state, gradient: gradient.mul_(3))
        backward(grad, (0, [1.0, 2.0, 3.0, 4.0]))
        return flat.parameter.grad.tolist()

    assert run_ranks(2, body) == [[3, 6, 9, 12]] * 2


# What goes wrong


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_dropped_gradients_leave_no_trace(make_flat, use_orig_params):
    flat = make_flat(torch.zeros(2), torch.zeros(2), use_orig_params=use_orig_params)
    grad = ShardedGrad(flat)
    had = torch.ones_like(flat.leaves[0]) if use_orig_params else None
    flat.leaves[0].grad = had
    put_together(grad, [(0, [1.0, 1.0])])
    grad.keep_back()
    put_together(grad, [(0, [2.0, 2.0])])
    flat.leaves[1].grad = torch.ones(2)  # autograd was about to have it taken
    grad.drop()
    reshard(flat)
    assert grad_bytes(grad) == 0
    assert not any(grad.used)
    assert flat.parameter.grad is None
    assert flat.leaves[0].grad is had
    assert flat.leaves[1].grad is None
    backward(grad, (0, [5.0, 5.0]))
    stepped = flat.leaves[0] if use_orig_params else flat.parameter
    assert stepped.grad[:2].tolist() == ([6, 6] if use_orig_params else [5, 5])


def test_a_leaf_without_a_gradient_is_left_as_it_is(make_flat):
    grad = ShardedGrad(make_flat(torch.zeros(2)))
    put_together(grad, [])
    grad.move_from_leaf(0)
    assert grad.used == [False]


def test_a_sparse_gradient_is_refused_by_name(make_flat):
    flat = make_flat(torch.zeros(4, 2))
    grad = ShardedGrad(flat)
    put_together(grad, [])
    flat.leaves[0].grad = torch.sparse_coo_tensor([[1]], torch.ones(1, 2), (4, 2), check_invariants=True)
    with pytest.raises(EngineError) as caught:
        grad.move_from_leaf(0)
    assert str(caught.value) == (
        "the gradient of 'p0' is torch.sparse_coo: sparse gradients cannot be sharded; use a dense one"
    )


def test_the_label_says_what_is_reduced(run_ranks, make_flat):
    def body(comm):
        grad = ShardedGrad(make_flat(torch.zeros(4), replicas=comm))
        put_together(grad, [])
        reduce(grad, label=f"rank {comm.rank}")

    for error in run_ranks(2, body):
        assert type(error) is CommunicationError
        assert "rank 0" in str(error)
        assert "rank 1" in str(error)
