"""`lastgood verify`: read every checkpoint of a directory, bucket or file of DeepSpeed's; say what a restore does."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lastgood.cli._output import Progress, console, emit_json, emit_table
from lastgood.cli._place import EndpointUrl, Profile, Region, s3_options
from lastgood.cli.inspect import Directory, held_by_all, listed, none_here, noted, of_step
from lastgood.errors import CheckpointError, CorruptCheckpoint, MismatchError, NoCheckpoint, StorageError
from lastgood.units import GIB, MIB, format_bytes

if TYPE_CHECKING:
    from lastgood.checkpointers.ranks.opened import OpenedJob
    from lastgood.storage import SlotInfo, SlotStatus, SlotView
    from lastgood.storage.standalone_slot import StandaloneSlots

__all__ = ["verify"]

_WINDOW_BYTES = 256 * MIB
"""Read between two looks at the progress."""


def verify(
    directory: Directory,
    step: Annotated[int | None, typer.Option(help="Only checkpoints of this step.", show_default="all")] = None,
    threads: Annotated[int, typer.Option(min=1, max=64, help="Threads that read.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results to stdout as JSON.")] = False,
    region: Region = None,
    endpoint_url: EndpointUrl = None,
    profile: Profile = None,
) -> None:
    """Read every complete checkpoint and check all that a restore checks; exit 1 if one would be refused.

    What a killed process left unfinished is no damage, nor is a slot that a training overwrites meanwhile.
    """
    from lastgood.checkpointers.ranks.opened import open_job
    from lastgood.storage.standalone_slot import look_at_standalone_slots

    opened = open_job(directory, s3_options(directory, region, endpoint_url, profile))
    ranks = opened.several
    standalone = None if ranks or opened.remote else look_at_standalone_slots(Path(directory))
    seen = console.is_terminal and not as_json and opened.remote is None
    total = _bytes_to_read(opened, standalone, step) if seen else 0
    with Progress("verify", total, shown=seen) as progress:
        if standalone is not None:
            looked = [_verify_standalone(standalone, step, threads, progress)]
        else:
            looked = [_verify(opened, rank, step, threads, progress) for rank in opened.views]
    found = [one for one, _ in looked]
    job = _verify_job(opened, step, found) if ranks else {}
    if as_json:
        emit_json({"directory": str(opened.place), "ranks": found, **job} if ranks else found[0])
    else:
        for rank, one in zip(opened.views, found, strict=True):
            _show(opened.where(rank), one)
        _show_job(job)
    if job.get("trouble") or any(one["trouble"] or any(slot["damaged"] for slot in one["slots"]) for one in found):
        raise typer.Exit(1)
    for rank, (one, steps) in zip(opened.views, looked, strict=True):
        if not one["slots"] and step is None:
            raise NoCheckpoint(none_here(opened, rank))
        if not any(slot["result"] == "whole" for slot in one["slots"]):
            asked = "complete checkpoint" if step is None else f"complete checkpoint of step {step}"
            raise NoCheckpoint(f"{opened.where(rank)}: no {asked}; complete ones are there of steps {steps or 'none'}")


def _bytes_to_read(job: OpenedJob, standalone: StandaloneSlots | None, step: int | None) -> int:
    """For the progress alone; what cannot be looked at is said later."""
    from lastgood.checkpointers.slots.contents import look_at_slots

    if standalone is None:
        found = [status for view in job.views.values() for status in look_at_slots(view)[0]]
    else:
        found = list(standalone.statuses)
    return sum(status.info.stream_bytes for status in of_step(found, step) if status.info is not None)


def _verify(
    job: OpenedJob, rank: int, step: int | None, threads: int, progress: Progress
) -> tuple[dict[str, Any], list[int]]:
    """What became of the slots of one rank's part, and the steps that looked complete before any was read."""
    from lastgood.checkpointers.recovery.restorable import step_to_restore
    from lastgood.checkpointers.slots.contents import look_at_slots

    view = job.views[rank]
    statuses, troubles = look_at_slots(view)
    asked = of_step(statuses, step)
    results = [_check(view, status, threads, progress) for status in asked]
    directory = str(job.place) if job.remote else job.where(rank)
    found: dict[str, Any] = {"directory": directory, "trouble": troubles, "slots": results}
    with noted(troubles):
        commit = view.global_commit()
        if commit is not None:
            found["global"] = commit._asdict()
    whole = {status.path for status, slot in zip(asked, results, strict=True) if slot["result"] == "whole"}
    if step is None and whole and not troubles:
        with noted(troubles):
            found["restore"] = step_to_restore(view, whole)
    return found, sorted({status.info.step for status in statuses if status.info is not None})


