"""The section of a configuration for StellaTrain's figure: an entry for each of its parts. Needs no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from lastgood.experiments.config.values import Count, Listed, Rate
from lastgood.experiments.records.stellatrain import ALONE, STELLATRAIN_PARTS, WAYS
from lastgood.models import FrozenModel

__all__ = ["KernelsBench", "LinksBench", "StellatrainSection"]


def _part(name: str) -> str:
    if name not in STELLATRAIN_PARTS:
        raise ValueError("no such part")
    return name


def _way(name: str) -> str:
    if name == ALONE:
        raise ValueError(f"{ALONE} is always measured")
    if name not in WAYS:
        raise ValueError("no such way")
    return name


_NAMED_WAYS = WAYS[1:]
_Compression = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


class LinksBench(FrozenModel):
    """The panel on links: a training on two nodes of a testbed."""

    model: Literal["resnet18", "mlp"] = Field(default="resnet18", description="resnet18 or mlp")
    classes: Count = Field(default=10, description="a whole number from 1")
    size_px: Count = Field(default=32, description="a whole number from 1: of pictures, or inputs of mlp")
    batch: Count = Field(default=8, description="a whole number from 1: pictures of each node")
    threads: Count | None = Field(
        default=None, description="a whole number from 1: of each node; null shares the cores out"
    )
    rates: Listed[Rate] = Field(
        default=["100mbit", "500mbit", "1gbit"], description="a list of rates, as 100mbit: of the nodes' links"
    )
    ways: Listed[Annotated[str, AfterValidator(_way)]] = Field(
        default=list(_NAMED_WAYS), description=f"a list of {', '.join(_NAMED_WAYS)}"
    )
    compression: _Compression = Field(
        default=0.99, description="a number from 0, below 1: the share of a gradient that is not sent"
    )
    average_every: Count = Field(
        default=4, description="a whole number from 1: iterations from average to average under post-local SGD"
    )
    warmup: Annotated[Count, Field(ge=4, le=1000)] = Field(
        default=4, description="a whole number from 4 to 1000: iterations before those that are timed"
    )
    block_s: Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False)] = Field(
        default=3.0, description="seconds above 0, at most 3600: of a block, which has two iterations at least"
    )
    most_steps: Annotated[Count, Field(ge=2, le=100_000)] = Field(
        default=200, description="a whole number from 2 to 100000: iterations of a block, at most"
    )
    rounds: Annotated[Count, Field(le=100)] = Field(
        default=2, description="a whole number from 1 to 100: blocks of each way at each rate"
    )


class KernelsBench(FrozenModel):
    """The panel on kernels: optimizers and compressors on one tensor."""

    elements: Annotated[Count, Field(ge=1024, le=2**32)] = Field(
        default=25_000_000, description="a whole number from 1024: float32 of the tensor"
    )
    compression: _Compression = Field(default=0.99, description="a number from 0, below 1: as of links")
    threads: Count | None = Field(default=None, description="a whole number from 1; null takes all threads")
    rounds: Annotated[Count, Field(le=1000)] = Field(
        default=5, description="a whole number from 1 to 1000: how often each kernel is timed"
    )


class StellatrainSection(FrozenModel):
    """StellaTrain's figure: a panel for each part. Defaults are for configurations from before it."""

    parts: Listed[Annotated[str, AfterValidator(_part)]] = Field(
        default=list(STELLATRAIN_PARTS), description=f"a list of {', '.join(STELLATRAIN_PARTS)}: the panels"
    )
    repetitions: Count = Field(default=1, description="a whole number from 1: measurements of each part")
    links: LinksBench = Field(default_factory=LinksBench, description="what the panel on links measures; it needs root")
    kernels: KernelsBench = Field(default_factory=KernelsBench, description="what the panel on kernels measures")
