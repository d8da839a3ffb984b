"""Steps of CPU trainers with fused Adam or AdamW: torch's own kernel, with nothing of Python between tensors."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from lastgood._lazy import lazy_module
from lastgood.optim.flat_state import FlatState
from lastgood.optim.preparation import Preparation
from lastgood.optim.rule import GroupRule, UpdateRule
from lastgood.optim.spec import OptimizerSpec
from lastgood.optim.threads import intra_op_threads

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_module("torch")

__all__ = ["PIECE_ELEMENTS", "FusedStep"]

PIECE_ELEMENTS: Final = 1 << 17
"""Of each thread: 512 KiB of prepared gradients in float32, which stay in its second-level cache. A multiple of 64."""
_ALIGN_BYTES: Final = 64

_scratch = threading.local()


class FusedStep:
    """torch's fused CPU kernels on tensors that somebody else owns.

    Gradients that need no preparation are stepped by one call. Others are cut into pieces: a piece is unscaled and
    clipped into a buffer that is used again and again, and stepped while it is in the cache, so that no memory is
    written for it. Cuts lie at multiples of 64 bytes, where the kernel itself cuts a tensor between its threads: the
    last elements, which it rounds otherwise, are the same ones.
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
        """One step in place. Gradients may be changed where the kernel divides by a loss scale."""
        prepare = Preparation(rule)
        with torch.no_grad(), intra_op_threads(self._threads):
            for (group, dtype), which in self._together.items():
                present = [(i, gradient.view(-1)) for i in which if (gradient := gradients[i]) is not None]
                steps = [self._state.tensors[i]["step"] for i, _ in present]
                if not present:
                    continue
                torch._foreach_add_(steps, 1)
                call = _Call(self._spec, group, rule)
                if prepare:
                    self._step_pieces(present, steps, dtype, prepare, call)
                else:
                    call([[*self._flat[i], gradient] for i, gradient in present], steps)
                for i, _ in present:
                    self._state.started[i] = True

    def _step_pieces(
        self,
        present: Sequence[tuple[int, torch.Tensor]],
        steps: Sequence[torch.Tensor],
        dtype: torch.dtype,
        prepare: Preparation,
        call: _Call,
    ) -> None:
        buffer = _buffer(dtype, self._elements)
        whole = _ALIGN_BYTES // dtype.itemsize
        rows: list[list[torch.Tensor]] = []
        counts: list[torch.Tensor] = []
        given: list[torch.Tensor] = []
        at = 0

        def flush() -> None:
            nonlocal at
            prepare(given, [row[-1] for row in rows])
            call(rows, counts)
            for filled in (rows, counts, given):
                filled.clear()
            at = 0

        for (i, gradient), step in zip(present, steps, strict=True):
            begin, count = 0, gradient.numel()
            while begin < count:
                end = min(count, begin + self._elements - at)
                given.append(gradient[begin:end])
                rows.append([*(flat[begin:end] for flat in self._flat[i]), buffer[at : at + end - begin]])
                counts.append(step)
                at += -(-(end - begin) // whole) * whole
                begin = end
                if at == self._elements:
                    flush()
        if rows:
            flush()


class _Call:
    """The kernel with one group's numbers."""

    def __init__(self, spec: OptimizerSpec, group: int, rule: UpdateRule) -> None:
        self._kernel: Any = torch._fused_adamw_ if spec.kind == "adamw" else torch._fused_adam_
        flags, numbers = spec.groups[group], rule.groups[group]
        self._arguments = {
            "amsgrad": flags.amsgrad,
            "maximize": flags.maximize,
            "lr": _learning_rate(numbers),
            "beta1": numbers.betas[0],
            "beta2": numbers.betas[1],
            "eps": numbers.eps,
            "weight_decay": numbers.weight_decay,
        }
        if rule.grad_scale is not None:
            self._arguments["grad_scale"] = torch.tensor(rule.grad_scale, dtype=torch.float32)
            self._arguments["found_inf"] = torch.tensor(0.0, dtype=torch.float32)

    def __call__(self, rows: Sequence[Sequence[torch.Tensor]], steps: Sequence[torch.Tensor]) -> None:
        """Step tensors, each a row of parameter, moments (the largest second one with amsgrad) and gradient."""
        parameters, first, second, *largest, gradients = (list(column) for column in zip(*rows, strict=True))
        self._kernel(parameters, gradients, first, second, largest[0] if largest else [], steps, **self._arguments)


def _learning_rate(numbers: GroupRule) -> float | torch.Tensor:
    if not numbers.tensor_lr:
        return numbers.lr
    return torch.tensor(numbers.lr, dtype=getattr(torch, numbers.tensor_lr))


def _buffer(dtype: torch.dtype, elements: int) -> torch.Tensor:
    """This thread's memory for prepared gradients: one for all buckets, so that it stays in the cache."""
    held: torch.Tensor | None = getattr(_scratch, "buffer", None)
    if held is None or held.numel() < elements * dtype.itemsize:
        held = _scratch.buffer = torch.empty(elements * dtype.itemsize, dtype=torch.uint8)
    return held[: elements * dtype.itemsize].view(dtype)
