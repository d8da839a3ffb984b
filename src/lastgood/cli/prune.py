"""`lastgood prune`: remove old checkpoints, and what killed processes left."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lastgood.cli._output import console, emit_json, emit_table, reporter
from lastgood.errors import NoCheckpoint
from lastgood.units import format_bytes

if TYPE_CHECKING:
    from lastgood.checkpointers.kept.prune import PrunePlan

__all__ = ["prune"]


def prune(
    directory: Annotated[
        Path,
        typer.Argument(
            help="Checkpoint directory of any system, or that of a job of several ranks; no training may run there.",
            show_default=False,
        ),
    ],
    keep: Annotated[int, typer.Option(min=1, help="Complete checkpoints that stay; the newest good one is one.")] = 2,
    yes: Annotated[bool, typer.Option("--yes", help="Remove it. Without, only say what would be removed.")] = False,
    threads: Annotated[int, typer.Option(min=1, max=64, help="Threads that read.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found to stdout as JSON.")] = False,
) -> None:
    """Say what a directory can do without, and with --yes remove it: older checkpoints, empty slots, unfinished writes.

    Checkpoints that stay are read first: one that is damaged does not count as kept, and if none can be read, none is
    removed. What is damaged is left where it is. A later training makes the slots that it needs again.
    """
    from lastgood.checkpointers.kept import prune as pruning

    if not directory.is_dir():
        raise NoCheckpoint(f"{directory}: there is no such directory")
    with pruning.held_for_pruning(directory) if yes else contextlib.nullcontext():
        plan = pruning.plan_prune(directory, keep, threads=threads, held=yes, tell=reporter("prune"))
        freed = pruning.prune(plan) if yes else 0
    if as_json:
        emit_json(
            {
                "directory": str(directory),
                "kept": [{"step": step, "where": where} for step, where in plan.kept],
                "removed" if yes else "would_remove": [{**asdict(one), "path": str(one.path)} for one in plan.doomed],
                "left": plan.left,
                "bytes": freed if yes else plan.freed_bytes,
            }
        )
        return
    _show(plan, yes)


def _show(plan: PrunePlan, done: bool) -> None:
    steps = ", ".join(str(step) for step, _ in plan.kept) or "none"
    if plan.doomed:
        rows = [(one.path.relative_to(plan.directory), one.what, format_bytes(one.nbytes)) for one in plan.doomed]
        emit_table(f"{plan.directory}: {'removed' if done else 'would be removed'}", ("file", "what", "size"), rows)
    for text in plan.left:
        console.print(f"left where it is: {text}")
    if not plan.doomed:
        console.print(f"{plan.directory}: nothing to remove; steps that stay: {steps}")
    elif done:
        console.print(f"{plan.directory}: {format_bytes(plan.freed_bytes)} freed; steps that stay: {steps}")
    else:
        console.print(
            f"{plan.directory}: {format_bytes(plan.freed_bytes)} would go (--yes); steps that would stay: {steps}"
        )
