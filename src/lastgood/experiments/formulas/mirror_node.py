"""What a node that mirrors a large training needs: link, memory and cores. Pure arithmetic.

A training of P parameters on G GPUs splits its model over m = tensor * pipeline GPUs. The G/m GPUs that hold the same
shard of P/m parameters reduce its gradients over a ring of k = G/m. One GPU of each ring is watched, and a node watches
w of them. With g bytes of gradient a parameter, one iteration of t seconds shows it, of each watched GPU::

    ring   = 2 (k - 1)/k * g * P/m             bytes in one direction: reduce-scatter and all-gather
    frames = 2 * ring * (1 + headers/payload)  bytes mirrored, both directions
    t      = FLOPs of an iteration / (G * FLOP/s that a GPU reaches)

The link must carry both directions at the rate of the GPU's own link while gradients are reduced (peak), and w * frames
/ t in the mean. Cores follow from the mean, since a ring in memory holds what comes faster than it is parsed: w *
frames * (1 - busy), where busy = ring / (link's rate * t) is the share of time in which frames come. Memory is that
ring, two versions of parameters and optimizer state, and one gradient. FLOPs of an iteration are those of a transformer
of l layers, hidden size h, vocabulary V, sequence s and B sequences, whose activations are computed again (Narayanan et
al., SC'21, equation 3)::

    96 B s l h^2 (1 + s / (6 h) + V / (16 l h))
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Final, Literal

from pydantic import Field

from lastgood.models import FrozenModel

__all__ = ["LARGE_MODELS", "LargeModel", "MirrorNode", "NodeNeed", "NodeRates", "node_need"]

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1)]
_FLOAT_BYTES: Final = 4
_STATE_TENSORS: Final = {"sgd": 2, "adam": 3, "adamw": 3}
"""Parameters, and what the optimizer keeps of each."""
_VERSIONS: Final = 2


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


@dataclass(frozen=True)
class NodeNeed:
    """What it needs, and what that follows from."""

    nodes: int
    """For all of the training."""
    iteration_s: float
    frame_bytes: float
    """Mirrored in one iteration, of all watched GPUs."""
    mean_bits_per_s: float
    peak_bits_per_s: float
    state_bytes: float
    """Two versions of parameters and optimizer state, and one gradient."""
    ring_bytes: float
    """Frames that wait to be parsed."""
    capture_cores: float | None
    parse_cores: float | None
    update_cores: float | None

    @property
    def memory_bytes(self) -> float:
        """All of it."""
        return self.state_bytes + self.ring_bytes


def node_need(model: LargeModel, node: MirrorNode, rates: NodeRates, optimizer: str) -> NodeNeed:
    """By the formulas of this module. Raises ValueError for a training without a ring: nothing is reduced there."""
    ranks = model.ring_ranks
    if ranks < 2:
        raise ValueError(f"{model.name} on {model.gpus} GPUs: no two of them hold the same parameters")
    ring = 2 * (ranks - 1) / ranks * node.gradient_bytes * model.shard_parameters
    frames = node.watched * 2 * ring * (1 + node.header_bytes / node.payload_bytes)
    parameters = node.watched * model.shard_parameters
    busy = min(1.0, ring * 8 / (node.gpu_link_bits_per_s * model.iteration_s))
    state = parameters * _FLOAT_BYTES * (_VERSIONS * _STATE_TENSORS[optimizer] + 1)

    def cores(work: float, rate: float | None) -> float | None:
        return None if rate is None else work / model.iteration_s / rate

    return NodeNeed(
        nodes=math.ceil(model.tensor * model.pipeline / node.watched),
        iteration_s=model.iteration_s,
        frame_bytes=frames,
        mean_bits_per_s=frames * 8 / model.iteration_s,
        peak_bits_per_s=2 * node.watched * node.gpu_link_bits_per_s,
        state_bytes=state,
        ring_bytes=frames * (1 - busy),
        capture_cores=cores(frames, rates.capture_bytes_per_s),
        parse_cores=cores(frames, rates.parse_bytes_per_s),
        update_cores=cores(parameters, rates.update_parameters_per_s),
    )
