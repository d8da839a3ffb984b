"""Steps of CPU trainers with fused Adam or AdamW, with nothing of Python between tensors."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

from lastgood._lazy import torch
from lastgood.optim.flat_state import FlatState
from lastgood.optim.host_adam import HostAdam, TorchAdam
from lastgood.optim.preparation import Preparation
from lastgood.optim.rule import UpdateRule
from lastgood.optim.spec import OptimizerSpec
from lastgood.optim.threads import intra_op_threads

__all__ = ["PIECE_ELEMENTS", "FusedStep"]

PIECE_ELEMENTS: Final = 1 << 17
"""Of each thread: 512 KiB of prepared gradients in float32, which stay in its second-level cache. A multiple of 64."""
_ALIGN_BYTES: Final = 64

_scratch = threading.local()


class FusedStep:
    """torch's fused CPU kernels on tensors that somebody else owns.

    Native code unscales, clips and steps in one pass, if it comes to the same bits. torch's kernel gets what is
    left, the last elements of each tensor or all of them: in one call if gradients are stepped as they are,
    otherwise cut into chunks. A chunk is unscaled and clipped into a buffer that is used again and again, and stepped
    while it is in the cache, so that no memory is written for it. Cuts lie at multiples of 64 bytes, where the kernel
    itself cuts a tensor between its threads, so that its last elements, rounded otherwise, are the same.
    """

    def __init__(
        self,
        spec: OptimizerSpec,
        parameters: Sequence[torch.Tensor],
        groups: Sequence[int],
        state: FlatState,
        threads: int,
    ) -> None:
        self._spec = spec
        self._state = state
        self._threads = threads
        self._elements = threads * PIECE_ELEMENTS
        together: dict[tuple[int, torch.dtype], list[int]] = {}
        for i, (parameter, group) in enumerate(zip(parameters, groups, strict=True)):
            together.setdefault((group, parameter.dtype), []).append(i)
        self._together = together
        keys = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        self._flat = [
            [parameter.detach().view(-1), *(held[key].view(-1) for key in keys if key in held)]
            for parameter, held in zip(parameters, state.tensors, strict=True)
        ]

    def step(self, gradients: Sequence[torch.Tensor | None], rule: UpdateRule) -> None:
        """One step in place. Gradients may be changed if the kernel divides by a loss scale."""
        prepare = Preparation(rule)
        with torch.no_grad(), intra_op_threads(self._threads):
            for (group, dtype), which in self._together.items():
                present = [(i, gradient.view(-1)) for i in which if (gradient := gradients[i]) is not None]
                steps = [self._state.tensors[i]["step"] for i, _ in present]
                if not present:
                    continue
                torch._foreach_add_(steps, 1)
                flags, numbers = self._spec.groups[group], rule.groups[group]
                kernel = TorchAdam(self._spec.kind, flags, numbers, rule.grad_scale)
                rows = [[*self._flat[i], gradient] for i, gradient in present]
                begins = [0] * len(rows)
                if HostAdam.can(self._spec.kind, dtype, numbers, rule):
                    HostAdam(self._spec.kind, flags, numbers, rule, self._threads)(rows, steps)
                    begins = [HostAdam.whole(row[-1]) for row in rows]
                if prepare:
                    self._step_pieces(rows, begins, steps, prepare, kernel)
                else:
                    _step_rest(rows, begins, steps, kernel)
                for i, _ in present:
                    self._state.started[i] = True

    def _step_pieces(
        self,
        tensors: Sequence[Sequence[torch.Tensor]],
        begins: Sequence[int],
        steps: Sequence[torch.Tensor],
        prepare: Preparation,
        kernel: TorchAdam,
    ) -> None:
        """Step each row of `tensors` from its element of `begins` on."""
        dtype = tensors[0][-1].dtype
        buffer = _buffer(dtype, self._elements)
        whole = _ALIGN_BYTES // dtype.itemsize
        rows: list[list[torch.Tensor]] = []
        counts: list[torch.Tensor] = []
        given: list[torch.Tensor] = []
        at = 0

        def flush() -> None:
            nonlocal at
            prepare(given, [row[-1] for row in rows])
            kernel(rows, counts)
            for filled in (rows, counts, given):
                filled.clear()
            at = 0

        for (*flat, gradient), begin, step in zip(tensors, begins, steps, strict=True):
            count = gradient.numel()
            while begin < count:
                end = min(count, begin + self._elements - at)
                given.append(gradient[begin:end])
                rows.append([*(tensor[begin:end] for tensor in flat), buffer[at : at + end - begin]])
                counts.append(step)
                at += -(-(end - begin) // whole) * whole
                begin = end
                if at == self._elements:
                    flush()
        if rows:
            flush()


def _step_rest(
    tensors: Sequence[Sequence[torch.Tensor]], begins: Sequence[int], steps: Sequence[torch.Tensor], kernel: TorchAdam
) -> None:
    """Step each row of `tensors` from its element of `begins` on, with gradients as they are."""
    left = [
        ([tensor[begin:] for tensor in row] if begin else row, step)
        for row, begin, step in zip(tensors, begins, steps, strict=True)
        if begin < row[-1].numel()
    ]
    if left:
        kernel([row for row, _ in left], [step for _, step in left])


def _buffer(dtype: torch.dtype, elements: int) -> torch.Tensor:
    """This thread's memory for prepared gradients: one for all buckets, so that it stays in the cache."""
    held: torch.Tensor | None = getattr(_scratch, "buffer", None)
    if held is None or held.numel() < elements * dtype.itemsize:
        held = _scratch.buffer = torch.empty(elements * dtype.itemsize, dtype=torch.uint8, device="cpu")
    return held[: elements * dtype.itemsize].view(dtype)
