"""The queues that find races: they find them, and accept what is in order."""

import pytest
import torch

from hpcfsdp.engine.streams import Queue, Wait
from tests.unit.engine.accesses import Watch
from tests.unit.engine.recording import RaceError, RecordingStreams

SHARD, OTHER_SHARD = (1, "shard"), (2, "shard")
VALUES, OTHER_VALUES, MORE_VALUES = (1, "values"), (2, "values"), (3, "values")
GRAD, OTHER_GRAD = (1, "grad"), (2, "grad")
WHY = Wait.VALUES_GATHERED


def nothing(async_op):
    return None


def doing(operation, *args):
    """Work that is done as soon as it is begun."""

    def begin(async_op):
        operation(*args)

    return begin


@pytest.fixture
def streams():
    return RecordingStreams()


def raced(streams):
    """The races as (queue, verb, part) of both accesses."""
    return [
        tuple((access.queue, access.verb, access.place[1]) for access in race if access is not None)
        for race in streams.races
    ]


# What is in order


def test_work_of_one_queue_is_in_order(streams):
    for _ in range(3):
        streams.touch(Queue.COMPUTE, reads=[SHARD], writes=[SHARD])
        streams.launch(Queue.COMPUTE, nothing, reads=[SHARD], writes=[SHARD])
    assert not streams.races


def test_reads_need_no_order(streams):
    for queue in Queue:
        streams.touch(queue, reads=[SHARD])
    assert not streams.races


def test_different_memory_needs_no_order(streams):
    streams.touch(Queue.COMPUTE, writes=[SHARD])
    streams.touch(Queue.GATHER, writes=[OTHER_SHARD])
    assert not streams.races


def test_what_the_program_does_comes_before_what_it_issues_later(streams):
    streams.touch(Queue.HOST, writes=[SHARD])
    for queue in (Queue.GATHER, Queue.COMPUTE, Queue.REDUCE):
        streams.touch(queue, reads=[SHARD])
    assert not streams.races


def test_a_wait_puts_things_in_order_also_by_way_of_a_third_queue(streams):
    streams.touch(Queue.COMPUTE, writes=[SHARD])
    streams.wait(Queue.GATHER, streams.record(Queue.COMPUTE), WHY)
    streams.wait(Queue.REDUCE, streams.record(Queue.GATHER), WHY)
    streams.touch(Queue.REDUCE, writes=[SHARD])
    assert not streams.races


def test_what_the_program_has_waited_for_comes_before_all_that_it_issues_later(streams):
    event = streams.launch(Queue.REDUCE, nothing, writes=[SHARD])
    streams.wait(Queue.HOST, event, WHY)
    streams.touch(Queue.HOST, reads=[SHARD])
    streams.touch(Queue.GATHER, writes=[SHARD])
    assert not streams.races


def test_draining_puts_compute_after_everything(streams):
    streams.touch(Queue.GATHER, writes=[SHARD])
    streams.touch(Queue.REDUCE, writes=[OTHER_SHARD])
    streams.drain()
    streams.touch(Queue.COMPUTE, writes=[SHARD, OTHER_SHARD])
    assert not streams.races


# What is not


@pytest.mark.parametrize("first", ["reads", "writes"])
@pytest.mark.parametrize("second", ["reads", "writes"])
def test_queues_that_do_not_wait_race_if_one_of_them_writes(streams, first, second):
    streams.touch(Queue.COMPUTE, **{first: [SHARD]})
    streams.touch(Queue.GATHER, **{second: [SHARD]})
    expected = [((Queue.COMPUTE, first, "shard"), (Queue.GATHER, second, "shard"))]
    assert raced(streams) == (expected if "writes" in (first, second) else [])


def test_the_program_is_not_after_what_it_has_issued(streams):
    streams.launch(Queue.REDUCE, nothing, writes=[SHARD])
    streams.touch(Queue.HOST, reads=[SHARD])
    assert raced(streams) == [((Queue.REDUCE, "writes", "shard"), (Queue.HOST, "reads", "shard"))]


def test_an_event_covers_what_was_before_it_and_no_more(streams):
    event = streams.record(Queue.COMPUTE)
    streams.touch(Queue.COMPUTE, writes=[SHARD])
    streams.wait(Queue.GATHER, event, WHY)
    streams.touch(Queue.GATHER, reads=[SHARD])
    assert len(streams.races) == 1


