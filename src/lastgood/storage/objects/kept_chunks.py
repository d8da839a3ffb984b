"""Chunks that a read needed in part only: the next read often needs another part of them."""

from __future__ import annotations

import threading
from collections import OrderedDict

from lastgood.units import MIB

__all__ = ["KeptChunks"]

KEPT_BYTES = 128 * MIB


class KeptChunks:
    """The last ones that were used, checked, `most_bytes` of them in all. Safe to use from several threads."""

    def __init__(self, most_bytes: int = KEPT_BYTES) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._chunks: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._nbytes = 0

    def get(self, manifest: str, chunk: int) -> bytes | None:
        """A chunk of the stream of a manifest, by its number; None if it is not kept."""
        with self._lock:
            found = self._chunks.get((manifest, chunk))
            if found is not None:
                self._chunks.move_to_end((manifest, chunk))
            return found

    def keep(self, manifest: str, chunk: int, content: bytes) -> None:
        """Keep a chunk, in place of those that were not used for longest."""
        if len(content) > self._most_bytes:
            return
        with self._lock:
            self._nbytes += len(content) - len(self._chunks.pop((manifest, chunk), b""))
            self._chunks[manifest, chunk] = content
            while self._nbytes > self._most_bytes:
                self._nbytes -= len(self._chunks.popitem(last=False)[1])
