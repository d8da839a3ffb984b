"""A switch's copies on their way to one shadow: a bounded queue, and a connection that says hello for the rank."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field

from lastgood.errors import CheckpointError, LastgoodError, MismatchError
from lastgood.gradients.protocol.connection import connect_shadow
from lastgood.gradients.protocol.messages import Hello
from lastgood.gradients.switch.faults import CopyFaults, FaultPlan
from lastgood.units import MIB
from lastgood.wire.frames import Wire
from lastgood.wire.records import Record, RecordKind, pack_header

__all__ = ["QUEUE_BYTES", "Copier", "CopySettings"]

_log = logging.getLogger("lastgood")

QUEUE_BYTES = 64 * MIB
_END_BYTES = MIB
"""Ends of iteration still fit when the queue is full of gradients: without them a shadow would wait for the rest."""
_BATCH_BYTES = MIB
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 2.0
_LOOK_S = 0.2


@dataclass(frozen=True)
class CopySettings:
    """How copies travel."""

    token: bytes = field(repr=False)
    queue_bytes: int = QUEUE_BYTES
    timeout_s: float = 60.0
    """A shadow that takes nothing for so long is connected to again; and how long the last copies are waited for."""
    faults: FaultPlan | None = None


class Copier:
    """Copies of one rank's records to one shadow. `offer` never waits: what does not fit is dropped and counted."""

    def __init__(self, shadow: int, shadows: int, address: str, hello: Hello, settings: CopySettings) -> None:
        self._shadow, self._shadows, self._address = shadow, shadows, address
        self._hello, self._settings = hello, settings
        self.incarnation = hello.epoch
        """The one whose copies these are."""
        self._faults = None
        if settings.faults is not None:
            self._faults = CopyFaults(settings.faults, f"rank {hello.rank} shadow {shadow}")
        self._queue: deque[tuple[Record, bytes]] = deque()
        self._ended: int | None = None
        """The newest iteration of which everything was offered."""
        self._queued_bytes = 0
        self._changed = threading.Condition()
        self._deadline: float | None = None
        self._counts: Counter[str] = Counter()
        self._said = ""
        self._wire: Wire | None = None
        self._thread = threading.Thread(target=self._run, name=f"copies-{hello.rank}-{shadow}", daemon=True)
        self._thread.start()

    @property
    def open(self) -> bool:
        """Whether it was not told to finish: its rank's connection goes on."""
        with self._changed:
            return self._deadline is None

    # -- the relay's side ----------------------------------------------------------------------------------------------

    def offer(self, record: Record, content: bytes) -> None:
        """Queue a copy (header and payload), or drop it."""
        end = record.kind is RecordKind.END
        limit = self._settings.queue_bytes + (_END_BYTES if end else 0)
        with self._changed:
            if end:
                self._ended = record.iteration
            if self._deadline is not None or self._queued_bytes + len(content) > limit:
                self._counts["dropped_ends" if end else "dropped_records"] += 1
                return
            self._queue.append((record, content))
            self._queued_bytes += len(content)
            self._changed.notify()

    def finish(self, within_s: float) -> None:
        """Take nothing more, and end once all is sent, or `within_s` from now."""
        with self._changed:
            deadline = time.monotonic() + within_s
            self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)
            if within_s <= 0 and self._wire is not None:
                self._wire.abort()
            self._changed.notify()

    def join(self, seconds: float) -> bool:
        """Whether it has ended, within `seconds`."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def counters(self) -> dict[str, int]:
        """Copies sent, dropped and lost with a connection; connections; bytes that wait."""
        with self._changed:
            faults = self._faults.count if self._faults is not None else 0
            return {**self._counts, "queued_bytes": self._queued_bytes, "faults": faults}

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        try:
            while not self._over():
                if self._wire is None and not self._connect():
                    self._sleep(pause_s)
                    pause_s = min(2 * pause_s, _LAST_PAUSE_S)
                    continue
                pause_s = _FIRST_PAUSE_S
                assert self._wire is not None
                try:
                    batch = self._take()
                    if batch:
                        self._send(self._wire, batch)
                    elif self._wire.ended():
                        raise CheckpointError(f"shadow {self._address} closed the connection")
                except CheckpointError as error:
                    self._say(f"{error}; connecting again")
                    self._disconnect()
        finally:
            self._disconnect()
            with self._changed:
                self._counts["lost_records"] += len(self._queue)
                self._queue.clear()
                self._queued_bytes = 0

    def _disconnect(self) -> None:
        with self._changed:
            if self._wire is not None:
                self._wire.close()
            self._wire = None

    def _over(self) -> bool:
        with self._changed:
            return self._deadline is not None and (not self._queue or time.monotonic() > self._deadline)

    def _connect(self) -> bool:
        try:
            wire, welcome = connect_shadow(self._address, self._settings.token, self._hello, self._settings.timeout_s)
        except LastgoodError as error:
            self._say(str(error))
            return False
        try:
            if (welcome.shadow, welcome.shadows) != (self._shadow, self._shadows):
                raise MismatchError(
                    f"{self._address} is shadow {welcome.shadow} of {welcome.shadows}, and stands as {self._shadow} of "
                    f"{self._shadows} on this switch's list: it gets no copies"
                )
            wire.write("where its copies begin", self._begin())
        except CheckpointError as error:
            self._say(str(error))
            wire.close()
            return False
        self._said = ""
        with self._changed:
            self._counts["connections"] += 1
            self._wire = wire
        return True

    def _take(self) -> list[tuple[Record, bytes]]:
        """The next copies, oldest first, up to a batch; none if there are none for a while."""
        with self._changed:
            if not self._queue and self._deadline is None:
                self._changed.wait(_LOOK_S)
            batch: list[tuple[Record, bytes]] = []
            nbytes = 0
            while self._queue and nbytes < _BATCH_BYTES:
                batch.append(self._queue.popleft())
                nbytes += len(batch[-1][1])
            return batch

    def _send(self, wire: Wire, batch: list[tuple[Record, bytes]]) -> None:
        """Send a batch. Raises CheckpointError if the connection breaks: then the batch is lost with it."""
        contents = [content for _, content in batch]
        sent = 0
        try:
            if self._faults is None:
                wire.write("copies", *contents)
                sent = len(batch)
            else:
                for record, content in batch:
                    for faulty in self._faults.befall(record, content):
                        self._sleep(faulty.delay_s)
                        wire.write("a copy", faulty.content)
                        if faulty.cut:
                            raise CheckpointError(f"shadow {self._address}: cut off inside a record, as planned")
                    sent += 1
        finally:
            with self._changed:
                self._queued_bytes -= sum(map(len, contents))
                self._counts["sent_records"] += sent
                self._counts["sent_bytes"] += sum(map(len, contents[:sent]))
                self._counts["lost_records"] += len(batch) - sent

    def _begin(self) -> bytes:
        """What a connection says first: nothing up to this iteration comes any more, on this one or another.

        So a shadow learns that what was lost with the connection before is missing permanently.
        """
        with self._changed:
            past = self._queue[0][0].iteration - 1 if self._queue else self._ended
        if past is None or past < 0:
            return b""
        job = int.from_bytes(bytes.fromhex(self._hello.job or "")[:8], "little")
        return pack_header(Record(RecordKind.END, job, self._hello.epoch, self._hello.rank, past))

    def _sleep(self, seconds: float) -> None:
        """Wait, but not beyond the end."""
        with self._changed:
            if self._deadline is not None:
                seconds = min(seconds, max(0.0, self._deadline - time.monotonic()))
        time.sleep(seconds)

    def _say(self, text: str) -> None:
        if text != self._said:
            _log.warning("switch: %s", text)
            self._said = text
