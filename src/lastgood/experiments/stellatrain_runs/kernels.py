"""Optimizers over the elements that were sent, and compressors, beside torch's own and one read of the memory."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

from lastgood.experiments.records.stellatrain import KERNELS, Kernel, KernelsSettings, KernelTimes
from lastgood.sparse.blocks import BLOCK_WIDTH, SparseGradient
from lastgood.sparse.compressors import COMPRESSORS, keep_count, make_compressor
from lastgood.sparse.optimizer import SparseOptimizer

__all__ = ["measure_kernels"]

_LEARNING_RATE: Final = 1e-3
_FREEDOM: Final = 3.0
"""Degrees of freedom of Student's t: gradients have heavy tails. Neighbours are independent here."""
_ROWS: Final = 1 << 20


def measure_kernels(settings: KernelsSettings, seed: int, report: Callable[[str], None]) -> list[KernelTimes]:
    """Every kernel once in each round after one that warms up, in another order each time."""
    torch.set_num_threads(settings.threads)
    bench = _Bench(settings, seed)
    seconds: dict[Kernel, list[float]] = {kernel: [] for kernel in KERNELS}
    for number in range(settings.rounds + 1):
        report(f"kernels: round {number} of {settings.rounds}" if number else "kernels: warming up")
        order = list(KERNELS)
        random.Random(f"{seed}/{number}").shuffle(order)
        bench.next_round(number)
        for kernel in order:
            call = bench.prepared(kernel)
            began = time.perf_counter()
            call()
            took = time.perf_counter() - began
            if number:
                seconds[kernel].append(took)
        if not number:
            bench.touch()
    return [
        KernelTimes(kernel=kernel, seconds=seconds[kernel], **(bench.kept(kernel) if _is_compressor(kernel) else {}))
        for kernel in KERNELS
    ]


def _is_compressor(kernel: Kernel) -> bool:
    return kernel == "torch-topk" or kernel in COMPRESSORS


class _Bench:
    """What all kernels work on."""

    def __init__(self, settings: KernelsSettings, seed: int) -> None:
        self._settings = settings
        self._seed = seed
        self._count = keep_count(settings.elements, settings.compression, 1)
        self._gradient = _heavy_tailed(settings.elements, seed)
        self._residuals: dict[str, torch.Tensor] = {}
        self._compressors: dict[str, Any] = {}
        self._optimizers: dict[str, Any] = {}
        self._sent: dict[int, SparseGradient] = {}
        self._round = 0

    def next_round(self, number: int) -> None:
        """Another choice of what was sent: one that is repeated would lie in the cache."""
        self._round = number
        dice = np.random.default_rng([self._seed, number])
        for width in (1, BLOCK_WIDTH):
            places = self._settings.elements // width
            indices = np.unique(dice.integers(0, places, self._count // width, dtype=np.uint32))
            values = torch.from_numpy(dice.standard_normal(len(indices) * width, dtype=np.float32))
            self._sent[width] = SparseGradient(self._settings.elements, width, indices, values)

    def prepared(self, kernel: Kernel) -> Callable[[], Any]:
        """What is to be timed; all that it needs is there, and as it would be in a training."""
        if kernel == "read":
            return self._gradient.sum
        if kernel == "torch-topk":
            return lambda: _torch_topk(self._gradient, self._count)
        if kernel in COMPRESSORS:
            return self._compression(kernel)
        name, _, how = kernel.partition("-")
        if how == "dense":
            optimizer = self._optimizer(kernel, name, fused=True)
            optimizer.param_groups[0]["params"][0].grad = self._gradient
            return optimizer.step  # type: ignore[no-any-return]  # torch gives it no type
        sparse = self._optimizer(kernel, name, fused=False)
        (parameter,) = sparse.optimizer.param_groups[0]["params"]
        sent = [self._sent[1 if how == "single" else BLOCK_WIDTH]]
        return lambda: sparse.apply(parameter, sent, iteration=self._round)

    def touch(self) -> None:
        """Write to all pages of parameters and moments: a sparse update alone would meet new ones for many rounds."""
        with torch.no_grad():
            for made in self._optimizers.values():
                optimizer = made.optimizer if isinstance(made, SparseOptimizer) else made
                for parameter, state in optimizer.state.items():
                    for tensor in (parameter, *(one for one in state.values() if isinstance(one, torch.Tensor))):
                        tensor.mul_(1.0)

    def kept(self, kernel: Kernel) -> dict[str, Any]:
        """Share of the gradient's sum of squares that goes, if nothing stayed behind before."""
        if kernel == "torch-topk":
            values = _torch_topk(self._gradient, self._count)
        else:
            compressor = make_compressor(kernel, self._settings.elements, seed=self._seed)
            values = compressor.compress(self._gradient, None, self._count).values
        whole = float(self._gradient.double().square().sum())
        return {"energy_kept": float(values.double().square().sum()) / whole, "elements_kept": len(values)}

    def _compression(self, kernel: str) -> Callable[[], Any]:
        elements = self._settings.elements
        if kernel not in self._compressors:
            self._compressors[kernel] = make_compressor(
                kernel, elements, seed=self._seed, threads=self._settings.threads
            )
            self._residuals[kernel] = torch.zeros(elements)
        compressor, residual = self._compressors[kernel], self._residuals[kernel]
        return lambda: compressor.compress(self._gradient, residual, self._count)

    def _optimizer(self, kernel: str, name: str, *, fused: bool) -> Any:
        if kernel not in self._optimizers:
            parameter = torch.nn.Parameter(torch.zeros(self._settings.elements))
            made: Any
            if name == "sgd":
                made = torch.optim.SGD([parameter], lr=_LEARNING_RATE, momentum=0.9, fused=fused)
            else:
                made = torch.optim.Adam([parameter], lr=_LEARNING_RATE, fused=fused)
            self._optimizers[kernel] = made if fused else SparseOptimizer(made, threads=self._settings.threads)
        return self._optimizers[kernel]


def _heavy_tailed(elements: int, seed: int) -> torch.Tensor:
    """Student's t, in pieces, so that it is made in little memory."""
    dice = np.random.default_rng(seed)
    drawn = torch.empty(elements)
    for begin in range(0, elements, _ROWS):
        count = min(_ROWS, elements - begin)
        drawn[begin : begin + count] = torch.from_numpy(dice.standard_t(_FREEDOM, count).astype(np.float32))
    return drawn


def _torch_topk(gradient: torch.Tensor, count: int) -> torch.Tensor:
    """What a hook in a few lines of Python does."""
    chosen = torch.topk(gradient.abs(), count, sorted=False).indices
    return gradient[chosen]
