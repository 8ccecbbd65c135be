"""Links by name, by number, and as the doctor has measured them."""

import json

import pytest

from hpcfsdp.doctor import speed
from hpcfsdp.errors import UsageError
from hpcfsdp.launch.topology import Topology
from hpcfsdp.plan import links

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


def test_who_measures_links_with_whom():
    even = Topology.regular(2, 3)
    assert speed.members(even, 4, between=False) == [3, 4, 5]
    assert speed.members(even, 4, between=True) == [1, 4]
    uneven = Topology.uneven([3, 2])
    assert speed.members(uneven, 2, between=True) == [2]
    assert speed.members(uneven, 4, between=True) == [1, 4]
