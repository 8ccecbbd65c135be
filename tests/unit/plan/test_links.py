"""Links by name, by number, and as the doctor has measured them; collectives on them, next to sums by hand."""

import json

import pytest

from hpcfsdp.errors import UsageError
from hpcfsdp.plan import links
from hpcfsdp.plan.links import Link, Links, RankGroup, Traffic

ASSUMED = links.Links(links.link_of("nvlink4"), links.link_of("ndr"))


def test_a_link_by_numbers():
    found = links.link_of("44,6")
    assert (found.bytes_per_s, found.latency_s) == (44e9, pytest.approx(6e-6))


@pytest.mark.parametrize("text", ["ndrr", "44", "0,1", "1,-1", "a,b", "nan,1"])
def test_what_is_no_link(text):
    with pytest.raises(UsageError, match="is no link"):
        links.link_of(text)


def test_the_nearest_device_is_named():
    with pytest.raises(UsageError, match="did you mean 'mi250x'"):
        links.device_named("mi250")
    assert all({device.within, device.between} <= set(links.PRESETS) for device in links.DEVICES.values())


def test_measured_links_replace_the_assumed(tmp_path):
    path = tmp_path / "links.json"
    path.write_text(
        json.dumps({"facts": {"links": {"within": {"latency_s": 2e-6, "bytes_per_s": 5e9}, "between": None}}})
    )
    found = links.measured_links(path, ASSUMED)
    assert found.within == links.Link(2e-6, 5e9, "measured, links.json")
    assert found.between == ASSUMED.between
    assert links.measured_rates(path) is None


def test_measured_rates(tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"facts": {"compute": {"flops": 1e11, "memory_bytes_per_s": 2e10}}}))
    assert links.measured_rates(path) == (1e11, 2e10)
    for rates, message in (
        ({"flops": 1}, "has no flops and memory"),
        ({"flops": 0, "memory_bytes_per_s": 1}, "cannot"),
    ):
        path.write_text(json.dumps({"facts": {"compute": rates}}))
        with pytest.raises(UsageError, match=message):
            links.measured_rates(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "holds no measured links"),
        ('{"facts": {"links": {"within": null, "between": null}}}', "holds no measured links"),
        ('{"facts": {"links": {"within": {"latency_s": 1}}}}', "has no latency_s and bytes_per_s"),
        ('{"facts": {"links": {"within": {"latency_s": 1, "bytes_per_s": 0}}}}', "cannot be planned with"),
    ],
)
def test_files_that_hold_no_links(tmp_path, text, message):
    path = tmp_path / "links.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        links.measured_links(path, ASSUMED)
    with pytest.raises(UsageError, match="No such file"):
        links.measured_links(tmp_path / "other.json", ASSUMED)


LINKS = Links(Link(1e-6, 100e9, "given"), Link(1e-5, 10e9, "given"))


@pytest.mark.parametrize(
    ("shards", "per_node", "expected"),
    [(16, 8, (8, 2)), (8, 8, (8, 1)), (4, 8, (4, 1)), (12, 8, (4, 3)), (1, 8, (1, 1)), (6, 4, (2, 3))],
)
def test_shards_are_neighbours(shards, per_node, expected):
    found = RankGroup.of_shards(shards, per_node)
    assert (found.per_node, found.nodes) == expected
    assert found.size == shards


@pytest.mark.parametrize(
    ("replicas", "shards", "per_node", "expected"),
    [(4, 8, 8, (1, 4)), (4, 16, 8, (1, 4)), (8, 4, 8, (2, 4)), (16, 1, 8, (8, 2)), (2, 2, 8, (2, 1))],
)
def test_replicas_are_at_the_distance_of_a_copy(replicas, shards, per_node, expected):
    found = RankGroup.of_replicas(replicas, shards, per_node)
    assert (found.per_node, found.nodes) == expected


def test_a_gather_within_a_node():
    found = RankGroup(4, 1).gather(4e9, LINKS)
    assert found == Traffic(3e9, 0.0, pytest.approx(3e-6), pytest.approx(0.03), 1)


def test_what_comes_from_other_nodes_arrives_once_at_each_node():
    found = RankGroup(4, 2).gather(8e9, LINKS)
    assert found.between_bytes * 4 == 4e9  # all ranks of a node together receive the other node's half
    assert found.between_bytes + found.within_bytes == 7e9
    assert found.latency_s == pytest.approx(1e-5 + 6e-6)
    assert found.transfer_s == pytest.approx(0.1)  # 1 GB at 10 GB/s; meanwhile the node passes on 6 GB


def test_one_rank_sends_nothing():
    assert RankGroup(1, 1).gather(1e9, LINKS) == Traffic()
    assert RankGroup(1, 1).all_reduce(1e9, LINKS).seconds == 0


def test_an_all_reduce_is_a_reduce_scatter_and_a_gather():
    gather, reduced = RankGroup(2, 4).gather(1e9, LINKS), RankGroup(2, 4).all_reduce(1e9, LINKS)
    assert reduced.between_bytes == 2 * gather.between_bytes
    assert reduced.seconds == 2 * gather.seconds
    assert reduced.calls == 1
