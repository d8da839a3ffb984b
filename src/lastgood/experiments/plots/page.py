"""Several small panels in one picture: title, legend, rows of panels and caption, none on top of another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lastgood.experiments.plots.canvas import INK, RIGHT_IN, Width, widest_legend, wrap_text
from lastgood.experiments.plots.style import BOUND_COLOUR, WIDTHS_IN

__all__ = ["lay_out_grid"]

_COLUMNS: Final[dict[str, int]] = {"single": 1, "double": 3}
_AXES_HEIGHT_IN: Final = 1.25
_ABOVE_IN: Final = 0.26
"""Over each row, for the panels' own titles."""
_BELOW_IN: Final = 0.36
"""Under each row, for two lines of text."""
_YLABEL_IN: Final = 0.52
_BETWEEN_IN: Final = 0.1
_GAP_IN: Final = 0.07
_TITLE_PT: Final = 8.5
_CAPTION_PT: Final = 7.0


def lay_out_grid(
    figure: Figure,
    panels: Sequence[Axes],
    handles: list[Any],
    width: Width,
    *,
    title: str,
    caption: str,
    partial: str,
) -> None:
    """Stack title, legend, rows of `panels` and caption with their real heights; the panels are of one size."""
    width_in = WIDTHS_IN[width]
    columns = _COLUMNS[width]
    rows = -(-len(panels) // columns)
    heading = figure.text(0, 0, title, weight="bold", va="top")
    heading.set_fontsize(_TITLE_PT)
    legend, legend_in = widest_legend(figure, handles, width_in)
    lines = wrap_text(figure, caption, width_in - 2 * RIGHT_IN, _CAPTION_PT)
    partial_lines = wrap_text(figure, partial, width_in - 2 * RIGHT_IN, _CAPTION_PT)
    line_in = 1.3 * _CAPTION_PT / 72
    title_in = 1.3 * _TITLE_PT / 72
    caption_in = line_in * (len(lines) + len(partial_lines))
    row_in = _ABOVE_IN + _AXES_HEIGHT_IN + _BELOW_IN
    height_in = _GAP_IN + title_in + legend_in + rows * row_in + caption_in + 2 * _GAP_IN
    figure.set_size_inches(width_in, height_in)
    heading.set_position((RIGHT_IN / width_in, 1 - _GAP_IN / height_in))
    legend.set_bbox_to_anchor((RIGHT_IN / width_in, 1 - (_GAP_IN + title_in) / height_in))
    column_in = (width_in - RIGHT_IN) / columns
    for number, axes in enumerate(panels):
        row, column = divmod(number, columns)
        top_in = height_in - _GAP_IN - title_in - legend_in - row * row_in - _ABOVE_IN
        axes.set_position(
            (
                (column * column_in + _YLABEL_IN) / width_in,
                (top_in - _AXES_HEIGHT_IN) / height_in,
                (column_in - _YLABEL_IN - _BETWEEN_IN) / width_in,
                _AXES_HEIGHT_IN / height_in,
            )
        )
        axes.yaxis.set_label_coords(-0.38 / (column_in - _YLABEL_IN - _BETWEEN_IN), 0.5)
    for number, line in enumerate([*partial_lines, *lines]):
        figure.text(
            RIGHT_IN / width_in,
            (_GAP_IN + caption_in - number * line_in) / height_in,
            line,
            va="top",
            fontsize=_CAPTION_PT,
            color=BOUND_COLOUR if number < len(partial_lines) else INK,
        )
