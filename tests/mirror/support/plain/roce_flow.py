"""The writes of one RoCE queue pair, in one direction, as messages: packets in order in, heads, pieces and losses out.

NCCL sends a message as one RDMA write with immediate. With adaptive routing it is a write without immediate (or one for
each packet) and then an empty one, to address 0, that carries the immediate. The receiver's own writes (clear to send)
have no immediate at all and are left aside. Gaps are told as such: `lose` says which packets will never come.

Nothing is guessed. The first packet of a write says how long it is; if it is lost, the last one's immediate does
(NCCL's is the message's size, in one byte order up to 2.28 and in the other from 2.29 on, so it is only believed if it
agrees with the length of the last packet). If both are lost, the message is lost with its number if that is certain;
otherwise the flow is resynchronised, and says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from lastgood.mirror.streams.roce import FIRST, LAST, LAST_IMMEDIATE, MIDDLE, ONLY, ONLY_IMMEDIATE
from tests.mirror.support.plain.ll import Coding, data_bytes, one_flag

__all__ = ["PACKET_BYTES", "Payload", "QueueFlow", "Sink", "Write"]

_MOST_WAITING_BYTES: Final = 16 << 20
"""Of one message whose length is not known yet."""
PACKET_BYTES: Final = 128
"""What a packet that waits takes beside its payload."""
_MOST_MISSING: Final = 4096
"""Messages that are counted by flags; more are not believed."""
_MOST_FLAG: Final = 1 << 31
_MOST_STEPS: Final = 5
"""By which a connection's step grows with a message, at most: 2 for a slice, and up to 3 to round up before it."""


class Payload(NamedTuple):
    """Bytes of a packet, and where they are."""

    address: int
    view: memoryview


@dataclass(frozen=True)
class Write:
    """One packet of an RDMA write. `psn` counts on without end. What an opcode does not carry is 0."""

    opcode: int
    psn: int
    address: int
    rkey: int
    length: int
    immediate: bytes
    payload: Payload
    time_ns: int

    @property
    def nbytes(self) -> int:
        """Of payload."""
        return len(self.payload.view)

    @property
    def only_immediate(self) -> bool:
        """Whether it only ends the write before it (adaptive routing). An empty message has an address."""
        return self.opcode == ONLY_IMMEDIATE and not self.nbytes and not self.address and not self.rkey


class Sink(Protocol):
    """Takes what a flow gives. All lengths and offsets are of data, without flags."""

    def head(self, message: int, nbytes: int, time_ns: int) -> None:
        """A message begins."""

    def piece(self, message: int, offset: int, payload: Payload, coding: Coding) -> None:
        """Payload, still coded."""

    def lost(self, message: int, offset: int, nbytes: int) -> None:
        """Will never come."""

    def resynced(self, why: str) -> None:
        """Messages before the next one are missing, without numbers."""

    def keep(self, payload: Payload) -> Payload:
        """The same bytes in memory that stays until they are given, and then as long as others."""

    def wait(self, more: int) -> bool:
        """Whether so many more bytes may wait with those of all flows; below 0: they wait no more."""

    def count(self, name: str, more: int = 1) -> None:
        """Add to a counter."""


