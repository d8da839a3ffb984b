"""Exports as safetensors whose header says something else than the file has."""

from __future__ import annotations

import json
import os
import struct

import pytest
import torch

from lastgood.checkpointers.export.formats import ExportFormat, export_checkpoint, load_exported
from lastgood.checkpointers.export.safetensors_file import _facts_checksum, read_facts
from lastgood.errors import CorruptCheckpoint, LastgoodError, MismatchError, StorageError
from lastgood.storage import SlotStore
from tests.checkpointers.support.stored_helpers import stored_state


@pytest.fixture
def exported(tmp_path):
    """The header and the data of an export, and a function that writes them to the path that it returns."""
    shared = torch.arange(6, dtype=torch.float32)
    state = {"a": shared, "b": torch.full((2, 2), 7, dtype=torch.int64), "c": shared, "step": 3}
    stored_state(tmp_path / "job", state)
    view = SlotStore.peek(tmp_path / "job")
    out = tmp_path / "x"
    export_checkpoint(view, view.newest(), out, ExportFormat.SAFETENSORS)
    content = out.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]

    def write(resealed=True):
        facts = header.get("__metadata__")
        if resealed and type(facts) is dict and all(type(value) is str for value in facts.values()):
            sums = json.loads(facts["lastgood.crc32c"])
            facts["lastgood.crc32c"] = json.dumps({**sums, "__metadata__": f"{_facts_checksum(facts):08x}"})
        text = json.dumps(header).encode()
        out.write_bytes(struct.pack("<Q", len(text)) + text + data)
        return out

    return header, data, write


def facts(header):
    return header["__metadata__"]


def layout(header, change):
    document = json.loads(facts(header)["lastgood.layout"])
    change(document)
    facts(header)["lastgood.layout"] = json.dumps(document)


def checksums(header, **values):
    found = json.loads(facts(header)["lastgood.crc32c"])
    facts(header)["lastgood.crc32c"] = json.dumps({**found, **values})


CHANGES = {
    "an offset outside": lambda h: h["a"].update(data_offsets=[1 << 20, (1 << 20) + 24]),
    "a negative offset": lambda h: h["a"].update(data_offsets=[-24, 0]),
    "backwards": lambda h: h["a"].update(data_offsets=[24, 0]),
    "one over another": lambda h: h["a"].update(data_offsets=[8, 32]),
    "a longer tensor": lambda h: h["a"].update(data_offsets=[0, 56]),
    "floats as offsets": lambda h: h["a"].update(data_offsets=[0.0, 24.0]),
    "no offsets": lambda h: h["a"].pop("data_offsets"),
    "another shape": lambda h: h["a"].update(shape=[3, 2]),
    "an endless shape": lambda h: h["a"].update(shape=[2**62, 2**62]),
    "another dtype": lambda h: h["a"].update(dtype="I32"),
    "no dtype": lambda h: h["a"].pop("dtype"),
    "no tensor": lambda h: h.pop("a"),
    "a tensor more": lambda h: h.update(d=h["a"]),
    "a tensor that is none": lambda h: h.update(a=[1]),
    "all are aliases": lambda h: facts(h).update({"lastgood.aliases": '{"a": "b", "b": "a", "c": "a"}'}),
    "an alias of nothing": lambda h: facts(h).update({"lastgood.aliases": '{"c": "d"}'}),
    "no aliases": lambda h: facts(h).update({"lastgood.aliases": "{}"}),
    "aliases that are none": lambda h: facts(h).update({"lastgood.aliases": "[1]"}),
    "aliases without end": lambda h: facts(h).update({"lastgood.aliases": "[" * 100_000}),
    "another checksum": lambda h: checksums(h, a="00000000"),
    "a checksum that is none": lambda h: checksums(h, a=None),
    "checksums that are none": lambda h: facts(h).update({"lastgood.crc32c": "{}"}),
    "a layout that is none": lambda h: facts(h).update({"lastgood.layout": "{}"}),
    "a larger layout": lambda h: layout(h, lambda d: d["block_bytes"].__setitem__(0, 1 << 40)),
    "a number as fact": lambda h: facts(h).update({"lastgood.step": 3}),
    "facts that are none": lambda h: h.update(__metadata__=[1]),
}


def test_an_export_that_was_written_anew_is_read(exported):
    assert load_exported(exported[2]())["step"] == 3


@pytest.mark.parametrize("name", CHANGES, ids=lambda name: name.replace(" ", "-"))
def test_a_header_that_does_not_fit_is_refused(exported, name):
    header, _, write = exported
    CHANGES[name](header)
    resealed = name != "checksums that are none"
    with pytest.raises(CorruptCheckpoint, match="x"):
        load_exported(write(resealed))


def test_a_plain_value_that_was_damaged_is_seen(exported):
    header, _, write = exported
    layout(header, lambda document: document["tree"][1][-1].__setitem__(1, ["i", 4]))
    with pytest.raises(CorruptCheckpoint, match="checksum of its metadata"):
        load_exported(write(resealed=False))


def test_a_file_without_that_checksum_is_read(exported):
    """As all were that older versions wrote."""
    header, _, write = exported
    sums = json.loads(facts(header)["lastgood.crc32c"])
    del sums["__metadata__"]
    facts(header)["lastgood.crc32c"] = json.dumps(sums)
    assert torch.equal(load_exported(write(resealed=False))["a"], torch.arange(6.0))


@pytest.mark.parametrize("length", [0, 1, 2**62, 2**64 - 1, 10**9])
def test_a_length_that_the_file_does_not_have_is_refused(exported, length):
    path = exported[2]()
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    with pytest.raises(CorruptCheckpoint, match="header"):
        load_exported(path)


def test_any_cut_and_any_flipped_byte_is_refused(exported):
    _, _, write = exported
    path = write()
    content = path.read_bytes()
    for position in range(0, len(content), 11):
        for damaged in (
            content[:position],
            content[:position] + bytes([content[position] ^ 2]) + content[position + 1 :],
        ):
            path.write_bytes(damaged)
            try:
                found = load_exported(path)
            except LastgoodError:
                continue
            assert found["step"] == 3 and torch.equal(found["a"], torch.arange(6.0))


def test_a_file_of_others_and_what_is_no_file(exported, tmp_path):
    header, _, write = exported
    facts(header).pop("lastgood.layout")
    with pytest.raises(MismatchError, match="not exported by Lastgood"):
        read_facts(write(resealed=False))
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(StorageError, match="FIFO"):
        load_exported(tmp_path / "fifo")
