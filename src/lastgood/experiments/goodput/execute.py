"""Goodput, measured: a training process is really killed at the trace's failures, restarts, restores and goes on.

The parent is the one of experiments/runs/execute.py: it imports torch once and forks each incarnation. That writes its
progress to a board in shared memory (experiments/runs/progress.py), so the parent can kill it at any moment, with
SIGKILL, and still knows how far it was.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from lastgood.errors import LastgoodError, WaitTimeout
from lastgood.experiments.machine.exclusive import exclusive_machine
from lastgood.experiments.machine.facts import where_run
from lastgood.experiments.records.goodput import GoodputRecord, GoodputSpec, Incarnation
from lastgood.experiments.runs.children import SILENCE_S, hear_child, import_before_fork, start_child
from lastgood.experiments.runs.logs import keep_logs_of_failure
from lastgood.experiments.runs.progress import Board
from lastgood.experiments.services.registry import services_of
from lastgood.experiments.services.service import run_services

__all__ = ["execute_goodput"]

Report = Callable[[str], None]

_END_S = 60.0
"""A killed process that is not gone after this long is an error."""


def execute_goodput(spec: GoodputSpec, data_dir: Path, scratch: Path, logs: Path, report: Report) -> GoodputRecord:
    """Live through the window of `spec` and return its record.

    Checkpoints live in a folder of their own below `scratch`, which is removed at the end. `report` is told each stage.
    Raises LastgoodError, naming what failed; nothing is left behind then but logs of the system's own processes (peers,
    shadows), in `logs`. A restore that gives back something else than was saved is no error but a fault in the record.
    """
    with exclusive_machine(spec.run, scratch, report) as mine, keep_logs_of_failure(mine.folder, logs, report):
        report("importing torch")
        import_before_fork(spec.run.workload)
        with run_services(services_of(spec.run), mine.folder, report) as services:
            window = _Window(spec, mine.folder / "checkpoints", data_dir, services.watched(report))
            window.run()
        return window.record(mine.started_at, mine.began_s, mine.folder.parent)


class _Window:
    """The incarnations of one run, one after the other."""

    def __init__(self, spec: GoodputSpec, checkpoints: Path, data_dir: Path, report: Report) -> None:
        self._spec = spec
        self._arguments = (spec.run, checkpoints, data_dir)
        self._report = report
        self._board = Board()
        self._incarnations: list[Incarnation] = []
        self._faults: list[str] = []
        self._loads_s: list[float] = []
        self._checked = 0
        self._base = 0
        self._reached = 0
        """The training's step: the last one of the newest incarnation that trained, or what was restored since."""
        self._issued = 0
        """Newest step that any incarnation has come to."""
        self._durable = 0
        """Newest step that the system has called durable."""
        self._found = 0
        """What the last look restored."""

    def run(self) -> None:
        """Run incarnation after incarnation until the window is over, and a last process that looks at what is left."""
        from lastgood.experiments.goodput.incarnation import first_incarnation, last_look, later_incarnation

        clock_s = 0.0
        for number, end_s in enumerate([*self._spec.failures_s, self._spec.window_s]):
            last = number == len(self._spec.failures_s)
            name = f"incarnation {number} of {self._spec.title()}"
            self._report(f"incarnation {number}, to {end_s:.1f} s of the window, step {self._reached}")
            function, more = (later_incarnation, (self._base,)) if number else (first_incarnation, ())
            uptime_s, age_s = self._live(name, function, more, max(0.0, end_s - clock_s))
            clock_s += uptime_s
            if not number:
                self._base = self._reached = self._board.get("restored_step") or 0
                self._durable = self._base if self._spec.run.interval_steps else 0
            self._note_incarnation("window" if last else "killed", uptime_s, age_s - uptime_s)
        self._report("restoring once more, to see what is durable")
        self._live(f"the last look of {self._spec.title()}", last_look, (self._base,), None)
        self._note_restore("the last look")
        self._found = self._board.get("restored_step") or 0

    def _live(
        self, name: str, function: Callable[..., None], more: tuple[int, ...], quota_s: float | None
    ) -> tuple[float, float]:
        """Let a process have `quota_s` seconds of uptime and kill it (None: let it end). Returns its uptime and age."""
        self._board.begin_incarnation()
        born = time.monotonic()
        process, pipe = start_child(name, function, (*self._arguments, *more, self._board))
        try:
            self._await_end(name, process, pipe, quota_s)
            # The clock stops here: what the process does until the signal meets it is not worth a correction.
            now = time.monotonic()
            return self._board.uptime_s(now), now - born
        finally:
            process.kill()
            process.join(_END_S)
            pipe.close()
            if process.is_alive():
                raise WaitTimeout(f"{name}: process {process.pid} is still there {_END_S:.0f} s after SIGKILL")

    def _await_end(self, name: str, process: Any, pipe: Connection, quota_s: float | None) -> None:
        """Return when the quota is used up, or the process has ended well."""
        board, stage = self._board, "starting"
        while True:
            left_s = SILENCE_S
            if quota_s is not None and board.begun:
                left_s = quota_s - board.uptime_s(time.monotonic())
                if left_s <= 0:
                    return
                if not board.running:
                    left_s = SILENCE_S
            if not pipe.poll(left_s):
                if quota_s is not None and board.running:
                    continue
                raise WaitTimeout(f"{name} said nothing for {SILENCE_S:.0f} s while {stage}; ended it")
            kind, content = hear_child(name, process, pipe, stage)
            if kind == "error":
                raise LastgoodError(f"{name} failed while {stage}: {content}")
            if kind == "result":
                return
            stage = content

    def _note_incarnation(self, ended: Literal["killed", "window"], uptime_s: float, start_up_s: float) -> None:
        board = self._board
        lost = self._note_restore(f"incarnation {len(self._incarnations)}") if self._incarnations else 0
        restored = board.get("restored_step")
        reached: int | None = None
        if restored is not None and board.time_of("training_s"):
            reached = max(restored, board.get("step") or 0)
            self._reached = reached
            self._issued = max(self._issued, board.get("issued_step") or 0, reached)
        durable, equal = board.get("durable_step"), board.get("first_loss_equal")
        self._durable = max(self._durable, durable or 0)
        self._incarnations.append(
            Incarnation(
                ended=ended,
                uptime_s=uptime_s,
                start_up_s=start_up_s,
                load_s=board.load_s,
                restored_step=restored,
                reached_step=reached,
                durable_step=durable,
                lost_steps=lost,
                failed_saves=board.get("failed_saves") or 0,
                loss_equal=None if equal is None else bool(equal),
            )
        )

    def _note_restore(self, name: str) -> int:
        """Judge what an incarnation restored, and go back to it. Returns the steps that this took from the training."""
        board = self._board
        restored, load_s = board.get("restored_step"), board.load_s
        if restored is None or load_s is None:
            return 0  # it was killed before
        self._loads_s.append(load_s)
        named, equal = board.get("named_step"), board.get("first_loss_equal")
        if named != restored:
            self._faults.append(f"{name}: restore() named step {named}, the state in it is of step {restored}")
        if restored < self._durable:
            self._faults.append(f"{name}: restored step {restored}, and step {self._durable} had been called durable")
        if restored > self._issued + 1:
            self._faults.append(f"{name}: restored step {restored}, and training had never come beyond {self._issued}")
        if equal is not None:
            self._checked += 1
            if not equal:
                self._faults.append(f"{name}: the loss of step {restored + 1} is another one than before the kill")
        lost = max(0, self._reached - restored)
        self._reached = restored
        return lost

    def record(self, started_at: str, began: float, scratch: Path) -> GoodputRecord:
        """What the incarnations came to."""
        board, incarnations = self._board, self._incarnations
        # A last incarnation that was still restoring has nothing but what is durable.
        end = incarnations[-1].reached_step if incarnations[-1].reached_step is not None else self._found
        useful, durable = max(0, end - self._base), max(0, self._found - self._base)
        window_s = sum(one.uptime_s for one in incarnations)
        start_up_s = sum(one.start_up_s for one in incarnations[1:])
        steps = sum(one.steps for one in incarnations)
        training_s = window_s - sum(one.load_s or 0.0 for one in incarnations)
        return GoodputRecord(
            spec=self._spec,
            started_at=started_at,
            wall_s=time.monotonic() - began,
            where=where_run(scratch),
            state_bytes=board.get("state_bytes") or 0,
            parameters=board.get("parameters") or 0,
            first_step=self._base,
            lives=incarnations,
            window_s=window_s,
            start_up_s=start_up_s,
            useful_steps=useful,
            durable_steps=durable,
            goodput_iterations_per_s=useful / window_s,
            durable_goodput_iterations_per_s=durable / window_s,
            raw_goodput_iterations_per_s=useful / (window_s + start_up_s),
            step_s=training_s / steps if steps else None,
            load_s=statistics.median(self._loads_s) if self._loads_s else None,
            restores=len(self._loads_s),
            restores_checked=self._checked,
            faults=self._faults,
        )
