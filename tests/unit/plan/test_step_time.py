"""Schedules, next to sums by hand."""

from dataclasses import replace

import pytest
import torch

from hpcfsdp.comm.communicator import CommOptions
from hpcfsdp.plan.layouts import Precision, Setup
from hpcfsdp.plan.links import Link, Links
from hpcfsdp.plan.step_time import Machine, replay
from hpcfsdp.plan.traced_step import EventKind, Param, PlannedUnit, without_activations

FREE = Link(0.0, 1e30, "given")
NUMEL = 1 << 20


def step_of(layers, flops):
    """Equal units, each with as many operations in its forward as in its backward."""
    units = [PlannedUnit(f"{n}", "Block", (Param("weight", (NUMEL,), torch.float32),)) for n in range(layers)]
    made = without_activations([*units, PlannedUnit("", "Model", ())], "model")
    events = tuple(
        replace(event, flops=flops)
        if event.kind in (EventKind.FORWARD, EventKind.BACKWARD) and event.unit < layers
        else event
        for event in made.events
    )
    return replace(made, events=events)


def machine(gather_s=0.0, flops=1.0, ranks=2):
    """One on which a gather of a unit takes so long."""
    link = Link(0.0, 2 * NUMEL / gather_s, "given") if gather_s else FREE
    return Machine(ranks, Links(link, FREE), flops, 1e30)


def time_of(step, setup, on):
    return replay(step, setup, on)[1]


def test_computation_hides_communication():
    """But for the first gathers of forward and backward, and the last reduction."""
    found = time_of(step_of(8, 10), Setup(shards=2), machine(gather_s=1.0))
    assert found.compute_s == 160
    assert found.seconds == pytest.approx(163)
    assert found.exposed_s == pytest.approx(3)


def test_communication_hides_computation():
    """Gathers of forward and backward, and reductions, one after the other on one link."""
    found = time_of(step_of(8, 0.5), Setup(shards=2), machine(gather_s=2.0))
    assert found.gathers.calls == 16 and found.reductions.calls == 8
    assert found.gathers.seconds == pytest.approx(32) and found.reductions.seconds == pytest.approx(16)
    assert 32 + 16 <= found.seconds <= 32 + 16 + 1
    assert found.exposed_s == pytest.approx(found.seconds - 8)


def test_kept_values_are_gathered_once():
    found = time_of(step_of(8, 1), Setup("SHARD_GRAD_OP", 2), machine(gather_s=1.0))
    assert found.gathers.calls == 8
    assert found.exposed_s < time_of(step_of(8, 1), Setup(shards=2), machine(gather_s=1.0)).exposed_s + 1e-9


