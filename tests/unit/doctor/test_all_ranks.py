from dataclasses import asdict

import pytest

from hpcfsdp import accelerator
from hpcfsdp.accelerator import Hardware
from hpcfsdp.doctor.all_ranks import device_facts, file_system_of
from hpcfsdp.launch.device import Place

MOUNTS = """\
overlay / overlay rw 0 0
server:/home /home nfs4 rw 0 0
none /home/me/image squashfs ro 0 0
mgs@tcp:/work /work\\040space lustre rw 0 0
tmpfs /tmp tmpfs rw 0 0
/dev/nvme0n1 /tmp xfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/usr/lib/python3", "overlay"),
        ("/home/me/venv/lib", "nfs4"),
        ("/home/me/image/lib", "squashfs"),
        ("/homes/me", "overlay"),
        ("/work space/venv", "lustre"),
        ("/tmp/venv", "xfs"),
    ],
)
def test_the_file_system_of_a_path_is_that_of_the_innermost_and_last_mount(path, kind):
    assert file_system_of(path, MOUNTS) == kind


def test_without_mounts_nothing_is_known():
    assert file_system_of("/home", "") is None


def test_this_machine_has_a_file_system():
    assert file_system_of("/proc/self") == "proc"


def test_facts_about_devices_are_those_that_init_will_choose(monkeypatch):
    monkeypatch.setattr(accelerator, "device_type", lambda: "cuda")
    cards = tuple(Hardware("H200", f"GPU-{n}", 8, f"0000:0{n}:00.0") for n in range(2))
    near = frozenset({2, 3}), frozenset({0, 1})
    places = [Place(frozenset({4})), Place(frozenset({0}), None, cards, near), Place(frozenset({1}), None, cards, near)]
    assert device_facts(0, [0], places) == {"devices_visible": 0, "accelerator": None}
    first, second = (device_facts(rank, [1, 2], places) for rank in (1, 2))
    expected = {"device": "cuda:1", "lowest_rank": 1, "far": False}
    assert first == {"devices_visible": 2, "accelerator": expected | asdict(cards[1])}
    expected = {"device": "cuda:0", "lowest_rank": 2, "far": True}
    assert second["accelerator"] == expected | asdict(cards[0])
    shared = [Place(frozenset({0}), None, cards[:1], near[:1])] * 2
    assert device_facts(1, [0, 1], shared)["accelerator"]["lowest_rank"] == 0
    assert device_facts(1, [0, 1], [places[0], shared[0]])["accelerator"]["lowest_rank"] == 1
