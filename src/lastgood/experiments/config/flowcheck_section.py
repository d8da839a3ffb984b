"""The section of a configuration for FlowCheck's figure: an entry for each of its parts. Needs no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator
from typing_extensions import Self

from lastgood.experiments.config.values import BASELINE, Count, CountOrZero, Listed, Rate, SystemName
from lastgood.experiments.records.flowcheck import FLOWCHECK_PARTS, GptShape
from lastgood.experiments.records.mirror_node import LARGE_MODELS
from lastgood.models import FrozenModel
from lastgood.workloads.optimizer_shapes import MODELS

__all__ = [
    "CaptureBench",
    "FlowcheckSection",
    "LivesBench",
    "RecoveryBench",
    "SizingBench",
    "StagesBench",
    "TrainingBench",
]


def _part(name: str) -> str:
    if name not in FLOWCHECK_PARTS:
        raise ValueError("no such part")
    return name


def _large_model(name: str) -> str:
    if name not in LARGE_MODELS:
        raise ValueError("no such model")
    return name


def _shape(name: str) -> str:
    if name not in MODELS:
        raise ValueError("no such shape")
    return name


def _different(ranks: list[int]) -> list[int]:
    if len(set(ranks)) < len(ranks):
        raise ValueError("a rank is there twice")
    return sorted(ranks)


_Watched = Annotated[list[CountOrZero], AfterValidator(_different), Field(min_length=1, max_length=64)]
_Share = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]
_Payload = Annotated[Count, Field(ge=64, le=65_536)]


def _saving(systems: list[str]) -> list[str]:
    if BASELINE in systems:
        raise ValueError(f"{BASELINE} is always measured")
    return systems


class TrainingBench(FrozenModel):
    """Panel (a): iteration time with a checkpoint of every iteration."""

    shape: GptShape = Field(default_factory=GptShape, description="the GPT that is trained")
    ranks: Annotated[Count, Field(ge=2, le=64)] = Field(
        default=3, description="a whole number from 2 to 64: trainers, each a node of a testbed; one more node watches"
    )
    rate: Rate | None = Field(default=None, description="as 1gbit: the limit of the testbed's links, or null")
    threads: Count | None = Field(
        default=None, description="a whole number from 1: of each rank; null shares the cores out"
    )
    systems: Annotated[Listed[SystemName], AfterValidator(_saving)] = Field(
        default=["sync", "checkfreq"], description="a list of systems that save after each step, without none"
    )
    warmup: CountOrZero = Field(default=4, description="a whole number from 0: steps before those that are timed")
    steps: Count = Field(default=16, description="a whole number from 1: steps timed in each block")
    rounds: Count = Field(default=2, description="a whole number from 1: blocks of each variant")


class LivesBench(FrozenModel):
    """Panel (b): effective training time under kills. What is trained is that of panel (a), the trace figure 9's."""

    systems: Annotated[list[SystemName], AfterValidator(_saving)] = Field(
        default=["sync", "checkfreq"], description="a list of systems that save after each step, beside FlowCheck"
    )
    window_s: Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)] = Field(
        default=20.0, description="seconds above 0, at most 86400: restoring and training of each way"
    )
    failures: Annotated[Count, Field(le=1000)] = Field(
        default=2, description="a whole number from 1 to 1000: kills of all ranks in it, at most"
    )


class CaptureBench(FrozenModel):
    """Panel (c): frames lost against offered rate."""

    frame_bytes: Listed[Annotated[Count, Field(ge=64, le=65_535)]] = Field(
        default=[1500, 65_535], description="a list of whole numbers from 64 to 65535: sizes of frames"
    )
    offered: Listed[Rate] = Field(
        default=["250mbit", "500mbit", "1gbit", "2gbit", "4gbit", "8gbit", "16gbit", "32gbit"],
        description="a list of rates, as 1gbit: asked of the sender",
    )
    seconds: Annotated[float, Field(gt=0, le=600, allow_inf_nan=False)] = Field(
        default=2.0, description="a number above 0, at most 600: seconds of each point"
    )
    ring_bytes: Annotated[Count, Field(ge=2 << 20, le=64 << 30)] = Field(
        default=64 << 20, description="a whole number from 2097152: bytes of the kernel's ring"
    )


