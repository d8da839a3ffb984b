"""Lastgood's own ring all-reduce: sums over TCP whose final sends travel as marked gradient records.

It carries the training in switch mode: what a switch copies to the shadows are these sends themselves, so the trainers
send nothing twice. The order of each sum is fixed (rank k + 1 first, rank k last, for chunk k), so that all ranks hold
the same bits, on every run.
"""

from __future__ import annotations

import enum
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from lastgood import _native
from lastgood.errors import CheckpointError, ConfigError, CorruptCheckpoint, HostError, MismatchError, WaitTimeout
from lastgood.units import KIB
from lastgood.wire.records import ITEM_BYTES, DType
from lastgood.wire.ring import CHUNK_BYTES, Cover, is_final, is_marked, one_channel, sent_chunk, step_count
from lastgood.wire.ring_link import Hello, connect_ring

__all__ = ["NO_BUCKET", "SEGMENT_BYTES", "Divide", "Place", "RingComm"]

NO_BUCKET = 0xFFFFFFFF
"""In records of bytes that no shadow wants."""
SEGMENT_BYTES = 256 * KIB
"""A record is no longer: the next rank begins to add while the rest is in progress."""


class Divide(enum.IntEnum):
    """Whether a sum becomes a mean, and when."""

    NO = 0
    BEFORE = 1
    """Each rank's part, as DDP's default does."""
    AFTER = 2
    """The sum, before it is sent on: for types whose sums would lose less than their parts."""


@dataclass(frozen=True)
class Place:
    """Bytes `start` to `start + nbytes` of a tensor belong at byte `offset` of `bucket`."""

    start: int
    nbytes: int
    bucket: int
    offset: int


