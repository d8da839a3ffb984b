"""The conductor's way to a shadow in the same process: what `ShadowLink` is over sockets."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lastgood.errors import LastgoodError, MismatchError
from lastgood.gradients.layout.entries import Side
from lastgood.gradients.link.any_link import Identity, Link, LinkMaker, Listener
from lastgood.gradients.link.data_link import DataSettings
from lastgood.gradients.protocol.messages import (
    Absent,
    Complete,
    Declare,
    Message,
    Refused,
    Seed,
    Step,
    Verify,
    Welcome,
)
from lastgood.gradients.shadow.core import ShadowCore

__all__ = ["Ear", "LocalLink", "local_link_maker"]

_log = logging.getLogger("lastgood.mirror")
_END_S = 60.0
_NOTHING = memoryview(b"")


@dataclass
class _Slots:
    """Gradients go into the shadow's slots by themselves."""

    connected: bool = False
    patient: bool = True
    cuts: int = 0
    waits: int = 0
    sent_bytes: int = 0


@dataclass(frozen=True)
class _Posted:
    message: Message
    payload: memoryview


class Ear:
    """Hears what a shadow tells its trainers, for the link that is there now."""

    def __init__(self) -> None:
        self.link: LocalLink | None = None

    def __call__(self, message: Message, everyone: bool = True) -> None:
        """As a shadow tells it, with its lock held: the conductor never waits for that lock."""
        del everyone
        link = self.link
        if link is not None:
            link.told(message)


class LocalLink:
    """One incarnation's link. What is posted is done in its order, in a thread of its own."""

    def __init__(self, core: ShadowCore, ear: Ear, identity: Identity, listener: Listener) -> None:
        self.address = "the mirror node"
        self.sent_bytes = 0
        self.data = _Slots()
        self._core = core
        self._ear = ear
        self._identity = identity
        self._listener = listener
        self._queue: queue.SimpleQueue[_Posted | Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="mirror-link", daemon=True)
        self.fault: str | None = None
        """Why nothing is done any more."""

    def start(self) -> None:
        """Declare the layout, and begin."""
        self._ear.link = self
        self._thread.start()

    def post(self, message: Message, iteration: int = 0, payload: memoryview = _NOTHING, arrives: Any = None) -> None:
        """As `Link.post`."""
        del iteration, arrives
        self._queue.put(_Posted(message, payload))

    def call(self, done: Callable[[], None]) -> None:
        """Call this once all that was posted before is done."""
        self._queue.put(done)

    def completed(self, iteration: int) -> None:
        """Nothing is ever said again here."""

    def close(self) -> None:
        """End, after all that was posted."""
        self._queue.put(None)
        if self._ear.link is self:
            self._ear.link = None
        if self._thread.ident is not None:
            self._thread.join(_END_S)

    def told(self, message: Message) -> None:
        """A message of the shadow; see `Ear`."""
        self._listener.heard(0, message)

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        identity = self._identity
        try:
            declared = Declare(layout=identity.layout.to_data(), adopt=identity.adopt)
            self._core.declare(identity.incarnation, declared, self._welcomed)
            self.data.connected = True  # not before: gradients are to find the windows where the declaration puts them
            self._core.greet(0, self.told)
        except LastgoodError as error:
            self._fail(error)
        while (posted := self._queue.get()) is not None:
            if not isinstance(posted, _Posted):
                posted()
                continue
            if self.fault is not None:
                continue
            try:
                self._do(posted)
            except LastgoodError as error:
                self._fail(error)
            except Exception as error:  # this thread must go on to its end, and say why it does nothing
                _log.exception("the mirror node's link: unexpected")
                self._fail(error)

    def _welcomed(self, welcome: Welcome) -> None:
        self._listener.connected(0, welcome)

    def _do(self, posted: _Posted) -> None:
        message, incarnation = posted.message, self._identity.incarnation
        if isinstance(message, (Step, Absent, Complete, Verify)):
            self._core.hear(incarnation, 0, message)
        elif isinstance(message, Side):
            self.sent_bytes += len(posted.payload)
            with self._core.side_room(message) as keep:
                self._core.side(incarnation, message, bytes(posted.payload) if keep else None)
        elif isinstance(message, Seed):
            self.sent_bytes += len(posted.payload)
            self._seed(message, posted.payload)
        else:
            raise MismatchError(f"a shadow takes no {message.kind} from a trainer")

    def _seed(self, message: Seed, payload: memoryview) -> None:
        incarnation = self._identity.incarnation
        try:
            value, views = self._core.begin_seed(incarnation, message, "the mirror")
        except MismatchError:
            raise
        except LastgoodError as error:
            self._listener.heard(0, Refused(why=str(error)[:10_000]))
            return
        at = 0
        for view in views:
            view[:] = payload[at : at + len(view)]
            at += len(view)
        self._core.end_seed(incarnation, message, value)

    def _fail(self, error: Exception) -> None:
        self.fault = str(error) or repr(error)
        now = self._core.body.state.incarnation
        if now != self._identity.incarnation:
            self._listener.fenced_off(0, now)
        else:
            self._listener.disconnected(0, self.fault)


def local_link_maker(core: ShadowCore, ear: Ear) -> LinkMaker:
    """As `Conductor` wants it: links to this shadow."""

    def make(
        shadow: int,
        address: str,
        token: bytes,
        identity: Identity,
        listener: Listener,
        timeout_s: float,
        data: DataSettings,
    ) -> Link:
        del shadow, address, token, timeout_s, data
        return LocalLink(core, ear, identity, listener)

    return make
