import pytest

from hpcfsdp.doctor.all_ranks import file_system_of

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
