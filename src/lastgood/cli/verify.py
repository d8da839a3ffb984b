"""`lastgood verify`: read every checkpoint of a directory, or file of DeepSpeed's; say what a restore would do."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lastgood.cli._output import console, emit_json, emit_table
from lastgood.cli.inspect import Directory, held_by_all, listed, noted, of_step
from lastgood.errors import CheckpointError, CorruptCheckpoint, MismatchError, NoCheckpoint, StorageError
from lastgood.units import GIB, format_bytes

if TYPE_CHECKING:
    from lastgood.storage import SlotStatus, SlotView
    from lastgood.storage.standalone_slot import StandaloneSlots

__all__ = ["verify"]


def verify(
    directory: Directory,
    step: Annotated[int | None, typer.Option(help="Only checkpoints of this step.", show_default="all")] = None,
    threads: Annotated[int, typer.Option(min=1, max=64, help="Threads that read.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results to stdout as JSON.")] = False,
) -> None:
    """Read every whole checkpoint and check all that a restore checks; exit 1 if one would be refused.

    What a killed process left unfinished is no damage, nor is a slot that a training overwrites meanwhile.
    """
    from lastgood.checkpointers.rank_directory import rank_directories
    from lastgood.checkpointers.recovery.found_here import words_on_none
    from lastgood.storage.standalone_slot import look_at_standalone_slots

    ranks = rank_directories(directory)
    standalone = None if ranks else look_at_standalone_slots(directory)
    if standalone is not None:
        looked = [_verify_standalone(standalone, step, threads)]
    else:
        looked = [_verify(folder, step, threads) for folder in ranks.values() or [directory]]
    found = [one for one, _ in looked]
    job = _verify_job(directory, step, found) if ranks else {}
    if as_json:
        emit_json({"directory": str(directory), "ranks": found, **job} if ranks else found[0])
    else:
        for one in found:
            _show(one)
        _show_job(job)
    if job.get("trouble") or any(one["trouble"] or any(slot["damaged"] for slot in one["slots"]) for one in found):
        raise typer.Exit(1)
    for one, steps in looked:
        if not one["slots"] and step is None:
            raise NoCheckpoint(words_on_none(Path(one["directory"])))
        if not any(slot["result"] == "whole" for slot in one["slots"]):
            asked = "whole checkpoint" if step is None else f"whole checkpoint of step {step}"
            raise NoCheckpoint(f"{one['directory']}: no {asked}; whole ones are there of steps {steps or 'none'}")


def _verify(directory: Path, step: int | None, threads: int) -> tuple[dict[str, Any], list[int]]:
    """What became of the slots of one rank's directory, and the steps that looked whole before any was read."""
    from lastgood.checkpointers.recovery.restorable import step_to_restore
    from lastgood.checkpointers.slots.contents import look_at_slots
    from lastgood.storage import SlotStore

    view = SlotStore.peek(directory)
    statuses, troubles = look_at_slots(view)
    results = [_check(view, status, threads) for status in of_step(statuses, step)]
    found: dict[str, Any] = {"directory": str(directory), "trouble": troubles, "slots": results}
    with noted(troubles):
        commit = view.global_commit()
        if commit is not None:
            found["global"] = commit._asdict()
    whole = {directory / slot["file"] for slot in results if slot["result"] == "whole"}
    if step is None and whole and not troubles:
        with noted(troubles):
            found["restore"] = step_to_restore(view, whole)
    return found, sorted({status.info.step for status in statuses if status.info is not None})


def _verify_job(job: Path, step: int | None, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """How the parts of a job's ranks fit together, and the step that a restore takes; after each was verified."""
    from lastgood.checkpointers.ranks.directories import whole_checkpoints
    from lastgood.checkpointers.ranks.parts import RankParts
    from lastgood.checkpointers.slots.contents import was_overwritten

    whole = {
        Path(one["directory"]) / slot["file"] for one in ranks for slot in one["slots"] if slot["result"] == "whole"
    }
    found: dict[str, Any] = {"whole": [], "trouble": []}
    try:
        checkpoints = whole_checkpoints(job)
    except CheckpointError as error:
        found["trouble"].append(str(error))
        return found
    for checkpoint in checkpoints:
        if (step is not None and checkpoint.step != step) or any(info.path not in whole for info in checkpoint.infos):
            continue  # said already, or written since
        try:
            RankParts(checkpoint).check_together()
        except CheckpointError as error:
            if not any(map(was_overwritten, checkpoint.infos)):
                found["trouble"].append(f"cannot be put together: {error}")
            continue
        found["whole"].append(
            {"step": checkpoint.step, "incarnation": checkpoint.incarnation, "bad": checkpoint.bad is not None}
        )
    good = [one for one in found["whole"] if step is not None or not one["bad"]]
    if good:
        found["restore"] = good[0]["step"]
    elif not found["trouble"]:
        found["trouble"].append(f"{job}: no good checkpoint that all ranks hold")
    return found


def _show_job(job: dict[str, Any]) -> None:
    if job:
        console.print(f"whole on all ranks: {listed(job['whole'])}")
        for trouble in job["trouble"]:
            console.print(trouble)


def _verify_standalone(standalone: StandaloneSlots, step: int | None, threads: int) -> tuple[dict[str, Any], list[int]]:
    """As `_verify`, for files that stand alone."""
    from lastgood.storage import SlotView
    from lastgood.storage.standalone_slot import ROOT

    results = [
        _check(SlotView(status.path.parent), status, threads, ROOT) for status in of_step(standalone.statuses, step)
    ]
    found = {
        "directory": str(standalone.place),
        "trouble": standalone.troubles,
        "slots": results,
        "not_checked": [path.name for path in standalone.others],
    }
    return found, sorted({status.info.step for status in standalone.statuses if status.info is not None})


def _show(found: dict[str, Any]) -> None:
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
    emit_table(f"{found['directory']}{held_by_all(found)}", ("file", "step", "result", "size", "GiB/s", "detail"), rows)
    if found.get("not_checked"):
        console.print(f"not in Lastgood's format, not checked: {', '.join(found['not_checked'])}")
    if "restore" in found:
        console.print(f"a restore takes step {found['restore']}")
    for trouble in found["trouble"]:
        console.print(trouble)


def _check(view: SlotView, status: SlotStatus, threads: int, root: str | None = None) -> dict[str, Any]:
    """What became of one slot, for people and programs. `root`: the one entry that it must hold."""
    from lastgood.checkpointers.recovery.restorable import check_content
    from lastgood.checkpointers.slots.contents import read_timeout_s, was_overwritten
    from lastgood.storage import SlotState
    from lastgood.storage.format import RecordKind

    result, detail, damaged, bytes_per_s = status.state.value, status.detail, False, None
    if status.info is not None:
        started = time.perf_counter()
        try:
            view.verify(status.info, threads, read_timeout_s(status.info.stream_bytes))
            check_content(view, status.info, root)
        except (CorruptCheckpoint, MismatchError, StorageError) as error:
            if was_overwritten(status.info):
                result, detail = "overwritten meanwhile", "a training has reused the slot"
            else:
                result = "refused" if isinstance(error, MismatchError) else "damaged"
                detail, damaged = str(error), True
        else:
            bytes_per_s = status.info.stream_bytes / (time.perf_counter() - started)
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
        "step": None if status.record is None else status.record.step,
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
