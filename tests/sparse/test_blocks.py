"""What a sparse gradient promises, and that nothing else passes its check."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from lastgood.errors import CorruptCheckpoint
from lastgood.sparse.blocks import MAX_ELEMENTS, SparseGradient, dense


def single(elements=10, indices=(1, 4), values=(2.0, -3.0), dtype=torch.float32):
    return SparseGradient(elements, 1, np.array(indices, np.uint32), torch.tensor(values, dtype=dtype))


def blocks():
    values = torch.arange(1, 33, dtype=torch.float32)
    values[-7:] = 0
    return SparseGradient(41, 16, np.array([0, 2], np.uint32), values)


def test_dense_has_each_value_at_its_place():
    assert dense(single()).tolist() == [0, 2, 0, 0, -3, 0, 0, 0, 0, 0]
    found = dense(blocks())
    assert found.numel() == 41
    assert found[:16].tolist() == list(range(1, 17))
    assert found[32:].tolist() == list(range(17, 26))
    assert not found[16:32].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_right_passes(dtype):
    single(dtype=dtype).check("here")
    blocks().check("here")
    SparseGradient(5, 1, np.empty(0, np.uint32), torch.empty(0), finite=False).check("here")


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (single(indices=(4, 1)), "do not ascend"),
        (single(indices=(4, 4)), "do not ascend"),
        (single(elements=4), "index 4 of 4"),
        (single(elements=0), "of 0 elements"),
        (single(elements=MAX_ELEMENTS + 1), "elements"),
        (single(values=(1.0,)), "1 values for 2 indices"),
        (single(values=(1.0, float("nan"))), "not finite"),
        (single(values=(1.0, float("-inf"))), "not finite"),
        (single(dtype=torch.float64), "float64"),
        (replace(single(), width=3), "blocks of 3"),
        (replace(single(), finite=False), "not finite"),
        (replace(single(), indices=np.array([1, 4], np.int64)), "int64"),
        (replace(blocks(), elements=40), "beyond the end"),
    ],
)
def test_what_is_wrong_is_named_with_its_source(wrong, why):
    with pytest.raises(CorruptCheckpoint, match=f"^rank 1: not a sparse gradient: .*{why}"):
        wrong.check("rank 1")
