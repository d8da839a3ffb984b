"""Lines of NCCL's LL and LL128."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastgood.mirror.streams.ll import encode, ll_bytes
from tests.mirror.support.plain.ll import Coding, data_bytes, decode, one_flag


@given(data=st.binary(max_size=100), flag=st.integers(1, 2**32 - 1))
def test_what_is_encoded_is_decoded(data: bytes, flag: int) -> None:
    wire = encode(data, flag)
    assert len(wire) == ll_bytes(len(data)) and len(wire) % 16 == 0
    assert one_flag(Coding.LL, wire) == (flag if data else 0)
    padded = data + bytes(-len(data) % 8)
    assert decode(Coding.LL, wire).tobytes() == padded
    assert data_bytes(Coding.LL, len(wire)) == len(padded)


@pytest.mark.parametrize("place", [4, 12, 20, 28])
def test_each_flag_of_each_line_is_checked(place: int) -> None:
    wire = bytearray(encode(bytes(16), 7))
    wire[place] ^= 1
    assert one_flag(Coding.LL, bytes(wire)) == 0


def test_a_part_of_a_line_has_no_flag() -> None:
    assert one_flag(Coding.LL, encode(bytes(8), 7)[:8]) == 0


def test_ll128_has_120_bytes_of_128() -> None:
    rows = np.arange(3 * 128, dtype=np.uint32).astype(np.uint8).reshape(3, 128)
    rows[:, 120:] = np.frombuffer((9).to_bytes(8, "little"), np.uint8)
    wire = rows.tobytes()
    assert one_flag(Coding.LL128, wire) == 9
    assert decode(Coding.LL128, wire).tobytes() == rows[:, :120].tobytes()
    assert data_bytes(Coding.LL128, len(wire)) == 360
    rows[1, 127] = 1
    assert one_flag(Coding.LL128, rows.tobytes()) == 0
