"""Memory of a rank, next to sums by hand. tests/accelerator/test_plan.py compares it with a device."""

import time
from dataclasses import replace

import pytest
import torch

from hpcfsdp.comm.communicator import CommOptions
from hpcfsdp.errors import UsageError
from hpcfsdp.params.layout import FlatLayout
from hpcfsdp.plan.footprint import KEPT_PART, footprint
from hpcfsdp.plan.layouts import Precision, Setup, groups_of
from hpcfsdp.plan.traced_step import Param, PlannedUnit, without_activations

MIB = 1 << 20


def model_of(layers, numel=MIB, dtype=torch.float32, root=0):
    """Units of one parameter, and a root of another one."""
    units = [PlannedUnit(f"blocks.{n}", "Block", (Param("weight", (numel,), dtype),)) for n in range(layers)]
    root_params = (Param("embed", (root,), dtype),) if root else ()
    return without_activations([*units, PlannedUnit("", "Model", root_params)], "model")


def test_shards_and_state_at_rest():
    found = footprint(model_of(8), Setup(shards=4))
    assert found.at_rest.bytes_by_kind["parameters"] == 8 * (MIB + 512)  # and a number for each parameter
    assert found.at_rest.bytes_by_kind["optimizer"] == 2 * 8 * MIB
    assert found.at_rest.bytes_by_kind["gradients"] == 0


def test_two_units_are_gathered_in_turn():
    found = footprint(model_of(8), Setup(shards=4, optimizer="sgd"))
    assert max(moment.bytes_by_kind["gathered"] for moment in found.course) == 2 * 4 * MIB
    # Of the last unit but one: the buffer is filled while its gradients wait on the leaf.
    assert max(moment.bytes_by_kind["unit gradients"] for moment in found.course) == 2 * 4 * MIB


@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2"])
def test_kept_units_are_all_gathered(strategy):
    replicas = 2 if "HYBRID" in strategy else 1
    found = footprint(model_of(8), Setup(strategy, 4, replicas))
    assert max(moment.bytes_by_kind["gathered"] for moment in found.course) == 8 * 4 * MIB


def test_a_part_of_each_unit_stays_on_a_device():
    """Two units at the beginning of the backward, and a quarter of each."""
    found = footprint(model_of(8), Setup(shards=8, nodes_of_shards=2, kept_over=4))
    assert max(moment.bytes_by_kind["gathered"] for moment in found.course) == 2 * 4 * MIB + 8 * MIB
    assert found.course[-1].bytes_by_kind["gathered"] == 0


def on_host(**options):
    return Setup(node_bytes=1 << 40, optimizer="sgd", **options)


def highest(found, kind):
    return max(moment.bytes_by_kind[kind] for moment in found.course)


def test_ranks_of_one_node_gather_nothing():
    found = footprint(model_of(8), on_host(shards=4))
    assert highest(found, "gathered") == 0
    assert found.at_rest.bytes_by_kind["unit gradients"] == 2 * 4 * MIB  # two buffers, which stay
    assert highest(found, "unit gradients") == 3 * 4 * MIB  # and a gradient that moves there


def test_a_node_holds_released_values_once_up_to_a_part_of_its_memory():
    setup = on_host(shards=8, nodes_of_shards=2)
    roomy = footprint(model_of(8), setup)
    assert highest(roomy, "gathered") == roomy.at_rest.bytes_by_kind["gathered"] == 8 * 4 * MIB // 4
    assert roomy.at_rest.bytes_by_kind["unit gradients"] == 4 * 4 * MIB
    assert highest(roomy, "scratch") == 2 * MIB // 2  # a partial result to the other node, and one from there
    tight = footprint(model_of(8), replace(setup, node_bytes=int(3 * 4 * MIB / KEPT_PART)))
    assert tight.at_rest.bytes_by_kind["gathered"] == 3 * 4 * MIB // 4
    assert highest(tight, "gathered") == 5 * 4 * MIB // 4  # two are in use
    kept = footprint(model_of(8), replace(setup, node_bytes=1, kept_over=4))
    assert highest(kept, "gathered") == 8 * 4 * MIB // 4
    assert kept.at_rest.bytes_by_kind["gathered"] == 0


def test_a_rank_alone_on_its_node_has_buffers_of_its_own():
    found = footprint(model_of(8), on_host(shards=4, nodes_of_shards=4))
    assert found.at_rest.bytes_by_kind["unit gradients"] == 0
    assert highest(found, "unit gradients") == 3 * 4 * MIB
    assert highest(found, "scratch") == 3 * MIB
    alone = footprint(model_of(8), on_host())
    assert highest(alone, "gradients") == 8 * 4 * MIB


def test_parameters_are_cut_where_ranks_share_memory():
    params = tuple(Param(f"weight{n}", (MIB,), torch.float32) for n in range(6))
    counts = [
        len(groups_of(params, on_host(**options)))
        for options in ({"shards": 2}, {"shards": 4, "nodes_of_shards": 2}, {"shards": 2, "nodes_of_shards": 2})
    ]
    assert counts == [6, 2, 1]


