"""Decoders of checkpoints: slots and layouts, parts of ranks, exports, what torch and other libraries write."""

from __future__ import annotations

import io
import json
import random
import struct
import zipfile
from collections import OrderedDict
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from lastgood import _native
from lastgood.state import flatten
from lastgood.storage import format as fmt
from tests.fuzz.support.hostile import changed_bytes, changed_pickle, changed_tree, json_of
from tests.fuzz.support.registry import Prepared, decoder
from tests.fuzz.support.text_files import put, tree_or_bits
from tests.storage.support import craft


def a_state() -> dict[str, Any]:
    weight = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    moments = {0: {"exp_avg": torch.ones(3, 4), "step": torch.tensor(3.0)}}
    return {
        "model": OrderedDict(weight=weight, tied=weight.t(), half=torch.ones(5, dtype=torch.bfloat16)),
        "optimizer": {"state": moments, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0]}]},
        "rng": torch.arange(16, dtype=torch.uint8),
        "step": 7,
        "names": ["a", None, b"xyz", 1 + 2j, torch.Size([2]), torch.float16],
    }


@lru_cache
def stored() -> tuple[dict[str, Any], bytes]:
    """A layout's document, and the stream of its blocks."""
    flat = flatten(a_state())
    blocks = [bytes(block.contiguous().numpy().tobytes()) for block in flat.blocks]
    return json.loads(flat.layout.to_json()), craft.stream_of(blocks)


# -- slots -------------------------------------------------------------------------------------------------------------


def _read_slots(folder: Path) -> None:
    from lastgood.checkpointers.slots.contents import named_tensors, read_layout, read_tree
    from lastgood.storage.reader import SlotView

    with SlotView(folder) as view:
        for status in view.statuses():
            assert str(status)
        info = view.newest()
        view.verify(info, 1)
        named_tensors(read_layout(view, info))
        read_tree(view, info, 1)


def changed_slot(rng: random.Random, thing: Any) -> Any:
    part = rng.choice(["commit", "commit", "header", "stream", "table"])
    return {**thing, part: changed_bytes(rng, thing[part])}


@lru_cache
def _slot_parts() -> dict[str, bytes]:
    import tempfile

    layout, stream = stored()
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / fmt.slot_name(0)
        craft.write_slot(path, craft.record(), stream, json_of(layout))
        content = path.read_bytes()
    record = fmt.CommitRecord.decode(content[fmt.COMMIT_OFFSET : fmt.COMMIT_OFFSET + fmt.RECORD_BYTES])
    assert record is not None
    at = record.table_offset
    return {
        "header": content[: fmt.RECORD_BYTES - 4],
        "commit": content[fmt.COMMIT_OFFSET : fmt.COMMIT_OFFSET + fmt.RECORD_BYTES - 4],
        "stream": content[fmt.DATA_OFFSET : fmt.DATA_OFFSET + record.stream_bytes],
        "table": content[at : at + record.table_bytes],
    }


def _resealed(record: bytes) -> bytes:
    covered = record[: fmt.RECORD_BYTES - 4].ljust(fmt.RECORD_BYTES - 4, b"\0")
    return covered + struct.pack("<I", _native.crc32c(covered))


@decoder("slot file", lambda: [_slot_parts()], change=changed_slot, share=0.5, native=True)
def _slot(thing: Any, folder: Path) -> Prepared:
    put(folder / fmt.JOB_FILE, fmt.encode_job(craft.record().job))
    path = folder / fmt.slot_name(0)
    table = fmt.DATA_OFFSET + fmt.align_up(len(_slot_parts()["stream"]))
    with path.open("wb") as file:
        file.write(_resealed(thing["header"]))
        for offset, content in (
            (fmt.COMMIT_OFFSET, _resealed(thing["commit"])),
            (fmt.DATA_OFFSET, thing["stream"]),
            (table, thing["table"]),
        ):
            file.seek(offset)
            file.write(content)
        file.truncate(max(table + fmt.BLOCK, file.tell()))
    return path.stat().st_size, partial(_read_slots, folder)


@decoder("layout of a slot", lambda: [stored()[0]], change=tree_or_bits, native=True, share=2.0)
def _layout(thing: Any, folder: Path) -> Prepared:
    put(folder / fmt.JOB_FILE, fmt.encode_job(craft.record().job))
    path = folder / fmt.slot_name(0)
    text = thing if isinstance(thing, bytes) else json_of(thing)
    craft.write_slot(path, craft.record(), stored()[1], text)
    return path.stat().st_size, partial(_read_slots, folder)


