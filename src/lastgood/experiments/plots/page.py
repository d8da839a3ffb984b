"""Several small panels in one picture: title, legend, rows of panels and caption, none on top of another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lastgood.experiments.plots.canvas import GAP_IN, RIGHT_IN, PageText, Width
from lastgood.experiments.plots.style import WIDTHS_IN

__all__ = ["lay_out_grid"]

_COLUMNS: Final[dict[str, int]] = {"single": 1, "double": 3}
_AXES_HEIGHT_IN: Final = 1.25
_ABOVE_IN: Final = 0.26
"""Over each row, for the panels' own titles."""
_YLABEL_IN: Final = 0.52
_BETWEEN_IN: Final = 0.1


def lay_out_grid(
    figure: Figure,
    panels: Sequence[Axes],
    handles: list[Any],
    width: Width,
    *,
    title: str,
    caption: str,
    partial: str,
    below_in: float,
) -> None:
    """Stack title, legend, rows of `panels` and caption with their real heights; the panels are of one size.

    `below_in` is what stands under each panel, in inches. If the last row has a place that no panel takes, the legend
    stands there.
    """
    columns = _COLUMNS[width]
    column_in = (WIDTHS_IN[width] - RIGHT_IN) / columns
    rows, free = -(-len(panels) // columns), -len(panels) % columns
    text = PageText(
        figure,
        handles,
        width,
        title=title,
        caption=caption,
        partial=partial,
        legend_width_in=column_in if free else None,
    )
    width_in = text.width_in
    row_in = _ABOVE_IN + _AXES_HEIGHT_IN + below_in
    height_in = text.above_in + rows * row_in + text.below_in + GAP_IN
    corner_in = ((columns - free) * column_in + GAP_IN, text.above_in + (rows - 1) * row_in + _ABOVE_IN)
    text.place(height_in, corner_in if free else None)
    for number, axes in enumerate(panels):
        row, column = divmod(number, columns)
        top_in = height_in - text.above_in - row * row_in - _ABOVE_IN
        axes.set_position(
            (
                (column * column_in + _YLABEL_IN) / width_in,
                (top_in - _AXES_HEIGHT_IN) / height_in,
                (column_in - _YLABEL_IN - _BETWEEN_IN) / width_in,
                _AXES_HEIGHT_IN / height_in,
            )
        )
        axes.yaxis.set_label_coords(-0.38 / (column_in - _YLABEL_IN - _BETWEEN_IN), 0.5)
