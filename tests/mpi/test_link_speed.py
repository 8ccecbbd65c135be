"""The doctor's measurement of links, with nodes that are imagined."""

from types import SimpleNamespace

import pytest

from hpcfsdp.doctor import speed
from hpcfsdp.launch.topology import Topology


def as_if_on(world, topology):
    """The world on other nodes. Its communicators keep to the nodes that there are."""
    facts = {"comm": world.comm, "communicator": world.communicator, "rank": world.rank, "device": world.device}
    return SimpleNamespace(**facts, topology=topology, num_nodes=topology.num_nodes)


@pytest.mark.ranks(3)
def test_links_within_and_between_uneven_nodes(world, monkeypatch):
    monkeypatch.setattr(speed, "LARGE_BYTES", 1 << 20)
    found = speed.measure_links(as_if_on(world, Topology.uneven([2, 1])))
    assert [found[name]["ranks"] for name in ("within", "between")] == [2, 2]
    assert all(link["latency_s"] > 0 and link["bytes_per_s"] > 0 for link in found.values())
    assert world.comm.allgather(found) == [found] * world.size
    assert speed.measure_links(as_if_on(world, Topology.regular(3, 1)))["within"] is None
