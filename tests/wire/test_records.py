from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastgood._native import crc32c_portable
from lastgood.errors import CorruptCheckpoint
from lastgood.wire.records import (
    FINAL,
    HEADER_BYTES,
    ITEM_BYTES,
    MAX_ITERATION,
    MAX_PAYLOAD_BYTES,
    DType,
    Record,
    RecordKind,
    pack_header,
    parse_header,
)


@st.composite
def records(draw: st.DrawFn) -> Record:
    kind = draw(st.sampled_from(RecordKind))
    dtype = draw(st.sampled_from(DType))
    item = ITEM_BYTES[dtype]
    return Record(
        kind,
        job=draw(st.integers(0, 2**64 - 1)),
        epoch=draw(st.integers(0, 2**32 - 1)),
        rank=draw(st.integers(0, 2**32 - 1)),
        iteration=draw(st.integers(0, MAX_ITERATION - 1)),
        bucket=draw(st.integers(0, 2**32 - 1)),
        dtype=dtype,
        offset=draw(st.integers(0, (2**64 - 1) // item)) * item,
        length=0 if kind is RecordKind.END else draw(st.integers(0, MAX_PAYLOAD_BYTES // item)) * item,
        checksum=draw(st.integers(0, 2**32 - 1)),
        flags=draw(st.sampled_from([0, FINAL])),
    )


@given(record=records())
def test_what_is_packed_is_parsed(record: Record) -> None:
    assert parse_header(pack_header(record), "peer") == record


@given(record=records())
def test_every_field_lies_where_the_document_says(record: Record) -> None:
    """By the offsets of docs/wire-format.md, and not by one format string."""
    packed = pack_header(record)
    assert len(packed) == HEADER_BYTES == 64

    def number(begin: int, end: int) -> int:
        return int.from_bytes(packed[begin:end], "little")

    assert packed[:4] == b"LGR1"
    assert number(4, 6) == 1
    assert (number(6, 7), number(7, 8)) == (record.kind, record.flags)
    assert number(8, 16) == record.job
    assert (number(16, 20), number(20, 24), number(24, 32)) == (record.epoch, record.rank, record.iteration)
    assert (number(32, 36), number(36, 37), number(37, 40)) == (record.bucket, record.dtype, 0)
    assert (number(40, 48), number(48, 52), number(52, 56)) == (record.offset, record.length, record.checksum)
    assert number(56, 60) == 0
    assert number(60, 64) == crc32c_portable(packed[:60])


@given(record=records(), bit=st.integers(0, 8 * HEADER_BYTES - 1))
def test_a_flipped_bit_is_noticed(record: Record, bit: int) -> None:
    packed = bytearray(pack_header(record))
    packed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptCheckpoint, match=r"^peer: "):
        parse_header(packed, "peer")


def sealed(changes: dict[int, bytes]) -> bytes:
    """A good header with bytes changed before its checksum was taken."""
    packed = bytearray(pack_header(Record(RecordKind.GRADIENT, 1, 2, 3, 4, dtype=DType.float64, offset=8, length=16)))
    for at, content in changes.items():
        packed[at : at + len(content)] = content
    return bytes(packed[:60]) + struct.pack("<I", crc32c_portable(bytes(packed[:60])))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({0: b"LGM1"}, "no gradient record"),
        ({4: b"\2\0"}, "of version 2"),
        ({6: b"\0"}, "kind 0"),
        ({6: b"\3"}, "kind 3"),
        ({7: b"\2"}, "flags 2"),
        ({36: b"\0"}, "dtype 0"),
        ({36: b"\5"}, "dtype 5"),
        ({24: struct.pack("<Q", MAX_ITERATION)}, f"iteration {MAX_ITERATION}"),
        ({24: struct.pack("<Q", (1 << 64) - 1)}, "which no training reaches"),
        ({38: b"\1"}, "leaves zero"),
        ({56: b"\1"}, "leaves zero"),
        ({40: struct.pack("<Q", 12)}, "16 bytes at 12"),
        ({48: struct.pack("<I", 12)}, "12 bytes at 8"),
        ({48: struct.pack("<I", MAX_PAYLOAD_BYTES + 8)}, "67108872 bytes at 8"),
        ({6: b"\2"}, "end of iteration with 16 bytes"),
    ],
)
def test_what_no_sender_writes_is_refused(changes: dict[int, bytes], why: str) -> None:
    assert parse_header(sealed({}), "peer").length == 16
    with pytest.raises(CorruptCheckpoint, match=f"^peer: .*{why}"):
        parse_header(sealed(changes), "peer")


@pytest.mark.parametrize("length", [0, 63, 65])
def test_another_length_is_no_header(length: int) -> None:
    with pytest.raises(CorruptCheckpoint, match=f"has 64 bytes, not {length}"):
        parse_header(bytes(length), "peer")


@given(content=st.binary(min_size=64, max_size=64))
def test_garbage_is_refused(content: bytes) -> None:
    with pytest.raises(CorruptCheckpoint):
        parse_header(content, "peer")


def test_the_longest_payload_is_allowed() -> None:
    record = Record(RecordKind.GRADIENT, 1, 1, 1, 1, length=MAX_PAYLOAD_BYTES)
    assert parse_header(pack_header(record), "peer").length == MAX_PAYLOAD_BYTES


def test_numbers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(struct.error):
        pack_header(Record(RecordKind.GRADIENT, 1 << 64, 1, 1, 1))
