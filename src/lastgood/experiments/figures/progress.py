"""How far a workflow is: a line that changes while records come in, and pictures of what there is so far."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from lastgood.errors import LastgoodError
from lastgood.experiments.figures.workflow_plan import predict_runs
from lastgood.experiments.machine.lock import machine_lock
from lastgood.experiments.plan.grid import Grid
from lastgood.experiments.records.base import Spec
from lastgood.units import format_seconds

__all__ = ["Progress"]

_LOOK_S = 2.0
_PLAIN_LINE_S = 60.0
"""If lines stay, as in a file, one is written at most so often."""
_TURN_S = 120.0
"""A picture waits so long for its turn on the machine: drawing would disturb a measurement."""
_SHARES = (1 / 3, 2 / 3)
"""A picture is drawn once so much of its panel is there. The first third is each system at one interval."""
Panel = tuple[str, str]


class Progress:
    """Watches, in a thread of its own, until `stop`.

    Args:
        specs: the measurements that this call makes: record file and spec, none of the records there yet.
        results_dir: where the plan's records lie.
        grids: what predicts the time of each of `specs`: the grid of the figure that shows it.
        panels: figure and model, with all record files that its picture is made from.
        draw: draws a panel from the records that are there; raises LastgoodError if it cannot.
        out: where the line goes.
    """

    def __init__(
        self,
        specs: Mapping[str, Spec],
        results_dir: Path,
        grids: Mapping[str, Grid],
        panels: Mapping[Panel, Sequence[str]],
        draw: Callable[[str, str], None],
        out: TextIO = sys.stderr,
    ) -> None:
        self._specs, self._results_dir = dict(specs), results_dir
        self._grids = [grids[record] for record in specs]
        self._panels, self._draw, self._out = dict(panels), draw, out
        # What is there already is no news.
        self._drawn = {panel: self._share(panel) for panel in panels}
        self._began_s = time.monotonic()
        self._told_s = -math.inf
        self._told = ""
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        if self._specs:
            self._thread.start()

    def stop(self) -> None:
        """End, with a picture that is being drawn, and leave the last line where it is."""
        self._ends.set()
        if self._thread.is_alive():
            self._thread.join(2 * _TURN_S)
        if self._told and self._out.isatty():
            self._out.write("\n")

    def line(self) -> str:
        """``measured 12 of 64, about 9 min left``; what is left is predicted by what is done."""
        done = [record for record in self._specs if Path(record).exists()]
        runs = predict_runs(self._specs.values(), self._results_dir, self._grids)
        left_s = sum(run.seconds for run in runs if not run.done)
        done_s = sum(run.seconds for run in runs if run.done)
        if done_s > 0:  # between two runs time passes as well
            left_s *= max(1.0, (time.monotonic() - self._began_s) / done_s) if len(done) > 2 else 1.0
        rest = f", about {format_seconds(left_s)} left" if len(done) < len(self._specs) else ""
        return f"measured {len(done)} of {len(self._specs)}{rest}"

    def _watch(self) -> None:
        seen = -1
        while not self._ends.wait(_LOOK_S):
            count = sum(Path(record).exists() for record in self._specs)
            if count != seen:
                seen = count
                self._tell(self.line())
                self._draw_some()

    def _tell(self, line: str) -> None:
        if self._out.isatty():
            self._out.write(f"\r\x1b[K{line}")
        elif time.monotonic() - self._told_s >= _PLAIN_LINE_S:
            self._out.write(f"{line}\n")
            self._told_s = time.monotonic()
        self._told = line
        self._out.flush()

    def _share(self, panel: Panel) -> float:
        records = self._panels[panel]
        return sum(Path(record).exists() for record in records) / len(records)

    def _draw_some(self) -> None:
        for panel in self._panels:
            share = self._share(panel)
            if share < 1 and any(self._drawn[panel] < step <= share for step in _SHARES) and not self._ends.is_set():
                self._drawn[panel] = share
                try:
                    lock = machine_lock()
                    lock.acquire(_TURN_S)
                    with lock:
                        self._draw(*panel)
                except LastgoodError as error:  # the next picture, or the last one, may come out
                    self._tell(f"no picture of {' '.join(panel)} yet: {error}")