@dataclass
class QueueFlow:
    """State between two packets. `protocol` is ``auto``, ``simple``, ``ll`` or ``ll128``."""

    sink: Sink
    protocol: str
    from_start: bool
    """Whether the connection's first packet is the first one here."""
    striped: bool = False
    """Whether other queue pairs carry other messages, or parts of each: then immediates are not sizes of what is here,
    and flags do not count messages."""
    message: int = 0
    """Number of the message that is open, or comes next."""
    due: int = 0
    """PSN of the packet that comes next."""
    size: int | None = None
    """Bytes on the wire of the open message; None between messages."""
    first: int = 0
    """PSN of the open message's first packet."""
    mtu: int = 0
    """Payload of a packet that is not the last one, as seen last; 0: not seen."""
    coding: Coding = Coding.RAW
    flag: int = 0
    """All flags of the open message are equal."""
    gap: int | None = None
    """From this PSN, at which a message begins, content is unknown. -1: where one begins is not known either."""
    tail: list[Write] = field(default_factory=list)
    """Packets after a gap that belong to a message of which the begin is missing."""
    split: list[Write] = field(default_factory=list)
    """Writes of one packet each without immediate: a message with adaptive routing, or clear to send."""
    waiting_bytes: int = 0
    """In `tail` and `split`."""
    split_gap: int = 0
    """Packets missing after the last one in `split`."""
    immediate_due: bool = False
    """The packet that comes next only carries the immediate of the message that has ended."""
    adaptive: bool = False
    """Such a packet was seen."""
    carries_data: bool = False
    last_flag: int = 0
    flag_message: int = 0
    """Number of the message that had `last_flag`."""
    numbers_lost: bool = False
    """The flow was resynchronised since."""
    begun: bool = False
    """A message was given."""

    def __post_init__(self) -> None:
        if not self.from_start:
            self.gap = -1

    # -- packets -------------------------------------------------------------------------------------------------------

    def take(self, write: Write) -> None:
        """The next packet in order."""
        self._take(write)
        self.due = write.psn + 1

    def _take(self, write: Write) -> None:
        if write.only_immediate:
            self._immediate(write)
            return
        self.immediate_due = False
        if self.split:
            if write.opcode == ONLY and self._continues_split(write):
                self._wait(self.split, write)
                return
            self._end_split()
        if self.gap is not None and not self._after_gap(write):
            return
        if self.size is not None:
            if write.opcode in (MIDDLE, LAST, LAST_IMMEDIATE):
                self._go_on(write)
                return
            self._cut(write.psn)
        if write.opcode in (FIRST, ONLY_IMMEDIATE):
            self._begin(write)
        elif write.opcode == ONLY:
            self._wait(self.split, write)
        else:
            self.sink.count("odd_packets")
            self._forget()

    def lose(self, first: int, last: int) -> None:
        """Packets `first` to `last` will never come."""
        self.due = last + 1
        self.sink.count("lost_packets", last - first + 1)
        if self.gap is not None:
            self._drop_tail()
            return
        if self.split:
            if self.carries_data:
                self.split_gap += last - first + 1
                return
            self._drop_split()
        if self.immediate_due:
            self.immediate_due = False
            first += 1
        if self.size is not None:
            end = self.first + self._packets(self.size) - 1
            upto = min(last, end)
            begin = (first - self.first) * self.mtu
            self._lost(begin, min(self.size, (upto - self.first + 1) * self.mtu) - begin)
            if upto == end:
                self._end()
            first = upto + 1
        if first <= last:
            self.gap = first

    def finish(self) -> None:
        """Nothing comes any more: what is open is lost."""
        self._drop_tail()
        if self.split and self.carries_data:
            self._split_unknown()
            self._lose_messages(1)
        self._drop_split()
        if self.size is not None:
            self._cut(self.due)

    # -- one message ---------------------------------------------------------------------------------------------------

    def _begin(self, write: Write) -> None:
        self.carries_data = True
        size = write.length if write.opcode == FIRST else write.nbytes
        if write.length != size or (write.opcode == FIRST and not 0 < write.nbytes < size):
            self.sink.count("odd_packets")
            self._forget()
            return
        if write.opcode == FIRST:
            self.mtu = write.nbytes
        self._open(size, write.psn, write.payload, write.time_ns)
        self._piece(0, write.payload)
        if write.opcode == ONLY_IMMEDIATE:
            self._end()

    def _go_on(self, write: Write) -> None:
        assert self.size is not None
        offset = (write.psn - self.first) * self.mtu
        rest = self.size - offset
        if write.nbytes != (self.mtu if write.opcode == MIDDLE else rest) or rest < write.nbytes + (
            write.opcode == MIDDLE
        ):
            self.sink.count("odd_packets")
            self._cut(write.psn)
            self._forget()
            return
        self._piece(offset, write.payload)
        if write.opcode != MIDDLE:
            self._end()
            self.immediate_due = write.opcode == LAST

    def _open(self, size: int, first: int, sample: Payload | None, time_ns: int) -> None:
        """Begin the message that `message` numbers; `sample` is any payload of it."""
        self.size, self.first = size, first
        self.coding, self.flag = self._coding(size, sample)
        if self.flag:
            self.last_flag, self.flag_message, self.numbers_lost = self.flag, self.message, False
        self.begun = True
        self.sink.head(self.message, data_bytes(self.coding, size), time_ns)

    def _end(self) -> None:
        self.size = None
        self.message += 1

    def _cut(self, psn: int) -> None:
        """The open message ends before `psn`, too early."""
        assert self.size is not None
        self.sink.count("cut_messages")
        begin = min(self.size, (psn - self.first) * self.mtu)
        self._lost(begin, self.size - begin)
        self._end()

    def _forget(self) -> None:
        """Where messages begin is not known from here on."""
        self.gap = -1

    def _piece(self, offset: int, payload: Payload) -> None:
        if not len(payload.view):
            return
        if self.coding is not Coding.RAW and (not self.flag or one_flag(self.coding, payload.view) != self.flag):
            self.sink.count("wrong_flags")
            self._lost(offset, len(payload.view))
            return
        self.sink.piece(self.message, data_bytes(self.coding, offset), payload, self.coding)

    def _lost(self, offset: int, nbytes: int) -> None:
        """By bytes on the wire; nothing for an empty range."""
        begin = data_bytes(self.coding, offset)
        end = data_bytes(self.coding, offset + nbytes)
        if end > begin:
            self.sink.lost(self.message, begin, end - begin)

    def _packets(self, size: int) -> int:
        return max(1, -(-size // self.mtu)) if self.mtu else 1

    # -- adaptive routing ----------------------------------------------------------------------------------------------

    def _immediate(self, write: Write) -> None:
        """A packet that only ends the message before it."""
        self.sink.count("immediates")
        self.adaptive = self.carries_data = True
        self.immediate_due = False
        if self.split:
            self._give_split(write)
        elif self.gap is not None:
            if self.tail and self.tail[-1].opcode == LAST:
                self._give_tail(write.immediate)
            else:
                self._ends_in_gap(write)
        elif self.size is not None:
            self._cut(write.psn)

    def _continues_split(self, write: Write) -> bool:
        head, last = self.split[0], self.split[-1]
        between = self.split_gap * head.nbytes
        return (
            write.address == last.address + last.nbytes + between
            and write.rkey == head.rkey
            and write.nbytes <= head.nbytes
            and (not between or last.nbytes == head.nbytes)
        )

    def _wait(self, where: list[Write], write: Write) -> None:
        """Keep a packet until it is known what it belongs to."""
        more = write.nbytes + PACKET_BYTES
        if self.waiting_bytes + more > _MOST_WAITING_BYTES or not self.sink.wait(more):
            self.sink.count("unplaced_packets", len(where) + 1)
            where.clear()
            self._release()
            self.split_gap = 0
            self._forget()
            return
        self.waiting_bytes += more
        payload = self.sink.keep(write.payload)
        where.append(
            Write(
                write.opcode,
                write.psn,
                write.address,
                write.rkey,
                write.length,
                write.immediate,
                payload,
                write.time_ns,
            )
        )
        if where is self.split:
            self.split_gap = 0

    def _release(self) -> None:
        """What waited is given, or dropped."""
        self.sink.wait(-self.waiting_bytes)
        self.waiting_bytes = 0

    def _end_split(self) -> None:
        """What waits is followed by something else: clear to send, or a message whose immediate is lost."""
        if not self.carries_data or not self.split_gap:
            self._drop_split()
        elif self.split_gap == 1:
            last = self.split[-1]
            self._split_message(last.address + last.nbytes - self.split[0].address)
        else:
            self._split_unknown()

    def _split_unknown(self) -> None:
        self.gap = self.split[0].psn
        self.sink.count("unplaced_packets", len(self.split))
        self.split.clear()
        self._release()
        self.split_gap = 0

    def _drop_split(self) -> None:
        self.sink.count("clear_to_send", len(self.split))
        self.split.clear()
        self._release()
        self.split_gap = 0

    def _give_split(self, write: Write) -> None:
        head, last = self.split[0], self.split[-1]
        size = last.address + last.nbytes - head.address
        if self.split_gap:
            mtu = head.nbytes
            sizes = {
                stated
                for stated in self._stated(write.immediate)
                if size + (self.split_gap - 1) * mtu < stated <= size + self.split_gap * mtu and last.nbytes == mtu
            }
            if len(sizes) != 1:
                self._split_unknown()
                self._ends_in_gap(write)
                return
            size = sizes.pop()
        self._split_message(size)

    def _split_message(self, size: int) -> None:
        head = self.split[0]
        self.mtu = head.nbytes if size > head.nbytes else self.mtu
        self._open(size, head.psn, head.payload, head.time_ns)
        at = 0
        for write in self.split:
            offset = write.address - head.address
            if offset > at:
                self._lost(at, offset - at)
            self._piece(offset, write.payload)
            at = offset + write.nbytes
        self._lost(at, size - at)
        self._end()
        self.split.clear()
        self._release()
        self.split_gap = 0

    # -- after a gap ---------------------------------------------------------------------------------------------------

    def _after_gap(self, write: Write) -> bool:
        """Whether it is known again what comes: this packet begins a message."""
        if write.opcode in (MIDDLE, LAST, LAST_IMMEDIATE):
            if self.tail and self.tail[-1].opcode == LAST:
                self._drop_tail()
            self._wait(self.tail, write)
            if write.opcode == LAST_IMMEDIATE and self.tail:
                self._give_tail(write.immediate)
            return False
        self._drop_tail()
        self._count_missing(write.psn, write)
        self.gap = None
        return True

    def _drop_tail(self) -> None:
        self.sink.count("unplaced_packets", len(self.tail))
        self.tail.clear()
        self._release()

    def _ends_in_gap(self, write: Write) -> None:
        """The immediate of a message that is lost: the next one begins right after."""
        self._drop_tail()
        assert self.gap is not None
        packets = write.psn - self.gap
        sizes = self._stated(write.immediate) if self.mtu and self.gap >= 0 else ()
        exact = any(self._packets(size) == packets for size in sizes)
        if exact:
            self._lose_messages(1)
        else:
            self._unknown()
        self.gap = None

    def _give_tail(self, immediate: bytes) -> None:
        """The message of which `tail` is the end."""
        last = self.tail[-1]
        end = last.psn + 1
        if len(self.tail) > 1:
            self.mtu = self.tail[0].nbytes
        sizes = set()
        for size in self._stated(immediate):
            packets = self._packets(size)
            if (
                self.mtu
                and size == (packets - 1) * self.mtu + last.nbytes
                and 1 < packets <= end - max(self.gap or 0, 0)
            ):
                sizes.add(size)
        if len(sizes) != 1 or any(write.nbytes != self.mtu for write in self.tail[:-1]):
            self._drop_tail()
            return
        size = sizes.pop()
        first = end - self._packets(size)
        if first > self.tail[0].psn:
            self._drop_tail()
            return
        tail, self.tail = self.tail, []
        self._release()
        self.carries_data = True
        if not self.begun and self.gap == -1:
            self.sink.count("packets_before_start", len(tail))
            self.gap = None
            return
        self._count_missing(first, None)
        self.gap = None
        self._open(size, first, tail[0].payload, tail[0].time_ns)
        self._lost(0, (tail[0].psn - first) * self.mtu)
        for write in tail:
            self._piece((write.psn - first) * self.mtu, write.payload)
        self._end()

    def _count_missing(self, start: int, write: Write | None) -> None:
        """A message begins at `start`: how many were there between it and the gap's begin?"""
        assert self.gap is not None
        if self.gap < 0:
            if self.begun:
                self._unknown()
            return
        packets = start - self.gap
        if packets == 0:
            return
        if packets == 1 and not self.adaptive:
            self._lose_messages(1)
            return
        counted = not self.numbers_lost and (self.last_flag > 0 or self.from_start)
        if self.protocol == "ll" and counted and not self.striped and write is not None and write.nbytes:
            flag = one_flag(Coding.LL, write.payload.view)
            # The first message of a connection has flag 1.
            missing = self.flag_message + flag - (self.last_flag or 1) - self.message
            if flag and 1 <= missing <= min(packets, _MOST_MISSING):
                self._lose_messages(missing)
                return
        self._unknown()

    def _stated(self, immediate: bytes) -> tuple[int, ...]:
        """The sizes that an immediate may mean."""
        return () if self.striped else (int.from_bytes(immediate, "little"), int.from_bytes(immediate, "big"))

    def _lose_messages(self, count: int) -> None:
        for _ in range(count):
            self.sink.lost(self.message, 0, 0)
            self.message += 1

    def _unknown(self) -> None:
        self.begun = self.numbers_lost = True
        self.sink.resynced("packets are missing, and how many messages they were is not certain")

    # -- LL ------------------------------------------------------------------------------------------------------------

    def _coding(self, size: int, sample: Payload | None) -> tuple[Coding, int]:
        """How the open message is coded, and its flag."""
        if self.protocol == "simple" or not size or sample is None:
            return Coding.RAW, 0
        if self.protocol == "ll128":
            return Coding.LL128, one_flag(Coding.LL128, sample.view)
        flag = one_flag(Coding.LL, sample.view)
        if self.protocol == "ll":
            return Coding.LL, flag
        if size % 16 or not 0 < flag < _MOST_FLAG:
            return Coding.RAW, 0
        if self.last_flag:
            since = self.message - self.flag_message
            least, most = self.last_flag + since, self.last_flag + _MOST_STEPS * since
            likely = least <= flag and (not _constant(sample.view) if self.numbers_lost else flag <= most)
        elif self.from_start and not self.numbers_lost:
            likely = self.message < flag <= 1 + _MOST_STEPS * self.message
        else:
            likely = not _constant(sample.view)
        return (Coding.LL, flag) if likely else (Coding.RAW, 0)


def _constant(view: memoryview) -> bool:
    """Whether data and flags cannot be told apart."""
    return bytes(view) == bytes(view[:4]) * (len(view) // 4)
