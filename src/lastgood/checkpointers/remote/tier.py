"""Every M-th checkpoint of a training, sent in the background to a place that outlives its machine."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from lastgood.checkpointers.remote.sending import (
    Sent,
    await_commit,
    await_parts,
    commit,
    done,
    send_part,
    tell_verdicts,
    tidy,
)
from lastgood.checkpointers.remote.status import RemoteStatus, Which, read_status, write_status
from lastgood.checkpointers.slots.follower import Follower
from lastgood.errors import CheckpointError, ConfigError, LastgoodError, StorageError
from lastgood.files import PRIVATE
from lastgood.storage import SlotInfo, SlotView
from lastgood.storage.objects.client import ObjectClient
from lastgood.storage.objects.commits import find_commits
from lastgood.storage.objects.format import CommitName
from lastgood.storage.objects.opening import ObjectPlace
from lastgood.units import format_bytes, format_seconds

__all__ = ["RemoteTier"]

_log = logging.getLogger("lastgood")

_SLOWER = 3.0
"""So many times as long as rank 0 took for its own part, it waits for those of others, and a while beyond."""
_COMMIT_S = 3600.0
"""How long another rank waits for rank 0's commit; it stops as soon as rank 0 goes on to another checkpoint."""
_PROMISE_S = 60.0
"""From rank 0's choice until that checkpoint is offered on rank 0 itself, or never will be."""
_ORPHANS_S = 86400.0
"""Between two sweeps that list all segments."""