class RingComm:
    """This rank's place in a ring. One call at a time; a failure of any rank ends it for all, within the timeout."""

    def __init__(
        self,
        rank: int,
        ranks: int,
        *,
        listener: socket.socket,
        next_address: str,
        token: bytes,
        job: str,
        epoch: int,
        layout: str,
        timeout_s: float = 60.0,
        cover: Cover = Cover.BALANCED,
        chunk_bytes: int = CHUNK_BYTES,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        """Connect to both neighbours; every rank must do so within `timeout_s`, the longest wait without progress.

        `listener` is `listen_ring`'s and is closed here; `next_address` is the next rank's, or a switch's in front of
        it. `job` (32 hex digits), `epoch` and `layout` (the declared layout's digest, 64) are what the records name.
        Raises WaitTimeout if a neighbour does not come, MismatchError if it belongs elsewhere, ConfigError for
        numbers that no ring has, HostError if this machine has no descriptors left.
        """
        with listener:
            one_channel(0, 4, ranks, chunk_bytes)
            if not 0 <= rank < ranks:
                raise ConfigError(f"rank {rank} is not one of {ranks}")
            own = Hello(job, epoch, rank, ranks, layout, os.uname().nodename)
            self._links = connect_ring(own, listener, next_address, token, timeout_s)
        self.rank, self.ranks, self._cover = rank, ranks, cover
        self._chunk_bytes, self._segment_bytes = chunk_bytes, segment_bytes
        self._busy = threading.Lock()
        previous, following = self._links
        try:
            self._ring = _native.Ring(
                previous.socket.fileno(),
                following.socket.fileno(),
                int.from_bytes(bytes.fromhex(job)[:8], "little"),
                epoch,
                rank,
                ranks,
                previous.name,
                following.name,
                timeout_s,
            )
        except BaseException as error:
            for link in self._links:
                link.wire.close()
            if isinstance(error, OSError):
                raise HostError(f"rank {rank}: its ring cannot begin: {error}") from error
            raise

    def plan(
        self, elements: int, dtype: DType, places: Sequence[Place], divide: Divide = Divide.NO
    ) -> _native.RingPlan:
        """How a tensor goes around: make it once, use it each iteration. All ranks must plan the same.

        `places` say what goes to shadows, without overlaps; bytes in none of them are reduced, and marked for nobody.
        Raises ConfigError if a place is not within the tensor.
        """
        item = ITEM_BYTES[dtype]
        layout = one_channel(elements, item, self.ranks, self._chunk_bytes)
        return _native.RingPlan(
            int(dtype),
            int(divide),
            [chunk.elements * item for chunk in layout.chunks()],
            _filled(places, elements * item),
            self._steps(self.rank),
            self._steps((self.rank - 1) % self.ranks),
            self._segment_bytes,
        )

    def all_reduce(self, plan: _native.RingPlan, address: int, iteration: int) -> None:
        """Reduce the tensor at `address`, in place. The records name `iteration`.

        Raises HostError if a neighbour's connection breaks (its text names rank and host), WaitTimeout if one
        does nothing for the timeout, MismatchError if the ranks are out of step, CorruptCheckpoint for damaged
        records. Each ends the ring; the tensor then holds part of a sum.
        """
        with self._calling():
            self._ring.all_reduce(plan, address, iteration)

    def end(self, iteration: int) -> None:
        """Tell the next rank, and a switch on the way, that all of an iteration is sent. Raises as `all_reduce`."""
        with self._calling():
            self._ring.end(iteration)

    @property
    def sent_bytes(self) -> int:
        """Bytes sent to the next rank since the start, headers included."""
        return self._ring.sent_bytes

    @property
    def marked_bytes(self) -> int:
        """Payload bytes among them that carried the final mark."""
        return self._ring.marked_bytes

    def close(self) -> None:
        """End the connections; a call in another thread fails at once. Safe to call twice."""
        self._ring.shut_down()
        for link in self._links:
            link.wire.close()

    def _steps(self, rank: int) -> list[tuple[int, bool, bool]]:
        return [
            (
                sent_chunk(self.ranks, rank, step),
                is_final(self.ranks, step),
                is_marked(self._cover, self.ranks, rank, step),
            )
            for step in range(step_count(self.ranks))
        ]

    @contextmanager
    def _calling(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise CheckpointError(f"rank {self.rank}: two threads use its ring at once; their sums would mix")
        try:
            yield
        except TimeoutError as error:
            raise WaitTimeout(f"rank {self.rank}: {error}") from error
        except OSError as error:
            # The error's own text speaks of bytes at an offset, as of a file.
            what = f"{getattr(error, 'operation', 'the ring')}: {os.strerror(error.errno or 0)}"
            raise HostError(f"rank {self.rank}: {what}; restart the ranks from their last good state") from error
        except _native.OutOfStep as error:
            raise MismatchError(f"rank {self.rank}: {error}") from error
        except _native.DamagedRecord as error:
            raise CorruptCheckpoint(f"rank {self.rank}: {error}") from error
        finally:
            self._busy.release()


def _filled(places: Sequence[Place], nbytes: int) -> list[tuple[int, int, int]]:
    """(bytes, bucket, offset) of all of a tensor, in its order; neighbours in tensor and bucket become one."""
    ranges: list[tuple[int, int, int]] = []
    position = 0
    for place in sorted(places, key=lambda place: place.start):
        if place.start < position or place.nbytes < 0 or place.start + place.nbytes > nbytes:
            raise ConfigError(f"{place} overlaps another one, or is not within the tensor of {nbytes} bytes")
        if place.start > position:
            ranges.append((place.start - position, NO_BUCKET, position))
        if ranges and ranges[-1][1] == place.bucket and ranges[-1][2] + ranges[-1][0] == place.offset:
            ranges[-1] = (ranges[-1][0] + place.nbytes, place.bucket, ranges[-1][2])
        elif place.nbytes:
            ranges.append((place.nbytes, place.bucket, place.offset))
        position = place.start + place.nbytes
    if position < nbytes:
        ranges.append((nbytes - position, NO_BUCKET, position))
    return ranges
