"""Addresses for native code: only inside of the memory that is named."""

from __future__ import annotations

import ctypes

import pytest
import torch

from lastgood.addresses import address_in, check_range, memory_address, row_addresses
from lastgood.errors import CorruptCheckpoint


def test_a_range_inside_of_a_tensor():
    tensor = torch.arange(12, dtype=torch.int32)[2:6]
    assert address_in(tensor, 4, 12) == tensor.data_ptr() + 4
    assert address_in(tensor, 16, 0) == tensor.data_ptr() + 16


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 17), (4, 16), (-4, 4), (0, -1), (1 << 63, 1), (17, 0)])
def test_what_lies_beside_a_tensor_in_its_storage_is_not_its_own(offset, nbytes):
    tensor = torch.arange(12, dtype=torch.int32)[2:6]
    with pytest.raises(CorruptCheckpoint, match="outside"):
        address_in(tensor, offset, nbytes)


def test_an_empty_tensor_has_no_bytes():
    with pytest.raises(CorruptCheckpoint):
        address_in(torch.empty(0, 3), 0, 1)
    with pytest.raises(CorruptCheckpoint, match="meta"):
        address_in(torch.empty(4, device="meta"), 0, 1)


def test_rows_reach_to_the_last_element_of_a_view_and_no_further():
    view = torch.arange(40, dtype=torch.float64).view(5, 8)[1:4, 2:6]
    assert row_addresses(view, torch.float64, [0, 8, 16], 4) == [view.data_ptr() + 8 * n for n in (0, 8, 16)]
    for begins, elements in (([0, 17], 4), ([-1], 1), ([0], 21)):
        with pytest.raises(CorruptCheckpoint, match="outside"):
            row_addresses(view, torch.float64, begins, elements)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_rows_of_another_dtype_are_refused_of_any_width(dtype):
    with pytest.raises(CorruptCheckpoint, match="elements of"):
        row_addresses(torch.zeros(4, dtype=torch.float64), dtype, [0], 1)


def test_bytes_of_pythons_own():
    memory = bytearray(b"0123456789")
    address, keep = memory_address(memory, 3, 4)
    assert ctypes.string_at(address, 4) == b"3456"
    del keep
    with pytest.raises(CorruptCheckpoint, match="outside"):
        memory_address(memory, 7, 4)
    with pytest.raises(CorruptCheckpoint, match="outside"):
        check_range(0, 1, 0)
