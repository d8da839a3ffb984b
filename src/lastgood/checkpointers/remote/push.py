"""A checkpoint of a job's directory, sent by hand to a store of objects."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lastgood.checkpointers.rank_directory import job_of
from lastgood.checkpointers.ranks.checkpoint import JobCheckpoint
from lastgood.checkpointers.ranks.directories import whole_checkpoints
from lastgood.checkpointers.remote.sending import Sent, commit, done, send_part
from lastgood.errors import CorruptCheckpoint, MismatchError, NoCheckpoint, NoGoodCheckpoint
from lastgood.storage.objects.client import ObjectClient
from lastgood.storage.objects.format import CommitName

__all__ = ["Pushed", "push_job"]

_TRIES = 3
"""A training beside may overwrite what is sent; then there is a newer one."""


@dataclass(frozen=True)
class Pushed:
    """What was sent, of all ranks."""

    name: CommitName
    world_size: int
    sent_bytes: int
    kept_bytes: int
    """That were there already."""
    seconds: float
    was_there: bool
    """It was committed before: nothing was sent."""


def push_job(
    directory: Path | str,
    client: ObjectClient,
    step: int | None = None,
    *,
    mbps: float | None = None,
    threads: int = 4,
    tell: Callable[[str], object] = str,
) -> Pushed:
    """Send the newest good checkpoint that all ranks hold (or that of `step`), and commit it. Every byte is checked.

    `directory` is a job's, of one rank or several, and may be in use. Called again after it failed or was killed, it
    sends only what is missing. `tell` hears of each rank.

    Raises NoCheckpoint, NoGoodCheckpoint, CorruptCheckpoint, StorageError, and MismatchError for one directory of a job
    of several ranks, and for other content under this checkpoint's name.
    """
    tries = 0
    while True:
        tries += 1
        chosen = _choose(directory, step)
        try:
            return _send(chosen, client, mbps, threads, tell)
        except CorruptCheckpoint as error:
            gone = any(view.why_gone(info) for view, info in zip(chosen.views, chosen.infos, strict=True))
            if not gone or step is not None or tries == _TRIES:
                raise
            tell(f"{error}; taking the newest one")


def _choose(directory: Path | str, step: int | None) -> JobCheckpoint:
    job = job_of(directory)
    if job is not None:
        raise MismatchError(f"{directory}: is one rank's part of a job; push {job}, all of it")
    found = whole_checkpoints(directory)
    chosen = next((one for one in found if (one.bad is None if step is None else one.step == step)), None)
    if chosen is None:
        steps = [one.step for one in found] or "none"
        if step is None and found:
            raise NoGoodCheckpoint(f"{directory}: all checkpoints are judged bad; --step names one of {steps}")
        asked = "no complete checkpoint" if step is None else f"no complete checkpoint of step {step}"
        raise NoCheckpoint(f"{directory}: {asked}; steps {steps}")
    ranks = chosen.infos[0].record.world_size
    if ranks != chosen.world_size:
        raise MismatchError(
            f"{directory}: holds {chosen.world_size} of the {ranks} ranks that wrote it; push all of them"
        )
    return chosen


def _send(
    chosen: JobCheckpoint, client: ObjectClient, mbps: float | None, threads: int, tell: Callable[[str], object]
) -> Pushed:
    began_s = time.monotonic()
    name = CommitName(chosen.job_id, chosen.incarnation, chosen.step)
    ranks = []
    for rank, (view, info) in enumerate(zip(chosen.views, chosen.infos, strict=True)):
        sent = Sent(name)
        ranks.append(sent)
        send_part(client, view, info, sent, mbps=mbps, threads=threads)
        if sent.part is None:
            return Pushed(name, chosen.world_size, 0, 0, time.monotonic() - began_s, was_there=True)
        if chosen.world_size > 1:
            tell(f"rank {rank} of {chosen.world_size}: {sent.sent_bytes} bytes sent, {sent.kept_bytes} were there")
    commit(ranks[0], [sent.part for sent in ranks if sent.part is not None], time.sleep)
    for sent in ranks:
        done(sent)
    return Pushed(
        name,
        chosen.world_size,
        sum(sent.sent_bytes for sent in ranks),
        sum(sent.kept_bytes for sent in ranks),
        time.monotonic() - began_s,
        was_there=False,
    )
