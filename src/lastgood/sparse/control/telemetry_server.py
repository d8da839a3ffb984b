"""The telemetry server of one training: takes what its ranks measured, and gives them the controller's settings.

A thread for each rank that is connected, and one that chooses; neither waits for the other. Another incarnation of the
training takes the place of one whose ranks are gone, with what was learnt of the workers.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lastgood.errors import ConfigError, LastgoodError, MismatchError
from lastgood.sparse.control.controller import MAX_WORKERS, Controller, ControllerSettings, Setting
from lastgood.sparse.control.objective import LossSurface, NoSurface
from lastgood.sparse.control.telemetry import TELEMETRY_GREETING, Join, Measured, read_join, read_told
from lastgood.wire.frames import Wire, keep_alive, peer_handshake
from lastgood.wire.gate import Gate, Guest

__all__ = ["Chooser", "Choosing", "RankView", "TelemetryServer"]

_TICK_S = 0.2
_MOST_GUESTS = MAX_WORKERS + 32
"""Ranks, and those who look."""
_MOST_UNREAD = 4096
"""Measurements that the controller has not taken yet."""
_NO_SURFACE = NoSurface()


@dataclass(frozen=True)
class Choosing:
    """How settings are chosen."""

    options: dict[str, Any] = field(default_factory=dict)
    """Of `ControllerSettings`, beside what the training says of itself."""
    surface: LossSurface = _NO_SURFACE
    every_iterations: int = 10
    """From one decision to the next, unless links have become slow."""
    most_share: float = 0.005
    """Of one processor that deciding may take: after a decision there is none for its time divided by this."""


class Chooser:
    """The controller of one incarnation. For one thread."""

    def __init__(self, choosing: Choosing, join: Join, before: Chooser | None = None) -> None:
        self._choosing, self._about = choosing, join
        self._learnt = None if before is None or before._controller is None else before._controller.state_dict()
        self._controller: Controller | None = None
        self._first: dict[int, Measured] = {}
        self._decided_at = -1
        self._not_before = 0.0
        self.decisions = 0
        self.cpu_s = 0.0
        """Spent on them."""
        self.trouble: str | None = None
        """Why the last decision could not be made."""

    def observe(self, measured: Measured) -> None:
        """Of any rank. The batch that is kept is that of all ranks' first iterations."""
        if self._controller is None:
            self._first.setdefault(measured.worker, measured)
            if len(self._first) == self._about.ranks:
                self._controller = self._made(sum(one.samples for one in self._first.values()))
                for one in self._first.values():
                    self._controller.observe(one)
        else:
            self._controller.observe(measured)

    def _made(self, samples: int) -> Controller:
        about, options = self._about, dict(self._choosing.options)
        options["least_compression"] = max(about.least_compression, options.get("least_compression", 0.0))
        settings = ControllerSettings(
            elements=about.elements,
            samples=samples,
            value_bytes=about.value_bytes,
            overlap=1.0 if about.staleness else 0.5,
            # Layers that normalise over a batch need two samples of each worker.
            **{"least_worker_samples": max(1, min(2, samples // about.ranks)), "starts": 4, **options},
        )
        controller = Controller(settings, about.ranks, self._choosing.surface)
        if self._learnt is not None and len(self._learnt["workers"]) == about.ranks:
            # Its iterations begin again, from a checkpoint.
            workers = [{**one, "newest": -1} for one in self._learnt["workers"]]
            controller.load_state_dict({"current": None, "workers": workers})
        return controller

    def consider(self, now_s: float) -> Setting | None:
        """A new setting, if it is time to decide, and one is better. `now_s` is any clock that does not go back."""
        controller = self._controller
        if controller is None or now_s < self._not_before:
            return None
        newest = controller.newest_iteration
        waited = newest - self._decided_at
        if waited < 1 or (waited < self._choosing.every_iterations and not controller.urgent):
            return None
        self._decided_at = newest
        began_s = time.thread_time()
        try:
            found = controller.decide()
            self.trouble = None
        except ConfigError as error:
            found, self.trouble = None, str(error)
        took_s = time.thread_time() - began_s
        self.decisions += 1
        self.cpu_s += took_s
        self._not_before = now_s + took_s / self._choosing.most_share
        return found

    def bits_per_s(self, rank: int) -> float | None:
        """The estimate of a rank's link; None before it can be."""
        return None if self._controller is None else self._controller.bits_per_s(rank)

    def most_samples(self, rank: int) -> int | None:
        """That a rank's memory takes, as far as it was measured."""
        return None if self._controller is None else self._controller.most_samples(rank)


@dataclass
class RankView:
    """What is known of one rank."""

    join: Join
    wire: Wire | None
    """None: it is not connected now."""
    last: Measured | None = None
    told_at_s: float = 0.0
    """Of time.monotonic."""
    told: int = 0
    forgotten: int = 0
    sent_bytes: int = 0
    samples: int = 0
    compute_s: float = 0.0
    waited_s: float = 0.0
    """The four of all iterations that were told."""
    bits_per_s: float | None = None
    most_samples: int | None = None


class _Job:
    def __init__(self, join: Join, chooser: Chooser | None) -> None:
        self.about = join
        self.ranks: dict[int, RankView] = {}
        self.chooser = chooser
        self.setting: Setting | None = None
        self.unread: deque[Measured] = deque(maxlen=_MOST_UNREAD)


class TelemetryServer:
    """Serves at `listener`, which it closes. `choosing` None: it tells ranks nothing. `say` takes lines for a log.

    `run` until `stop`, in a thread of the caller's or by `start` in one of its own.
    """

    def __init__(
        self,
        listener: socket.socket,
        token: bytes,
        choosing: Choosing | None,
        say: Callable[[str], object],
        *,
        timeout_s: float = 10.0,
    ) -> None:
        self._listener, self._token, self._choosing = listener, token, choosing
        self._say, self._timeout_s = say, timeout_s
        self._ending = threading.Event()
        self._changed = threading.Condition()
        self._job: _Job | None = None
        self._guests = 0
        self._thread: threading.Thread | None = None
        self._chooses = threading.Thread(target=self._choose_all, name="lastgood-controller", daemon=True)

    def start(self) -> None:
        """Run in a thread."""
        self._thread = threading.Thread(target=self.run, name="lastgood-telemetry-server", daemon=True)
        self._thread.start()

    def run(self) -> None:
        """Take connections until `stop`."""
        self._chooses.start()
        try:
            with Gate(self._listener, self._handshake, "telemetry", self._say) as gate:
                while not self._ending.is_set():
                    for guest in gate.step(_TICK_S):
                        self._begin(gate, guest)
        finally:
            self.stop()

    def stop(self) -> None:
        """End, for any thread or a signal's handler. Connections end within a moment."""
        self._ending.set()

    def close(self) -> None:
        """`stop`, and wait for the threads. Safe to call twice."""
        self.stop()
        for thread in (self._thread, self._chooses):
            if thread is not None and thread.ident is not None:
                thread.join(self._timeout_s)

    # -- who connects --------------------------------------------------------------------------------------------------

    def _handshake(self, other: str) -> Any:
        return peer_handshake(other, self._token, TELEMETRY_GREETING)

    def _begin(self, gate: Gate[int], guest: Guest[int]) -> None:
        with self._changed:
            if self._guests >= _MOST_GUESTS:
                gate.lines(f"{guest.other}: {_MOST_GUESTS} connections are there already")
                guest.connection.close()
                return
            self._guests += 1
        if gate.serve_in_thread(guest, self._serve) is None:
            with self._changed:
                self._guests -= 1

    def _serve(self, guest: Guest[int]) -> None:
        try:
            keep_alive(guest.connection)
            wire = Wire(guest.connection, guest.other, self._timeout_s)
            content = wire.receive_message("who it is")
            if content.get("look") is True:
                wire.send_message(ok=True, **self.view())
                return
            with self._entered(content, wire) as (job, rank):
                wire.send_message(ok=True, setting=_dumped(job.setting))
                while not self._ending.is_set():
                    if not wire.wait_readable(_TICK_S):
                        continue
                    if wire.ended():
                        return
                    measured, forgotten = read_told(wire.receive_message("measurements"), rank.join, wire.other)
                    wire.send_message(ok=True, setting=_dumped(self._take(job, rank, measured, forgotten)))
        finally:
            with self._changed:
                self._guests -= 1

    @contextmanager
    def _entered(self, content: dict[str, Any], wire: Wire) -> Iterator[tuple[_Job, RankView]]:
        try:
            join = read_join(content, wire.other)
            job, rank = self._enter(join, wire)
        except LastgoodError as error:
            wire.send_message(ok=False, why=str(error)[:300])
            raise
        try:
            yield job, rank
        finally:
            with self._changed:
                if rank.wire is wire:
                    rank.wire = None

    def _enter(self, join: Join, wire: Wire) -> tuple[_Job, RankView]:
        with self._changed:
            job = self._job
            if job is None or job.about.job != join.job:
                if job is not None and any(one.wire is not None for one in job.ranks.values()):
                    raise MismatchError(f"ranks of another training of {job.about.ranks} ranks are connected")
                job = self._job = _Job(join, self._made_chooser(join, job))
            about = job.about
            for name in ("ranks", "elements", "staleness", "least_compression"):
                if getattr(about, name) != getattr(join, name):
                    raise MismatchError(
                        f"{name} is {getattr(join, name)} on rank {join.rank}, and {getattr(about, name)} on rank "
                        f"{about.rank}"
                    )
            rank = job.ranks.get(join.rank)
            if rank is None:
                rank = job.ranks[join.rank] = RankView(join, None)
            elif rank.wire is not None:
                rank.wire.abort()  # it has connected again, and its old connection did not end yet
            rank.join, rank.wire = join, wire
            return job, rank

    def _made_chooser(self, join: Join, before: _Job | None) -> Chooser | None:
        learnt = None if before is None else before.chooser
        return None if self._choosing is None else Chooser(self._choosing, join, learnt)

    # -- what they tell ------------------------------------------------------------------------------------------------

    def _take(self, job: _Job, rank: RankView, measured: tuple[Measured, ...], forgotten: int) -> Setting | None:
        """Keep it; returns the setting that this rank should have heard of."""
        with self._changed:
            rank.last, rank.told_at_s, rank.forgotten = measured[-1], time.monotonic(), forgotten
            for one in measured:
                rank.told += 1
                rank.sent_bytes += one.sent_bytes
                rank.samples += one.samples
                rank.compute_s += one.compute_s
                rank.waited_s += one.waited_s
            if job.chooser is not None:
                job.unread.extend(measured)
                self._changed.notify_all()
            setting = job.setting
        return setting if setting is not None and setting.number > measured[-1].setting_number else None

    def _choose_all(self) -> None:
        while not self._ending.is_set():
            with self._changed:
                self._changed.wait(_TICK_S)
                job = self._job
                if job is None or job.chooser is None or not job.unread:
                    continue
                unread = list(job.unread)
                job.unread.clear()
            self._choose(job, job.chooser, unread)

    def _choose(self, job: _Job, chooser: Chooser, unread: list[Measured]) -> None:
        trouble = chooser.trouble
        try:
            for one in unread:
                chooser.observe(one)
            found = chooser.consider(time.monotonic())
        except Exception as error:  # settings that cannot be, say: ranks keep what they have
            self._say(f"controller: {error or repr(error)}; it chooses nothing more for this training")
            with self._changed:
                job.chooser = None
            return
        if chooser.trouble not in (None, trouble):
            self._say(f"controller: {chooser.trouble}")
        with self._changed:
            job.setting = found or job.setting
            for number, rank in job.ranks.items():
                rank.bits_per_s, rank.most_samples = chooser.bits_per_s(number), chooser.most_samples(number)
        if found is not None:
            sizes = ", ".join(map(str, found.samples))
            self._say(f"controller: setting {found.number}: batches of {sizes}, compression {found.compression:g}")

    # -- what is seen --------------------------------------------------------------------------------------------------

    def view(self) -> dict[str, Any]:
        """How the training stands, in values of JSON."""
        now = time.monotonic()
        with self._changed:
            job = self._job
            if job is None:
                return {"job": None, "setting": None, "controller": None, "ranks": []}
            chooser = job.chooser
            return {
                "job": job.about.job,
                "setting": _dumped(job.setting),
                "controller": None
                if chooser is None
                else {"decisions": chooser.decisions, "cpu_s": chooser.cpu_s, "trouble": chooser.trouble},
                "ranks": [_view(number, job.ranks[number], now) for number in sorted(job.ranks)],
            }


def _view(number: int, rank: RankView, now_s: float) -> dict[str, Any]:
    return {
        "rank": number,
        "host": rank.join.host,
        "connected": rank.wire is not None,
        "silent_s": None if rank.last is None else round(now_s - rank.told_at_s, 3),
        "told_iterations": rank.told,
        "forgotten_iterations": rank.forgotten,
        "samples": rank.samples,
        "sent_bytes": rank.sent_bytes,
        "compute_s": rank.compute_s,
        "waited_s": rank.waited_s,
        "link_bits_per_s": rank.bits_per_s,
        "most_samples": rank.most_samples,
        "last": None if rank.last is None else rank.last.model_dump(),
    }


def _dumped(setting: Setting | None) -> dict[str, Any] | None:
    return None if setting is None else setting.model_dump(mode="json")
