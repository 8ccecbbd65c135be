"""No wait between queues is missing, and none is there in vain.

Programs run on queues that check each access to memory against the waits (``RecordingStreams``, as a GPU would order
it), and on those of the CPU with collectives that end as late as they may. docs/design/streams.md tells of each wait.
"""

import pytest
import torch

from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.runtime.recording import RecordingStreams, Site, where
from hpcfsdp.runtime.streams import CudaStreams, HostStreams, Queue, Wait, streams_for
from tests.unit.runtime.accesses import Watch
from tests.unit.runtime.scenarios import SCENARIOS, Late, LateCommunicator, Program, flats_of

RECORDS_ACCESSES = True


def name_of(value):
    return getattr(value, "__name__", None) or value.name


def run_recorded(scenario, monkeypatch, *, watched=True, ignore=None):
    """The queues and what watched them, after the program has run on them."""
    streams = RecordingStreams(ignore=ignore)
    watch = Watch(streams)
    with monkeypatch.context() as patch:
        patch.setattr("hpcfsdp.runtime.engine.streams_for", lambda device: streams)
        if watched:
            with watch:
                scenario(Program(streams, watch=watch, patch=patch))
        else:
            scenario(Program(streams))
    return streams, watch


class ForgetfulStreams(HostStreams):
    """The queues of the CPU without one wait."""

    def __init__(self, ignore):
        super().__init__()
        self._ignore = ignore

    def wait(self, queue, event, why):
        if not self._ignore(Site(why, queue, where())):
            super().wait(queue, event, why)

    def drain(self):
        if not self._ignore(Site(None, Queue.COMPUTE, where())):
            super().drain()


def run_on_cpu(scenario, monkeypatch, comm, ignore=lambda site: False):
    """What all shards hold after the program has run on the queues of the CPU."""
    streams = ForgetfulStreams(ignore)
    with monkeypatch.context() as patch:
        patch.setattr("hpcfsdp.runtime.engine.streams_for", lambda device: streams)
        program = Program(streams, comm=comm)
        scenario(program)
    return [flat.parameter.detach().clone() for model in program.models for flat in flats_of(model)]


@pytest.fixture(scope="module")
def sites():
    """All waits in the source, each with the scenarios that come to it."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for scenario in SCENARIOS:
            streams, _ = run_recorded(scenario, patch, watched=False)
            for site in streams.sites:
                found.setdefault(site, []).append(scenario)
    return found


@pytest.mark.parametrize("scenario", SCENARIOS, ids=name_of)
def test_no_wait_is_missing(monkeypatch, scenario):
    streams, _ = run_recorded(scenario, monkeypatch)
    assert not streams.races, "\n".join(dict.fromkeys(map(str, streams.races)))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=name_of)
def test_what_the_engine_declares_is_what_it_does(monkeypatch, scenario):
    declared, _ = run_recorded(scenario, monkeypatch, watched=False)
    assert not declared.races


@pytest.mark.parametrize("scenario", SCENARIOS, ids=name_of)
def test_collectives_may_end_as_late_as_they_are_waited_for(monkeypatch, scenario):
    at_once = run_on_cpu(scenario, monkeypatch, FakeCommunicator)
    late = run_on_cpu(scenario, monkeypatch, LateCommunicator)
    for got, expected in zip(late, at_once, strict=True):
        assert torch.equal(got, expected)
        assert got.isfinite().all()


def needed_by(site, scenarios, patch):
    def ignore(other):
        return other == site

    found = {"gpu": [], "declared": [], "cpu": []}
    for scenario in scenarios:
        if run_recorded(scenario, patch, ignore=ignore)[0].races:
            found["gpu"].append(scenario.__name__)
        if run_recorded(scenario, patch, ignore=ignore, watched=False)[0].races:
            found["declared"].append(scenario.__name__)
        try:
            got = run_on_cpu(scenario, patch, LateCommunicator, ignore)
            exp = run_on_cpu(scenario, patch, FakeCommunicator)
            if not all(map(torch.equal, got, exp)): found["cpu"].append(scenario.__name__)
        except Exception as e:
            found["cpu"].append(scenario.__name__ + f"({type(e).__name__}: {str(e)[:80]})")
    return found

def test_table(sites, monkeypatch):
    import json
    for site, scenarios in sites.items():
        found = needed_by(site, scenarios, monkeypatch)
        print("SITE", site, len(scenarios), {k: (len(v), v[:3]) for k, v in found.items()})
