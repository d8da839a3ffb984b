"""How far the making of files for checkpoints is, for people who wait for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lastgood.units import format_bytes

__all__ = ["room_for"]


def room_for(directory: Path, nbytes: int) -> tuple[str, Callable[[], str]]:
    """What is being done when room for checkpoints of `nbytes` in all is made in `directory`, and how far it is."""

    def progress() -> str:
        try:
            held = sum(path.stat().st_blocks * 512 for path in directory.iterdir() if path.is_file())
        except OSError:  # a file was renamed between the two looks
            return "files are being written"
        return f"{format_bytes(held)} of {format_bytes(nbytes)} on the disk"

    return f"{directory}: making room for checkpoints, once", progress
