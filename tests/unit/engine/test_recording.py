"""The queues that find races: they find them, and accept what is in order."""

import pytest
import torch

from hpcfsdp.engine.streams import Stream, Wait
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
        streams.touch(Stream.COMPUTE, reads=[SHARD], writes=[SHARD])
        streams.launch(Stream.COMPUTE, nothing, reads=[SHARD], writes=[SHARD])
    assert not streams.races


def test_reads_need_no_order(streams):
    for queue in Stream:
        streams.touch(queue, reads=[SHARD])
    assert not streams.races


def test_different_memory_needs_no_order(streams):
    streams.touch(Stream.COMPUTE, writes=[SHARD])
    streams.touch(Stream.GATHER, writes=[OTHER_SHARD])
    assert not streams.races


def test_what_the_program_does_comes_before_what_it_issues_later(streams):
    streams.touch(Stream.HOST, writes=[SHARD])
    for queue in (Stream.GATHER, Stream.COMPUTE, Stream.REDUCE):
        streams.touch(queue, reads=[SHARD])
    assert not streams.races


def test_a_wait_puts_things_in_order_also_by_way_of_a_third_queue(streams):
    streams.touch(Stream.COMPUTE, writes=[SHARD])
    streams.wait(Stream.GATHER, streams.record(Stream.COMPUTE), WHY)
    streams.wait(Stream.REDUCE, streams.record(Stream.GATHER), WHY)
    streams.touch(Stream.REDUCE, writes=[SHARD])
    assert not streams.races


def test_what_the_program_has_waited_for_comes_before_all_that_it_issues_later(streams):
    event = streams.launch(Stream.REDUCE, nothing, writes=[SHARD])
    streams.wait(Stream.HOST, event, WHY)
    streams.touch(Stream.HOST, reads=[SHARD])
    streams.touch(Stream.GATHER, writes=[SHARD])
    assert not streams.races


def test_draining_puts_compute_after_everything(streams):
    streams.touch(Stream.GATHER, writes=[SHARD])
    streams.touch(Stream.REDUCE, writes=[OTHER_SHARD])
    streams.drain()
    streams.touch(Stream.COMPUTE, writes=[SHARD, OTHER_SHARD])
    assert not streams.races


# What is not


@pytest.mark.parametrize("first", ["reads", "writes"])
@pytest.mark.parametrize("second", ["reads", "writes"])
def test_queues_that_do_not_wait_race_if_one_of_them_writes(streams, first, second):
    streams.touch(Stream.COMPUTE, **{first: [SHARD]})
    streams.touch(Stream.GATHER, **{second: [SHARD]})
    expected = [((Stream.COMPUTE, first, "shard"), (Stream.GATHER, second, "shard"))]
    assert raced(streams) == (expected if "writes" in (first, second) else [])


def test_the_program_is_not_after_what_it_has_issued(streams):
    streams.launch(Stream.REDUCE, nothing, writes=[SHARD])
    streams.touch(Stream.HOST, reads=[SHARD])
    assert raced(streams) == [((Stream.REDUCE, "writes", "shard"), (Stream.HOST, "reads", "shard"))]


def test_an_event_covers_what_was_before_it_and_no_more(streams):
    event = streams.record(Stream.COMPUTE)
    streams.touch(Stream.COMPUTE, writes=[SHARD])
    streams.wait(Stream.GATHER, event, WHY)
    streams.touch(Stream.GATHER, reads=[SHARD])
    assert len(streams.races) == 1


def test_the_wrong_direction_does_not_help(streams):
    streams.touch(Stream.COMPUTE, writes=[SHARD])
    streams.wait(Stream.COMPUTE, streams.record(Stream.GATHER), WHY)
    streams.touch(Stream.GATHER, reads=[SHARD])
    assert len(streams.races) == 1


def test_a_write_has_to_come_after_the_reads_of_all_queues(streams):
    streams.touch(Stream.GATHER, reads=[SHARD])
    streams.touch(Stream.REDUCE, reads=[SHARD])
    streams.wait(Stream.COMPUTE, streams.record(Stream.GATHER), WHY)
    streams.touch(Stream.COMPUTE, writes=[SHARD])
    assert raced(streams) == [((Stream.REDUCE, "reads", "shard"), (Stream.COMPUTE, "writes", "shard"))]


def test_a_race_names_both_places_or_is_raised():
    streams = RecordingStreams(raises=True)
    streams.touch(Stream.COMPUTE, writes=[SHARD])
    message = (
        r"GATHER reads 'shard' of 1 at test_recording.py:\d+ .*after: COMPUTE writes 'shard' of 1 at test_recording.py"
    )
    with pytest.raises(RaceError, match=message):
        streams.touch(Stream.GATHER, reads=[SHARD])


def test_a_wait_that_is_ignored_orders_nothing_and_is_known_by_its_place():
    def run(streams):
        for why in (Wait.SHARDS_WRITTEN, Wait.VALUES_USED):
            streams.touch(Stream.COMPUTE, writes=[SHARD])
            streams.wait(Stream.GATHER, streams.record(Stream.COMPUTE), why)
            streams.touch(Stream.GATHER, reads=[SHARD])
            streams.wait(Stream.COMPUTE, streams.record(Stream.GATHER), WHY)
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

    streams.launch(Stream.REDUCE, begin, lambda: done.append(("finish", streams.current)))
    assert done == [(False, Stream.REDUCE), ("wait", Stream.REDUCE), ("finish", Stream.REDUCE)]
    assert streams.current is Stream.COMPUTE


