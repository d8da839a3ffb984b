"""One rank's side of the agreement: a thread that is connected to the coordinator until the incarnation ends.

Nothing is lost when the connection breaks: what this rank has committed, given up or judged, and has had no answer to,
is kept and told again on the next connection.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lastgood.checkpointers.agreement.address import Address
from lastgood.checkpointers.agreement.channel import Channel, open_channel, whole_number
from lastgood.checkpointers.agreement.decide import Decided, Fate, Identity, Report, failure_class
from lastgood.checkpointers.agreement.messages import cut, identity_of, reached_of, said_report
from lastgood.errors import CheckpointError, CorruptCheckpoint, LastgoodError, WaitTimeout
from lastgood.wire.frames import is_ready
from lastgood.wire.gate import close_in_forks

__all__ = ["Member", "Offer"]

_log = logging.getLogger("lastgood")

_CONNECT_S = 5.0
_FIRST_BACKOFF_S = 0.05
_LONGEST_BACKOFF_S = 2.0
_MOST_KEPT = 1024
"""Unanswered saves and verdicts that are told again."""


@dataclass(frozen=True)
class Offer:
    """What all ranks are to begin with; `choice` is None if there is nothing to read."""

    number: int
    job_id: bytes
    incarnation: int
    choice: Identity | None
    common: tuple[Identity, ...]
    bad: dict[Identity, str]
    reached: int
    """The highest step that all ranks ever held; -1 if there is none."""


class Member:
    """Joins at once, in a thread of its own. `heard_fate` and `heard_verdict` are called in that thread: be quick.

    Args:
        address: of the coordinator.
        report: what this rank has.
        silence_s: a coordinator that says nothing for so long is taken for lost.
        heard_fate: told of every step that is decided, perhaps more than once.
        heard_verdict: told of every verdict, of this rank's own too: identity, ok, reason, and whether a rank takes
            back its bad one of that reason.
    """

    def __init__(
        self,
        address: Address,
        report: Report,
        silence_s: float,
        heard_fate: Callable[[Decided], None],
        heard_verdict: Callable[[Identity, bool, str, bool], None],
    ) -> None:
        self.address = address
        self._report = report
        self._silence_s = silence_s
        self._heard_fate = heard_fate
        self._heard_verdict = heard_verdict
        self._changed = threading.Condition()
        self._phase = "joining"
        self._incarnation_id = ""
        self._offer: Offer | None = None
        self._error: LastgoodError | None = None
        self._link_lost = f"the coordinator at {address} has not answered yet"
        self._missing = ""
        self.waiting = ""
        """For whom the oldest checkpoint waits, as the coordinator last said."""
        self._trouble_since: float | None = time.monotonic()
        self._open: dict[int, None] = {}
        self._voids: dict[int, dict[str, Any]] = {}
        self._verdicts: dict[Identity, dict[str, Any]] = {}
        self._outbox: list[dict[str, Any]] = []
        self._linked = False
        """Whether what goes into the outbox will be sent; what has no answer is told again on the next connection."""
        self._closing = False
        self._why = ""
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
            close_in_forks(end)
        self._thread = threading.Thread(target=self._run, name="lastgood-member", daemon=True)
        self._thread.start()

    # -- beginning -------------------------------------------------------------------------------------------------

    def wait_for_offer(self, after: int, timeout_s: float) -> Offer | None:
        """The offer after that of number `after`, or None once all ranks have read that one and the incarnation begins.

        Raises WaitTimeout, which names the ranks that did not come, and whatever the coordinator refuses with.
        """
        with self._changed:
            found = self._changed.wait_for(
                lambda: (
                    self._error is not None
                    or self._phase == "running"
                    or (self._offer is not None and self._offer.number > after)
                ),
                timeout_s,
            )
            if self._error is not None:
                raise self._error
            if not found:
                what = "the other ranks to join" if after == 0 else "the other ranks to read their checkpoints"
                hint = "; a rank that saves alone needs world_size=1" if after == 0 and not self._link_lost else ""
                raise WaitTimeout(
                    f"rank {self._report.rank} of {self._report.world_size} waited {timeout_s:g} s for {what} at "
                    f"{self.address}: {self._link_lost or self._missing or 'they are all there'}{hint}"
                )
            return None if self._phase == "running" else self._offer

    def answer(self, offer: Offer, why: str | None = None) -> None:
        """Say that this rank has read what was offered; `why` says why it could not."""
        self._tell({"kind": "read", "round": offer.number, "ok": why is None, "why": cut(why or "", 1000)})

    # -- running ---------------------------------------------------------------------------------------------------

    def committed(self, step: int) -> None:
        """This rank's part of `step` is durable."""
        with self._changed:
            self._open[step] = None
            while len(self._open) > _MOST_KEPT:
                del self._open[next(iter(self._open))]
        self._tell({"kind": "committed", "step": step})

    def void(self, step: int, fate: Fate, why: str) -> None:
        """This rank will never commit `step`."""
        message = {"kind": "void", "step": step, "fate": fate.value, "why": cut(why, 500)}
        with self._changed:
            if step in self._voids:
                return
            self._voids[step] = message
            while len(self._voids) > _MOST_KEPT:
                del self._voids[next(iter(self._voids))]
        self._tell(message)

    def judge(self, identity: Identity, ok: bool, reason: str, *, taken_back: bool = False) -> None:
        """Tell all ranks a verdict."""
        message = {"kind": "verdict", "of": identity, "ok": ok, "why": cut(reason, 500), "taken_back": taken_back}
        with self._changed:
            self._verdicts.pop(identity, None)
            self._verdicts[identity] = message
            while len(self._verdicts) > _MOST_KEPT:
                del self._verdicts[next(iter(self._verdicts))]
        self._tell(message)

    def trouble(self) -> tuple[str, float]:
        """Why checkpoints cannot become global now ("" if nothing is known), and for how many seconds already."""
        with self._changed:
            reason = self._link_lost or self._missing
            since = self._trouble_since
        return reason, 0.0 if since is None or not reason else time.monotonic() - since

    def close(self, timeout_s: float, why: str = "") -> None:
        """Leave; `why` says what failed, if something did. Safe to call twice."""
        with self._changed:
            self._why = why
            self._closing = True
        self._nudge()
        self._thread.join(timeout_s)

    # -- the thread ------------------------------------------------------------------------------------------------

    def _tell(self, message: dict[str, Any]) -> None:
        with self._changed:
            if self._linked:
                self._outbox.append(message)
        self._nudge()

    def _nudge(self) -> None:
        with contextlib.suppress(OSError):  # full: it will wake up anyway; or closed
            self._wake.send(b"x")

    def _run(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        try:
            while not self._closing and self._error is None:
                try:
                    channel = open_channel(
                        self.address.host, self.address.port, self.address.token, min(_CONNECT_S, self._silence_s)
                    )
                    try:
                        if self._talk(channel):
                            backoff_s = _FIRST_BACKOFF_S
                    finally:
                        channel.close()
                except LastgoodError as error:
                    self._lost(error)
                self._sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)
        except Exception as error:
            _log.exception("the member of rank %d failed; its saves fail until the job begins again", self._report.rank)
            self._end(CheckpointError(f"the member of rank {self._report.rank} failed: {error}"))
        finally:
            self._wake.close()
            self._woken.close()

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._closing and self._error is None and (left := deadline - time.monotonic()) > 0:
            is_ready(self._woken, select.POLLIN, left)
            self._drain_wake()

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(64):
                pass

    def _talk(self, channel: Channel) -> bool:
        """Until the connection ends, which raises, or this member does. Returns whether the coordinator took it."""
        self._introduce(channel)
        taken = False
        spoke_s = time.monotonic()
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        while True:
            poll.register(channel, select.POLLIN | (select.POLLOUT if channel.unsent else 0))
            poll.poll(self._silence_s / 4 * 1e3)
            self._drain_wake()
            channel.push()
            for message in channel.receive():
                if self._hear(channel, message):
                    taken = True
                elif not taken:
                    return False
                if self._error is not None:
                    return taken
            spoke_s = self._flush(channel, spoke_s, taken=taken)
            if time.monotonic() - channel.heard_s > self._silence_s:
                raise WaitTimeout(f"nothing was heard from {channel.other} for {self._silence_s:g} s")
            if self._closing:
                self._say_farewell(channel)
                return taken

    def _introduce(self, channel: Channel) -> None:
        with self._changed:
            self._linked = True
            if self._phase == "joining":
                self._outbox.clear()
                channel.send(kind="join", **said_report(self._report))
            else:
                # On a new connection all that has no answer yet is told again.
                self._outbox = [*self._voids.values(), *self._verdicts.values()]
                channel.send(kind="resume", rank=self._report.rank, life=self._incarnation_id, open=list(self._open))

    def _flush(self, channel: Channel, spoke_s: float, *, taken: bool = True) -> float:
        """Send what is due, once the coordinator has taken this member, or a sign of life; returns when that was."""
        messages: list[dict[str, Any]] = []
        if taken:
            with self._changed:
                messages, self._outbox = self._outbox, []
        now = time.monotonic()
        if not messages and now - spoke_s > self._silence_s / 4:
            messages = [{"kind": "ping"}]
        for message in messages:
            channel.send(**message)
        return now if messages else spoke_s

    def _say_farewell(self, channel: Channel) -> None:
        with contextlib.suppress(LastgoodError):
            self._flush(channel, time.monotonic())
            channel.send(kind="leave", why=self._why)
            deadline = time.monotonic() + min(1.0, self._silence_s)
            while channel.unsent and time.monotonic() < deadline:
                is_ready(channel, select.POLLOUT, 0.1)
                channel.push()

    def _lost(self, error: LastgoodError) -> None:
        with self._changed:
            self._linked = False
            if self._phase == "running" and not self._link_lost:
                _log.warning("rank %d: %s; trying to reach it again", self._report.rank, error)
            if self._phase == "reading":
                self._end(CheckpointError(f"before all ranks had restored: {error}"))
            self._link_lost = str(error)
            self._note_trouble()

    def _note_trouble(self) -> None:
        if not (self._link_lost or self._missing):
            self._trouble_since = None
        elif self._trouble_since is None:
            self._trouble_since = time.monotonic()
        self._changed.notify_all()

    def _end(self, error: LastgoodError) -> None:
        with self._changed:
            if self._error is None:
                self._error = error
                self._link_lost = str(error)
                self._note_trouble()

    # -- what is heard ---------------------------------------------------------------------------------------------

    def _hear(self, channel: Channel, message: dict[str, Any]) -> bool:
        """Take a message; returns False if the coordinator refused for now."""
        kind = message.get("kind")
        if kind == "refused":
            error = failure_class(message.get("error"))(cut(message.get("why", ""), 4000))
            if message.get("final") is True:
                self._end(error)
                return True
            self._lost(error)
            return False
        if kind == "fate":
            self._fate(message)
        elif kind == "verdict":
            identity = identity_of(message.get("of"))
            ok, why = message.get("ok") is True, cut(message.get("why", ""), 500)
            with self._changed:
                own = self._verdicts.get(identity)
                if own is not None and own["ok"] == ok:
                    del self._verdicts[identity]
            self._heard_verdict(identity, ok, why, message.get("taken_back") is True)
        else:
            with self._changed:
                if kind == "ping":
                    self._missing = cut(message.get("missing", ""), 2000)
                    self.waiting = cut(message.get("waiting", ""), 2000)
                elif kind == "read" and self._phase in ("joining", "reading"):
                    self._offer = _offer_of(message)
                    self._incarnation_id = cut(message.get("life"), 64)
                    self._phase = "reading"
                elif kind == "go" and self._phase == "reading":
                    self._phase = "running"
                elif kind != "resumed":
                    raise CorruptCheckpoint(f"{channel.other} sent {kind!r:.40} in the phase {self._phase}")
                if self._link_lost and self._phase == "running":
                    _log.warning("rank %d has reached %s again", self._report.rank, channel.other)
                self._link_lost = ""
                self._note_trouble()
        return True

    def _fate(self, message: dict[str, Any]) -> None:
        step = whole_number(message, "step")
        try:
            fate, why = Fate(message.get("fate")), cut(message.get("why", ""), 700)
        except ValueError as error:
            raise CorruptCheckpoint(f"the fate of step {step} is {message.get('fate')!r:.40}") from error
        decided = Decided(step, fate, why, fate is Fate.GLOBAL and message.get("chosen") is True)
        with self._changed:
            self._open.pop(step, None)
            self._voids.pop(step, None)
        self._heard_fate(decided)


def _offer_of(message: dict[str, Any]) -> Offer:
    try:
        return Offer(
            number=whole_number(message, "round"),
            job_id=bytes.fromhex(message["job_id"]),
            incarnation=whole_number(message, "incarnation"),
            choice=None if message["choice"] is None else identity_of(message["choice"]),
            common=tuple(identity_of(one) for one in message["common"]),
            bad={identity_of(one): cut(one[2], 100) for one in message["bad"]},
            reached=reached_of(message),
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CorruptCheckpoint(f"an offer that cannot be read: {error!r:.200}") from error
