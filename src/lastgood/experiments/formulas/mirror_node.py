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
from typing import Final

from lastgood.experiments.records.mirror_node import LargeModel, MirrorNode, NodeRates

__all__ = ["NodeNeed", "node_need"]

_FLOAT_BYTES: Final = 4
_STATE_TENSORS: Final = {"sgd": 2, "adam": 3, "adamw": 3}
"""Parameters, and what the optimizer keeps of each."""
_VERSIONS: Final = 2


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
