"""Which filesystem a path is on, by mount tables of this machine and made-up ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lastgood import mounts
from lastgood.errors import ConfigError

MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
23 22 0:20 / /proc rw - proc proc rw
24 22 0:30 / /mnt/in\\040memory rw - tmpfs tmpfs rw,size=1g
25 22 8:1 / /mnt rw - xfs /dev/sda1 rw
26 22 8:2 / /mnt rw - btrfs /dev/sdb1 rw
"""


@pytest.mark.parametrize(
    ("path", "filesystem", "device"),
    [
        ("/", "ext4", "/dev/vda"),
        ("/mnt", "btrfs", "/dev/sdb1"),
        ("/mntx", "ext4", "/dev/vda"),
        ("/mnt/in memory", "tmpfs", "tmpfs"),
    ],
)
def test_mounts(monkeypatch: pytest.MonkeyPatch, path: str, filesystem: str, device: str) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self, **_: MOUNTS)
    monkeypatch.setattr(mounts, "nearest_folder", lambda path: path)
    found = mounts.mount_of(Path(path))
    assert (found.filesystem, found.device) == (filesystem, device)


def test_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert mounts.nearest_folder(tmp_path / "a" / "b") == tmp_path.resolve()
    assert mounts.mount_of(tmp_path / "a" / "b") == mounts.mount_of(tmp_path)


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no tmpfs at /dev/shm")
def test_memory_is_no_disk() -> None:
    assert mounts.lies_in_memory(Path("/dev/shm/below/it"))
    assert not mounts.lies_in_memory(Path("/proc"))
    with pytest.raises(ConfigError, match="/dev/shm/below/it lies in memory"):
        mounts.refuse_memory(Path("/dev/shm/below/it"))