def _parts() -> list[Any]:
    def tree(rank: int) -> Any:
        half = craft.part(craft.dense([8]), [16], [[[8 * rank, 8]]])
        return craft.entries(w=half, b=craft.dense([4], block=1), step=["i", 3])

    return [[tree(0), tree(1)]]


@decoder("parts of several ranks", _parts, change=partial(changed_tree, raw=False), native=True)
def _ranks(thing: Any, folder: Path) -> Prepared:
    from lastgood.checkpointers.export.formats import ExportFormat
    from lastgood.checkpointers.export.whole_job import export_job
    from lastgood.checkpointers.ranks.reshard import restore_ranks

    trees = (list(thing) if isinstance(thing, (list, dict)) else [thing])[:2] or [None]
    job = craft.put_ranks(folder / "job", [(tree, [b"A" * 32, b"B" * 16]) for tree in trees])

    def read() -> None:
        guarded = torch.full((48,), 7.0)
        state = {"w": guarded[16:32], "b": torch.zeros(4), "step": 0}
        try:
            restore_ranks(job, state, (0, 1), 1)
        finally:
            assert bool((guarded[:16] == 7).all()) and bool((guarded[32:] == 7).all())
        export_job(job, folder / "out.safetensors", ExportFormat.SAFETENSORS, threads=1)

    return sum(path.stat().st_size for path in job.rglob("*") if path.is_file()), read


# -- exports -----------------------------------------------------------------------------------------------------------


@lru_cache
def _exported(to: str) -> bytes:
    import tempfile

    from lastgood.checkpointers.export.formats import ExportFormat, export_checkpoint
    from lastgood.storage.reader import SlotView

    layout, stream = stored()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        put(folder / fmt.JOB_FILE, fmt.encode_job(craft.record().job))
        craft.write_slot(folder / fmt.slot_name(0), craft.record(), stream, json_of(layout))
        out = folder / f"out.{to}"
        with SlotView(folder) as view:
            export_checkpoint(view, view.newest(), out, ExportFormat(to))
        return out.read_bytes()


def _safetensors() -> list[Any]:
    content = _exported("safetensors")
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    facts = header["__metadata__"]
    for key in ("lastgood.layout", "lastgood.aliases", "lastgood.crc32c"):
        facts[key] = json.loads(facts[key])
    return [{"header": header, "data": content[end:].hex()}]


@decoder("exported safetensors", _safetensors)
def _safetensors_file(thing: Any, folder: Path) -> Prepared:
    from lastgood.checkpointers.export.formats import load_exported

    header = thing.get("header") if isinstance(thing, dict) else thing
    facts = header.get("__metadata__") if isinstance(header, dict) else None
    if isinstance(facts, dict):
        facts = {
            key: value if isinstance(value, str) else json_of(value).decode(errors="surrogatepass")
            for key, value in facts.items()
        }
        header = {**header, "__metadata__": facts}
    text = json_of(header)
    try:
        data = bytes.fromhex(thing["data"])
    except (TypeError, KeyError, ValueError):
        data = b""
    path = folder / "x.safetensors"
    return put(path, len(text).to_bytes(8, "little") + text + data), partial(load_exported, path)


