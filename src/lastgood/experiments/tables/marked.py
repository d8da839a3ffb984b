"""What pictures mark about the numbers of a tidy CSV, in words: for captions and for the report. Pure over frames."""

from __future__ import annotations

from typing import Any

import pandas as pd

from lastgood.checkpointers.registry import BASELINE
from lastgood.experiments.formulas.bound import IN_INTERVAL, why_above
from lastgood.experiments.formulas.pairs import Interval
from lastgood.experiments.systems.labels import system_label, system_rank
from lastgood.experiments.tables.frames import pair_interval

__all__ = [
    "above_bound",
    "all_marks",
    "cells_named",
    "disturbed_cells",
    "disturbed_pairs",
    "noisy_cells",
    "not_credible",
]

_IN_ONE_STRETCH = "measured in one stretch of time, and training without checkpoints in another"
_BETWEEN_RUNS = "the bound lies between its runs"
_ALIKE = 1 + 1e-9
"""Rates that were divided and multiplied differ by no more."""
_OF_ONE_RUN = 1.05
"""How far a single run may be above for nothing."""


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
    """Cells whose interval stayed wide; ``all cells`` in place of many names."""
    if "rounds_ended_by" not in frame.columns:
        return ""
    noisy = cells_named(frame[(frame["rounds_ended_by"] == "budget") & ~_all_disturbed(frame)])
    return "all cells" if noisy.count(",") > 2 and noisy == cells_named(frame) else noisy


def disturbed_cells(frame: pd.DataFrame) -> str:
    """Cells of which nothing is known, since others disturbed all pairs."""
    return cells_named(frame[_all_disturbed(frame)]) if "ratio_high" in frame.columns else ""


def _all_disturbed(frame: pd.DataFrame) -> pd.Series[bool]:
    rows = zip(*(_numbers(frame, name) for name in ("ratio_low", "ratio_to_none", "ratio_high")), strict=True)
    return pd.Series([Interval(*row).says_nothing for row in rows], index=frame.index, dtype=bool)


def above_bound(frame: pd.DataFrame, *, named: bool = True) -> str:
    """Cells above their bound, and why; without their names, if the rows are of one cell.

    Of a cell without pairs it is the median of its runs: one above, and one below it, are no result above the bound.
    """
    above = frame.assign(above_bound=_reasons_above(frame)).dropna(subset="above_bound")
    reasons = above.groupby("above_bound")
    return "; ".join(f"{cells_named(cells)}: {reason}" if named else str(reason) for reason, cells in reasons)


def _reasons_above(frame: pd.DataFrame) -> pd.Series[Any]:
    """Why each row's cell is above its bound; None if it is not."""
    nothing = pd.Series(None, frame.index, dtype=object)
    told = frame["above_bound"].astype(object) if "above_bound" in frame.columns else nothing
    if not {"ratio_to_bound", "cell", "system"} <= set(frame.columns) or frame.empty:
        return told
    ratios = _numbers(frame, "ratio_to_bound").groupby(frame["cell"])
    medians, least = ratios.transform("median"), ratios.transform("min")
    stretch = frame["ratio_low"].isna() if "ratio_low" in frame.columns else pd.Series(True, frame.index)
    above = stretch & (medians > _ALIKE) & (frame["system"] != BASELINE)
    reasons = pd.Series(_IN_ONE_STRETCH, frame.index, dtype=object).where(least > _ALIKE, _BETWEEN_RUNS)
    return told.where(~above | told.notna(), reasons)


def not_credible(cell: pd.DataFrame) -> str:
    """Why the rows of a cell with checkpoints cannot be faster than training without; nothing if they are not.

    What repetitions or the interval of pairs leave open is noise, and so is a twentieth of a single run.
    """
    if not {"durable_iterations_per_s", "none_iterations_per_s", "system"} <= set(cell.columns) or cell.empty:
        return ""
    if (cell["system"] == BASELINE).any():
        return ""
    shares = (_numbers(cell, "durable_iterations_per_s") / _numbers(cell, "none_iterations_per_s")).dropna()
    if shares.empty:
        return ""
    measured, share = pair_interval(cell), float(shares.median())
    low = measured.low if measured else float(shares.min()) if len(shares) > 1 else share / _OF_ONE_RUN
    skipped = int(_numbers(cell, "checkpoints_skipped").sum()) if "checkpoints_skipped" in cell.columns else 0
    reason = why_above(share, low, 1.0, skipped)
    return (
        ""
        if reason in (None, IN_INTERVAL)
        else f"{share:.0%} of training without checkpoints is not credible: {reason}"
    )


def all_marks(frame: pd.DataFrame) -> list[str]:
    """One text for each kind of mark that the picture of `frame` has."""
    noisy, above, unknown = noisy_cells(frame), above_bound(frame), disturbed_cells(frame)
    return [
        text
        for text in (
            *_proofs(frame),
            *_not_credible_cells(frame),
            f"above its bound: {above}" if above else "",
            f"could not be measured, others disturbed all pairs: {unknown}" if unknown else "",
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


def _not_credible_cells(frame: pd.DataFrame) -> list[str]:
    keys = [name for name in ("workload", "system", "interval_steps", "axis_value") if name in frame.columns]
    if not {"system", "interval_steps"} <= set(keys):
        return []
    cells = [cell for _, cell in frame.groupby(keys, dropna=False)]
    return [f"{cells_named(cell)}: {reason}" for cell in cells if (reason := not_credible(cell))]


def _numbers(frame: pd.DataFrame, name: str) -> pd.Series:
    return pd.to_numeric(frame[name], errors="coerce")
