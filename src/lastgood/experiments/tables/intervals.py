"""The interval of a cell that was measured in pairs of blocks, from the rows of its runs."""

from __future__ import annotations

import pandas as pd

from lastgood.experiments.formulas.pairs import Interval

__all__ = ["pair_interval"]


def pair_interval(runs: pd.DataFrame) -> Interval | None:
    """The ratio to training without checkpoints: of several repetitions the widest interval.

    None if a run of the cell was measured in one stretch.
    """
    if "ratio_low" not in runs.columns or runs.empty or runs["ratio_low"].isna().any():
        return None
    return Interval(
        float(runs["ratio_low"].min()), float(runs["ratio_to_none"].median()), float(runs["ratio_high"].max())
    )