def _archive(content: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _zipped(parts: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return made.getvalue()


def changed_archive(rng: random.Random, thing: Any) -> Any:
    """The pickle changed mostly; else a part cut, left out or under another name, or the zip's own bytes changed."""
    parts = dict(thing)
    name = next((name for name in parts if name.endswith("data.pkl")), next(iter(parts)))
    kind = rng.randrange(10)
    if kind <= 6:
        parts[name] = changed_pickle(rng, parts[name])
    elif kind == 7:
        other = rng.choice(list(parts))
        parts[other] = changed_bytes(rng, parts[other])
    elif kind == 8:
        del parts[rng.choice(list(parts))]
    else:
        return changed_bytes(rng, _zipped(parts))
    return parts


def _archived(thing: Any) -> bytes:
    return thing if isinstance(thing, bytes) else _zipped(thing)


@decoder("exported .pt", lambda: [_archive(_exported("pt"))], change=changed_archive)
def _pt(thing: Any, folder: Path) -> Prepared:
    from lastgood.checkpointers.export.formats import load_exported

    return put(folder / "x.pt", _archived(thing)), partial(load_exported, folder / "x.pt")


# -- what torch and others write ---------------------------------------------------------------------------------------


def _saved(value: Any) -> dict[str, bytes]:
    made = io.BytesIO()
    torch.save(value, made)
    return _archive(made.getvalue())


def _torch_files() -> list[Any]:
    import tempfile

    from lastgood.checkpointers.torch_files.files import TorchFiles

    with tempfile.TemporaryDirectory() as name:
        files = TorchFiles(Path(name), 2)
        files.prepare()
        files.write(7, a_state())
        (path,) = (path for path in Path(name).iterdir() if path.suffix == ".pt")
        content = _archive(path.read_bytes())
    return [{"name": path.name.encode(), **content}]


def _changed_torch_file(rng: random.Random, thing: Any) -> Any:
    parts = {name: content for name, content in thing.items() if name != "name"}
    changed = changed_archive(rng, parts)
    return {"name": thing["name"], "": changed} if isinstance(changed, bytes) else {"name": thing["name"], **changed}


@decoder("file of torch.save", _torch_files, change=_changed_torch_file)
def _torch_file(thing: Any, folder: Path) -> Prepared:
    from lastgood.checkpointers.torch_files.files import TorchFiles

    content = thing[""] if "" in thing else _zipped({name: part for name, part in thing.items() if name != "name"})
    return put(folder / thing["name"].decode(), content), lambda: TorchFiles(folder, 2).read(None)


def _foreign() -> list[Any]:
    import argparse

    value = {"module": a_state()["model"], "args": argparse.Namespace(name="x", n=[1, 2.5]), "step": 3}
    return [
        _saved(value),
        _saved({"optimizer": a_state()["optimizer"], "shape": torch.Size([2]), "kind": torch.float16}),
    ]


@decoder("file of DeepSpeed's own engine", _foreign, change=changed_archive)
def _deepspeed(thing: Any, folder: Path) -> Prepared:
    from lastgood.integrations.deepspeed import _load_foreign

    return put(folder / "x.pt", _archived(thing)), partial(_load_foreign, folder / "x.pt")


def _deepspeed_state() -> Any:
    import argparse

    from lastgood.integrations.deepspeed_objects import encode_objects
    from lastgood.storage.standalone_slot import ROOT

    value = {"module": a_state()["model"], "args": argparse.Namespace(name="x", n=[1, 2.5]), "step": 3}
    flat = flatten({ROOT: encode_objects(value, "state")})
    blocks = [bytes(block.contiguous().numpy().tobytes()) for block in flat.blocks]
    return {"layout": json.loads(flat.layout.to_json()), "stream": craft.stream_of(blocks).hex()}


@decoder("file of DeepSpeed's through Lastgood", lambda: [_deepspeed_state()], native=True)
def _deepspeed_own(thing: Any, folder: Path) -> Prepared:
    from lastgood.integrations.deepspeed import LastgoodFiles
    from lastgood.integrations.deepspeed_saves import SaveOptions

    try:
        stream = bytes.fromhex(thing["stream"])
    except (TypeError, KeyError, ValueError):
        stream = b""
    path = folder / "part.pt"
    made = replace(craft.record(), chunk_bytes=craft.CHUNK)
    craft.write_slot(path, made, stream, json_of(thing.get("layout") if isinstance(thing, dict) else thing))

    def read() -> None:
        files = LastgoodFiles(torch.device("cpu"), lambda: 7, SaveOptions(timeout_s=60.0, pool_bytes=16 << 20), False)
        try:
            files.load(str(path))
        finally:
            files.close()

    return path.stat().st_size, read


def _directory(system: str) -> list[Any]:
    """The files of one checkpoint of a system that writes directories."""
    import tempfile

    from lastgood.checkpointers.registry import checkpointer_class

    kind = checkpointer_class(system)
    if kind.unavailable() is not None:
        return []
    with tempfile.TemporaryDirectory() as name:
        checkpointer = kind(Path(name) / "job")
        checkpointer.start({"w": torch.arange(100.0), "h": torch.ones(7, dtype=torch.bfloat16), "n": 3})
        checkpointer.save(5)
        checkpointer.drain()
        checkpointer.close()
        (folder,) = (path for path in (Path(name) / "job").iterdir() if path.is_dir())
        files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return [{"": folder.name.encode(), **files}]


def _changed_directory(rng: random.Random, thing: Any) -> Any:
    from lastgood.checkpointers.directories.manifest import MANIFEST

    files = dict(thing)
    names = [name for name in files if name not in ("", MANIFEST)]
    name = next((name for name in names if name.startswith((".metadata", ".snapshot"))), names[0])
    if rng.random() < 0.35:
        name = rng.choice(names)
    if name == ".metadata":
        files[name] = changed_pickle(rng, files[name])
    elif name == ".snapshot_metadata" and rng.random() < 0.8:
        files[name] = json_of(changed_tree(rng, json.loads(files[name])))
    elif rng.random() < 0.1:
        del files[name]
    else:
        files[name] = changed_bytes(rng, files[name])
    return files


def _put_directory(system: str, thing: Any, folder: Path) -> Prepared:
    from lastgood.checkpointers.directories import manifest as directories
    from lastgood.checkpointers.registry import checkpointer_class

    checkpoint = folder / "job" / thing[""].decode()
    sums: dict[str, tuple[int, int]] = {}
    total = 0
    for name, content in thing.items():
        if name not in ("", directories.MANIFEST):
            total += put(checkpoint / name, content)
            sums[name] = len(content), _native.crc32c(content)
    total += put(checkpoint / directories.MANIFEST, directories.manifest_text(5, sums))

    def read() -> None:
        checkpointer = checkpointer_class(system)(folder / "job")
        try:
            state = {"w": torch.zeros(100), "h": torch.zeros(7, dtype=torch.bfloat16), "n": 0}
            assert checkpointer.restore(state) == 5
        finally:
            checkpointer.close()

    return total, read


@decoder("directory of DCP", lambda: _directory("dcp"), change=_changed_directory)
def _dcp(thing: Any, folder: Path) -> Prepared:
    return _put_directory("dcp", thing, folder)


@decoder("directory of torchsnapshot", lambda: _directory("torchsnapshot"), change=_changed_directory)
def _torchsnapshot(thing: Any, folder: Path) -> Prepared:
    return _put_directory("torchsnapshot", thing, folder)


# -- folders of DCP over ranks -----------------------------------------------------------------------------------------


def _dcp_folders() -> list[Any]:
    """The files of a checkpoint of torch's writer, and of Lastgood's in both layouts."""
    import tempfile

    import torch.distributed.checkpoint as dcp

    from lastgood.integrations.dcp import LastgoodWriter

    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "step-1"
        ours = [LastgoodWriter(folder, layout=one) for one in ("lastgood", "dcp")]
        for storage in (dcp.FileSystemWriter(folder), *ours):
            dcp.save(_dcp_state(), storage_writer=storage)
            found.append({path.name: path.read_bytes() for path in folder.iterdir()})
    return found


def _dcp_state() -> dict[str, Any]:
    return {"w": torch.arange(100.0), "h": {"b": torch.ones(7, dtype=torch.bfloat16)}, "n": 3, "l": [1, {"x": 2.5}]}


def _changed_dcp_folder(rng: random.Random, thing: Any) -> Any:
    files = dict(thing)
    name = ".metadata" if rng.random() < 0.6 else rng.choice(sorted(files))
    files[name] = (changed_pickle if name == ".metadata" else changed_bytes)(rng, files[name])
    return files


@decoder("folder of DCP through LastgoodReader", _dcp_folders, change=_changed_dcp_folder)
def _dcp_folder(thing: Any, folder: Path) -> Prepared:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    from lastgood.checkpointers.dcp.torch_io import first_cause
    from lastgood.checkpointers.directories.manifest import manifest_text
    from lastgood.errors import LastgoodError
    from lastgood.integrations.dcp import LastgoodReader

    total = 0
    sums = {".metadata": (len(thing[".metadata"]), _native.crc32c(thing[".metadata"]))}
    for name, content in thing.items():
        sound = manifest_text(0, sums) if name.startswith("lastgood-manifest") else content
        total += put(folder / "step-1" / name, sound)

    def read() -> None:
        try:
            dcp.load(_dcp_state(), storage_reader=LastgoodReader(folder / "step-1", timeout_s=60.0))
        except CheckpointException as error:
            cause = first_cause(error)
            (_, trace) = next(iter(error.failures.values()))
            if not isinstance(cause, LastgoodError) and "planner" not in trace[-1].filename:
                raise AssertionError(f"{trace[-1]}: {cause!r}") from cause
            if isinstance(cause, LastgoodError):
                raise cause from None

    return total, read
