"""The filesystem that a path is on, and whether it keeps its files in memory only."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from lastgood.errors import ConfigError

__all__ = ["Mount", "lies_in_memory", "mount_of", "nearest_folder", "refuse_memory"]

_MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})


@dataclass(frozen=True)
class Mount:
    """A mounted filesystem."""

    point: Path
    filesystem: str
    device: str


def nearest_folder(path: Path) -> Path:
    """`path`, or the closest of its parents that is there already; absolute, links followed."""
    found = Path(os.path.realpath(path))
    while not found.exists() and found != found.parent:
        found = found.parent
    return found


def mount_of(path: Path) -> Mount:
    """The filesystem that `path` is on, or would be on once it is made."""
    target = nearest_folder(path)
    best = Mount(Path("/"), "unknown", "unknown")
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return best
    for line in lines:
        left, _, right = line.partition(" - ")
        point = Path(_unescape(left.split()[4]))
        # Later lines lie on top of earlier ones with the same mount point.
        if target.is_relative_to(point) and len(point.parts) >= len(best.point.parts):
            words = right.split()
            best = Mount(point, words[0], _unescape(words[1]))
    return best


def _unescape(text: str) -> str:
    """Undo mountinfo's octal escapes of blanks and backslashes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def lies_in_memory(path: Path) -> bool:
    """Whether the filesystem of `path` keeps its files in memory: nothing there survives a power failure."""
    return mount_of(path).filesystem in _MEMORY_FILESYSTEMS


def refuse_memory(scratch: Path) -> None:
    """Raise ConfigError if the folder `scratch` lies in memory, where nothing is durable and no disk is measured."""
    if lies_in_memory(scratch):
        mount = mount_of(scratch)
        raise ConfigError(
            f"scratch {scratch} lies in memory ({mount.filesystem} at {mount.point}), where nothing is durable and no "
            "disk is measured; name a folder on a disk"
        )
