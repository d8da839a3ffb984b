"""A Triton kernel whose threads store a block of a CUDA device into host memory that is registered with the driver.

Imports Triton, so import it only if there is a device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["store_from_device"]

_PER_PROGRAM = 2048
"""Words that one program of the grid stores."""


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]  # Triton's types differ between its versions
def _store_words(target, source, count, per_program: tl.constexpr):  # type: ignore[no-untyped-def]
    words = tl.program_id(0).to(tl.int64) * per_program + tl.arange(0, per_program)
    inside = words < count
    tl.store(target + words, tl.load(source + words, mask=inside), mask=inside)


def store_from_device(target: torch.Tensor, source: torch.Tensor) -> None:
    """Have the threads of `source`'s device store it into `target`, on that device's current stream.

    Both are uint8 tensors of one size, `target` over registered host memory. The stores have ended, and the CPU sees
    them, once the stream has come past this.
    """
    aligned = target.data_ptr() % 8 == 0 and source.data_ptr() % 8 == 0 and source.storage_offset() % 8 == 0
    whole = source.numel() // 8 * 8 if aligned else 0
    with torch.cuda.device(source.device):
        for begin, end, dtype in ((0, whole, torch.int64), (whole, source.numel(), torch.uint8)):
            if begin < end:
                into, words = target[begin:end].view(dtype), source[begin:end].view(dtype)
                _store_words[(triton.cdiv(words.numel(), _PER_PROGRAM),)](into, words, words.numel(), _PER_PROGRAM)
