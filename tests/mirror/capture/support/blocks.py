"""Blocks as the kernel fills them (TPACKET_V3), and a plain reader of them: the twin of the native one."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from lastgood.mirror.capture.frames import NO_CHECKSUM, OWN, TRUNCATED, VLAN_RESTORED

BLOCK_HEAD, HEADER, SENDER = 48, 48, 20
USER, CSUM_NOT_READY, VLAN_VALID, TPID_VALID = 1, 8, 16, 64
OUTGOING = 4
_FRAME_AT = 86
"""From a frame's header to its bytes: headers, the sender, 16 bytes, and 4 for a tag."""


@dataclass(frozen=True)
class KernelFrame:
    data: bytes
    time_ns: int = 1_700_000_000_000_000_001
    length: int | None = None
    status: int = 0
    tag: int = 0
    kind: int = 0x8100
    sender: int = 0

    def expected(self) -> tuple[bytes, int, int, int, int]:
        """As `captures.rows_of` has it."""
        data, length, flags = self.data, len(self.data) if self.length is None else self.length, 0
        if self.status & VLAN_VALID and len(data) >= 12:
            kind = self.kind if self.status & TPID_VALID else 0x8100
            data = data[:12] + struct.pack(">HH", kind, self.tag) + data[12:]
            length, flags = length + 4, flags | VLAN_RESTORED
        flags |= NO_CHECKSUM * bool(self.status & CSUM_NOT_READY) | OWN * (self.sender == OUTGOING)
        flags |= TRUNCATED * (len(data) < length)
        return data, length, self.time_ns, flags, 1


def kernel_block(frames: list[KernelFrame], block_bytes: int, status: int = USER) -> bytes:
    """A block with these frames, each of which begins at a multiple of 16."""
    body, places = bytearray(), []
    for one in frames:
        places.append(BLOCK_HEAD + len(body))
        size = (_FRAME_AT + len(one.data) + 15) // 16 * 16
        is_last = one is frames[-1]
        seconds, nanoseconds = divmod(one.time_ns, 10**9)
        length = len(one.data) if one.length is None else one.length
        head = struct.pack(
            "IIIIIIHHIIHH8x",
            0 if is_last else size,
            seconds,
            nanoseconds,
            len(one.data),
            length,
            USER | one.status,
            _FRAME_AT,
            _FRAME_AT + 14,
            0,
            one.tag,
            one.kind,
            0,
        )
        sender = struct.pack("HHiHBB8s", 17, 0, 1, 1, one.sender, 6, b"")
        raw = (head + sender).ljust(_FRAME_AT, b"\0") + one.data
        body += raw.ljust(size, b"\0")
    block_head = struct.pack(
        "IIIIIIQIIII", 1, 0, status, len(frames), BLOCK_HEAD, BLOCK_HEAD + len(body), 1, 0, 0, 0, 0
    )
    return (block_head + bytes(body)).ljust(block_bytes, b"\0")
