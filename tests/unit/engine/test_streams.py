"""No wait between queues is missing, and none is there in vain.

Programs run on queues that check each access to memory against the waits (``RecordingStreams``, as a GPU would order
it), and on those of the CPU with collectives that end as late as they may. docs/developers/streams.md lists each wait.
"""

import pytest
import torch

from hpcfsdp import accelerator
from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.comm.progress import Finished
from hpcfsdp.engine.streams import OWN_STREAMS, DeviceStreams, HostStreams, Stream, Wait, streams_for
from hpcfsdp.errors import CommunicationError, EngineError
from tests.unit.engine import scenarios
from tests.unit.engine.accesses import Watch
from tests.unit.engine.recording import RecordingStreams, Site, declare_accesses, where
from tests.unit.engine.scenarios import SCENARIOS, Late, LateCommunicator, Program, sharded_params_of

RECORDS_ACCESSES = True


def name_of(value):
    return getattr(value, "__name__", None)


class DeclaredStreams(RecordingStreams):
    """Remembers what ``declare_accesses`` declares, apart from what is watched."""

    def __init__(self, **options):
        super().__init__(**options)
        self.declared = set()

    def touch(self, queue, *, reads=(), writes=()):
        reads, writes = list(reads), list(writes)
        self.declared |= {(queue, "reads", place) for place in reads} | {(queue, "writes", place) for place in writes}
        super().touch(queue, reads=reads, writes=writes)


def run_recorded(scenario, patch, *, watched=True, ignore=None):
    """The queues and what watched them, after the program has run on them."""
    streams = DeclaredStreams(ignore=ignore)
    watch = Watch(streams)
    with patch.context() as inner:
        inner.setattr("hpcfsdp.engine.root.streams_for", lambda device: streams)
        declare_accesses(streams, inner)
        if watched:
            with watch:
                scenario(Program(streams, watch=watch, patch=inner))
        else:
            scenario(Program(streams))
    return streams, watch


class ForgetfulStreams(HostStreams):
    """The queues of the CPU without some of the waits."""

    def __init__(self, ignore):
        super().__init__()
        self._ignore = ignore

    def wait(self, queue, event, why):
        if not self._ignore(Site(why, queue, where())):
            super().wait(queue, event, why)

    def drain(self):
        if not self._ignore(Site(None, Stream.COMPUTE, where())):
            super().drain()


def run_on_cpu(scenario, patch, comm, ignore=lambda site: False):
    """What all shards hold after the program has run on the queues of the CPU."""
    streams = ForgetfulStreams(ignore)
    with patch.context() as inner:
        inner.setattr("hpcfsdp.engine.root.streams_for", lambda device: streams)
        program = Program(streams, comm=comm)
        scenario(program)
    return [flat.parameter.detach().clone() for model in program.models for flat in sharded_params_of(model)]


# No wait is missing


@pytest.mark.parametrize("scenario", SCENARIOS, ids=name_of)
def test_no_wait_is_missing_and_all_memory_is_declared(monkeypatch, scenario):
    streams, watch = run_recorded(scenario, monkeypatch)
    assert not streams.races, "\n".join(dict.fromkeys(map(str, streams.races)))
    for queue, verb, place in watch.accesses:
        if place[1] == "values" or (place[1] == "shard" and queue is Stream.GATHER):
            assert {(queue, verb, place), (queue, "writes", place)} & streams.declared


@pytest.mark.parametrize("scenario", SCENARIOS, ids=name_of)
def test_collectives_may_end_as_late_as_they_are_waited_for(monkeypatch, scenario):
    at_once = run_on_cpu(scenario, monkeypatch, FakeCommunicator)
    late = run_on_cpu(scenario, monkeypatch, LateCommunicator)
    for got, expected in zip(late, at_once, strict=True):
        assert torch.equal(got, expected)
        assert got.isfinite().all()


@pytest.mark.parametrize(
    ("scenario", "units"),
    [
        (scenarios.four_ranks_without_prefetch, 2),
        (scenarios.nested_units, 2),
        (scenarios.forward_prefetch_and_backward_prefetch_before, 2),
        (scenarios.recomputed, 2),
    ],
    ids=name_of,
)
def test_two_units_have_memory_at_a_time_besides_the_root(monkeypatch, scenario, units):
    streams, _ = run_recorded(scenario, monkeypatch)
    assert streams.pieces["values"] == 1 + units
    assert streams.pieces["grad"] == 1


