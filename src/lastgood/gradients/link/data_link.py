"""A rank's data connection to one shadow: the native sender, and what becomes of it when the shadow is slow or gone."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from lastgood import _native
from lastgood.gradients.layout.spans import Span

__all__ = ["DataLink", "DataSettings", "Ticket"]

_log = logging.getLogger("lastgood")

_END_S = 5.0
_LOST_SHARE = 0.1


@dataclass(frozen=True)
class DataSettings:
    """How much may wait to be sent, and for how long."""

    pool_bytes: int
    """Memory for gradients that are copied."""
    copied_bytes: int
    """A longer run is copied in pieces of this size, a multiple of every element's."""
    patience_s: float
    """How long one gradient waits for room in it, before this shadow is cut off; 0: not at all."""
    stall_s: float
    """How long the other side may take nothing."""
    carried: bool = False
    """Whether gradients come to shadows on another way (a ring's switch): then no connection is made."""


@dataclass(frozen=True)
class Ticket:
    """What one connection was given."""

    sender: _native.Sender
    number: int

    @property
    def returned(self) -> bool:
        """Whether its memory is not read any more."""
        return self.sender.returned(self.number)


class DataLink:
    """Sends gradients while there is a connection, and swallows them while there is none; never raises for that.

    A connection is cut when its queue stays full, and only a new one, from the begin of an iteration on, is used again.
    The shadow sees the cut, and asks for seeds of what it then lacks.
    """

    def __init__(self, address: str, job: int, incarnation: int, rank: int, settings: DataSettings) -> None:
        self._address = address
        self._who = (job, incarnation, rank)
        self._settings = settings
        self._lock = threading.Lock()
        self._sender: _native.Sender | None = None
        self._next: _native.Sender | None = None
        self._borrowed: Ticket | None = None
        """The newest one of memory that is not the sender's own."""
        self._begun = 0
        self._closed = False
        self._sent_before = 0
        self.patient = True
        """False for a shadow that the others do not wait for: then room is waited for a tenth as long."""
        self.cuts = 0
        """How often it was cut off, but for the end."""
        self.waits = 0
        """How often there was no room at once, and it was waited for."""
        self.waited_s = 0.0

    # -- connecting ------------------------------------------------------------------------------------------------

    @property
    def wants_connection(self) -> bool:
        """Whether `connect` is of use."""
        return not (self._settings.carried or self._closed) and self._sender is None and self._next is None

    @property
    def connected(self) -> bool:
        """Whether the next iteration's gradients will be sent, or are carried otherwise."""
        return self._settings.carried or self._sender is not None or self._next is not None

    def connect(self, fd: int) -> None:
        """Use this connection, after its hello, from the next iteration on. Takes `fd` over."""
        job, incarnation, rank = self._who
        try:
            sender = _native.Sender(
                fd,
                job,
                incarnation,
                rank,
                f"shadow {self._address}",
                pool_bytes=self._settings.pool_bytes,
                stall_s=self._settings.stall_s,
            )
        finally:
            os.close(fd)  # the sender has its own
        # Said at once: the next iteration may never begin, since another rank waits in this one until the shadow takes
        # its gradients, and the shadow has no room for them as long as it waits for this rank's.
        with contextlib.suppress(OSError):  # the first gradient will fail with the reason
            sender.end(self._begun, timeout_s=0.0)
        with self._lock:
            if not self._closed:
                self._next, sender = sender, self._next
        if sender is not None:
            _abort(sender)

    def begin_iteration(self, iteration: int) -> None:
        """An iteration's first gradient comes now: a connection that was made meanwhile is used from here on."""
        self._begun = iteration
        if self._next is not None:
            with self._lock:
                self._sender, self._next = self._next, None
                self._borrowed = None
                self.patient = True
            # What an older connection took with it never comes, and the shadow must not wait for it.
            self.end(iteration - 1)

    # -- sending ---------------------------------------------------------------------------------------------------

    def put(self, iteration: int, span: Span, address: int, *, borrowed: bool) -> Ticket | None:
        """Send a run of gradients from `address`; returns its ticket, or None if it is not sent.

        Borrowed memory must stay as it is until the ticket has returned.
        """
        if not span.nbytes:
            return None
        whole = span.nbytes if borrowed else self._settings.copied_bytes
        ticket: Ticket | None = None
        for at in range(0, span.nbytes, whole):
            ticket = self._try(
                partial(
                    _put,
                    (iteration, span.bucket, span.dtype, span.offset + at, address + at, min(whole, span.nbytes - at)),
                    borrowed,
                )
            )
            if ticket is None:
                return None
        if borrowed and ticket is not None:
            with self._lock:
                # Threads come back from the sender in another order than that of their tickets.
                last = self._borrowed
                if last is None or last.sender is not ticket.sender or last.number < ticket.number:
                    self._borrowed = ticket
        return ticket

    def end(self, iteration: int) -> None:
        """Say that this rank sends nothing more for this iteration."""
        self._try(lambda sender, patience_s: sender.end(iteration, timeout_s=patience_s))

    def _try(self, call: Callable[[_native.Sender, float], int]) -> Ticket | None:
        sender = self._sender
        if sender is None:
            return None
        patience_s = self._patience_s
        try:
            ticket = call(sender, 0.0)
            if not ticket and patience_s:
                begin = time.perf_counter()
                self.waits += 1
                ticket = call(sender, patience_s)
                self.waited_s += time.perf_counter() - begin
        except OSError as error:
            self._cut(sender, str(error))
            return None
        except RuntimeError:
            if sender is self._sender:
                raise
            return None  # another thread has closed it meanwhile
        if not ticket:
            self._cut(sender, f"its queue stayed full for {patience_s:g} s")
        return Ticket(sender, ticket) if ticket else None

    def wait_returned(self) -> bool:
        """Return when no borrowed memory is read any more; a connection that takes longer than its patience is cut.

        False: its thread has not ended even then, and may read it still (nothing of that is sent).
        """
        ticket = self._borrowed
        if ticket is None:
            return True
        sender = ticket.sender
        patience_s = self._patience_s
        begin = time.perf_counter()
        try:
            if not sender.wait_returned(ticket.number, patience_s):
                self._cut(sender, f"it took nothing for {patience_s:g} s")
        except OSError as error:
            self._cut(sender, str(error))
        self.waited_s += time.perf_counter() - begin
        self._borrowed = None
        return ticket.returned

    @property
    def sent_bytes(self) -> int:
        """Payload bytes that have gone out, over all connections."""
        sender = self._sender
        return self._sent_before + (0 if sender is None else int(sender.counters()["bytes"]))

    @property
    def _patience_s(self) -> float:
        return self._settings.patience_s * (1.0 if self.patient else _LOST_SHARE)

    # -- ends ------------------------------------------------------------------------------------------------------

    def cut(self, why: str) -> None:
        """Give the connection up, with all that waits in it. On return nothing of it is read any more."""
        for sender in (self._sender, self._next):
            if sender is not None:
                self._cut(sender, why)

    def _cut(self, sender: _native.Sender, why: str) -> None:
        with self._lock:
            if sender is self._sender:
                self._sender = None
                self._sent_before += int(sender.counters()["bytes"])
            elif sender is self._next:
                self._next = None
            else:
                return  # another thread was first
            self.cuts += 1
        _log.warning("checkmate: shadow %s is cut off: %s", self._address, why)
        _abort(sender)

    def close(self) -> None:
        """Send what is queued, within a bounded time, and end."""
        with self._lock:
            self._closed = True
            senders = [sender for sender in (self._sender, self._next) if sender is not None]
            if self._sender is not None:
                self._sent_before += int(self._sender.counters()["bytes"])
            self._sender = self._next = None
        for sender in senders:
            try:
                sender.close(_END_S)
            except OSError as error:
                _log.debug("checkmate: shadow %s: %s", self._address, error)


def _abort(sender: _native.Sender) -> None:
    sender.abort()
    sender.join(_END_S)


def _put(what: tuple[int, int, int, int, int, int], borrowed: bool, sender: _native.Sender, patience_s: float) -> int:
    return sender.put(*what, borrowed=borrowed, timeout_s=patience_s)