class RemoteTier(Follower):
    """Sends every `every`-th checkpoint to `place`, and keeps the newest `keep` there, and the newest good one.

    Training never waits for it, and never sees an error of it. The checkpoint that is sent keeps its slot meanwhile.
    What cannot be sent (the place is away, or full) is given up after the retries of one request; the next one that is
    due is tried again. What did not change since the newest one there is not sent again. What a process was sending
    when it ended, the next one goes on with, as long as its slot holds it (`resume`). Bad verdicts are told there
    (`judged`), since a new machine has no others.

    Of several ranks, each sends its part of the same checkpoint, and rank 0 commits. Rank 0 chooses which (`choose`),
    only while it sends none, and the ranks' agreement tells all of them with that checkpoint's fate. A part that does
    not come in time ends that checkpoint there, and names the rank; it is sent no more, and the next one is.

    Clients are made for each checkpoint in the follower's own thread, so a forked process has none.

    Args:
        place: where to.
        directory: of this rank's slots, for `status`.
        every, keep: at least 1, or ConfigError is raised.
        mbps: what is sent at most, in 10**6 bits per second.
        world: rank, and number of ranks.
        patience_s: for other ranks, beyond three times as long as the own part took.
        trouble: what is known of ranks that are missing, for messages.
        mode: of the status file.
    """

    name: ClassVar[str] = "lastgood-remote"
    done_word: ClassVar[str] = "sent"
    advice: ClassVar[str] = "send fewer (remote_every), or allow more (remote_mbps)"

    def __init__(
        self,
        place: ObjectPlace,
        directory: Path,
        *,
        every: int,
        keep: int,
        mbps: float | None = None,
        world: tuple[int, int] = (0, 1),
        patience_s: float = 30.0,
        trouble: Callable[[], str] = str,
        mode: int = PRIVATE,
    ) -> None:
        if place.needs is not None:
            raise ConfigError(place.needs)
        super().__init__(place, every)
        self.objects = place
        self.directory = directory
        self.keep = keep
        self.trouble = trouble
        self._mbps = mbps
        self._rank, self._world_size = world
        self._patience_s = patience_s
        self._mode = mode
        self._status = read_status(directory) or RemoteStatus()
        if self._status.place != str(place):
            self._status = RemoteStatus(str(place))
        if self._status.committed is not None:
            self._last_due = self._status.committed.sequence
        self._replaced_before = self._status.replaced
        self._sent_bytes = self._kept_bytes = 0
        self._newest: Which | None = None
        self._durable_s: dict[int, float] = {}
        """When checkpoints that may be sent were durable, by sequence."""
        self._promised_s: float | None = None
        self._put_off = False
        self._swept_s: float | None = None
        self._judged: SlotView | None = None
        """Whose verdicts have changed since they were told."""

    # -- for the checkpointer ----------------------------------------------------------------------------------------

    def resume(self, view: SlotView, held: Sequence[SlotInfo]) -> None:
        """A new incarnation begins with these checkpoints, newest first: go on with what the last one was sending."""
        with self._changed:
            if not held or self._closed or not self._is_ours(held[0]):
                return
            self._see(held[0])
            sending = self._status.sending
            left = next((info for info in held if sending is not None and sending.names(info)), None)
            if left is None and self._world_size == 1 and self._is_due(held[0]):
                left = held[0]
            if left is not None:
                self._see(left)
                self._take(view, left)
            if view.book().verdicts:
                self.judged(view)  # the last life may have ended before it was told

    def judged(self, view: SlotView) -> None:
        """A verdict of `view` has changed, and the place hears of it in the background. Never waits or raises."""
        with self._changed:
            if self._rank == 0 and self._status.committed is not None and not self._closed:
                self._judged = view
                try:
                    self._begin()
                except RuntimeError as error:
                    self._log_once("verdicts", f"verdicts are not told: {error}")

    def choose(self, info: SlotInfo) -> bool:
        """On rank 0 of several: whether all ranks shall send this one, which all of them hold. Never raises."""
        with self._changed:
            if not self._is_due(info):
                return False
            promised = self._promised_s is not None and time.monotonic() - self._promised_s < _PROMISE_S
            if self._thread is not None or promised:
                if not self._put_off:
                    self._put_off = True
                    self.counts.replaced += 1
                    self._log_once(
                        "put off",
                        f"the checkpoint of step {info.step} was not {self.done_word}, since an older one was still "
                        f"being sent; {self.advice}",
                    )
                return False
            self._promised_s, self._put_off = time.monotonic(), False
            self._last_due = info.sequence
            return True

    def offer(self, view: SlotView, info: SlotInfo, *, chosen: bool | None = None) -> bool:
        """As `Follower.offer`. Of several ranks, `chosen` says whether rank 0 chose this one."""
        with self._changed:
            if self._closed or not self._is_ours(info):
                return False
            self._see(info)
            due = self._is_due(info) if chosen is None else chosen
            if due:
                self._promised_s = None
                self._take(view, info)
            return due

    def close(self, timeout_s: float = 600.0) -> None:
        """Take no more, and finish what is due; what takes longer is given up. Raises WaitTimeout then."""
        try:
            super().close(timeout_s)
        finally:
            self._stopped.set()

    def facts(self) -> dict[str, Any]:
        """What it has done in this incarnation, and how far the place is behind, for records and people."""
        with self._changed:
            lag = self._status.lag(self._newest)
            newest = self._status.committed
            return {
                "place": str(self.place),
                "every": self.every,
                "sent": self.counts.done,
                "replaced": self.counts.replaced,
                "failed": self.counts.failed,
                "sent_bytes": self._sent_bytes,
                "kept_bytes": self._kept_bytes,
                "step": None if newest is None else newest.step,
                "lag_steps": None if lag is None else lag[0],
                "lag_s": None if lag is None else lag[1],
            }

    # -- inside ------------------------------------------------------------------------------------------------------

    def _is_ours(self, info: SlotInfo) -> bool:
        """Counts and sequences of another job, whose directory this was, mean nothing to this one."""
        job = info.record.job_id.hex()
        if self._status.job_id != job:
            if self._status.job_id:
                self._last_due = 0
                self._replaced_before = 0
                self._status = RemoteStatus(str(self.place))
            self._status.job_id = job
        return True

    def _see(self, info: SlotInfo) -> None:
        """A checkpoint is durable here. Called with `_changed` held."""
        now_s = time.time()
        self._durable_s[info.sequence] = now_s
        while len(self._durable_s) > 64:
            del self._durable_s[min(self._durable_s)]
        if self._newest is None or info.sequence > self._newest.sequence:
            self._newest = Which.of(info, now_s)

    def _go_on(self) -> None:
        super()._go_on()
        if self._rank != 0 and self._gone_on():
            raise CheckpointError(f"{self.place}: rank 0 has gone on to a newer checkpoint")

    def _gone_on(self) -> bool:
        """On other ranks: whether rank 0 has chosen another one, which it does only once this one is over."""
        with self._changed:
            return self._waiting is not None

    def _aside(self) -> Callable[[], None] | None:
        return None if self._judged is None else self._tell

    def _tell(self) -> None:
        with self._changed:
            view, self._judged = self._judged, None
        if view is not None and self._status.job_id:
            with contextlib.closing(self.objects.open()) as client:
                tell_verdicts(client, find_commits(client, bytes.fromhex(self._status.job_id)), view.book())

    def _follow(self, view: SlotView, info: SlotInfo) -> None:
        which = Which.of(info, self._durable_s.get(info.sequence, time.time()))
        self._note(sending=which)
        sent = Sent(CommitName.of(info.record))
        try:
            self._send(view, info, sent)
        except Exception as error:
            self._tally(sent)
            told = f"{type(error).__name__}: {error}" if isinstance(error, LastgoodError) else type(error).__name__
            self._note(failed=1, last_error=told)
            raise
        self._tally(sent)
        newest = self._status.committed
        if newest is None or newest.sequence < which.sequence:
            newest = which
        self._note(sent=1, sending=None, committed=newest, last_error="")
        lag = self._status.lag(self._newest)
        behind = "" if not lag or not lag[0] else f"; {lag[0]} steps, {format_seconds(lag[1])} behind by now"
        _log.info(
            "%s: has step %d: %s sent, %s were there%s",
            self.place,
            info.step,
            format_bytes(sent.sent_bytes),
            format_bytes(sent.kept_bytes),
            behind,
        )

    def _send(self, view: SlotView, info: SlotInfo, sent: Sent) -> None:
        client = self.objects.open()
        try:
            send_part(client, view, info, sent, mbps=self._mbps, sleep=self._sleep)
            if sent.upload is not None and sent.part is not None:
                if self._world_size > 1:
                    sent.upload.tell(sent.part)
                if self._rank == 0:
                    wait_s = self._patience_s + _SLOWER * sent.seconds
                    commit(sent, await_parts(client, sent, wait_s, self._sleep, self.trouble), self._sleep)
                else:
                    ends_s = time.monotonic() + self._patience_s + _SLOWER * sent.seconds
                    await_commit(
                        client,
                        sent,
                        _COMMIT_S,
                        self._stopped_sleep,
                        # At its end rank 0 goes on to nothing else.
                        lambda: self._gone_on() or (self._closed and time.monotonic() > ends_s),
                    )
                done(sent)
            if self._rank == 0:
                self._tidy(client, view, sent.name.job_id)
        finally:
            client.close()

    def _stopped_sleep(self, seconds: float) -> None:
        """As `_sleep`, and shorter if rank 0 has gone on; whoever waits looks at that by itself."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and not self._gone_on():
            self._stopped.wait(min(left, 0.5))
            super()._go_on()

    def _tidy(self, client: ObjectClient, view: SlotView, job_id: bytes) -> None:
        """What fails here is told, and tried again after the next commit: the checkpoint itself is there."""
        now_s = time.monotonic()
        orphans = self._swept_s is None or now_s - self._swept_s > _ORPHANS_S
        with self._changed:
            self._judged = None  # before the book is read
        try:
            tidy(client, job_id, self.keep, view.book(), orphans=orphans)
        except CheckpointError as error:
            with self._changed:
                self._log_once(f"tidy {type(error).__name__}", f"older checkpoints were not removed: {error}")
        else:
            self._swept_s = now_s if orphans else self._swept_s

    def _tally(self, sent: Sent) -> None:
        with self._changed:
            self._sent_bytes += sent.sent_bytes
            self._kept_bytes += sent.kept_bytes
            self._status.sent_bytes += sent.sent_bytes
            self._status.kept_bytes += sent.kept_bytes

    def _note(self, *, sent: int = 0, failed: int = 0, **changed: Any) -> None:
        """Change the status, on the disk too; what that refuses is told."""
        with self._changed:
            status = self._status
            status.sent += sent
            status.failed += failed
            status.replaced = self._replaced_before + self.counts.replaced
            for name, value in changed.items():
                setattr(status, name, value)
            noted = replace(status)
        try:
            write_status(self.directory, noted, self._mode)
        except StorageError as error:
            with self._changed:
                self._log_once("status", f"what was sent is not noted: {error}")