class RecoveryBench(FrozenModel):
    """Panel (d): iterations that survive a lossy mirror."""

    ranks: Annotated[Count, Field(ge=2, le=1024)] = Field(
        default=8, description="a whole number from 2 to 1024: ranks of the ring"
    )
    watched: list[_Watched] = Field(
        default=[[0], [0, 1], [0, 4], [0, 1, 2], [0, 3, 5]],
        min_length=1,
        max_length=16,
        description="a list of lists of ranks: whose links are mirrored, both directions of each",
    )
    gradient_bytes: Count = Field(default=1 << 20, description="a whole number from 1: reduced in each iteration")
    payload_bytes: _Payload = Field(default=1024, description="a whole number from 64 to 65536: of a packet")
    loss_rates: Listed[_Share] = Field(
        default=[1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1],
        description="a list of numbers between 0 and 1: the share of mirrored packets that is lost",
    )
    simulated: CountOrZero = Field(default=400, description="a whole number from 0: iterations simulated at each point")
    measured: CountOrZero = Field(
        default=40,
        description="a whole number from 0: iterations whose packets are generated, lost and parsed at each point",
    )

    @model_validator(mode="after")
    def _in_the_ring(self) -> Self:
        for ranks in self.watched:
            if ranks[-1] >= self.ranks:
                raise ValueError(f"watched: {ranks}: a ring of {self.ranks} has ranks 0 to {self.ranks - 1}")
        return self


class StagesBench(FrozenModel):
    """Panel (e): time of the node's stages against the gap between steps. What is trained is that of panel (a)."""

    widths: Listed[Count] = Field(
        default=[128, 256, 512], description="a list of whole numbers: widths of the GPT, multiples of its heads"
    )
    steps: Count = Field(default=16, description="a whole number from 1: steps timed of each width")
    rounds: Count = Field(default=1, description="a whole number from 1: trainings of each width")


class SizingBench(FrozenModel):
    """Panel (f): what a mirror node of a large training needs."""

    models: Listed[Annotated[str, AfterValidator(_large_model)]] = Field(
        default=list(LARGE_MODELS), description=f"a list of {', '.join(LARGE_MODELS)}"
    )
    watched: Count = Field(
        default=8, description="a whole number from 1: GPUs that a node watches, each of another ring"
    )
    gpu_link_gbit: Annotated[float, Field(gt=0, le=100_000, allow_inf_nan=False)] = Field(
        default=200.0, description="a number above 0: Gbit/s of each GPU's link"
    )
    gradient_bytes: Literal[2, 4] = Field(default=4, description="2 or 4: of a parameter, on the wire")
    header_bytes: CountOrZero = Field(
        default=58, description="a whole number from 0: of a frame, beside its payload; RoCEv2 over IPv4 has 58"
    )
    payload_bytes: _Payload = Field(default=4096, description="a whole number from 64 to 65536: of a packet")
    optimizer: Literal["sgd", "adam", "adamw"] = Field(default="adamw", description="sgd, adam or adamw")
    update_shape: Annotated[str, AfterValidator(_shape)] = Field(
        default="resnet50", description=f"one of {', '.join(MODELS)}: what is updated to learn this machine's rate"
    )
    updates: Count = Field(default=5, description="a whole number from 1: updates timed")
    traffic_bytes: Count = Field(
        default=16 << 20, description="a whole number from 1: bytes of gradients parsed to learn this machine's rate"
    )


class FlowcheckSection(FrozenModel):
    """FlowCheck's figure: a panel for each part. Defaults are for configurations from before it."""

    parts: Listed[Annotated[str, AfterValidator(_part)]] = Field(
        default=list(FLOWCHECK_PARTS), description=f"a list of {', '.join(FLOWCHECK_PARTS)}: the panels"
    )
    repetitions: Count = Field(default=1, description="a whole number from 1: measurements of each part")
    training: TrainingBench = Field(
        default_factory=TrainingBench, description="what the panel on iteration times trains; it needs root"
    )
    lives: LivesBench = Field(default_factory=LivesBench, description="what the panel on kills measures; it needs root")
    capture: CaptureBench = Field(
        default_factory=CaptureBench, description="what the panel on lost frames sends; it needs root"
    )
    recovery: RecoveryBench = Field(
        default_factory=RecoveryBench, description="what the panel on lossy mirrors simulates and measures"
    )
    stages: StagesBench = Field(
        default_factory=StagesBench, description="what the panel on the node's stages trains; it needs root"
    )
    sizing: SizingBench = Field(default_factory=SizingBench, description="what the panel on large trainings assumes")

    @model_validator(mode="after")
    def _widths_have_heads(self) -> Self:
        heads = self.training.shape.heads
        for width in self.stages.widths:
            if width % heads:
                raise ValueError(f"stages: widths: {width} is not a multiple of the {heads} heads of training.shape")
        return self
