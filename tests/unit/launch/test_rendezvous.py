import ipaddress
import socket
from types import SimpleNamespace

import psutil
import pytest

from hpcfsdp.errors import LaunchError
from hpcfsdp.launch import rendezvous


class Ranks:
    """A communicator of rank 0. On other ranks `others` lists which of the addresses they reach."""

    rank = 0

    def __init__(self, *others):
        self.others = others

    def allgather(self, mine):
        return [mine, *(None if any(reached) else f"{1 + i} on n{1 + i}" for i, reached in enumerate(self.others))]


@pytest.fixture
def reached(monkeypatch):
    """``reached(addresses)``: let rank 0 reach just these."""
    monkeypatch.setattr(
        rendezvous, "minima", lambda comm, mine: [*map(min, mine, *comm.others)] if comm.others else mine
    )
    return lambda addresses: monkeypatch.setattr(rendezvous, "reachable", lambda address, _port: address in addresses)


def test_the_first_address_that_all_reach_is_chosen(reached):
    reached({"10.0.0.1", "10.1.0.1", "10.2.0.1"})
    comm = Ranks([False, True, True], [True, True, True])
    assert rendezvous.first_reached_by_all(["10.0.0.1", "10.1.0.1", "10.2.0.1"], 5, comm) == "10.1.0.1"


def test_a_rank_that_does_not_probe_opens_no_connection(reached, monkeypatch):
    reached(set())
    monkeypatch.setattr(rendezvous, "reachable", lambda *_: pytest.fail("a connection was tried"))
    comm = Ranks([False, True])
    assert rendezvous.first_reached_by_all(["10.0.0.1", "10.1.0.1"], 5, comm, probes=False) == "10.1.0.1"


def error_of(candidates, comm):
    with pytest.raises(LaunchError) as caught:
        rendezvous.first_reached_by_all(candidates, 4321, comm)
    assert caught.value.raised_on_all_ranks
    return str(caught.value)


def test_ranks_that_reach_no_address_are_named(reached):
    reached({"10.0.0.1"})
    assert error_of(["10.0.0.1", "10.1.0.1"], Ranks([False, False], [True, True], [False, False])) == (
        "no address of rank 0's host (10.0.0.1, 10.1.0.1; port 4321) is reached from every node; ranks that reach none "
        "of them: 1 on n1, 3 on n3. Allow TCP between the nodes"
    )


def test_ranks_that_reach_different_addresses_raise(reached):
    reached({"10.0.0.1"})
    assert error_of(["10.0.0.1", "10.1.0.1"], Ranks([False, True])) == (
        "no address of rank 0's host (10.0.0.1, 10.1.0.1; port 4321) is reached from every node; ranks that reach none "
        "of them: none, but no single address serves all. Allow TCP between the nodes"
    )


def test_a_host_without_addresses_is_an_error(reached):
    reached(set())
    assert "rank 0's host (it has none besides loopback; port 4321)" in error_of([], Ranks())


@pytest.fixture
def interfaces(monkeypatch):
    """The host's name resolves to one address, its interfaces have that, loopback, IPv6, and another one."""

    def entry(family, address):
        return SimpleNamespace(family=family, address=address)

    named = [(socket.AF_INET, None, None, "", (address, 0)) for address in ("127.0.1.1", "10.0.0.2")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: named)
    found = {
        "lo": [entry(socket.AF_INET, "127.0.0.1"), entry(socket.AF_INET6, "::1")],
        "ib0": [entry(socket.AF_INET, "192.168.0.2"), entry(socket.AF_INET, "10.0.0.2")],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)


@pytest.mark.usefixtures("interfaces")
def test_addresses_are_those_of_the_name_first_without_loopback_and_doubles():
    assert rendezvous.addresses_of_this_host() == ["10.0.0.2", "192.168.0.2"]


@pytest.mark.usefixtures("interfaces")
def test_a_host_that_does_not_know_its_own_name_has_its_interfaces(monkeypatch):
    def unknown(*_):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert rendezvous.addresses_of_this_host() == ["192.168.0.2", "10.0.0.2"]


def test_this_hosts_addresses_are_valid_and_not_loopback():
    assert not any(ipaddress.ip_address(address).is_loopback for address in rendezvous.addresses_of_this_host())


def test_an_open_port_is_reachable_and_a_closed_one_is_not():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert rendezvous.reachable("127.0.0.1", port)
    assert not rendezvous.reachable("127.0.0.1", port)


def test_sockets_of_several_addresses_have_one_port_and_foreign_addresses_none():
    servers = rendezvous.listening(["192.0.2.1", "127.0.0.1", "127.0.0.2"])
    assert list(servers) == ["127.0.0.1", "127.0.0.2"]
    assert len({server.getsockname()[1] for server in servers.values()}) == 1
    for server in servers.values():
        server.close()


def test_the_store_listens_on_its_address_alone():
    alone = SimpleNamespace(rank=0, size=1, bcast=lambda value: value, Barrier=lambda: None)
    store, address = rendezvous.open_store(alone, single_node=True, timeout_s=20)
    store.set("a", "b")
    assert (address, store.get("a")) == ("127.0.0.1", b"b")
    assert rendezvous.reachable("127.0.0.1", store.port)
    assert not rendezvous.reachable("127.0.0.2", store.port)  # all of 127.0.0.0/8 is this host