def test_replicas_reduce_shards():
    found = time_of(step_of(4, 1), Setup("HYBRID_SHARD", 2, 4), machine())
    assert found.replication.calls == 4
    assert found.replication.between_bytes == pytest.approx(4 * 2 * (NUMEL // 2 * 4) * 3 / 4)
    assert found.gathers.between_bytes == 0
    alone = time_of(step_of(4, 1), Setup("NO_SHARD", 1, 8), machine())
    assert (alone.gathers.calls, alone.replication.calls) == (0, 4)


def test_a_buffer_waits_for_the_reduction_before():
    """Reductions that take twice as long as a backward hold it up, one by one."""
    links = Links(FREE, Link(0.0, 1e30, "given"))
    slow = Machine(1, Links(FREE, Link(0.0, 2 * NUMEL / 2.0, "given")), 1.0, 1e30)
    found = time_of(step_of(8, 1), Setup("SHARD_GRAD_OP", 2), slow)
    assert found.seconds >= 8 * 2  # all reductions in turn
    assert time_of(step_of(8, 1), Setup("SHARD_GRAD_OP", 2), Machine(1, links, 1.0, 1e30)).seconds == pytest.approx(16)


def test_more_backwards_take_as_many_times_as_long():
    one, four = (time_of(step_of(4, 1), Setup(shards=2, accumulation=n), machine(gather_s=0.5)) for n in (1, 4))
    assert four.seconds == pytest.approx(4 * one.seconds)
    assert four.traffic.calls == 4 * one.traffic.calls


def test_the_optimizer_reads_and_writes_shards():
    found = time_of(step_of(4, 1), Setup(shards=2), replace(machine(), memory_bytes_per_s=1e9))
    assert found.optimizer_s == pytest.approx(4 * NUMEL / 2 * 4 * (6 + 1) / 1e9)


def test_reductions_of_16_bits_between_nodes():
    """By node, for each rank, and by the backend: 2 nodes x 4 ranks, of a unit of 2 MiB in 16 bits."""
    half, link, step = Precision(torch.bfloat16), Link(0.0, 1e9, "given"), step_of(1, 1)
    two_nodes = Machine(4, Links(link, link), 1.0, 1e30)

    def reductions(**options):
        setup = Setup(shards=8, precision=half, nodes_of_shards=2, comm_options=CommOptions(**options))
        found = time_of(step, setup, two_nodes).reductions
        return found.calls, found.between_bytes, found.within_bytes

    assert reductions() == (2, NUMEL / 4, 1.5 * NUMEL)
    assert reductions(sums_by="backend") == (1, NUMEL / 4, 1.5 * NUMEL)
    assert reductions(separate_reductions=False) == (1, NUMEL, 0.75 * NUMEL)


def test_gathers_and_reductions_of_one_communicator_wait_for_each_other():
    """Two links, one for each: only the communicator keeps them apart."""
    links = Links(Link(0.4, 1e30, "given"), Link(0.4, 1e30, "given"))
    setup = Setup(shards=2)
    one = replace(setup, comm_options=CommOptions(separate_reductions=False))
    two_s, one_s = (time_of(step_of(8, 0.5), each, Machine(2, links, 1.0, 1e30)).seconds for each in (setup, one))
    assert one_s > two_s + 1


def test_on_cpus_nothing_overlaps():
    """2 nodes x 2 ranks, a second for the bytes of a unit over a link, or for 16 accesses of its bytes in memory."""
    link, nbytes = Link(0.0, 4 * NUMEL, "given"), 4 * NUMEL
    on = Machine(2, Links(FREE, link), 1.0, 16 * nbytes, on_cpu=True)
    setup = Setup(shards=4, nodes_of_shards=2, node_bytes=1 << 40, optimizer="none")
    freed, kept = (time_of(step_of(8, 0.5), replace(setup, kept_over=n), on) for n in (0, 2))
    gather = 1 / 4 + 2 / 4 / 16  # what a rank receives, and its part copied to where neighbours read it
    reduction = 1 / 4 + (2 + 3 / 4 + 4 / 4) / 16  # into the buffer; for the rank on the other node; its own
    assert freed.seconds == pytest.approx(8 * (1 + 2 * gather + reduction))
    assert kept.seconds == pytest.approx(8 * (1 + gather + reduction))
    assert (freed.gathers.between_bytes, kept.gathers.between_bytes) == (4 * nbytes, 2 * nbytes)
    one_node = time_of(step_of(8, 0.5), replace(setup, nodes_of_shards=1), replace(on, ranks_per_node=4))
    assert one_node.gathers.calls == 0
    assert one_node.seconds == pytest.approx(8 * (1 + (2 + 5 / 4) / 16))


def test_torch_steps_one_tensor_after_the_other_on_cpus():
    on = replace(machine(), memory_bytes_per_s=1e9, on_cpu=True)
    adamw, fused = (
        time_of(step_of(4, 1), Setup(shards=2, node_bytes=1 << 40, optimizer=name), on).optimizer_s
        for name in ("adamw", "adamw-fused")
    )
    assert (adamw, fused) == pytest.approx((4 * NUMEL / 2 * 4 * 20 / 1e9, 4 * NUMEL / 2 * 4 * 7 / 1e9))
