"""Captured frames as the parsers take them: one stretch of memory, and a table of what lies where in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = [
    "COOKED",
    "COOKED_V2",
    "ETHERNET",
    "FRAME",
    "LINK_TYPES",
    "MOST_FRAME_BYTES",
    "NO_CHECKSUM",
    "OWN",
    "TRUNCATED",
    "VLAN_RESTORED",
    "FrameBatch",
    "FrameSource",
    "empty_batch",
]

FRAME: Final = np.dtype(
    [
        ("offset", "<u8"),
        ("captured", "<u4"),
        ("length", "<u4"),
        ("time_ns", "<u8"),
        ("flags", "<u4"),
        ("link", "<u4"),
    ]
)
"""A frame: bytes ``offset`` to ``offset + captured`` of a batch's data, ``length`` bytes on the wire, the time of its
capture (ns since 1970), flags, and the link type of its interface (one of `LINK_TYPES`)."""

NO_CHECKSUM: Final = 1
"""The checksum was left to a network card (offload) that never saw the frame."""
TRUNCATED: Final = 2
"""Fewer bytes were captured than the frame has."""
VLAN_RESTORED: Final = 4
"""The kernel had taken a VLAN tag out; it is in its place again."""
OWN: Final = 8
"""This host sent it."""

ETHERNET: Final = 1
COOKED: Final = 113
COOKED_V2: Final = 276
LINK_TYPES: Final = frozenset((ETHERNET, COOKED, COOKED_V2))
"""As pcap files number them: Ethernet, and Linux's cooked headers (16 and 20 bytes) of captures on all interfaces."""

MOST_FRAME_BYTES: Final = 1 << 18
"""Of one frame: the kernel's largest (with segmentation offload) have 64 KiB; a larger length is not believed."""


@dataclass(frozen=True)
class FrameBatch:
    """Frames in the order of their capture. Valid until the next `read` of the source that gave it."""

    data: memoryview
    """uint8, in which all captured bytes lie; perhaps with gaps, and perhaps much larger than the batch."""
    table: npt.NDArray[np.void]
    """FRAME, one for each frame."""

    def __len__(self) -> int:
        return len(self.table)

    def frame(self, number: int) -> memoryview:
        """The captured bytes of one frame: for tests, and for what looks at few frames."""
        row = self.table[number]
        return self.data[int(row["offset"]) : int(row["offset"]) + int(row["captured"])]


class FrameSource(Protocol):
    """Where frames come from: an interface, a file, the ring in shared memory."""

    @property
    def link_type(self) -> int:
        """One of `LINK_TYPES`. A file of several interfaces has that of the first; each frame's own is in the table."""

    def read(self, limit: int, timeout_s: float) -> FrameBatch | None:
        """Up to `limit` frames (at least 1); waits for the first one at most `timeout_s`.

        None: the source has ended. An empty batch: nothing came in time. The batch before is not valid any more.
        """

    def counters(self) -> dict[str, int]:
        """Frames and bytes given, and what was lost, place by place; counted from the start."""

    def close(self) -> None:
        """Give everything back; safe to call twice."""


def empty_batch() -> FrameBatch:
    """What a source gives when nothing came in time."""
    return FrameBatch(memoryview(b""), np.empty(0, FRAME))