def test_the_wrong_direction_does_not_help(streams):
    streams.touch(Queue.COMPUTE, writes=[SHARD])
    streams.wait(Queue.COMPUTE, streams.record(Queue.GATHER), WHY)
    streams.touch(Queue.GATHER, reads=[SHARD])
    assert len(streams.races) == 1


def test_a_write_has_to_come_after_the_reads_of_all_queues(streams):
    streams.touch(Queue.GATHER, reads=[SHARD])
    streams.touch(Queue.REDUCE, reads=[SHARD])
    streams.wait(Queue.COMPUTE, streams.record(Queue.GATHER), WHY)
    streams.touch(Queue.COMPUTE, writes=[SHARD])
    assert raced(streams) == [((Queue.REDUCE, "reads", "shard"), (Queue.COMPUTE, "writes", "shard"))]


def test_a_race_names_both_places_or_is_raised():
    streams = RecordingStreams(raises=True)
    streams.touch(Queue.COMPUTE, writes=[SHARD])
    message = (
        r"GATHER reads 'shard' of 1 at test_recording.py:\d+ .*after: COMPUTE writes 'shard' of 1 at test_recording.py"
    )
    with pytest.raises(RaceError, match=message):
        streams.touch(Queue.GATHER, reads=[SHARD])


def test_a_wait_that_is_ignored_orders_nothing_and_is_known_by_its_place():
    def run(streams):
        for why in (Wait.SHARDS_WRITTEN, Wait.VALUES_USED):
            streams.touch(Queue.COMPUTE, writes=[SHARD])
            streams.wait(Queue.GATHER, streams.record(Queue.COMPUTE), why)
            streams.touch(Queue.GATHER, reads=[SHARD])
            streams.wait(Queue.COMPUTE, streams.record(Queue.GATHER), WHY)
        return streams

    whole = run(RecordingStreams())
    assert not whole.races
    assert sorted(site.why.name for site in whole.sites) == ["SHARDS_WRITTEN", "VALUES_GATHERED", "VALUES_USED"]
    assert all("test_recording.py" in site.where for site in whole.sites)
    for site in whole.sites:
        assert run(RecordingStreams(ignore=lambda other, site=site: other == site)).races


# Work is done


def test_work_is_begun_waited_for_and_finished_on_the_spot(streams):
    done = []

    class Work:
        def wait(self):
            done.append(("wait", streams.current))

    def begin(async_op):
        done.append((async_op, streams.current))
        return Work()

    streams.launch(Queue.REDUCE, begin, lambda: done.append(("finish", streams.current)))
    assert done == [(False, Queue.REDUCE), ("wait", Queue.REDUCE), ("finish", Queue.REDUCE)]
    assert streams.current is Queue.COMPUTE


def test_errors_of_work_come_out(streams):
    with pytest.raises(ZeroDivisionError):
        streams.launch(Queue.GATHER, lambda async_op: 1 / 0)
    assert streams.current is Queue.COMPUTE


# Memory that comes and goes


def test_what_was_freed_last_is_given_out_first(streams):
    streams.touch(Queue.GATHER, writes=[VALUES, OTHER_VALUES])
    streams.free(VALUES)
    streams.free(OTHER_VALUES)
    streams.touch(Queue.GATHER, writes=[MORE_VALUES])
    streams.wait(Queue.COMPUTE, streams.record(Queue.GATHER), WHY)
    streams.touch(Queue.COMPUTE, reads=[MORE_VALUES])
    assert streams.pieces["values"] == 2
    assert not streams.races


@pytest.mark.parametrize("in_order", [True, False])
def test_memory_that_is_read_under_one_name_is_not_written_under_another(streams, in_order):
    streams.touch(Queue.GATHER, writes=[VALUES])
    streams.wait(Queue.COMPUTE, streams.record(Queue.GATHER), WHY)
    streams.touch(Queue.COMPUTE, reads=[VALUES])
    event = streams.record(Queue.COMPUTE)
    streams.free(VALUES)
    if in_order:
        streams.wait(Queue.GATHER, event, WHY)
    streams.touch(Queue.GATHER, writes=[OTHER_VALUES])
    race = ((Queue.COMPUTE, "reads", "values"), (Queue.GATHER, "writes", "values"))
    assert raced(streams) == ([] if in_order else [race])