def _verify_job(job: OpenedJob, step: int | None, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """How the parts of a job's ranks fit together, and the step that a restore takes; after each was verified."""
    from lastgood.checkpointers.ranks.parts import RankParts

    whole = {
        (rank, slot["file"])
        for rank, one in zip(job.views, ranks, strict=True)
        for slot in one["slots"]
        if slot["result"] == "whole"
    }
    found: dict[str, Any] = {"whole": [], "trouble": []}
    try:
        checkpoints = job.checkpoints()
    except CheckpointError as error:
        found["trouble"].append(str(error))
        return found
    for checkpoint in checkpoints:
        if step is not None and checkpoint.step != step:
            continue
        try:
            views, infos = checkpoint.views, checkpoint.infos
        except CheckpointError:
            continue  # said already, of each rank
        if any((rank, info.path.name) not in whole for rank, info in enumerate(infos)):
            continue  # said already, or written since
        try:
            RankParts(checkpoint).check_together()
        except CheckpointError as error:
            if not any(view.why_gone(info) for view, info in zip(views, infos, strict=True)):
                found["trouble"].append(f"cannot be put together: {error}")
            continue
        found["whole"].append(
            {"step": checkpoint.step, "incarnation": checkpoint.incarnation, "bad": checkpoint.bad is not None}
        )
    good = [one for one in found["whole"] if step is not None or not one["bad"]]
    if good:
        found["restore"] = good[0]["step"]
    elif not found["trouble"]:
        found["trouble"].append(f"{job.place}: no good checkpoint that all ranks hold")
    return found


def _show_job(job: dict[str, Any]) -> None:
    if job:
        console.print(f"complete on all ranks: {listed(job['whole'])}")
        for trouble in job["trouble"]:
            console.print(trouble)


def _verify_standalone(
    standalone: StandaloneSlots, step: int | None, threads: int, progress: Progress
) -> tuple[dict[str, Any], list[int]]:
    """As `_verify`, for files that stand alone."""
    from lastgood.storage import SlotView
    from lastgood.storage.standalone_slot import ROOT

    results = [
        _check(SlotView(status.path.parent), status, threads, progress, ROOT)
        for status in of_step(standalone.statuses, step)
    ]
    found = {
        "directory": str(standalone.place),
        "trouble": standalone.troubles,
        "slots": results,
        "not_checked": [path.name for path in standalone.others],
    }
    return found, sorted({status.info.step for status in standalone.statuses if status.info is not None})


def _show(where: str, found: dict[str, Any]) -> None:
    rows = (
        (
            slot["file"],
            slot["step"],
            slot["result"],
            None if slot["stream_bytes"] is None else format_bytes(slot["stream_bytes"]),
            None if slot["bytes_per_s"] is None else f"{slot['bytes_per_s'] / GIB:.3g}",
            slot["detail"],
        )
        for slot in found["slots"]
    )
    emit_table(f"{where}{held_by_all(found)}", ("file", "step", "result", "size", "GiB/s", "detail"), rows)
    if found.get("not_checked"):
        console.print(f"not in Lastgood's format, not checked: {', '.join(found['not_checked'])}")
    if "restore" in found:
        console.print(f"a restore takes step {found['restore']}")
    for trouble in found["trouble"]:
        console.print(trouble)


def _read(view: SlotView, info: SlotInfo, threads: int, progress: Progress) -> None:
    """Read and check the stream, of a large one in windows of complete chunks. Raises as `SlotView.verify`."""
    from lastgood.checkpointers.slots.contents import read_timeout_s

    chunk = info.record.chunk_bytes
    window = max(1, _WINDOW_BYTES // chunk) * chunk
    if view.remote or info.stream_bytes <= window:
        view.verify(info, threads, read_timeout_s(info.stream_bytes))
        progress.advance(info.stream_bytes)
        return
    for begin in range(0, info.stream_bytes, window):
        nbytes = min(window, info.stream_bytes - begin)
        view.read_into(info, [(0, nbytes)], threads, offset=begin, timeout_s=read_timeout_s(nbytes))
        progress.advance(nbytes)


def _check(
    view: SlotView, status: SlotStatus, threads: int, progress: Progress, root: str | None = None
) -> dict[str, Any]:
    """What became of one slot, for people and programs. `root`: the one entry that it must hold."""
    from lastgood.checkpointers.recovery.restorable import check_content
    from lastgood.storage import SlotState
    from lastgood.storage.format import RecordKind

    result, detail, damaged, bytes_per_s = status.state.value, status.detail, False, None
    if status.info is not None:
        started = time.perf_counter()
        try:
            _read(view, status.info, threads, progress)
            read_s = time.perf_counter() - started  # the look at the content imports torch
            check_content(view, status.info, root)
        except (CorruptCheckpoint, MismatchError, StorageError) as error:
            gone = view.why_gone(status.info)
            if gone:
                result, detail = "removed meanwhile" if view.remote else "overwritten meanwhile", gone
            else:
                result = "refused" if isinstance(error, MismatchError) else "damaged"
                detail, damaged = str(error), True
        else:
            bytes_per_s = status.info.stream_bytes / read_s
    elif status.state is SlotState.TORN:
        unfinished = status.record is not None and status.record.kind is RecordKind.WRITING
        # A look, too, can fall into the moment in which a training takes a slot.
        again = None if unfinished else _look_again(view, status)
        if unfinished:
            result = "unfinished"
        elif again is not None:
            result, detail = "overwritten meanwhile", f"now {again}"
        else:
            result, damaged = "damaged", True
    elif status.state is SlotState.FOREIGN:
        result, damaged = "foreign", True
    return {
        "file": status.path.name,
        "step": status.step,
        "sequence": None if status.record is None else status.record.sequence,
        "result": result,
        "damaged": damaged,
        "stream_bytes": None if status.record is None else status.record.stream_bytes,
        "bytes_per_s": bytes_per_s,
        "detail": detail,
    }


def _look_again(view: SlotView, status: SlotStatus) -> str | None:
    """What a slot that looked torn beside a living training is now, if it is no longer torn."""
    from lastgood.checkpointers.slots.contents import look_at_slots
    from lastgood.storage import SlotState

    if not view.held:
        return None
    for other in look_at_slots(view)[0]:
        if other.path == status.path:
            return None if other.state is SlotState.TORN else other.state.value
    return "removed"
