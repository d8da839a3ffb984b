"""A rank's connections to one shadow: a control connection for messages, a data connection for gradients.

Both are made, and made again after they broke, by a thread in the background with growing pauses; nothing here ever
keeps the training waiting. What a broken connection took with it is not sent again, but for the steps and side records
that are not complete yet: the shadow says which buckets are torn, and gets a seed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, Literal

from lastgood.errors import LastgoodError, MismatchError
from lastgood.gradients.layout.entries import Side
from lastgood.gradients.link.any_link import Identity, Listener
from lastgood.gradients.link.data_link import DataLink, DataSettings
from lastgood.gradients.protocol.client import ShadowClient
from lastgood.gradients.protocol.connection import connect_shadow
from lastgood.gradients.protocol.messages import (
    Absent,
    Complete,
    Declare,
    Hello,
    Message,
    Refused,
    Step,
    Welcome,
    parse_message,
)
from lastgood.gradients.protocol.payload import send_stream
from lastgood.units import MIB
from lastgood.wire.frames import Wire

__all__ = ["Identity", "Listener", "ShadowLink"]

_log = logging.getLogger("lastgood")

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 2.0
_SLICE_S = 0.2
"""Between two looks at whether to stop, or to connect again."""
_OUTBOX_BYTES = 512 * MIB
"""A shadow that lets so much wait is not reading."""
_RESENT = 64
"""Steps, side records and the like that are kept to be sent again."""
_END_S = 5.0
_MAX_EARLY = 1000
_NOTHING = memoryview(b"")


@dataclass(frozen=True)
class _Outgoing:
    message: Message
    iteration: int
    payload: memoryview
    arrives: Any = None
    """A CUDA event after which the payload is complete."""


class ShadowLink:
    """One shadow, from one rank. Threads run from `start` to `close`."""

    def __init__(
        self,
        shadow: int,
        address: str,
        token: bytes,
        identity: Identity,
        listener: Listener,
        timeout_s: float,
        data: DataSettings,
    ) -> None:
        self.shadow = shadow
        self.address = address
        job = int.from_bytes(bytes.fromhex(identity.job)[:8], "little")
        self.data = DataLink(address, job, identity.incarnation, identity.rank, data)
        self._token = token
        self._identity = identity
        self._listener = listener
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._outbox: deque[_Outgoing] = deque()
        self._outbox_bytes = 0
        self._resent: deque[_Outgoing] = deque(maxlen=_RESENT)
        self._complete: Complete | None = None
        self._wire: Wire | None = None
        self._described: Wire | None = None
        """The connection on which a side record came with its layout."""
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=f"checkmate-shadow-{shadow}", daemon=True)
        self.sent_bytes = 0
        """Of side records and seeds."""

    def start(self) -> None:
        """Begin to connect."""
        self._thread.start()

    def post(self, message: Message, iteration: int = 0, payload: memoryview = _NOTHING, arrives: Any = None) -> None:
        """Let a message go out, with its bytes after it, once `arrives` (a CUDA event) has come.

        Without a connection it is dropped.
        What shadows must hear of an iteration is sent again on the next connection, until it is complete.
        """
        outgoing = _Outgoing(message, iteration, payload, arrives)
        with self._changed:
            if isinstance(message, (Step, Absent, Side)):
                self._resent.append(outgoing)
            elif isinstance(message, Complete):
                self._complete = message
            if self._wire is None:
                return
            self._outbox.append(outgoing)
            self._outbox_bytes += len(payload)
            full = self._outbox_bytes > _OUTBOX_BYTES
            self._changed.notify_all()
        if full:
            self.disconnect()

    def completed(self, iteration: int) -> None:
        """Nothing up to this iteration will have to be sent again."""
        with self._changed:
            while self._resent and self._resent[0].iteration <= iteration:
                self._resent.popleft()

    def disconnect(self) -> None:
        """Give the connections up; new ones are made in the background."""
        with self._changed:
            wire = self._wire
        if wire is not None:
            wire.abort()
        self.data.cut("the shadow's control connection is given up")

    def close(self) -> None:
        """End the threads and both connections, within a bounded time."""
        with self._changed:
            self._ended = True
            wire = self._wire
            self._changed.notify_all()
        if wire is not None:
            with self._changed:  # what was posted goes out first
                self._changed.wait_for(lambda: not self._outbox or self._wire is None, _END_S)
            wire.abort()
        self.data.close()
        if self._thread.ident is not None:  # or it was never started
            self._thread.join(_END_S)

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        logged = ""
        while not self._ended:
            began = time.monotonic()
            try:
                with contextlib.closing(self._open_control()) as wire:
                    logged = ""
                    self._serve(wire)
                if time.monotonic() - began > _LAST_PAUSE_S:
                    pause_s = _FIRST_PAUSE_S
            except _FencedOffError as error:
                self._listener.fenced_off(self.shadow, error.incarnation)
                self.data.close()
                return
            except Exception as error:  # whatever it is: without this thread the shadow would be lost permanently
                what = str(error) or repr(error)
                self._listener.failing(self.shadow, what)
                if isinstance(error.__cause__, ConnectionRefusedError):
                    self._listener.refused(self.shadow)
                if what != logged:  # not at every try
                    logged = what
                    strange = None if isinstance(error, (LastgoodError, OSError)) else error
                    _log.warning("checkmate: shadow %d: %s; trying again", self.shadow, what, exc_info=strange)
            with self._changed:
                if not self._ended:
                    self._changed.wait(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    def _hello(self, role: Literal["control", "data"]) -> Hello:
        mine = self._identity
        layout = None if role == "control" and mine.rank == 0 else mine.layout.digest
        return Hello(role=role, job=mine.job, epoch=mine.incarnation, rank=mine.rank, layout=layout)

    def _open_control(self) -> Wire:
        mine = self._identity
        try:
            wire, welcome = connect_shadow(self.address, self._token, self._hello("control"), self._timeout_s)
        except MismatchError as error:
            self._find_out(error)
            raise
        early: list[Message] = []
        try:
            if mine.rank == 0:
                wire.send_message(**Declare(layout=mine.layout.to_data(), adopt=mine.adopt).content())
                welcome, early = self._answer_to_layout(wire)
            if (welcome.shadow, welcome.shadows) != (self.shadow, mine.layout.shadows):
                raise MismatchError(
                    f"shadow {self.address} is number {welcome.shadow} of {welcome.shadows}; here it is number "
                    f"{self.shadow} of {mine.layout.shadows}: give all shadows in their order"
                )
        except BaseException:
            wire.close()
            raise
        self._begin(wire, welcome)
        for message in early:
            self._listener.heard(self.shadow, message)
        return wire

    def _begin(self, wire: Wire, welcome: Welcome) -> None:
        """Say again what is not complete yet, before anything new."""
        with self._changed:
            self._wire = wire
            self._outbox = deque(map(_again, self._resent))
            if self._complete is not None:
                self._outbox.append(_Outgoing(self._complete, self._complete.iteration, _NOTHING))
            self._outbox_bytes = sum(len(one.payload) for one in self._outbox)
        self._listener.connected(self.shadow, welcome)

    def _end(self) -> None:
        with self._changed:
            self._wire = None
            self._outbox.clear()
            self._outbox_bytes = 0
            self._changed.notify_all()

    def _answer_to_layout(self, wire: Wire) -> tuple[Welcome, list[Message]]:
        """What the shadow answers, and what it says of the state that it has kept before that."""
        early: list[Message] = []
        while True:
            answer = parse_message(wire.receive_message("the answer to a layout"), wire.other)
            if isinstance(answer, Welcome):
                return answer, early
            if isinstance(answer, Refused) or len(early) > _MAX_EARLY:
                why = answer.why if isinstance(answer, Refused) else "it says too much"
                raise MismatchError(f"shadow {self.address} does not take the layout: {why}")
            early.append(answer)

    def _find_out(self, refused: MismatchError) -> None:
        """Why a hello was refused. Rank 0 lets a shadow that is new join this incarnation."""
        mine = self._identity
        with ShadowClient(self.address, self._token, self._timeout_s, mine.job) as client:
            incarnation = client.status().epoch
            if incarnation > mine.incarnation:
                raise _FencedOffError(incarnation) from refused
            if incarnation < mine.incarnation and mine.rank == 0:
                client.fence(mine.incarnation)
                _log.info("checkmate: shadow %s is new, and joins this incarnation of the job", self.address)

    def _serve(self, wire: Wire) -> None:
        """Write what is posted, until the connection breaks or the link ends."""
        reader = threading.Thread(target=self._read, args=(wire,), name=f"checkmate-from-{self.shadow}", daemon=True)
        reader.start()
        why = "it was closed"
        next_data_try, pause_s = 0.0, _FIRST_PAUSE_S
        connected = 0.0
        try:
            while reader.is_alive():
                if self.data.wants_connection and time.monotonic() >= next_data_try and not self._ended:
                    now = time.monotonic()
                    if connected and now - connected > _LAST_PAUSE_S:
                        pause_s = _FIRST_PAUSE_S  # the last one was of use
                    connected = now if self._connect_data() else 0.0
                    next_data_try = now + pause_s
                    pause_s = min(2 * pause_s, _LAST_PAUSE_S)
                with self._changed:
                    if not self._outbox:
                        if self._ended:
                            break
                        self._changed.wait(_SLICE_S if not self.data.wants_connection else _FIRST_PAUSE_S)
                    outgoing = self._outbox[0] if self._outbox else None
                if outgoing is not None:
                    self._write(wire, outgoing)
                    with self._changed:
                        self._outbox.popleft()
                        self._outbox_bytes -= len(outgoing.payload)
                        self._changed.notify_all()
        except (LastgoodError, OSError) as error:
            why = str(error)
        finally:
            self._end()
            wire.abort()
            reader.join(self._timeout_s)
            if not self._ended:  # `close` lets the data connection send what is queued
                self.data.cut("its control connection broke")
            self._listener.disconnected(self.shadow, why)

    def _write(self, wire: Wire, outgoing: _Outgoing) -> None:
        message = outgoing.message
        if isinstance(message, Side):
            # The rank's layout stays as it is, and may be large: once for each connection.
            if self._described is wire:
                message = message.model_copy(update={"layout": None})
            self._described = wire
        if outgoing.arrives is not None:
            outgoing.arrives.synchronize()
        wire.send_message(**message.content())
        # Counted first: what a shadow answers to may reach the training before this thread goes on.
        self.sent_bytes += len(outgoing.payload)
        if len(outgoing.payload):
            send_stream(wire, outgoing.iteration, [outgoing.payload])

    def _read(self, wire: Wire) -> None:
        """Until the connection ends; at this link's own end that is once all that was posted has gone out."""
        try:
            while True:
                if wire.wait_readable(_SLICE_S):
                    if wire.ended():
                        return
                    message = parse_message(wire.receive_message("a message"), wire.other)
                    self._listener.heard(self.shadow, message)
        except (LastgoodError, OSError, ValueError) as error:
            if not self._ended:
                _log.warning("checkmate: shadow %d: %s", self.shadow, error)
        finally:
            wire.abort()

    def _connect_data(self) -> bool:
        try:
            wire, _ = connect_shadow(self.address, self._token, self._hello("data"), self._timeout_s)
        except LastgoodError as error:
            self._listener.failing(self.shadow, str(error))
            _log.debug("checkmate: shadow %d takes no gradients yet: %s", self.shadow, error)
            return False
        self.data.connect(wire.detach())
        return True


def _again(outgoing: _Outgoing) -> _Outgoing:
    """A spill is asked for once: what the shadow has not heard of by its welcome counts as failed (`SpillPlan`)."""
    message = outgoing.message
    if isinstance(message, Step) and message.spill:
        return replace(outgoing, message=message.model_copy(update={"spill": False, "keep": None}))
    return outgoing


class _FencedOffError(Exception):
    def __init__(self, incarnation: int) -> None:
        super().__init__(incarnation)
        self.incarnation = incarnation
