"""What pictures mark about the numbers of a tidy CSV, in words: for captions and for the report. Pure over frames."""

from __future__ import annotations

import pandas as pd

from lastgood.checkpointers.registry import BASELINE
from lastgood.experiments.systems.labels import system_label, system_rank

__all__ = ["above_bound", "all_marks", "cells_named", "disturbed_pairs", "noisy_cells"]


def cells_named(rows: pd.DataFrame) -> str:
    """``PCcheck 10, GPM 1``: the systems and intervals of `rows`, without training without checkpoints."""
    found = sorted(
        {
            (system_rank(name), name, int(interval))
            for name, interval in zip(rows["system"], rows["interval_steps"], strict=True)
            if name != BASELINE
        }
    )
    return ", ".join(f"{system_label(name)} {interval}" for _, name, interval in found)


def disturbed_pairs(frame: pd.DataFrame) -> str:
    """How many pairs of blocks others disturbed; nothing if none was."""
    count = int(frame["rounds_disturbed"].fillna(0).sum()) if "rounds_disturbed" in frame.columns else 0
    return f"{count} disturbed pair{' is' if count == 1 else 's are'} not counted" if count else ""


def noisy_cells(frame: pd.DataFrame) -> str:
    """Cells whose interval stayed wide."""
    return cells_named(frame[frame["rounds_ended_by"] == "budget"]) if "rounds_ended_by" in frame.columns else ""


def above_bound(frame: pd.DataFrame) -> str:
    """Cells above their bound, and why."""
    if "above_bound" not in frame.columns:
        return ""
    above = frame[frame["above_bound"].notna()]
    return "; ".join(f"{cells_named(cells)}: {reason}" for reason, cells in above.groupby("above_bound"))


def all_marks(frame: pd.DataFrame) -> list[str]:
    """One text for each kind of mark that the picture of `frame` has."""
    noisy, above = noisy_cells(frame), above_bound(frame)
    return [
        text
        for text in (
            *_proofs(frame),
            f"above its bound: {above}" if above else "",
            f"the time was used up before the interval was narrow: {noisy}" if noisy else "",
            disturbed_pairs(frame),
        )
        if text
    ]


def _proofs(frame: pd.DataFrame) -> list[str]:
    """Cells that were restored to something else, that nothing was proved of, or that had too few checkpoints."""
    if not {"proof_equal", "enough_checkpoints", "system", "interval_steps"} <= set(frame.columns):
        return []
    own = frame[frame["system"] != BASELINE]
    proofs = own["proof_equal"].astype(str)
    wrong = cells_named(own[proofs == "False"])
    # One repetition's proof holds for the cell.
    proved = proofs.isin(("True", "False")).groupby([own["system"], own["interval_steps"]]).transform("any")
    unproved = cells_named(own[~proved.astype(bool)])
    few = cells_named(own[own["enough_checkpoints"].astype(str) == "False"])
    return [
        f"RESTORE DIFFERS: {wrong}" if wrong else "",
        f"restore not proved: {unproved}" if unproved else "",
        f"fewer than 2 checkpoints in a run: {few}" if few else "",
    ]
