"""The coordinator of a job's ranks: one thread of rank 0's process. It decides once for all (`decide`).

An incarnation of the job: every rank *joins* with what it has; the coordinator chooses; every rank *reads*, and if one
cannot, all read the next older one; then they *run*. A running rank whose connection breaks may come back and tell
again what it committed. A process that joins a running incarnation is refused: its ranks begin together.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lastgood.checkpointers.agreement.channel import Channel, coordinator_handshake, whole_number
from lastgood.checkpointers.agreement.decide import Beginning, Decided, Fate, Identity, Report, Tally, begin
from lastgood.checkpointers.agreement.messages import cut, identity_of, report_of, short_reason
from lastgood.errors import CheckpointError, CorruptCheckpoint, LastgoodError, MismatchError, WaitTimeout
from lastgood.wire.gate import Gate, close_in_forks
from lastgood.wire.gate import Guest as Proved

__all__ = ["Coordinator"]

_log = logging.getLogger("lastgood")

_JOIN_S = 10.0
"""From its proof on, for a new connection to say which rank it is."""
_MOST_VERDICTS = 256
_MOST_NAMED = 8


@dataclass(eq=False)
class _Guest:
    """A connection; `rank` once it is known whose."""

    channel: Channel
    since_s: float
    rank: int | None = None


@dataclass(eq=False)
class _Seat:
    """A rank that has joined."""

    report: Report
    guest: _Guest | None
    lost: str = ""
    """Why there is no guest."""
    read: bool = False

    @property
    def name(self) -> str:
        """For messages."""
        return f"rank {self.report.rank} on {self.report.host}"


class Coordinator:
    """Serves one incarnation of a job on a listening socket, which it closes at its end.

    Args:
        listener: bound and listening.
        token: what all ranks know and no foreign process does.
        world_size: ranks that must join.
        silence_s: a rank that says nothing for so long is missing; ranks are told something four times as often.
        choose: asked once of every step that all ranks hold, in their order; what it says is told with the step's fate.
    """

    def __init__(
        self,
        listener: socket.socket,
        token: bytes,
        world_size: int,
        silence_s: float,
        choose: Callable[[int], bool] | None = None,
    ) -> None:
        self._token = token
        self._world_size = world_size
        self._silence_s = silence_s
        self._guests: set[_Guest] = set()
        self._seats: dict[int, _Seat] = {}
        self._phase = "joining"
        self._beginning: Beginning | None = None
        self._candidates: list[Identity | None] = []
        self._unreadable: set[Identity] = set()
        self._round = 0
        self._incarnation_id = secrets.token_hex(16)
        self._tally = Tally(world_size)
        self._choose = choose
        self._chosen = -1
        """The newest step that was chosen."""
        self._job_id = ""
        self._verdicts: dict[Identity, dict[str, Any]] = {}
        self._told_s = 0.0
        self._closing = False
        self._ended = threading.Event()
        self._linger_until = 0.0
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
            close_in_forks(end)
        self._gate: Gate[bool] = Gate(
            listener,
            lambda other: coordinator_handshake(other, token),
            "at the control port of this job's checkpoints",
            _log.warning,
        )
        self._selector.register(self._gate, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="lastgood-coordinator", daemon=True)
        self._thread.start()

    def close(self, linger_s: float) -> None:
        """Serve until the other ranks have left, `linger_s` at most, then end. Raises WaitTimeout."""
        self._linger_until = time.monotonic() + linger_s
        self._closing = True
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        if not self._ended.wait(linger_s + self._silence_s):
            raise WaitTimeout(f"waited {linger_s + self._silence_s:.3g} s for the coordinator to end")

    # -- the loop --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not (self._closing and self._may_end()):
                for key, events in self._selector.select(self._gate.patience(self._silence_s / 4)):
                    if key.fileobj is self._woken:
                        self._drain_wake()
                    elif key.data is not None:
                        self._serve(key.data, events)
                for proved in self._gate.step(0.0):
                    self._welcome(proved)
                self._look_around()
        except Exception:
            _log.exception("the coordinator of the ranks' checkpoints failed; saves fail until the job begins again")
        finally:
            for guest in list(self._guests):
                guest.channel.close()
            for end in (self._gate, self._wake, self._woken):
                end.close()
            self._selector.close()
            self._ended.set()

    def _may_end(self) -> bool:
        others = [seat for rank, seat in self._seats.items() if rank != 0 and seat.guest is not None]
        unsent = any(guest.channel.unsent for guest in self._guests)
        return (not others and not unsent) or time.monotonic() >= self._linger_until

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(64):
                pass

    def _welcome(self, proved: Proved[bool]) -> None:
        try:
            guest = _Guest(Channel(proved.connection, proved.other, proved=True), time.monotonic())
            self._selector.register(guest.channel, selectors.EVENT_READ, guest)
        except Exception as error:  # it has gone again, say: its own end only
            self._gate.lines(f"{proved.other}: {error or repr(error)}")
            proved.connection.close()
            return
        self._guests.add(guest)

    def _serve(self, guest: _Guest, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                guest.channel.push()
            if events & selectors.EVENT_READ:
                for message in guest.channel.receive():
                    self._hear(guest, message)
                    if guest not in self._guests:
                        return
        except Exception as error:  # whatever one connection brings ends that one, and not the ranks' agreement
            known = isinstance(error, LastgoodError)
            if not known or isinstance(error, (MismatchError, CorruptCheckpoint)):
                self._gate.lines(f"{error if known else repr(error)}; refused")
            self._drop(guest, str(error) or repr(error))
        else:
            self._watch(guest)

    def _watch(self, guest: _Guest) -> None:
        if guest in self._guests:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if guest.channel.unsent else 0)
            self._selector.modify(guest.channel, wanted, guest)

    def _drop(self, guest: _Guest, why: str) -> None:
        if guest not in self._guests:
            return
        self._guests.discard(guest)
        self._selector.unregister(guest.channel)
        guest.channel.close()
        seat = None if guest.rank is None else self._seats.get(guest.rank)
        if seat is None or seat.guest is not guest:
            return
        seat.guest = None
        seat.lost = cut(why)
        if self._phase == "joining":
            del self._seats[seat.report.rank]
        elif self._phase == "reading":
            self._refuse_all(CheckpointError(f"{seat.name} was lost before it had restored: {seat.lost}"))
        else:
            self._tell_all_is_well()

    def _send(self, guest: _Guest, **message: Any) -> None:
        if guest not in self._guests:
            return
        try:
            guest.channel.send(**message)
        except CheckpointError as error:
            self._drop(guest, str(error))
        else:
            self._watch(guest)

    def _send_all(self, **message: Any) -> None:
        for seat in list(self._seats.values()):
            if seat.guest is not None:
                self._send(seat.guest, **message)

    def _look_around(self) -> None:
        """Let go of what is silent, and say that this side is not."""
        now = time.monotonic()
        for guest in list(self._guests):
            if guest.rank is None and now - guest.since_s > _JOIN_S:
                self._drop(guest, "it said nothing")
            elif now - guest.channel.heard_s > self._silence_s:
                self._drop(guest, f"nothing was heard from it for {self._silence_s:g} s")
        if now - self._told_s >= self._silence_s / 4:
            self._tell_all_is_well()

    def _tell_all_is_well(self) -> None:
        """Or what is not: which ranks are missing, and for whom the oldest checkpoint waits."""
        self._told_s = time.monotonic()
        waiting = self._tally.waiting()
        self._send_all(
            kind="ping",
            missing=cut(self._missing(), 2000),
            waiting=""
            if waiting is None
            else f"step {waiting[0]} waits for " + ", ".join(self._seats[rank].name for rank in waiting[1]),
        )

    def _missing(self) -> str:
        if self._phase == "joining":
            absent = [rank for rank in range(self._world_size) if rank not in self._seats]
            more = f" and {len(absent) - _MOST_NAMED} more" if len(absent) > _MOST_NAMED else ""
            names = ", ".join(map(str, absent[:_MOST_NAMED]))
            return f"rank{'s' if len(absent) > 1 else ''} {names}{more} did not come" if absent else ""
        lost = [f"{seat.name} is missing ({seat.lost})" for seat in self._seats.values() if seat.guest is None]
        more = f"; and {len(lost) - _MOST_NAMED} more" if len(lost) > _MOST_NAMED else ""
        return "; ".join(lost[:_MOST_NAMED]) + more

    # -- what is said ----------------------------------------------------------------------------------------------

    def _hear(self, guest: _Guest, message: dict[str, Any]) -> None:
        kind = message.get("kind")
        if kind == "ping":
            return
        if guest.rank is None:
            if kind == "join":
                self._join(guest, report_of(message))
            elif kind == "resume":
                self._resume(guest, message)
            else:
                raise CorruptCheckpoint(f"{guest.channel.other} sent {kind!r:.40} before it joined")
        elif kind == "leave":
            self._leave(guest, cut(message.get("why", "")))
        elif self._phase == "reading" and kind == "read":
            self._read(self._seats[guest.rank], message)
        elif self._phase == "running" and kind == "committed":
            self._announce(self._tally.commit(guest.rank, whole_number(message, "step")))
        elif self._phase == "running" and kind == "void":
            self._void(self._seats[guest.rank], message)
        elif self._phase == "running" and kind == "verdict":
            self._verdict(message)
        else:
            raise CorruptCheckpoint(f"{guest.channel.other} sent {kind!r:.40} while the job was {self._phase}")

    def _refuse(self, guest: _Guest, error: LastgoodError, *, final: bool) -> None:
        self._send(guest, kind="refused", error=type(error).__name__, why=cut(error, 4000), final=final)

    def _refuse_all(self, error: LastgoodError) -> None:
        self._phase = "over"
        _log.error("the ranks cannot begin together: %s", error)
        for seat in list(self._seats.values()):
            if seat.guest is not None:
                self._refuse(seat.guest, error, final=True)

    def _join(self, guest: _Guest, report: Report) -> None:
        if report.world_size != self._world_size or report.rank >= self._world_size:
            self._refuse(
                guest,
                MismatchError(
                    f"{report} says that the job has {report.world_size} ranks, and rank 0 that it has "
                    f"{self._world_size}"
                ),
                final=True,
            )
        elif self._phase != "joining":
            # Not final: the old incarnation's processes may be about to end.
            error = CheckpointError(
                f"this incarnation of the job is {self._phase} already; end all its ranks, and start all together"
            )
            self._refuse(guest, error, final=False)
        elif report.rank in self._seats:
            other = self._seats[report.rank].report
            self._refuse(guest, MismatchError(f"{report}: {other} has joined as this rank already"), final=False)
        else:
            guest.rank = report.rank
            self._seats[report.rank] = _Seat(report, guest)
            self._tell_all_is_well()
            if len(self._seats) == self._world_size:
                self._decide()

    def _decide(self) -> None:
        try:
            beginning = begin([seat.report for seat in self._seats.values()])
        except LastgoodError as error:
            self._refuse_all(error)
            return
        for note in beginning.notes:
            _log.warning("%s", note)
        self._beginning = beginning
        self._job_id = beginning.job_id or secrets.token_hex(16)
        self._candidates = list(beginning.candidates) or [None]
        self._phase = "reading"
        self._offer()

    def _offer(self) -> None:
        assert self._beginning is not None
        self._round += 1
        for seat in self._seats.values():
            seat.read = False
        self._send_all(
            kind="read",
            round=self._round,
            life=self._incarnation_id,
            job_id=self._job_id,
            incarnation=self._beginning.incarnation,
            choice=self._candidates[0],
            common=[identity for identity in self._beginning.common if identity not in self._unreadable],
            bad=[[*identity, short_reason(why)] for identity, why in self._beginning.bad.items()],
            reached=self._beginning.reached,
        )

    def _read(self, seat: _Seat, message: dict[str, Any]) -> None:
        if message.get("round") != self._round:
            return  # an answer to what was offered before
        if message.get("ok") is True:
            seat.read = True
            if all(other.read for other in self._seats.values()):
                self._phase = "running"
                self._send_all(kind="go")
            return
        why = f"{seat.name} cannot read it: {cut(message.get('why', ''), 1000)}"
        chosen = self._candidates.pop(0)
        if chosen is not None:
            self._unreadable.add(chosen)
        _log.warning("step %s: %s; all ranks try the checkpoint before it", None if chosen is None else chosen[1], why)
        if not self._candidates:
            self._refuse_all(CorruptCheckpoint(f"no checkpoint can be read on all ranks; of the last, {why}"))
            return
        self._offer()

    def _leave(self, guest: _Guest, why: str) -> None:
        seat = self._seats.get(-1 if guest.rank is None else guest.rank)
        self._drop(guest, f"it failed: {why}" if why else "it has left in order")
        if self._phase == "joining" and seat is not None and seat.report.rank == 0:
            # The coordinator ends with rank 0, so nobody need wait for the others any longer.
            self._refuse_all(CheckpointError(f"{seat.name} gave up: {why}"))

    def _resume(self, guest: _Guest, message: dict[str, Any]) -> None:
        rank = whole_number(message, "rank", self._world_size)
        if self._phase != "running" or message.get("life") != self._incarnation_id:
            error = CheckpointError(
                f"rank {rank} comes from an incarnation of the job that is over; its process must end and begin again"
            )
            self._refuse(guest, error, final=self._phase == "running")
            return
        seat = self._seats[rank]
        if seat.guest is not None:
            self._drop(seat.guest, "it connected again")
        guest.rank, seat.guest, seat.lost = rank, guest, ""
        self._send(guest, kind="resumed")
        # What it may not have heard: what was decided against saves that it has yet to begin, and every verdict.
        for decided in list(self._tally.decided.values()):
            if decided.step > self._tally.newest:
                self._send(guest, **self._said(decided))
        for verdict in self._verdicts.values():
            self._send(guest, **verdict)
        opened = message.get("open")
        for step in opened[:1024] if isinstance(opened, list) else ():
            number = whole_number({"step": step}, "step")
            known = self._tally.fate(number)
            if known is not None:
                self._send(guest, **self._said(known))
            else:
                self._announce(self._tally.commit(rank, number))
        self._tell_all_is_well()

    def _void(self, seat: _Seat, message: dict[str, Any]) -> None:
        fate = Fate.SKIPPED if message.get("fate") == Fate.SKIPPED.value else Fate.FAILED
        why = f"{seat.name}: {cut(message.get('why', ''), 500)}"
        self._announce(self._tally.void(whole_number(message, "step"), fate, why))

    def _announce(self, decided: list[Decided]) -> None:
        for one in decided:
            if one.fate is Fate.GLOBAL and self._choose is not None and self._choose(one.step):
                self._chosen = one.step
            self._send_all(**self._said(one))

    def _said(self, decided: Decided) -> dict[str, Any]:
        said = {"kind": "fate", "step": decided.step, "fate": decided.fate.value, "why": decided.why}
        chosen = decided.fate is Fate.GLOBAL and decided.step == self._chosen
        return {**said, "chosen": True} if chosen else said

    def _verdict(self, message: dict[str, Any]) -> None:
        identity = identity_of(message.get("of"))
        said = {
            "kind": "verdict",
            "of": identity,
            "ok": message.get("ok") is True,
            "why": cut(message.get("why", ""), 500),
            "taken_back": message.get("taken_back") is True,
        }
        self._verdicts.pop(identity, None)
        self._verdicts[identity] = said
        while len(self._verdicts) > _MOST_VERDICTS:
            del self._verdicts[next(iter(self._verdicts))]
        self._send_all(**said)
