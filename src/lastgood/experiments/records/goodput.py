"""What a measured goodput run is, and its record: one JSON file per run, written once, atomically. Needs no torch.

A run lives through a window of uptime in which its training process is really killed at given moments. Uptime is the
time in which an incarnation restores or trains: the artefact's formula knows no other cost of a failure. What else it
needs (a process, the model's building, the system's start) is measured too, but the window's clock stands still for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from lastgood.checkpointers.registry import BASELINE
from lastgood.experiments.records.base import Record, Scale, Spec
from lastgood.experiments.records.spec import RunSpec
from lastgood.models import FrozenModel

__all__ = ["GOODPUT_METHOD", "GoodputRecord", "GoodputSpec", "Incarnation"]

GOODPUT_METHOD = 1
"""Version of how goodput is measured, part of every run's identity."""
_MAX_WINDOW_S = 24 * 3600.0
_MAX_FAILURES = 1000


class GoodputSpec(Spec):
    """One measured goodput run: a run's settings, and the failures it lives through, all resolved."""

    NOT_IN_CELL: ClassVar[Mapping[str, Any]] = {"run": {"repetition", "seed", "proof", "measured_steps"}}
    """The last two mean nothing here."""

    spec_version: Literal[1] = 1
    method: int = Field(default=GOODPUT_METHOD, ge=1)
    run: RunSpec
    """Workload, system, interval and options; the steps that it measures and its proof mean nothing here."""
    window_s: float = Field(gt=0, le=_MAX_WINDOW_S, allow_inf_nan=False)
    """Seconds of uptime."""
    failures_s: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(max_length=_MAX_FAILURES)
    """When the training process is killed, in seconds of uptime, ascending, each below `window_s`."""
    trace_name: str
    trace_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    trace_s: float = Field(gt=0)
    """Seconds of the complete trace."""
    trace_failures: int = Field(ge=0)
    """Failures of the complete trace."""
    stretch_start_s: float = Field(ge=0)
    """Where the stretch of the trace begins that the window stands for."""
    stretch_s: float = Field(gt=0)
    """Seconds of that stretch; over `window_s` this is the factor of compression."""

    @model_validator(mode="after")
    def _in_order(self) -> GoodputSpec:
        if any(after < before for before, after in pairwise([*self.failures_s, self.window_s])):
            raise ValueError("failures_s must ascend and end before window_s")
        if self.run.pairs is not None:
            raise ValueError("a goodput run has no pairs of blocks")
        if self.run.interval_steps < 1 and self.run.system != BASELINE:
            raise ValueError(f"interval_steps 0 takes no checkpoints; only the system {BASELINE} goes without")
        return self

    @property
    def scale(self) -> Scale:
        """The run's."""
        return self.run.scale

    @property
    def workload(self) -> str:
        """The run's."""
        return self.run.workload

    @property
    def panel(self) -> str:
        """The run's."""
        return self.run.panel

    @property
    def repetition(self) -> int:
        """The run's."""
        return self.run.repetition

    @property
    def proof(self) -> bool:
        """Every restore is checked, so there is no proof to ask for."""
        return False

    @property
    def data(self) -> str | None:
        """The run's."""
        return self.run.data

    def record_path(self) -> PurePosixPath:
        """Where the record lies, below the results folder."""
        run = self.run.record_path()
        machine, scale, workload, system, interval, variant, name = run.parts
        readable = variant.rpartition("-c")[0]
        cell = "-".join([*([readable] if readable else []), f"k{len(self.failures_s)}", f"c{self.cell_hash}"])
        return PurePosixPath(machine, scale, "goodput", workload, system, interval, cell, name)

    def title(self) -> str:
        """A short name for logs and progress bars."""
        return f"goodput of {self.run.title()}"


class Incarnation(FrozenModel):
    """One incarnation of the training process."""

    ended: Literal["killed", "window"]
    """``window``: it was the last one, and the window was over."""
    uptime_s: float
    """Seconds in which it restored or trained."""
    start_up_s: float
    """Seconds for all else: the process, building the workload, starting the system (of the first: its warm-up)."""
    load_s: float | None
    """Seconds of its restore; None for the first, and for one that was killed before its restore was done."""
    restored_step: int | None
    """The step of the training state after the restore; 0 if it began from nothing; None as for `load_s`."""
    reached_step: int | None
    """The last step that it finished; None if it never trained. The kill may have come in the save of one more."""
    durable_step: int | None
    """The newest checkpoint of its own that the system called durable."""
    lost_steps: int
    """Steps that earlier incarnations had finished beyond what this one restored."""
    failed_saves: int
    loss_equal: bool | None
    """Whether its first step's loss was the one that an earlier one had there; None if none had been there."""

    @property
    def steps(self) -> int:
        """Steps that it finished itself."""
        return 0 if self.reached_step is None or self.restored_step is None else self.reached_step - self.restored_step


class GoodputRecord(Record[GoodputSpec]):
    """One measured goodput run, complete."""

    NAME: ClassVar[str] = "a goodput record"

    state_bytes: int
    parameters: int
    first_step: int
    """The step at which the window began, after warm-up and one checkpoint."""
    lives: list[Incarnation]
    window_s: float
    """Uptime of all incarnations: the spec's window, as closely as kills could be timed."""
    start_up_s: float
    """Seconds that all incarnations but the first spent outside of uptime."""
    useful_steps: int
    """Steps from the window's begin to its end that no failure took back."""
    durable_steps: int
    """How many of them a last process, started after the window, found when it restored."""
    goodput_iterations_per_s: float
    """useful_steps / window_s: what the formula predicts."""
    durable_goodput_iterations_per_s: float
    """durable_steps / window_s."""
    raw_goodput_iterations_per_s: float
    """useful_steps / (window_s + start_up_s): with start-up, which the compression leaves as long as it is."""
    step_s: float | None
    """Training time of all incarnations by the steps that they did, lost ones included."""
    load_s: float | None
    """Median over the restores, the last process's included."""
    restores: int
    restores_checked: int
    """Restores after which a loss could be compared to the bit (CUDA: to 1 %) with that of an earlier incarnation."""
    faults: list[str] = Field(default_factory=list)
    """What restores did that they must not: one sentence each."""

    def summary(self) -> str:
        """Useful steps of its window, goodput with and without start-up, and restores."""
        rate, raw = self.goodput_iterations_per_s, self.raw_goodput_iterations_per_s
        return (
            f"{self.useful_steps} useful steps in {self.window_s:.1f} s of uptime with {len(self.lives) - 1} failures, "
            f"{rate:.3g} iterations/s ({raw:.3g} with start-up); {self.restores_checked} of {self.restores} restores "
            f"checked, {self.wall_s:.0f} s in all"
        )

    def marks(self) -> list[str]:
        """What restores did that they must not."""
        return self.faults
