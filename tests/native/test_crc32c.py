from __future__ import annotations

import ctypes
import struct

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastgood import _native

VARIANTS = _native.crc32c_variants()
# Around every block length at which a variant changes its method.
LENGTHS = sorted({max(0, at + off) for at in (0, 8, 64, 256, 768, 4096, 12288, 16384, 65536) for off in (-1, 0, 1, 65)})
BYTES = bytes((i * i + 7 * i) % 251 for i in range(70000))

seeds = st.integers(0, 2**32 - 1)
contents = st.one_of(
    st.binary(max_size=600),
    st.builds(lambda start, n: BYTES[start : start + n], st.integers(0, 300), st.integers(0, 69000)),
)


def test_known_values() -> None:
    assert _native.crc32c(b"123456789") == 0xE3069283
    assert _native.crc32c(bytes(32)) == 0x8A9136AA
    assert _native.crc32c(b"\xff" * 32) == 0x62A8AB43
    assert _native.crc32c(b"") == 0


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("length", LENGTHS)
def test_lengths(variant: str, length: int) -> None:
    data = BYTES[:length]
    assert _native.crc32c(data, 77, variant=variant) == google_crc32c.extend(77, data)


@pytest.mark.parametrize("variant", VARIANTS)
@given(content=contents, seed=seeds)
def test_agrees_with_google_and_portable(variant: str, content: bytes, seed: int) -> None:
    found = _native.crc32c(content, seed, variant=variant)
    assert found == google_crc32c.extend(seed, content) == _native.crc32c_portable(content, seed)


@pytest.mark.parametrize("variant", VARIANTS)
@given(content=contents, cut=st.integers(0, 70000))
def test_goes_on_from_a_seed(variant: str, content: bytes, cut: int) -> None:
    first = _native.crc32c(content[:cut], variant=variant)
    assert _native.crc32c(content[cut:], first, variant=variant) == _native.crc32c(content, variant=variant)


@pytest.mark.parametrize("variant", VARIANTS)
@given(content=contents, seed=seeds, source_offset=st.integers(0, 70), target_offset=st.integers(0, 70))
def test_copy(variant: str, content: bytes, seed: int, source_offset: int, target_offset: int) -> None:
    n = len(content)
    source = ctypes.create_string_buffer(bytes(source_offset) + content, source_offset + n + 1)
    target = ctypes.create_string_buffer(b"\xaa" * (target_offset + n + 70), target_offset + n + 70)
    found = _native.copy_crc32c(
        ctypes.addressof(target) + target_offset, ctypes.addressof(source) + source_offset, n, seed, variant=variant
    )
    assert found == _native.crc32c_portable(content, seed)
    assert target.raw == b"\xaa" * target_offset + content + b"\xaa" * 70
    address = ctypes.addressof(source) + source_offset
    assert _native.crc32c_at(address, n, seed, variant=variant) == found


def test_chunk_seed() -> None:
    assert _native.chunk_seed(5, 2**40) == google_crc32c.value(struct.pack("<QQ", 5, 2**40))


def test_buffers_and_names() -> None:
    assert _native.crc32c(memoryview(bytearray(b"123456789"))) == 0xE3069283
    assert VARIANTS[-1] == "portable"
    assert _native.crc32c_implementation() == VARIANTS[0]
    with pytest.raises(ValueError, match="portable"):
        _native.crc32c(b"", variant="none such")
    with pytest.raises((TypeError, BufferError)):
        _native.crc32c("text")
