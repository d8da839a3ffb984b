"""docs/wire-format.md says what the code does: every field of records and messages, every cause of a refusal."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from lastgood.gradients.protocol import messages
from lastgood.gradients.trainer.rank_record import SIDE_VERSIONS
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
