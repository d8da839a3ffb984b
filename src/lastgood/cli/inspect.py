"""`lastgood inspect`: what a checkpoint directory holds, without the model's code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lastgood.cli._output import emit_json, emit_table
from lastgood.units import format_bytes

if TYPE_CHECKING:
    from lastgood.storage import SlotInfo, SlotStatus

__all__ = ["inspect"]


def inspect(
    directory: Annotated[Path, typer.Argument(help="Checkpoint directory; may be in use.", show_default=False)],
    json: Annotated[bool, typer.Option("--json", help="Print the slots to stdout as JSON.")] = False,
) -> None:
    """Show the slots of a checkpoint directory: which are whole, and which is the newest."""
    from lastgood.storage import SlotStore
    from lastgood.storage.reader import newest_first

    with SlotStore.peek(directory) as view:
        held = view.held
        statuses = view.statuses()
    newest = next(iter(newest_first(statuses)), None)
    described = [_describe(status, newest) for status in statuses]
    if json:
        emit_json({"directory": str(directory), "in_use": held, "slots": described})
        return
    rows: list[tuple[Any, ...]] = [
        (
            slot["file"],
            slot["state"] + (", newest" if slot["newest"] else ""),
            slot["step"],
            slot["incarnation"],
            slot["sequence"],
            _size(slot["stream_bytes"]),
            _size(slot["meta_bytes"]),
            slot["detail"],
        )
        for slot in described
    ]
    columns = ["file", "state", "step", "incarnation", "sequence", "size", "meta", "detail"]
    if not any(slot["detail"] for slot in described):
        rows, columns = [row[:-1] for row in rows], columns[:-1]
    emit_table(f"{directory}{' (in use)' if held else ''}", columns, rows)


def _describe(status: SlotStatus, newest: SlotInfo | None) -> dict[str, Any]:
    record = status.record
    return {
        "file": status.path.name,
        "state": status.state.value,
        "newest": newest is not None and status.info == newest,
        "step": None if record is None else record.step,
        "incarnation": None if record is None else record.incarnation,
        "sequence": None if record is None else record.sequence,
        "stream_bytes": None if record is None else record.stream_bytes,
        "meta_bytes": None if record is None else record.meta_bytes,
        "chunk_bytes": None if record is None else record.chunk_bytes,
        "job_id": None if record is None else record.job_id.hex(),
        "layout_digest": None if record is None else record.layout_digest.hex(),
        "file_bytes": status.file_bytes,
        "detail": status.detail,
    }


def _size(nbytes: int | None) -> str:
    return "" if nbytes is None else format_bytes(nbytes)