def test_held_memory_is_not_given_out_again(streams):
    streams.touch(Queue.GATHER, writes=[VALUES])
    streams.touch(Queue.COMPUTE, writes=[OTHER_VALUES])
    assert streams.pieces["values"] == 2
    assert not streams.races


def test_memory_that_is_free_is_not_read(streams):
    streams.touch(Queue.GATHER, writes=[VALUES])
    streams.free(VALUES)
    streams.touch(Queue.GATHER, reads=[VALUES])
    assert raced(streams) == [((Queue.GATHER, "reads", "values"),)]
    assert "since it was free" in str(streams.races[0])


def test_kinds_of_memory_do_not_mix(streams):
    streams.touch(Queue.GATHER, writes=[VALUES])
    streams.free(VALUES)
    streams.touch(Queue.COMPUTE, writes=[GRAD])
    assert streams.pieces == {"values": 1, "grad": 1}
    assert not streams.races


@pytest.mark.parametrize("in_order", [True, False])
def test_memory_of_the_module_is_freed_after_all_that_others_do_with_it(streams, in_order):
    # The allocator may give it to the next thing that the module computes.
    streams.touch(Queue.COMPUTE, writes=[GRAD])
    streams.wait(Queue.REDUCE, streams.record(Queue.COMPUTE), WHY)
    streams.touch(Queue.REDUCE, reads=[GRAD])
    if in_order:
        streams.wait(Queue.COMPUTE, streams.record(Queue.REDUCE), WHY)
    streams.free(GRAD)
    race = ((Queue.REDUCE, "reads", "grad"), (Queue.COMPUTE, "frees", "grad"))
    assert raced(streams) == ([] if in_order else [race])


def test_freeing_free_memory_does_nothing(streams):
    streams.free(VALUES, GRAD)
    streams.touch(Queue.COMPUTE, writes=[OTHER_GRAD])
    assert streams.pieces["grad"] == 1
    assert not streams.races


# Operations that torch reports


def test_operations_are_seen_with_the_memory_that_they_use(streams):
    with Watch(streams) as watch:
        shard, values = torch.zeros(2), torch.zeros(4)
        watch.name(shard, SHARD)
        watch.name(values, VALUES)
        watch.accesses.clear()
        streams.launch(Queue.GATHER, doing(values.view(2, 2)[1].copy_, shard), writes=[VALUES])
        torch.add(values[:1], 1.0)
        shard.mul_(2.0)
    named = {access for access in watch.accesses if access[2] in (SHARD, VALUES)}
    assert named == {
        (Queue.GATHER, "reads", SHARD),
        (Queue.GATHER, "writes", VALUES),
        (Queue.COMPUTE, "reads", VALUES),
        (Queue.COMPUTE, "writes", SHARD),
    }
    assert len(streams.races) == 2


@pytest.mark.parametrize("in_order", [True, False])
def test_memory_goes_back_to_the_queue_that_allocated_it(streams, in_order):
    with Watch(streams):
        memory = torch.ones(8)
        streams.wait(Queue.REDUCE, streams.record(Queue.COMPUTE), WHY)
        streams.launch(Queue.REDUCE, doing(memory.sum))
        del memory
        if in_order:
            streams.wait(Queue.COMPUTE, streams.record(Queue.REDUCE), WHY)
        torch.ones(3)
    assert len(streams.races) == (0 if in_order else 1)


def test_host_memory_is_used_by_the_program_at_once(streams):
    with Watch(streams) as watch:
        host, grad = watch.on_host(torch.ones(2)), torch.ones(2)
        for queue in (Queue.REDUCE, Queue.HOST):
            streams.wait(queue, streams.record(Queue.COMPUTE), WHY)
        streams.launch(Queue.REDUCE, doing(host.copy_, grad))
        host.mul_(2.0)
    assert {(race.first.queue, race.second.queue) for race in streams.races} == {(Queue.REDUCE, Queue.HOST)}
