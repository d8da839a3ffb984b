"""Sums and quotients of the ring, to the bit as torch computes them on a CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood import _native
from lastgood.wire.records import DType

TORCH = {
    DType.float32: torch.float32,
    DType.float64: torch.float64,
    DType.float16: torch.float16,
    DType.bfloat16: torch.bfloat16,
}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal to the bit, except that any NaN is as good as any other."""
    numbers = ~(one.isnan() & other.isnan())
    return torch.equal(one[numbers].view(torch.uint8), other[numbers].view(torch.uint8))


def added(dtype: DType, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    result = target.clone()
    _native.ring_add(int(dtype), result.data_ptr(), source.data_ptr(), result.numel())
    return result


def divided(dtype: DType, target: torch.Tensor, divisor: int) -> torch.Tensor:
    result = target.clone()
    _native.ring_divide(int(dtype), result.data_ptr(), result.numel(), divisor)
    return result


def every_16_bit_number(dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.arange(1 << 16, dtype=np.uint16).view(np.int16)).view(dtype)


@pytest.mark.parametrize("dtype", [DType.float16, DType.bfloat16])
@pytest.mark.parametrize("shift", [0, 1, 7, 255, 4096, 21845, 32768])
def test_every_16_bit_number_plus_another(dtype: DType, shift: int) -> None:
    numbers = every_16_bit_number(TORCH[dtype])
    others = numbers.roll(shift)
    assert same_bits(added(dtype, numbers, others), others + numbers)


@pytest.mark.parametrize("dtype", [DType.float16, DType.bfloat16])
@pytest.mark.parametrize("other", [15.99, 16.0, 2.0**-24, -65504.0])
def test_every_16_bit_number_in_runs_too_short_for_vectors(dtype: DType, other: float) -> None:
    numbers = every_16_bit_number(TORCH[dtype])
    others = torch.full_like(numbers, other)
    result, divided_by_3 = numbers.clone(), numbers.clone()
    for at in range(0, len(numbers), 7):
        count = min(7, len(numbers) - at)
        _native.ring_add(int(dtype), result.data_ptr() + 2 * at, others.data_ptr() + 2 * at, count)
        _native.ring_divide(int(dtype), divided_by_3.data_ptr() + 2 * at, count, 3)
    assert same_bits(result, others + numbers)
    assert same_bits(divided_by_3, numbers / 3)


@pytest.mark.parametrize("dtype", [DType.float16, DType.bfloat16])
@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 12, 1000])
def test_every_16_bit_number_divided(dtype: DType, divisor: int) -> None:
    numbers = every_16_bit_number(TORCH[dtype])
    assert same_bits(divided(dtype, numbers, divisor), numbers / divisor)


@pytest.mark.parametrize("dtype", list(DType))
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), elements=st.integers(1, 70), divisor=st.integers(1, 40), scale=st.integers(-30, 30)
)
def test_random_bits(dtype: DType, seed: int, elements: int, divisor: int, scale: int) -> None:
    generator = np.random.default_rng(seed)
    item = torch.empty(0, dtype=TORCH[dtype]).element_size()
    bits = [torch.from_numpy(generator.integers(0, 256, elements * item, dtype=np.uint8)) for _ in range(2)]
    one, other = (each.view(TORCH[dtype]) for each in bits)
    near = torch.from_numpy(generator.standard_normal(elements) * 2.0**scale).to(TORCH[dtype])
    for target, source in ((one, other), (near, one), (near, near.flip(0) * -1)):
        assert same_bits(added(dtype, target, source), source + target)
        assert same_bits(divided(dtype, target, divisor), target / divisor)


def test_unknown_type_is_refused() -> None:
    with pytest.raises(ValueError, match="number 9"):
        _native.ring_add(9, 0, 0, 0)
    with pytest.raises(ValueError, match="number 0"):
        _native.ring_divide(0, 0, 0, 1)
