"""Large trainings and the node that mirrors them: what `formulas.mirror_node` starts from. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Literal

from pydantic import Field

from lastgood.models import FrozenModel

__all__ = ["LARGE_MODELS", "LargeModel", "MirrorNode", "NodeRates"]

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1)]


class LargeModel(FrozenModel):
    """A transformer and the cluster that it was trained on, as published."""

    name: str
    parameters: _Positive
    gpus: _Count
    tensor: _Count
    pipeline: _Count
    layers: _Count
    hidden: _Count
    sequences: _Count
    """In one iteration."""
    sequence_tokens: _Count = 2048
    vocabulary: _Count = 51_200
    gpu_flops_per_s: _Positive
    """Reached, not the card's best."""
    source: str

    @property
    def ring_ranks(self) -> int:
        """GPUs that hold the same parameters."""
        return self.gpus // (self.tensor * self.pipeline)

    @property
    def shard_parameters(self) -> float:
        """That one GPU holds."""
        return self.parameters / (self.tensor * self.pipeline)

    @property
    def iteration_s(self) -> float:
        """By the number of its operations."""
        length, hidden = self.sequence_tokens, self.hidden
        more = 1 + length / (6 * hidden) + self.vocabulary / (16 * self.layers * hidden)
        flops = 96 * self.sequences * length * self.layers * hidden**2 * more
        return flops / (self.gpus * self.gpu_flops_per_s)


def _narayanan(
    name: str,
    parameters: float,
    gpus: int,
    tensor: int,
    pipeline: int,
    layers: int,
    hidden: int,
    sequences: int,
    teraflops: int,
    table: int,
) -> LargeModel:
    return LargeModel(
        name=name,
        parameters=parameters,
        gpus=gpus,
        tensor=tensor,
        pipeline=pipeline,
        layers=layers,
        hidden=hidden,
        sequences=sequences,
        gpu_flops_per_s=teraflops * 1e12,
        source=f"Narayanan et al., SC'21, table {table}",
    )


LARGE_MODELS: Final = {
    model.name: model
    for model in (
        _narayanan("175B", 174.6e9, 1536, 8, 12, 96, 12_288, 1536, 141, 2),
        _narayanan("310B", 310.1e9, 1920, 8, 16, 96, 16_384, 2160, 155, 1),
        _narayanan("530B", 529.6e9, 2520, 8, 35, 105, 20_480, 2520, 163, 1),
        _narayanan("1T", 1008.0e9, 3072, 8, 64, 128, 25_600, 3072, 163, 1),
    )
}
"""GPT of 175 thousand million parameters to a million million, on 1,536 to 3,072 A100."""


class MirrorNode(FrozenModel):
    """How a node is used."""

    watched: _Count
    """GPUs, each of another ring: those of one server, for instance."""
    gpu_link_bits_per_s: _Positive
    gradient_bytes: Literal[2, 4]
    """Of a parameter, on the wire."""
    header_bytes: int = Field(ge=0)
    payload_bytes: _Count


@dataclass(frozen=True)
class NodeRates:
    """What one core does in a second; None for what nobody measured."""

    capture_bytes_per_s: float | None
    """Frames taken from an interface."""
    parse_bytes_per_s: float | None
    """Frames parsed, and their gradients extracted."""
    update_parameters_per_s: float | None
