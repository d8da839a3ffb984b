"""One checkpoint on its way to a store of objects: each rank sends its part, and rank 0 commits."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lastgood.errors import CheckpointError, StorageError
from lastgood.storage import SlotInfo, SlotView
from lastgood.storage.objects.client import ObjectClient
from lastgood.storage.objects.commits import find_base, find_commits, is_committed, retire, spared
from lastgood.storage.objects.format import BadVerdict, CommitName, Part
from lastgood.storage.objects.judged import bad_verdicts
from lastgood.storage.objects.sweep import SweepReport, sweep
from lastgood.storage.objects.upload import PartUpload, commit_parts, told_parts, upload_slot
from lastgood.storage.objects.view import RemoteView

if TYPE_CHECKING:
    from lastgood.storage.verdicts import VerdictBook

__all__ = ["Sent", "Sleep", "await_commit", "await_parts", "commit", "done", "send_part", "tell_verdicts", "tidy"]

_FIRST_PAUSE_S, _MOST_PAUSE_S = 0.1, 5.0
_MOST_NAMED = 8
_TRIES = 3
"""Of a commit."""

Sleep = Callable[[float], None]
"""Waits for so many seconds; it may raise, to end whatever waits."""


@dataclass
class Sent:
    """What one rank has sent of a checkpoint so far."""

    name: CommitName
    upload: PartUpload | None = None
    """None: it was committed before."""
    part: Part | None = None
    seconds: float = 0.0

    @property
    def sent_bytes(self) -> int:
        """Of the stream, by this upload."""
        return 0 if self.upload is None else self.upload.sent_bytes

    @property
    def kept_bytes(self) -> int:
        """Of the stream, that were there already."""
        return 0 if self.upload is None else self.upload.kept_bytes


def send_part(
    client: ObjectClient,
    view: SlotView,
    info: SlotInfo,
    sent: Sent,
    *,
    mbps: float | None = None,
    threads: int = 1,
    sleep: Sleep = time.sleep,
) -> None:
    """Send the part that a slot holds, and note in `sent` how far it is; the slot stays meanwhile.

    Nothing is sent if the checkpoint is committed already. `mbps` (10**6 bits per second) bounds the rate. Raises
    StorageError, CorruptCheckpoint (the slot was reused, or is damaged), CheckpointError (a sweep gave it up), and what
    `sleep` raises.
    """
    began_s = time.monotonic()
    if is_committed(client, sent.name):
        return
    base = find_base(client, info.record.rank, info.record.job_id)
    upload = sent.upload = PartUpload(client, info.record, base=base)

    def pace(_: int) -> None:
        due_s = 0.0 if mbps is None else upload.sent_bytes * 8 / (mbps * 1e6)
        sleep(max(0.0, due_s - (time.monotonic() - began_s)))

    with view.hold(info):
        sent.part = upload_slot(upload, view, info, threads=threads, pace=pace)
    sent.seconds = time.monotonic() - began_s


def await_parts(
    client: ObjectClient, sent: Sent, wait_s: float, sleep: Sleep, trouble: Callable[[], str]
) -> list[Part]:
    """On rank 0: the parts of all ranks, once they are there.

    Raises CheckpointError, naming ranks whose parts are not there, or at once if this one cannot be committed any more;
    MismatchError if a second copy of the job sends there.
    """
    upload, part = sent.upload, sent.part
    assert upload is not None and part is not None
    deadline, pause_s = time.monotonic() + wait_s, _FIRST_PAUSE_S
    found = {0: part}
    while True:
        if upload.world_size > 1:
            found = told_parts(client, sent.name, upload.world_size, found)
        missing = [rank for rank in range(upload.world_size) if rank not in found]
        if not missing:
            return [found[rank] for rank in range(upload.world_size)]
        upload.refuse_given_up()
        if time.monotonic() >= deadline:
            named = ", ".join(map(str, missing[:_MOST_NAMED])) + (" and others" if missing[_MOST_NAMED:] else "")
            why = trouble()
            raise CheckpointError(
                f"{client.place}: step {sent.name.step} is not committed: waited {wait_s:.0f} s for the part of rank "
                f"{named}" + (f"; {why}" if why else "")
            )
        upload.beat()
        sleep(pause_s)
        pause_s = min(2 * pause_s, _MOST_PAUSE_S)


def await_commit(client: ObjectClient, sent: Sent, wait_s: float, sleep: Sleep, gone_on: Callable[[], bool]) -> None:
    """On other ranks: until rank 0 has committed. Raises CheckpointError after `wait_s`, or if rank 0 has `gone_on`."""
    deadline, pause_s = time.monotonic() + wait_s, _FIRST_PAUSE_S
    while True:
        over = gone_on() or time.monotonic() >= deadline
        if is_committed(client, sent.name):
            return
        if over:
            raise CheckpointError(f"{client.place}: rank 0 has not committed step {sent.name.step}; its log says why")
        if sent.upload is not None:
            sent.upload.beat()
        sleep(pause_s)
        pause_s = min(2 * pause_s, _MOST_PAUSE_S)


def commit(sent: Sent, parts: list[Part], sleep: Sleep) -> None:
    """On rank 0: make the checkpoint, again if the answer is lost. Raises as `commit_parts` does."""
    assert sent.upload is not None
    for attempt in range(_TRIES):
        try:
            commit_parts(sent.upload, parts)
        except StorageError:
            if attempt == _TRIES - 1:
                raise
            sleep(_FIRST_PAUSE_S)
        else:
            return


def done(sent: Sent) -> None:
    """Take this rank's note away. A sweep does it, if this cannot."""
    if sent.upload is not None:
        with contextlib.suppress(CheckpointError):
            sent.upload.done()


def tidy(client: ObjectClient, job_id: bytes, keep: int, book: VerdictBook, *, orphans: bool) -> SweepReport:
    """Take away all but the newest `keep` checkpoints and the newest good one, and remove what nobody needs any more.

    With `orphans` also what dead uploads left. The verdicts of rank 0 (`book`) are told. Raises as `sweep` does.
    """
    found = find_commits(client, job_id)
    stays = spared(found, keep, tell_verdicts(client, found, book))
    for name in found:
        if name not in stays:
            retire(client, name)
    return sweep(client, orphans=orphans)


def tell_verdicts(client: ObjectClient, found: Collection[CommitName], book: VerdictBook) -> set[CommitName]:
    """Bring rank 0's verdicts to where its checkpoints are. Returns those of `found` that are bad by now.

    What the book says counts; where it knows nothing, as on a new disk, what was told before stays. What cannot be read
    is not good either. May be killed and repeated. Raises StorageError.
    """
    view, told, bad = RemoteView(client), bad_verdicts(client, found), set()
    for name in found:
        try:
            verdict = book.verdicts.get(view.look(name).sequence)
        except StorageError:
            raise
        except CheckpointError:
            bad.add(name)
            continue
        if verdict is None or verdict.step != name.step:
            bad.update({name} & set(told))
        elif not verdict.ok:
            bad.add(name)
            if told.get(name) != verdict.reason:
                client.put(name.verdict_key, BadVerdict(name, verdict.reason).encode())
        elif name in told:
            client.delete([name.verdict_key])
    return bad