def test_errors_of_work_come_out(streams):
    with pytest.raises(ZeroDivisionError):
        streams.launch(Stream.GATHER, lambda async_op: 1 / 0)
    assert streams.current is Stream.COMPUTE


# Memory that comes and goes


def test_what_was_freed_last_is_given_out_first(streams):
    streams.touch(Stream.GATHER, writes=[VALUES, OTHER_VALUES])
    streams.free(VALUES)
    streams.free(OTHER_VALUES)
    streams.touch(Stream.GATHER, writes=[MORE_VALUES])
    streams.wait(Stream.COMPUTE, streams.record(Stream.GATHER), WHY)
    streams.touch(Stream.COMPUTE, reads=[MORE_VALUES])
    assert streams.pieces["values"] == 2
    assert not streams.races


@pytest.mark.parametrize("in_order", [True, False])
def test_memory_that_is_read_under_one_name_is_not_written_under_another(streams, in_order):
    streams.touch(Stream.GATHER, writes=[VALUES])
    streams.wait(Stream.COMPUTE, streams.record(Stream.GATHER), WHY)
    streams.touch(Stream.COMPUTE, reads=[VALUES])
    event = streams.record(Stream.COMPUTE)
    streams.free(VALUES)
    if in_order:
        streams.wait(Stream.GATHER, event, WHY)
    streams.touch(Stream.GATHER, writes=[OTHER_VALUES])
    race = ((Stream.COMPUTE, "reads", "values"), (Stream.GATHER, "writes", "values"))
    assert raced(streams) == ([] if in_order else [race])


def test_held_memory_is_not_given_out_again(streams):
    streams.touch(Stream.GATHER, writes=[VALUES])
    streams.touch(Stream.COMPUTE, writes=[OTHER_VALUES])
    assert streams.pieces["values"] == 2
    assert not streams.races


def test_memory_that_is_free_is_not_read(streams):
    streams.touch(Stream.GATHER, writes=[VALUES])
    streams.free(VALUES)
    streams.touch(Stream.GATHER, reads=[VALUES])
    assert raced(streams) == [((Stream.GATHER, "reads", "values"),)]
    assert "since it was free" in str(streams.races[0])


def test_kinds_of_memory_do_not_mix(streams):
    streams.touch(Stream.GATHER, writes=[VALUES])
    streams.free(VALUES)
    streams.touch(Stream.COMPUTE, writes=[GRAD])
    assert streams.pieces == {"values": 1, "grad": 1}
    assert not streams.races


@pytest.mark.parametrize("in_order", [True, False])
def test_memory_of_the_module_is_freed_after_all_that_others_do_with_it(streams, in_order):
    # The allocator may give it to the next thing that the module computes.
    streams.touch(Stream.COMPUTE, writes=[GRAD])
    streams.wait(Stream.REDUCE, streams.record(Stream.COMPUTE), WHY)
    streams.touch(Stream.REDUCE, reads=[GRAD])
    if in_order:
        streams.wait(Stream.COMPUTE, streams.record(Stream.REDUCE), WHY)
    streams.free(GRAD)
    race = ((Stream.REDUCE, "reads", "grad"), (Stream.COMPUTE, "frees", "grad"))
    assert raced(streams) == ([] if in_order else [race])


def test_freeing_free_memory_does_nothing(streams):
    streams.free(VALUES, GRAD)
    streams.touch(Stream.COMPUTE, writes=[OTHER_GRAD])
    assert streams.pieces["grad"] == 1
    assert not streams.races


# Operations that torch reports


def test_operations_are_seen_with_the_memory_that_they_use(streams):
    with Watch(streams) as watch:
        shard, values = torch.zeros(2), torch.zeros(4)
        watch.name(shard, SHARD)
        watch.name(values, VALUES)
        watch.accesses.clear()
        streams.launch(Stream.GATHER, doing(values.view(2, 2)[1].copy_, shard), writes=[VALUES])
        torch.add(values[:1], 1.0)
        shard.mul_(2.0)
    named = {access for access in watch.accesses if access[2] in (SHARD, VALUES)}
    assert named == {
        (Stream.GATHER, "reads", SHARD),
        (Stream.GATHER, "writes", VALUES),
        (Stream.COMPUTE, "reads", VALUES),
        (Stream.COMPUTE, "writes", SHARD),
    }
    assert len(streams.races) == 2


@pytest.mark.parametrize("in_order", [True, False])
def test_memory_goes_back_to_the_queue_that_allocated_it(streams, in_order):
    with Watch(streams):
        memory = torch.ones(8)
        streams.wait(Stream.REDUCE, streams.record(Stream.COMPUTE), WHY)
        streams.launch(Stream.REDUCE, doing(memory.sum))
        del memory
        if in_order:
            streams.wait(Stream.COMPUTE, streams.record(Stream.REDUCE), WHY)
        torch.ones(3)
    assert len(streams.races) == (0 if in_order else 1)


def test_host_memory_is_used_by_the_program_at_once(streams):
    with Watch(streams) as watch:
        host, grad = watch.on_host(torch.ones(2)), torch.ones(2)
        for queue in (Stream.REDUCE, Stream.HOST):
            streams.wait(queue, streams.record(Stream.COMPUTE), WHY)
        streams.launch(Stream.REDUCE, doing(host.copy_, grad))
        host.mul_(2.0)
    assert {(race.first.queue, race.second.queue) for race in streams.races} == {(Stream.REDUCE, Stream.HOST)}
