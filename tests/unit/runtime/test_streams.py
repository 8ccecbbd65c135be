import pytest
import torch

from hpcfsdp.runtime.recording import RecordingStreams
from tests.unit.runtime.accesses import Watch
from tests.unit.runtime.scenarios import SCENARIOS, Program


def run(scenario, monkeypatch, *, watched=True, **options):
    """The queues and what watched them, after the program has run on them."""
    streams = RecordingStreams(**options)
    watch = Watch(streams) if watched else None
    monkeypatch.setattr("hpcfsdp.runtime.engine.streams_for", lambda device: streams)
    program = Program(streams, watch=watch, patch=monkeypatch)
    if watched:
        with watch:
            scenario(program)
    else:
        scenario(program)
    return streams, watch


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_no_wait_is_missing(monkeypatch, scenario):
    streams, _ = run(scenario, monkeypatch)
    assert not streams.races, "\n".join(dict.fromkeys(map(str, streams.races)))
