"""Bytes after a message: chunks of one stream, each checked for its place and content."""

from __future__ import annotations

from collections import deque

from lastgood.errors import CorruptCheckpoint
from lastgood.gradients.protocol.messages import CHUNK_BYTES
from lastgood.wire.frames import Kind, Wire, chunk_checksum

__all__ = ["drain_stream", "receive_stream", "send_stream"]


def send_stream(wire: Wire, sequence: int, buffers: list[memoryview]) -> None:
    """Send buffers as one stream of chunks; none crosses the end of a buffer."""
    offset = 0
    for buffer in buffers:
        for begin in range(0, len(buffer), CHUNK_BYTES):
            chunk = buffer[begin : begin + CHUNK_BYTES]
            wire.send_chunk(chunk, offset, chunk_checksum(chunk, sequence, offset))
            offset += len(chunk)


def receive_stream(wire: Wire, sequence: int, views: list[memoryview], what: str) -> None:
    """Fill `views`, one after another, from a stream of chunks, which may be cut anywhere.

    Raises CorruptCheckpoint for a wrong checksum or place, at once; CheckpointError, WaitTimeout as `Wire` does.
    """
    rest = deque(view for view in views if len(view))
    room = sum(map(len, rest))
    offset = 0
    while rest:
        frame = wire.receive_frame(what)
        if frame.kind is not Kind.CHUNK or frame.offset != offset or not 0 < frame.length <= room:
            raise CorruptCheckpoint(
                f"{wire.other}: {what}: {frame.length} bytes at {frame.offset}, where up to {room} at {offset} were due"
            )
        filled: list[memoryview] = []
        left = frame.length
        while left:
            part = rest[0][:left]
            rest[0] = rest[0][len(part) :]
            if not len(rest[0]):
                rest.popleft()
            wire.read_into(part, what)
            filled.append(part)
            left -= len(part)
        content = filled[0] if len(filled) == 1 else memoryview(b"".join(filled))
        if chunk_checksum(content, sequence, offset) != frame.checksum:
            raise CorruptCheckpoint(f"{wire.other}: {what}: the chunk at byte {offset} is damaged")
        offset += frame.length
        room -= frame.length


def drain_stream(wire: Wire, nbytes: int, what: str) -> None:
    """Read a stream that nobody wants; its bytes are bounded by what a bucket or record may be."""
    scratch = memoryview(bytearray(min(nbytes, CHUNK_BYTES)))
    left = nbytes
    while left:
        frame = wire.receive_frame(what)
        if frame.kind is not Kind.CHUNK or not 0 < frame.length <= left:
            raise CorruptCheckpoint(f"{wire.other}: {what}: {frame.length} bytes, where up to {left} were due")
        rest = frame.length
        while rest:
            part = scratch[: min(rest, len(scratch))]
            wire.read_into(part, what)
            rest -= len(part)
        left -= frame.length
