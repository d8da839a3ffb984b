"""`lastgood verify`: read every checkpoint of a directory and check every checksum."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lastgood.cli._output import console, emit_json, emit_table
from lastgood.errors import CorruptCheckpoint, NoCheckpoint, StorageError
from lastgood.units import GIB, format_bytes

if TYPE_CHECKING:
    from lastgood.storage import SlotStatus, SlotView

__all__ = ["verify"]


def verify(
    directory: Annotated[Path, typer.Argument(help="Checkpoint directory; may be in use.", show_default=False)],
    step: Annotated[int | None, typer.Option(help="Only checkpoints of this step.", show_default="all")] = None,
    threads: Annotated[int, typer.Option(min=1, max=64, help="Threads that read.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results to stdout as JSON.")] = False,
) -> None:
    """Read every whole checkpoint and check every checksum; exit 1 if a slot is damaged.

    What a killed process left unfinished is no damage, nor is a slot that a training overwrites meanwhile.
    """
    from lastgood.checkpointers.stored import look_at_slots
    from lastgood.storage import SlotStore

    view = SlotStore.peek(directory)
    statuses, troubles = look_at_slots(view)
    results = []
    for status in statuses:
        if step is None or (status.record is not None and status.record.step == step):
            results.append(_check(view, status, threads))
    if as_json:
        emit_json({"directory": str(directory), "trouble": troubles, "slots": results})
    else:
        rows = (
            (
                found["file"],
                found["step"],
                found["result"],
                None if found["stream_bytes"] is None else format_bytes(found["stream_bytes"]),
                None if found["bytes_per_s"] is None else f"{found['bytes_per_s'] / GIB:.3g}",
                found["detail"],
            )
            for found in results
        )
        emit_table(str(directory), ("file", "step", "result", "size", "GiB/s", "detail"), rows)
        for trouble in troubles:
            console.print(trouble)
    if troubles or any(found["damaged"] for found in results):
        raise typer.Exit(1)
    if not any(found["result"] == "whole" for found in results):
        asked = "whole checkpoint" if step is None else f"whole checkpoint of step {step}"
        steps = sorted({status.info.step for status in statuses if status.info is not None})
        raise NoCheckpoint(f"{directory}: no {asked}; whole ones are there of steps {steps or 'none'}")


def _check(view: SlotView, status: SlotStatus, threads: int) -> dict[str, Any]:
    """What became of one slot, for people and programs."""
    from lastgood.checkpointers.stored import read_timeout_s, was_overwritten
    from lastgood.storage import SlotState
    from lastgood.storage.format import RecordKind

    result, detail, damaged, bytes_per_s = status.state.value, status.detail, False, None
    if status.info is not None:
        started = time.perf_counter()
        try:
            view.verify(status.info, threads, read_timeout_s(status.info.stream_bytes))
        except (CorruptCheckpoint, StorageError) as error:
            if was_overwritten(status.info):
                result, detail = "overwritten meanwhile", "a training has reused the slot"
            else:
                result, detail, damaged = "damaged", str(error), True
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
    from lastgood.checkpointers.stored import look_at_slots
    from lastgood.storage import SlotState

    if not view.held:
        return None
    for other in look_at_slots(view)[0]:
        if other.path == status.path:
            return None if other.state is SlotState.TORN else other.state.value
    return "removed"
