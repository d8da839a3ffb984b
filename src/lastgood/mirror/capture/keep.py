"""A pcapng file of all that passes, up to a size."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Final

import numpy as np

from lastgood import _native
from lastgood.errors import ConfigError
from lastgood.files import open_new, storage_errors
from lastgood.mirror.capture.frames import MOST_FRAME_BYTES, FrameBatch
from lastgood.mirror.capture.memory import address_of
from lastgood.mirror.capture.pcapng import interface_block, section_block

__all__ = ["KEEP_BUFFER_BYTES", "FrameKeeper"]

KEEP_BUFFER_BYTES: Final = 1 << 20
assert KEEP_BUFFER_BYTES > 2 * MOST_FRAME_BYTES


class FrameKeeper:
    """Writes batches into a new file. At its limit, and on a full disk, it stops; frames after that are counted.

    Capturing goes on whatever happens here.
    """

    def __init__(self, path: Path, limit_bytes: int) -> None:
        """Raises ConfigError if there is a file already, StorageError if none can be made."""
        self.path = path
        self.limit_bytes = limit_bytes
        self.stopped: str | None = None
        """Why nothing more is kept."""
        self._buffer = np.empty(KEEP_BUFFER_BYTES, np.uint8)
        self._interfaces: dict[int, int] = {}
        self._written = self._frames = self._not_kept = 0
        with storage_errors(path, "making the file of kept frames"):
            try:
                self._file = open_new(path)
            except FileExistsError as error:
                raise ConfigError(f"--keep {path}: is there already; name a new file") from error
        self._write(memoryview(section_block()))

    def write(self, batch: FrameBatch) -> None:
        """Keep the frames of a batch, in their order, as far as they fit."""
        table, kept = batch.table, 0
        if self.stopped is None:
            kept = self._keep(batch)
        self._frames += kept
        self._not_kept += len(table) - kept

    def counters(self) -> dict[str, int]:
        """Frames and bytes of the file, and frames that are not in it."""
        return {"kept_frames": self._frames, "kept_bytes": self._written, "not_kept_frames": self._not_kept}

    def close(self) -> None:
        """Close the file; safe to call twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _keep(self, batch: FrameBatch) -> int:
        table = batch.table if batch.table.flags.c_contiguous else np.ascontiguousarray(batch.table)
        # A change of the link type begins a run of its own; nearly always there is one run.
        links = table["link"]
        edges = [0, *(np.flatnonzero(links[1:] != links[:-1]) + 1).tolist(), len(table)]
        kept = 0
        for begin, end in itertools.pairwise(edges):
            number = self._interface(int(links[begin])) if begin < end else 0
            while begin < end and self.stopped is None:
                frames, nbytes = _native.pcapng_blocks(
                    address_of(batch.data),
                    len(batch.data),
                    table.ctypes.data + begin * table.itemsize,
                    end - begin,
                    number,
                    self._buffer.ctypes.data,
                    min(KEEP_BUFFER_BYTES, self.limit_bytes - self._written),
                )
                if not frames:
                    self.stopped = f"{self.path}: the limit of {self.limit_bytes} bytes is reached"
                elif self._write(self._buffer.data[:nbytes]):
                    begin, kept = begin + frames, kept + frames
        return kept

    def _interface(self, link_type: int) -> int:
        if link_type not in self._interfaces:
            self._interfaces[link_type] = len(self._interfaces)
            self._write(memoryview(interface_block(link_type)))
        return self._interfaces[link_type]

    def _write(self, content: memoryview) -> bool:
        """All or nothing: a block that is there in part would be the end of the file for its readers."""
        if self.stopped is not None or self._written + len(content) > self.limit_bytes:
            self.stopped = self.stopped or f"{self.path}: the limit of {self.limit_bytes} bytes is reached"
            return False
        done = 0
        try:
            while done < len(content):
                done += os.write(self._file, content[done:])
        except OSError as error:
            self.stopped = f"{self.path}: {error.strerror}"
            if done:
                os.ftruncate(self._file, self._written)
            return False
        self._written += done
        return True
