"""Parts of FlowCheck's figure that train on a testbed: what each is asked for, and what it gives. Needs no torch."""

from __future__ import annotations

import statistics
from typing import Annotated, Final, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from lastgood.models import FrozenModel

__all__ = [
    "ALONE",
    "MIRRORED",
    "STAGES",
    "WATCHED",
    "GptShape",
    "LivesResult",
    "LivesSettings",
    "NodeLook",
    "StageBlock",
    "StagesResult",
    "StagesSettings",
    "TrainingBlock",
    "TrainingResult",
    "TrainingSettings",
    "Variant",
    "WatchedLife",
    "Window",
]

Variant = str
"""Of a training: `ALONE`, `MIRRORED`, `WATCHED`, or a system that saves each step."""
ALONE: Final = "none"
MIRRORED: Final = "mirror"
"""Its frames are copied, and nobody reads them."""
WATCHED: Final = "node"
"""A mirror node reads them, and holds each step."""
STAGES: Final = ("parse", "extract", "take over", "update")
"""Of a mirror node; ``take over`` puts gradients into the shadow's slots, and tells what the update is."""
_Count = Annotated[int, Field(ge=1)]


class GptShape(FrozenModel):
    """The small GPT that is trained."""

    vocabulary: _Count = 2048
    width: _Count = 256
    heads: _Count = 4
    blocks: _Count = 4
    length: _Count = 32
    batch: _Count = 2
    """Sequences of each rank."""


class TrainingSettings(FrozenModel):
    """Iterations of one training with a checkpoint of each, by system, on a testbed. Needs root."""

    part: Literal["training"] = "training"
    shape: GptShape
    ranks: int = Field(ge=2, le=64)
    """Each on a node of its own; the first is watched."""
    rate: str | None
    """Of each node's link."""
    threads: _Count
    """Of each rank."""
    systems: tuple[str, ...] = Field(max_length=16)
    """That save after each step, on rank 0; training alone, mirrored and watched are always there."""
    warmup: int = Field(ge=0, le=1000)
    steps: int = Field(ge=1, le=100_000)
    """Timed in each block."""
    rounds: int = Field(ge=1, le=1000)
    """Blocks of each variant, in a shuffled order each time."""


class LivesSettings(FrozenModel):
    """Useful iterations of a training that is killed now and then, as a trace has it. Needs root."""

    part: Literal["lives"] = "lives"
    training: TrainingSettings
    """Its systems restore as well; FlowCheck is always there."""
    window_s: float = Field(gt=0, le=86_400)
    """Of restoring and training; what processes need to start stands outside."""
    failures_s: tuple[Annotated[float, Field(gt=0)], ...] = Field(max_length=1000)
    """When all ranks are killed, from the window's begin."""
    trace_name: str
    trace_sha256: str
    trace_s: float = Field(gt=0)
    trace_failures: int = Field(ge=0)
    """In all of the trace, for the share at its own rate."""

    @model_validator(mode="after")
    def _inside(self) -> Self:
        if list(self.failures_s) != sorted(self.failures_s) or any(at >= self.window_s for at in self.failures_s):
            raise ValueError("failures_s: not in order, or not inside window_s")
        return self


class StagesSettings(FrozenModel):
    """How long a mirror node works on a step, beside the step itself, by the model's width. Needs root."""

    part: Literal["stages"] = "stages"
    training: TrainingSettings
    """Of each width; only its watched variant is made."""
    widths: tuple[_Count, ...] = Field(min_length=1, max_length=16)

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        heads = self.training.shape.heads
        for width in self.widths:
            if width % heads:
                raise ValueError(f"widths: {width} is not a multiple of the {heads} heads")
        return self

    def at_width(self, width: int) -> TrainingSettings:
        """The training of one width."""
        shape = self.training.shape.model_copy(update={"width": width})
        return self.training.model_copy(update={"shape": shape})


class TrainingBlock(FrozenModel):
    """One training from its start, in one way."""

    variant: Variant
    round: int = Field(ge=0)
    iteration_s: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(min_length=1)
    """Of each timed step, on rank 0."""
    mirrored_frames: int | None = None
    """That the mirror copied."""
    held_step: int | None = None
    """The newest step that the mirror node held in the end."""

    @property
    def median_s(self) -> float:
        """Of an iteration."""
        return statistics.median(self.iteration_s)


class TrainingResult(FrozenModel):
    """All blocks."""

    part: Literal["training"] = "training"
    blocks: list[TrainingBlock] = Field(min_length=1)
    left_out: list[str] = Field(default_factory=list)
    """Variants that could not be, and why."""


class WatchedLife(FrozenModel):
    """From a start to a kill."""

    restored_step: int | None = Field(default=None, ge=0)
    """None: it was the first."""
    restore_s: float | None = Field(default=None, ge=0)
    """From all ranks being there until the first step began; None: it was killed before."""
    last_step: int = Field(ge=0)
    """Updates done at its end."""


class Window(FrozenModel):
    """One way of training through the window."""

    variant: Variant
    lives: list[WatchedLife] = Field(min_length=1)
    differing: int = Field(ge=0)
    """Losses of steps done again that are other ones than before: must be none."""

    @property
    def useful_steps(self) -> int:
        """What is left in the end."""
        return self.lives[-1].last_step

    @property
    def lost_steps(self) -> list[int]:
        """By kill: done before it, and not restored after it."""
        pairs = zip(self.lives, self.lives[1:], strict=False)
        return [before.last_step - (after.restored_step or 0) for before, after in pairs]


class LivesResult(FrozenModel):
    """All windows."""

    part: Literal["lives"] = "lives"
    alone: list[TrainingBlock] = Field(min_length=1)
    """Training with nothing beside it, before and after the windows."""
    windows: list[Window]
    left_out: list[str] = Field(default_factory=list)

    @property
    def alone_s(self) -> float:
        """Median iteration of training alone."""
        return statistics.median(second for block in self.alone for second in block.iteration_s)


class NodeLook(FrozenModel):
    """What a mirror node's own clocks showed at one moment."""

    steps: int = Field(ge=0)
    """Whose gradients were all there."""
    updates: int = Field(ge=0)
    """Steps that were applied."""
    stage_s: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]]
    """By name (`STAGES`): what each had worked since the node began."""


class StageBlock(FrozenModel):
    """One training of one width, watched."""

    width: _Count
    parameters: _Count
    round: int = Field(ge=0)
    iteration_s: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(min_length=1)
    """Of each timed step, on rank 0."""
    first: NodeLook
    last: NodeLook
    held_step: int | None = None
    """The newest step that the node held in the end."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.last.steps <= self.first.steps or self.last.updates <= self.first.updates:
            raise ValueError("no step between the two looks at the node's clocks")
        return self

    @property
    def gap_s(self) -> float:
        """Median from one step to the next: the time that a node has for a step."""
        return statistics.median(self.iteration_s)

    @property
    def step_s(self) -> dict[str, float]:
        """What each stage worked on a step, between the two looks."""
        counts = dict.fromkeys(STAGES, self.last.steps - self.first.steps)
        counts["update"] = self.last.updates - self.first.updates
        return {name: (self.last.stage_s[name] - self.first.stage_s[name]) / counts[name] for name in STAGES}


class StagesResult(FrozenModel):
    """All blocks."""

    part: Literal["stages"] = "stages"
    blocks: list[StageBlock] = Field(min_length=1)
    left_out: list[str] = Field(default_factory=list)