def test_the_root_stays_gathered():
    found = footprint(model_of(2, root=4 * MIB), Setup(shards=4))
    assert max(moment.bytes_by_kind["gathered"] for moment in found.course) == 16 * MIB + 2 * 4 * MIB


def test_no_shard_gathers_nothing_unless_it_casts():
    assert not any(m.bytes_by_kind["gathered"] for m in footprint(model_of(4), Setup("NO_SHARD", 1, 8)).course)
    cast = footprint(model_of(4), Setup("NO_SHARD", 1, 8, precision=Precision(torch.bfloat16)))
    assert max(moment.bytes_by_kind["gathered"] for moment in cast.course) == 4 * 2 * MIB


def test_parameters_that_need_no_cast_give_back_no_memory():
    params = Param("weight", (MIB,), torch.float32), Param("bias", (MIB,), torch.bfloat16)
    units = [PlannedUnit(f"blocks.{n}", "Block", params) for n in range(2)]
    step = without_activations([*units, PlannedUnit("", "Model", ())], "model")
    found = footprint(step, Setup("FULL_SHARD", 1, 1, precision=Precision(torch.bfloat16)))
    gathered = [moment.bytes_by_kind["gathered"] for moment in found.course]
    assert (min(gathered), max(gathered)) == (0, 2 * 2 * MIB)


@pytest.mark.parametrize("front", ["class", "fully_shard"])
@pytest.mark.parametrize("ranks", [3, 7, 1000])
def test_the_worst_rank_of_uneven_shards(front, ranks):
    params = Param("weight", (1000, 37), torch.float32), Param("bias", (1000,), torch.float32)
    (group,) = groups_of(params, Setup(shards=ranks, front=front))
    rows = -(-1000 // ranks)
    if front == "class":
        layout = FlatLayout.plan([("weight", (1000, 37), ()), ("bias", (1000,), ())], torch.float32, ranks)
        assert group.stepped == (layout.shard_numel,)
        assert group.layout.shard_numel * ranks >= 38000
    else:
        assert group.stepped == (rows * 37, rows)
        assert group.layout.padded_numel == ranks * group.layout.shard_numel


def test_offloaded_shards_are_in_host_memory():
    found = footprint(model_of(8), Setup(shards=4, offload=True))
    assert found.at_rest.bytes_by_kind["optimizer"] == 0
    assert found.host == {
        "parameters": 8 * MIB,
        "optimizer": 16 * MIB,
        "gradients": 8 * MIB,
        "scratch": 8 * MIB,
    }
    assert found.at_rest.nbytes == 8 * 512


@pytest.mark.parametrize(("copies", "replicas"), [(2, 1), (4, 1), (4, 2)])
def test_checkpoints_in_host_memory(copies, replicas):
    strategy = "HYBRID_SHARD" if replicas > 1 else "FULL_SHARD"
    found = footprint(model_of(8), Setup(strategy, 4, replicas, memory_copies=copies))
    assert found.host == {"checkpoints": copies * 24 * MIB // replicas}  # parameters, and two values for each


def test_later_backwards_find_gradients():
    one, two = (footprint(model_of(8), Setup(shards=4, accumulation=n)) for n in (1, 2))
    assert two.course[0].bytes_by_kind["gradients"] == 8 * MIB > one.course[0].bytes_by_kind["gradients"]


def test_many_ranks_take_no_longer_than_few():
    began = time.perf_counter()
    found = footprint(model_of(100), Setup(shards=1 << 20))
    assert time.perf_counter() - began < 10  # a rank at a time would take hours
    assert found.at_rest.bytes_by_kind["parameters"] == 100 * (512 + 512)


def test_a_model_without_units():
    found = footprint(model_of(0, root=MIB), Setup(shards=2))
    assert found.peak.nbytes > found.at_rest.nbytes > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "ZERO"}, "there is no strategy 'ZERO'"),
        ({"strategy": "NO_SHARD", "shards": 2}, "shards is 1"),
        ({"shards": 0}, "positive"),
        ({"optimizer": "lion"}, "unknown optimizer 'lion'"),
    ],
)
def test_setups_that_do_not_exist(options, message):
    with pytest.raises(UsageError, match=message):
        Setup(**options)


def test_sums_of_the_backend_take_no_second_buffer():
    by_us, by_backend = (
        footprint(model_of(4), Setup(shards=4, precision=Precision(torch.bfloat16), comm_options=options))
        for options in (CommOptions(), CommOptions(sums_by="backend"))
    )
    scratch = [max(moment.bytes_by_kind["scratch"] for moment in each.course[:-1]) for each in (by_us, by_backend)]
    assert scratch == [2 * MIB, 0], "at the moments with most memory: all parts of the others, or nothing"