class ExposedGathers(DeclaredStreams):
    """Counts gathers that begin after everything that the device could compute meanwhile."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def wait(self, queue, event, why):
        if why is Wait.VALUES_GATHERED and event is not None:
            self.count += event.clock[Stream.COMPUTE] == self._clocks[Stream.COMPUTE][Stream.COMPUTE]
        super().wait(queue, event, why)


@pytest.mark.parametrize("options", [{}, {"forward_prefetch": True}, {"backward_prefetch": None}], ids=str)
def test_the_device_computes_while_all_gathers_but_the_first_of_a_step_run(monkeypatch, options):
    """As long as the program runs ahead of the device."""
    streams = ExposedGathers()
    monkeypatch.setattr("hpcfsdp.engine.root.streams_for", lambda device: streams)
    declare_accesses(streams, monkeypatch)
    program, counts = scenarios.Program(streams), []
    model = program.shard(scenarios.Net(), **options)
    program.train(model, between=lambda _model, _turn: counts.append(streams.count))
    assert counts == [1, 2, 3]


# No wait is there in vain


@pytest.fixture(scope="module")
def sites():
    """All waits that the source comes to."""
    found = set()
    with pytest.MonkeyPatch.context() as patch:
        for scenario in SCENARIOS:
            found |= set(run_recorded(scenario, patch, watched=False)[0].sites)
    return found


@pytest.fixture(scope="module")
def results():
    """What comes of each scenario on the CPU when nothing is left out."""
    with pytest.MonkeyPatch.context() as patch:
        return {scenario: run_on_cpu(scenario, patch, LateCommunicator) for scenario in SCENARIOS}


def goes_wrong(site, patch, results):
    """The first scenario that goes wrong without a wait, and where; None if nothing does."""

    def ignore(other):
        return other == site

    for watched in (False, True):
        for scenario in SCENARIOS:
            if run_recorded(scenario, patch, watched=watched, ignore=ignore)[0].races:
                return name_of(scenario), "GPU"
        for scenario in () if watched else SCENARIOS:
            try:
                got = run_on_cpu(scenario, patch, LateCommunicator, ignore)
            except AssertionError:
                return name_of(scenario), "CPU"
            if not all(map(torch.equal, got, results[scenario])):
                return name_of(scenario), "CPU"
    return None


@pytest.mark.parametrize("why", [*Wait, None], ids=lambda why: why.name if why else "drain")
def test_without_any_one_wait_something_goes_wrong(monkeypatch, sites, results, why):
    mine = [site for site in sites if site.why is why]
    assert mine, "no scenario comes to this wait"
    in_vain = [str(site) for site in mine if goes_wrong(site, monkeypatch, results) is None]
    assert not in_vain


# The queues of the CPU


def work_of(done, name):
    return lambda async_op: Late(lambda: done.append(name))


def failing(error):
    def fail():
        raise error

    return lambda async_op: Late(fail)


def test_what_is_done_at_once_leaves_nothing_to_wait_for():
    streams, done = HostStreams(), []
    assert streams.launch(Stream.GATHER, done.append, lambda: done.append("end")) is None
    assert streams.launch(Stream.GATHER, lambda async_op: Finished()) is None
    assert done == [True, "end"]
    assert streams.record(Stream.GATHER) is None
    streams.wait(Stream.COMPUTE, None, Wait.VALUES_GATHERED)


def test_work_of_one_queue_is_finished_in_order_and_other_queues_go_their_own_way():
    streams, done = HostStreams(), []
    events = [
        streams.launch(Stream.REDUCE, work_of(done, name), lambda name=name: done.append(f"after {name}"))
        for name in "abc"
    ]
    streams.launch(Stream.GATHER, work_of(done, "other"))
    streams.wait(Stream.COMPUTE, events[1], Wait.GRADS_TAKEN)
    assert done == ["a", "after a", "b", "after b"]
    assert streams.record(Stream.REDUCE) is events[2]
    streams.wait(Stream.COMPUTE, streams.record(Stream.REDUCE), Wait.GRADS_REDUCED)
    assert done[4:] == ["c", "after c"]
    assert streams.record(Stream.REDUCE) is None


def test_what_is_done_at_once_still_comes_after_what_was_begun_before():
    streams, done = HostStreams(), []
    streams.launch(Stream.REDUCE, work_of(done, "first"))
    event = streams.launch(Stream.REDUCE, lambda async_op: None, lambda: done.append("second"))
    assert done == []
    streams.wait(Stream.COMPUTE, event, Wait.GRADS_REDUCED)
    assert done == ["first", "second"]


def test_an_event_may_be_waited_for_twice():
    streams, done = HostStreams(), []
    event = streams.launch(Stream.GATHER, work_of(done, "once"))
    for queue in (Stream.COMPUTE, Stream.COMPUTE, Stream.HOST):
        streams.wait(queue, event, Wait.VALUES_GATHERED)
    assert done == ["once"]


def test_errors_of_work_come_out_of_the_wait():
    streams, done = HostStreams(), []
    streams.launch(Stream.GATHER, failing(CommunicationError("rank 1 is gone")), lambda: done.append("never"))
    event = streams.launch(Stream.GATHER, work_of(done, "later"))
    with pytest.raises(CommunicationError, match="rank 1 is gone"):
        streams.wait(Stream.COMPUTE, event, Wait.VALUES_GATHERED)
    assert done == []


def test_errors_of_what_begins_work_come_out_at_once():
    streams = HostStreams()
    with pytest.raises(ZeroDivisionError):
        streams.launch(Stream.GATHER, lambda async_op: 1 / 0)
    assert streams.record(Stream.GATHER) is None


def test_draining_ends_work_and_forgets_what_was_to_follow():
    streams, done = HostStreams(), []
    events = [
        streams.launch(queue, work_of(done, queue.value), lambda: done.append("never"))
        for queue in (Stream.GATHER, Stream.REDUCE)
    ]
    streams.drain()
    assert done == ["gather", "reduce"]
    for event in events:
        streams.wait(Stream.COMPUTE, event, Wait.GRADS_REDUCED)
    assert done == ["gather", "reduce"]
    assert streams.record(Stream.GATHER) is None


# The queues of an accelerator


class Device:
    """What ``hpcfsdp.accelerator`` is asked for, written down."""

    def __init__(self):
        self.log = []
        self.compute = self.current = FakeStream(self, "compute")
        self.names = iter(("gather", "reduce", "replicate"))

    def new_stream(self, _device, priority):
        return FakeStream(self, next(self.names))

    def on(self, stream):
        device = self

        class Use:
            def __enter__(self):
                self.before, device.current = device.current, stream

            def __exit__(self, *_):
                device.current = self.before

        return Use()

    def record(self, stream):
        self.log.append(f"event of {stream.name}")
        return FakeEvent(self, stream.name)

    def current_stream(self, _device):
        return self.current


class FakeStream:
    def __init__(self, device, name):
        self.device, self.name = device, name

    def wait_event(self, event):
        self.device.log.append(f"{self.name} waits for {event.of}")

    def synchronize(self):
        self.device.log.append(f"host waits for {self.name}")


class FakeEvent:
    def __init__(self, device, of):
        self.device, self.of = device, of

    def synchronize(self):
        self.device.log.append(f"host waits for {self.of}")


@pytest.fixture
def device(monkeypatch):
    device = Device()
    for name in ("new_stream", "on", "record", "current_stream"):
        monkeypatch.setattr(accelerator, name, getattr(device, name))
    monkeypatch.setattr(accelerator, "frees_by_stream", lambda _device: True)
    return device


def test_an_allocator_that_mixes_streams_is_refused(device, monkeypatch):
    monkeypatch.setattr(accelerator, "frees_by_stream", lambda _device: False)
    with pytest.raises(EngineError, match="cudaMallocAsync, which may give memory"):
        DeviceStreams(torch.device("cuda", 0))


def test_work_and_what_follows_it_run_on_the_stream_of_their_queue(device):
    streams = DeviceStreams(torch.device("cuda", 0))
    for queue in (*OWN_STREAMS, Stream.COMPUTE):
        streams.launch(
            queue,
            lambda async_op: device.log.append(f"begin on {device.current.name}, async {async_op}"),
            lambda: device.log.append(f"finish on {device.current.name}"),
        )
        name = queue.value
        assert device.log == [f"begin on {name}, async False", f"finish on {name}", f"event of {name}"]
        assert device.current is device.compute
        device.log.clear()


def test_streams_wait_on_the_device_and_the_program_by_itself(device):
    streams = DeviceStreams(torch.device("cuda", 0))
    event = streams.record(Stream.REDUCE)
    for queue in Stream:
        streams.wait(queue, event, Wait.GRADS_REDUCED)
        streams.wait(queue, None, Wait.GRADS_REDUCED)
    assert device.log == ["event of reduce", *(f"{queue.value} waits for reduce" for queue in Stream)]


def test_draining_a_gpu_ends_what_was_begun(device):
    DeviceStreams(torch.device("cuda", 0)).drain()
    assert sorted(device.log) == [f"host waits for {queue.value}" for queue in OWN_STREAMS]


def test_errors_of_work_on_a_gpu_leave_the_stream_as_it_was(device):
    with pytest.raises(ZeroDivisionError):
        DeviceStreams(torch.device("cuda", 0)).launch(Stream.GATHER, lambda async_op: 1 / 0)
    assert device.current is device.compute


def test_each_device_has_its_queues(device):
    assert isinstance(streams_for(torch.device("cpu")), HostStreams)
    assert isinstance(streams_for(torch.device("cuda", 0)), DeviceStreams)


def test_the_next_gradient_of_replicas_waits_for_no_other_node(monkeypatch):
    """Its buffer is free when the shards' ranks have read it; the reduction over replicas goes on."""
    streams, launched, waited = DeclaredStreams(), {}, []
    launch, wait = streams.launch, streams.wait

    def noted(stream, begin, finish=None, *, label=""):
        event = launch(stream, begin, finish, label=label)
        launched[id(event)] = stream, event
        return event

    def watched(stream, event, why):
        if stream is Stream.COMPUTE and why is Wait.GRADS_TAKEN and event is not None:
            waited.append(launched[id(event)][0])
        wait(stream, event, why)

    monkeypatch.setattr(streams, "launch", noted)
    monkeypatch.setattr(streams, "wait", watched)
    monkeypatch.setattr("hpcfsdp.engine.root.streams_for", lambda device: streams)
    program = Program(streams)
    program.train(program.hybrid(scenarios.Net()))
    assert len(waited) > 3
    assert set(waited) == {Stream.REDUCE}
