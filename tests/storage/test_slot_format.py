from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastgood._native import crc32c_portable
from lastgood.storage import format as fmt

numbers = st.integers(0, 2**64 - 1)


@st.composite
def records(draw: st.DrawFn) -> fmt.CommitRecord:
    chunk = fmt.BLOCK * draw(st.integers(1, 1 << 20))
    length = draw(st.integers(0, 1 << 45))
    meta = draw(st.integers(0, length))
    table_offset, table_bytes, _ = fmt.stream_layout(length, chunk)
    return fmt.CommitRecord(
        kind=draw(st.sampled_from(fmt.RecordKind)),
        job_id=draw(st.binary(min_size=16, max_size=16)),
        step=draw(numbers),
        incarnation=draw(numbers),
        sequence=draw(numbers),
        stream_bytes=length,
        meta_offset=meta,
        meta_bytes=draw(st.integers(0, length - meta)),
        chunk_bytes=chunk,
        data_offset=fmt.DATA_OFFSET,
        table_offset=table_offset,
        table_bytes=table_bytes,
        layout_digest=draw(st.binary(min_size=32, max_size=32)),
        table_digest=draw(st.binary(min_size=32, max_size=32)),
    )


@given(records())
def test_commit_record_roundtrip(record: fmt.CommitRecord) -> None:
    encoded = record.encode()
    assert len(encoded) == fmt.RECORD_BYTES
    assert fmt.CommitRecord.decode(encoded) == record
    assert fmt.CommitRecord.decode(encoded + bytes(fmt.BLOCK - len(encoded))) == record
    assert record.end_offset == fmt.stream_layout(record.stream_bytes, record.chunk_bytes)[2]


@given(records(), st.integers(0, fmt.RECORD_BYTES * 8 - 1))
def test_every_flipped_bit_is_seen(record: fmt.CommitRecord, bit: int) -> None:
    damaged = bytearray(record.encode())
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(fmt.RecordError):
        fmt.CommitRecord.decode(bytes(damaged))


@given(records(), records(), st.integers(1, fmt.RECORD_BYTES - 1))
def test_torn_records_are_seen(old: fmt.CommitRecord, new: fmt.CommitRecord, cut: int) -> None:
    torn = new.encode()[:cut] + old.encode()[cut:]
    if torn not in (old.encode(), new.encode()):
        with pytest.raises(fmt.RecordError):
            fmt.CommitRecord.decode(torn)


@given(st.binary(max_size=2 * fmt.RECORD_BYTES))
def test_noise_is_no_record(noise: bytes) -> None:
    if any(noise[: fmt.RECORD_BYTES]) or len(noise) < fmt.RECORD_BYTES:
        with pytest.raises(fmt.RecordError):
            fmt.CommitRecord.decode(noise)
    with pytest.raises(fmt.RecordError):
        fmt.SlotHeader.decode(noise)


def test_void_and_header() -> None:
    assert fmt.CommitRecord.decode(bytes(fmt.BLOCK)) is None
    header = fmt.SlotHeader(os.urandom(16), 12)
    assert fmt.SlotHeader.decode(header.encode()) == header
    with pytest.raises(fmt.RecordError, match="magic"):
        fmt.CommitRecord.decode(header.encode())


def test_another_version_is_named_only_if_the_record_is_sound() -> None:
    encoded = bytearray(fmt.SlotHeader(bytes(16), 0).encode())
    encoded[8] = 2
    with pytest.raises(fmt.RecordError, match="checksum"):
        fmt.SlotHeader.decode(bytes(encoded))
    encoded[508:] = crc32c_portable(bytes(encoded[:508])).to_bytes(4, "little")
    with pytest.raises(fmt.OtherVersionError, match="version 2, and this program knows version 1"):
        fmt.SlotHeader.decode(bytes(encoded))


def test_records_that_no_reader_would_take_are_not_written() -> None:
    table_offset, table_bytes, _ = fmt.stream_layout(100, 4096)
    good = fmt.CommitRecord(
        fmt.RecordKind.COMMITTED, bytes(16), 1, 1, 1, 100, 90, 10, 4096, fmt.DATA_OFFSET, table_offset, table_bytes,
        bytes(32), bytes(32),
    )  # fmt: skip
    good.encode()
    for change in (
        {"meta_bytes": 11}, {"chunk_bytes": 1000}, {"chunk_bytes": 0}, {"chunk_bytes": 1 << 33}, {"step": -1},
        {"step": 1 << 64}, {"table_offset": 0}, {"table_bytes": 0}, {"data_offset": 0}, {"job_id": b""},
        {"layout_digest": b"x"},
    ):  # fmt: skip
        with pytest.raises(fmt.RecordError):
            replace(good, **change).encode()


def test_job_description() -> None:
    job_id = os.urandom(16)
    content = fmt.encode_job(fmt.Job(job_id))
    assert fmt.decode_job(content) == fmt.Job(job_id)
    for at in range(len(content)):
        damaged = bytearray(content)
        damaged[at] ^= 1
        try:
            assert fmt.decode_job(bytes(damaged)) == fmt.Job(job_id)  # only white space may change unseen
            assert chr(content[at]).isspace()
        except fmt.RecordError:
            pass
    for noise in (b"", b"[]", b"1", b"{}", b"\xff\xfe", b"[" * 100000, content[:-5]):
        with pytest.raises(fmt.RecordError):
            fmt.decode_job(noise)


def test_slot_names() -> None:
    assert fmt.slot_name(3) == "slot-0003.lgs"
    for number in (0, 12, 9999, 10000, 123456):
        assert fmt.slot_number(Path(fmt.slot_name(number))) == number
    for name in ("slot-3.lgs", "slot-00003.lgs", "slot-0003.lgs.tmp", "slot--001.lgs", "job.json"):
        assert fmt.slot_number(Path(name)) is None
