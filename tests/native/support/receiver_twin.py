"""A plain receiver of gradient records, byte by byte: what the native one is held to."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from lastgood._native import crc32c_portable
from lastgood.errors import CorruptCheckpoint
from lastgood.wire.records import FINAL, HEADER_BYTES, MAX_PAYLOAD_BYTES, DType, Record, RecordKind, parse_header

Event = tuple[str, int, int, int, int, str]
"""kind, connection, rank, bucket, iteration, cause"""


@dataclass
class TwinSlot:
    content: bytearray
    held: bytearray
    """A byte of 1 for each that is held."""
    reserved: bytearray
    generation: int = 0

    def clear(self) -> None:
        self.held = bytearray(len(self.held))
        self.reserved = bytearray(len(self.reserved))
        self.generation += 1

    @property
    def complete(self) -> bool:
        return all(self.held)

    def missing(self) -> list[tuple[int, int]]:
        ranges: list[tuple[int, int]] = []
        for at, held in enumerate(self.held):
            if not held and ranges and ranges[-1][1] == at:
                ranges[-1] = (ranges[-1][0], at + 1)
            elif not held:
                ranges.append((at, at + 1))
        return ranges


@dataclass
class TwinBucket:
    nbytes: int
    dtype: DType
    slots: list[TwinSlot]
    placed: bool = False
    first: int | None = None

    def inside(self, iteration: int) -> bool:
        return self.first is not None and self.first <= iteration < self.first + len(self.slots)

    def slot(self, iteration: int) -> TwinSlot:
        return self.slots[iteration % len(self.slots)]

    def move(self, first: int) -> None:
        assert self.first is not None
        for iteration in range(self.first, min(first, self.first + len(self.slots))):
            self.slot(iteration).clear()
        self.first = first


@dataclass
class TwinConnection:
    number: int
    rank: int
    life: int
    unread: bytearray = field(default_factory=bytearray)
    closing: bool = False
    header: bytearray = field(default_factory=bytearray)
    record: Record | None = None
    """Whose payload is on its way."""
    payload: bytearray = field(default_factory=bytearray)
    draining: bool = False
    generation: int = 0
    parked: bool = False
    ended: bool = False


class TwinReceiver:
    """Does at once what the native one does in its thread. The caller reads `events`, `refused` and `read_bytes`."""

    def __init__(self, job: int, epoch: int, buckets: list[tuple[int, int, int]], slots: int) -> None:
        self.job, self.epoch, self.life = job, epoch, 0
        self.buckets = {
            index: TwinBucket(
                nbytes,
                DType(dtype),
                [TwinSlot(bytearray(nbytes), bytearray(nbytes), bytearray(nbytes)) for _ in range(slots)],
            )
            for index, nbytes, dtype in buckets
        }
        self.connections: list[TwinConnection] = []
        self.events: list[Event] = []
        self.refused: Counter[str] = Counter()
        self.read_bytes = self.records = self.bytes = self.drained_bytes = self.ends = 0
        self._added = 0

    # -- what the caller does --------------------------------------------------------------------------------------

    def add(self, rank: int) -> TwinConnection:
        self._added += 1
        self.connections.append(TwinConnection(self._added, rank, self.life))
        return self.connections[-1]

    def feed(self, connection: TwinConnection, data: bytes) -> None:
        connection.unread += data
        self._serve(connection)

    def close(self, connection: TwinConnection) -> None:
        connection.closing = True
        self._serve(connection)

    def advance(self, first: int) -> None:
        for bucket in self.buckets.values():
            if bucket.placed and bucket.first is not None and first > bucket.first:
                bucket.move(first)
        self._go_on()

    def set_first(self, index: int, first: int) -> bool:
        bucket = self.buckets[index]
        possible = bucket.first is None or first >= bucket.first
        if possible:
            if bucket.first is None:
                bucket.first = first
            bucket.move(first)
            bucket.placed = True
        self._go_on()
        return possible

    def reset(self, index: int) -> None:
        self.buckets[index].placed = False
        self._go_on()

    def begin(self, epoch: int, keep: bool) -> None:
        self.epoch = epoch
        self.life += 1
        self.events = [event for event in self.events if event[0] == "closed"]
        for bucket in self.buckets.values():
            for slot in bucket.slots:
                if not keep or not slot.complete:
                    slot.clear()
            if not keep:
                bucket.placed, bucket.first = False, None
        for connection in self.connections:
            if not connection.ended:
                self._end(connection, "fenced")

    def complete(self, index: int, iteration: int) -> bool:
        bucket = self.buckets[index]
        return bucket.inside(iteration) and bucket.slot(iteration).complete

    def missing(self, iteration: int) -> dict[int, list[tuple[int, int]]]:
        found = {}
        for index, bucket in self.buckets.items():
            if bucket.placed and bucket.first is not None and iteration < bucket.first:
                continue
            inside = bucket.inside(iteration)
            ranges = bucket.slot(iteration).missing() if inside else [(0, bucket.nbytes)] * bool(bucket.nbytes)
            if ranges:
                found[index] = ranges
        return found

    # -- what follows ----------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        for connection in self.connections:
            if connection.parked:
                connection.parked = False
                self._serve(connection)

    def _serve(self, connection: TwinConnection) -> None:
        while not connection.ended and not connection.parked:
            if connection.record is not None:
                wanted = connection.record.length - len(connection.payload)
                if wanted and (connection.unread or connection.closing):
                    self._notice_lost(connection)
                piece = self._take(connection, wanted)
                connection.payload += piece
                if connection.draining:
                    self.drained_bytes += len(piece)
                if len(connection.payload) == connection.record.length:
                    self._end_record(connection, connection.record)
                    continue
            elif len(connection.header) == HEADER_BYTES:
                self._begin_record(connection)
                continue
            else:
                connection.header += self._take(connection, HEADER_BYTES - len(connection.header))
                if len(connection.header) == HEADER_BYTES:
                    continue
            if not connection.unread:
                if connection.closing:
                    between = connection.record is None and not connection.header
                    self._end(connection, "" if between else "truncated")
                return

    def _take(self, connection: TwinConnection, most: int) -> bytes:
        piece = bytes(connection.unread[:most])
        del connection.unread[: len(piece)]
        self.read_bytes += len(piece)
        return piece

    def _slot(self, record: Record) -> TwinSlot:
        return self.buckets[record.bucket].slot(record.iteration)

    def _notice_lost(self, connection: TwinConnection) -> None:
        assert connection.record is not None
        if not connection.draining and self._slot(connection.record).generation != connection.generation:
            self.refused["old_iteration"] += 1
            connection.draining = True

    def _begin_record(self, connection: TwinConnection) -> None:
        try:
            record = parse_header(connection.header, "the other side")
        except CorruptCheckpoint as error:
            return self._end(connection, self._cause_of(error, bytes(connection.header)))
        if record.job != self.job:
            return self._end(connection, "wrong_job")
        why = self._examine(connection, record)
        if why == "parked":
            connection.parked = True
            return None
        connection.header.clear()
        connection.draining = why != ""
        if why:
            self.refused[why] += 1
        if record.kind is RecordKind.END:
            if not why:
                self.ends += 1
                self.events.append(("end", connection.number, connection.rank, 0, record.iteration, ""))
            return None
        connection.record = record
        connection.payload.clear()
        return None

    @staticmethod
    def _cause_of(error: CorruptCheckpoint, header: bytes) -> str:
        if "of version" in str(error):
            return "unknown_version"
        if int.from_bytes(header[48:52], "little") > MAX_PAYLOAD_BYTES and "bytes at" in str(error):
            return "too_long"
        known = ("not known", "no training reaches", "bytes at", "bytes of payload")
        return "malformed" if any(words in str(error) for words in known) else "damaged_header"

    def _examine(self, connection: TwinConnection, record: Record) -> str:
        """Why it is refused; "" if it is not."""
        if record.rank != connection.rank:
            return "wrong_rank"
        if record.epoch != self.epoch:
            return "wrong_epoch"
        if record.kind is RecordKind.END:
            return ""
        bucket = self.buckets.get(record.bucket)
        if not record.flags & FINAL:
            return "not_final"
        if bucket is None:
            return "wrong_bucket"
        if record.dtype is not bucket.dtype:
            return "wrong_dtype"
        if record.offset + record.length > bucket.nbytes:
            return "out_of_range"
        count = len(bucket.slots)
        if bucket.first is None:
            bucket.first = max(0, record.iteration - count + 1)
        if record.iteration < bucket.first:
            return "old_iteration"
        if record.iteration >= bucket.first + count:
            if bucket.placed:
                return "parked"
            bucket.move(record.iteration - count + 1)
        slot = bucket.slot(record.iteration)
        taken = slice(record.offset, record.offset + record.length)
        if record.length and all(slot.held[taken]):
            return "duplicate"
        if any(slot.held[taken]) or any(slot.reserved[taken]):
            return "overlapping"
        slot.reserved[taken] = b"\1" * record.length
        connection.generation = slot.generation
        return ""

    def _end_record(self, connection: TwinConnection, record: Record) -> None:
        if not connection.draining:
            slot = self._slot(record)
            taken = slice(record.offset, record.offset + record.length)
            lost = slot.generation != connection.generation
            if crc32c_portable(bytes(connection.payload)) != record.checksum:
                self.refused["damaged_payload"] += 1
                if not lost:
                    slot.reserved[taken] = bytes(record.length)
            elif lost:
                self.refused["old_iteration"] += 1
            else:
                self.records += 1
                self.bytes += record.length
                if record.length:
                    slot.reserved[taken] = bytes(record.length)
                    slot.held[taken] = b"\1" * record.length
                    slot.content[taken] = connection.payload
                    if slot.complete:
                        told = (connection.number, connection.rank, record.bucket, record.iteration)
                        self.events.append(("complete", *told, ""))
        connection.record = None

    def _end(self, connection: TwinConnection, cause: str) -> None:
        if cause not in ("", "fenced"):
            self.refused[cause] += 1
        if connection.record is not None and not connection.draining:
            record = connection.record
            slot = self._slot(record)
            if slot.generation == connection.generation:
                slot.reserved[record.offset : record.offset + record.length] = bytes(record.length)
        connection.ended, connection.parked, connection.record = True, False, None
        self.events.append(("closed", connection.number, connection.rank, 0, 0, cause))
