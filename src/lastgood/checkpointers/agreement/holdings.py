"""What a rank holds when it joins: the checkpoints on its disk, and those in the place that its job sends them to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lastgood.checkpointers.agreement.decide import Held, Report
from lastgood.errors import LockHeld, MismatchError
from lastgood.storage import SlotStore, VerdictBook
from lastgood.storage.format import RecordKind
from lastgood.storage.objects.reachable import Reachable
from lastgood.storage.reader import SlotState, job_of_slots, newest_first, read_job, refuse_foreign

__all__ = ["on_disk", "with_place"]


def on_disk(report: Report, directory: Path) -> tuple[Report, VerdictBook]:
    """A report with what lies in a rank's directory, and what is known of it beyond its bytes.

    Raises LockHeld, StorageError, MismatchError.
    """
    if not directory.is_dir():
        return report, VerdictBook(directory, kept=False)
    view = SlotStore.peek(directory)
    if view.held:
        raise LockHeld(f"{directory}: another process writes here; it must end first")
    statuses = view.statuses()
    job = read_job(directory) or job_of_slots(statuses)
    refuse_foreign(statuses)
    book = view.book()
    held = tuple(
        Held(
            info.incarnation,
            info.step,
            book.is_bad(info.sequence),
            book.verdicts[info.sequence].reason if book.is_bad(info.sequence) else "",
            book.failed_restarts(info.sequence, info.step),
        )
        for info in newest_first(statuses)
    )
    records = [status.record for status in statuses if status.record is not None]
    torn = [
        status
        for status in statuses
        if status.state is SlotState.TORN and (status.record is None or status.record.kind is RecordKind.COMMITTED)
    ]
    found = view.global_commit()
    report = replace(
        report,
        job_id=None if job is None else job.job_id.hex(),
        highest=max([(0, 0), *((record.incarnation, record.step) for record in records)]),
        held=held,
        damaged=tuple(f"{status.path.name}: {status.detail}" for status in torn),
        mark=None if found is None else (found.incarnation, found.step),
        reached=max(book.reached, -1 if found is None else found.step),
        wrote=None if job is None else (job.rank, job.world_size),
    )
    return report, book


def with_place(report: Report, found: Reachable, book: VerdictBook) -> Report:
    """A report with what the rank can fetch as well; `book` says what its disk knows of that.

    Raises MismatchError if the place is another job's.
    """
    if found.trouble:
        told = f"{found.place} cannot be looked at: {found.trouble}"
        return replace(report, damaged=(told, *report.damaged))
    if found.job_id is None:
        return report
    job_id = found.job_id.hex()
    if report.job_id not in (None, job_id) and (report.mark or report.damaged):
        raise MismatchError(
            f"{report}: its directory belongs to job {report.job_id}, and {found.place} has checkpoints of job "
            f"{job_id}; give each job a place of its own as remote"
        )
    own = {one.identity for one in report.held}
    fetched = []
    for name in found.names:
        if (name.incarnation, name.step) not in own:
            bad = found.bad(book, name)
            reason = "" if bad is None else bad.reason
            restarts = book.failed_restarts(-1, name.step)
            fetched.append(Held(name.incarnation, name.step, bad is not None, reason, restarts))
    held = sorted([*report.held, *fetched], key=lambda one: one.identity, reverse=True)
    damaged = report.damaged
    if held and held[0].identity not in own:
        # So this disk has lost something, or is new: going back to what is there is no mistake.
        damaged = (f"{found.place} has step {held[0].step}, and this disk does not", *damaged)
    return replace(report, job_id=job_id, highest=max(report.highest, found.highest), held=tuple(held), damaged=damaged)
