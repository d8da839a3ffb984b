"""docs/wire-format.md says what the code does: every field of records and messages, every cause of a refusal."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from pydantic import BaseModel

from lastgood.gradients.protocol import messages
from lastgood.gradients.trainer.rank_record import SIDE_VERSIONS
from lastgood.sparse import chunks, coding, meeting
from lastgood.sparse.blocks import SparseGradient
from lastgood.wire import frames, records

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "wire-format.md").read_text()
SECTIONS = dict(re.findall(r"^#{2,3} (.+?)\n(.*?)(?=^#{2,3} |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL))
MODELS: list[type[BaseModel]] = [*get_args(messages.Message)]


def rows_of(section: str) -> list[list[str]]:
    lines = [line for line in SECTIONS[section].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def kind_of(model: type[BaseModel]) -> str:
    return str(model.model_fields["kind"].default)


def type_of(schema: dict[str, Any]) -> str:
    """A field's type in the page's words."""
    if "anyOf" in schema:
        return ", or ".join("null" if part.get("type") == "null" else type_of(part) for part in schema["anyOf"])
    if "$ref" in schema:
        return f"`{schema['$ref'].rpartition('/')[2].lower()}`"
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    match schema["type"]:
        case "integer":
            return "number"
        case "boolean":
            return "yes or no"
        case "string" if "pattern" in schema:
            return f"{re.findall('[0-9]+', schema['pattern'])[-1]} hex digits"
        case "string":
            return "text"
        case "array":
            return f"list of {type_of(schema['items']).replace('number', 'numbers')}"
        case "object" if isinstance(schema.get("additionalProperties"), dict):
            return f"object of {type_of(schema['additionalProperties'])}s"
    return str(schema["type"])


def fields_of(model: type[BaseModel]) -> list[list[str]]:
    schema = model.model_json_schema()
    return [
        [f"`{name}`", type_of(field) + ("" if name in schema.get("required", []) else "; may be left out")]
        for name, field in schema["properties"].items()
        if name != "kind"
    ]


@pytest.mark.parametrize("model", [*MODELS, messages.Entry, messages.Saved], ids=lambda model: model.__name__)
def test_every_field_of_a_message_has_its_row(model: type[BaseModel]) -> None:
    assert [row[:2] for row in rows_of(f"`{kind_of(model)}`")] == fields_of(model)


def test_no_section_is_about_a_message_that_is_not_there() -> None:
    kinds = {f"`{kind_of(model)}`" for model in [*MODELS, messages.Entry, messages.Saved]}
    assert {name for name in SECTIONS if name.startswith("`")} == kinds


def test_a_record_s_fields_lie_one_behind_another() -> None:
    rows = rows_of("A record")
    at = 0
    for offset, length, *_ in rows:
        assert int(offset) == at
        at += int(length)
    assert at == records.HEADER_BYTES
    text = SECTIONS["A record"]
    for kind in records.RecordKind:
        assert f"{int(kind)} = {kind.name}" in text
    for dtype in records.DType:
        assert f"{int(dtype)} = {dtype.name}" in text
    assert f"{records.MAX_PAYLOAD_BYTES >> 20} MiB" in text


def test_a_frame_s_fields_lie_one_behind_another() -> None:
    at = 0
    for offset, length, *_ in rows_of("Frames"):
        assert int(offset) == at
        at += int(length)
    assert at == frames.HEADER_BYTES
    for kind in frames.Kind:
        assert f"{int(kind)} = {kind.name.lower()}" in SECTIONS["Frames"]
    for limit in (frames.MAX_CHUNK_BYTES, messages.MAX_MESSAGE_BYTES, messages.CHUNK_BYTES):
        assert f"{limit >> 20} MiB" in PAGE
    assert messages.GREETING.decode().encode("unicode_escape").decode() in PAGE
    assert PAGE.startswith(f"# What goes over the wire to a shadow, version {messages.PROTOCOL_VERSION}\n")
    assert rows_of("A connection begins")[-1][0] == str(messages.PROTOCOL_VERSION)


def test_messages_change_with_their_version_only() -> None:
    """Both sides refuse fields that they do not know. Who changes one raises `PROTOCOL_VERSION`, and this with it."""
    fields = [(kind_of(model), fields_of(model)) for model in [*MODELS, messages.Entry, messages.Saved]]
    known = json.dumps([sorted(fields), SIDE_VERSIONS[-1]]).encode()
    assert (messages.PROTOCOL_VERSION, hashlib.sha256(known).hexdigest()[:16]) == (4, "fd7f99d9c9f86a85")


def test_every_cause_of_a_refusal_is_told() -> None:
    source = (ROOT / "native" / "src" / "wire" / "record.cpp").read_text()
    assert {row[0] for row in rows_of("Refusals")} == {f"`{name}`" for name in re.findall(r'return "(\w+)";', source)}


def test_sparse_records_and_blocks_are_as_the_page_says() -> None:
    text = SECTIONS["Sparse blocks"]
    tables = re.findall(r"\| offset \| length \| field \|\n\|---\|---\|---\|\n((?:\|.*\n)+)", text)
    ends = []
    for table in tables:
        at = 0
        for row in table.splitlines():
            offset, length = (int(cell) for cell in row.split("|")[1:3])
            assert offset == at, row
            at += length
        ends.append(at)
    assert ends == [chunks.HEADER_BYTES, coding.BLOCK_HEADER_BYTES]
    for kind in chunks.Kind:
        assert f"{int(kind)} = {kind.name}" in text
    for one in coding.Coding:
        assert f"| {int(one)} = {one.name} |" in text
    assert f"{chunks.CHUNK_BYTES >> 10} KiB" in text
    assert meeting.SPARSE_GREETING.decode().encode("unicode_escape").decode() in text
    for name, example in (("float32", 5.17), ("float16", 3.17)):
        places, count = 10_000_000, 100_000
        item = records.ITEM_BYTES[records.DType[name]]
        index_bytes = coding.encoded_bytes(coding.choose_coding(places, count), places, count)
        assert round(item + index_bytes / count, 2) == example and str(example) in text


def test_another_reader_of_sparse_blocks_follows_the_page() -> None:
    """Written from the page alone, without a name of the module that it is about."""

    def read(content: bytes) -> tuple[int, int, list[int], bytes]:
        assert content[:5] == b"LGSB\1" and content[9:16] == bytes(7)
        code, dtype, width = content[5], content[6], content[7]
        n, k = int.from_bytes(content[16:24], "little"), int.from_bytes(content[24:32], "little")
        p = -(-n // width)
        end = 32 + k * width * {1: 4, 3: 2, 4: 2}[dtype]
        rest = content[end:]

        def bits(field: bytes) -> list[int]:
            return [at for at in range(len(field) * 8) if field[at // 8] >> at % 8 & 1]

        if code == 0:
            indices, length = list(range(p)), 0
        elif code == 1:
            indices, length = bits(rest), -(-p // 8)
        elif code in (2, 3):
            low = code - 1
            lows = [int.from_bytes(rest[low * at : low * (at + 1)], "little") for at in range(k)]
            highs = [at - number for number, at in enumerate(bits(rest[low * k :]))]
            indices = [high * 256**low + one for high, one in zip(highs, lows, strict=True)]
            length = low * k + -(-(k + (p - 1) // 256**low) // 8)
        else:
            indices, length = [int.from_bytes(rest[4 * at : 4 * at + 4], "little") for at in range(k)], 4 * k
        assert len(rest) == length
        return n, width, indices, content[32:end]

    rng = np.random.default_rng(0)
    for elements, count, width in [
        (50, 50, 1),
        (900, 300, 1),
        (9000, 90, 1),
        (3_000_000, 100, 1),
        (1 << 32, 2, 1),
        (900, 5, 16),
    ]:
        places = -(-elements // width)
        chosen = np.sort(rng.choice(places - 1, count, replace=False)) if count < places else np.arange(places)
        values = torch.from_numpy(rng.standard_normal(count * width)).to(torch.float32)
        sparse = SparseGradient(elements, width, chosen.astype(np.uint32), values)
        found = read(coding.encode(sparse).tobytes())
        assert found == (elements, width, chosen.tolist(), values.numpy().tobytes())
