"""DCP's ``.metadata``, read as data: names on a list, numbers within bounds, and only then torch's own objects.

torch unpickles this file with whatever code is in it, and believes every size, place and file name.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from lastgood._lazy import torch
from lastgood.bounds import Budget, Refused, require, tree_cost
from lastgood.checkpointers.torch_files.archive import dtype_names, file_names
from lastgood.pickles import Maker, Record, load_pickle

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

__all__ = ["decode_metadata", "metadata_names", "plain_file_name"]

_MODULE = "torch.distributed.checkpoint.metadata"
_CLASSES = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)
_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
_PATHS = [(module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")]
_MOST_NUMBER = 1 << 62


@functools.cache
def metadata_names() -> Mapping[tuple[str, str], Any]:
    """All that a ``.metadata`` may name: classes, which become records, and what dtypes and sizes are made of."""
    classes = [(_MODULE, name) for name in _CLASSES]
    classes += [("torch.distributed.checkpoint.filesystem", "_StorageInfo"), *_PATHS]
    return {
        **{(module, name): Record.maker(f"{module}.{name}") for module, name in classes},
        ("torch.serialization", "_get_layout"): Maker("torch.serialization._get_layout", _layout),
        **{name: file_names()[name] for name in (("collections", "OrderedDict"), ("torch", "Size"))},
        **dtype_names(),
    }


def _layout(name: Any) -> Any:
    if name != "torch.strided":
        raise Refused("it describes tensors that have no plain bytes")
    return name


def plain_file_name(name: Any) -> bool:
    """Whether something names a file of a folder, and none elsewhere."""
    return type(name) is str and name not in ("", ".", "..") and not {"/", "\0"} & set(name)


def decode_metadata(content: bytes, budget: Budget) -> Metadata:
    """What DCP pickled into a ``.metadata``; memory is charged to `budget`. Raises Refused, and what `DAMAGE` lists.

    Every part of a tensor lies inside it and has a place, every item in a file beside the metadata, and no two items
    share bytes; whether the files are that long is for the reader to see.
    """
    from torch.distributed.checkpoint import metadata as of_torch

    fields = _state(load_pickle(content, metadata_names(), budget), f"{_MODULE}.Metadata")
    described: Any = fields.get("state_dict_metadata")
    places: Any = fields.get("storage_data")
    require(type(described) is dict and type(places) is dict, "its metadata lacks what it should describe")
    entries: dict[str, Any] = {}
    for name, about in described.items():
        require(type(name) is str and type(about) is Record, "its metadata describes what is no tensor")
        if about.name == f"{_MODULE}.BytesStorageMetadata":
            entries[name] = of_torch.BytesStorageMetadata()
        else:
            entries[name] = _tensor(name, _state(about, f"{_MODULE}.TensorStorageMetadata"))
    planned: Any = fields.get("planner_data")
    tree_cost(planned, lambda leaf: 100 if type(leaf) is torch.Size else None, "its planner's data")
    version: Any = fields.get("version")
    require(version is None or type(version) is str, "its metadata has a damaged version")
    found = _places(places, entries)
    _check_room(entries, found)
    return of_torch.Metadata(entries, planned, found, _storage_meta(fields.get("storage_meta")), version)


def _tensor(name: str, about: dict[str, Any]) -> Any:
    from torch.distributed.checkpoint import metadata as of_torch

    properties: Any = about.get("properties")
    shape: Any = about.get("size")
    chunks: Any = about.get("chunks")
    require(
        type(properties) is Record and properties.name == f"{_MODULE}.TensorProperties",
        "its metadata has a damaged tensor",
    )
    values = properties.state
    require(
        type(values) is tuple and len(values) == 5 and type(values[0]) is torch.dtype,
        "its metadata has a damaged dtype",
    )
    require(_is_size(shape), f"its metadata has a damaged size of {name!r:.60}")
    require(type(chunks) is list, f"its metadata lacks the parts of {name!r:.60}")
    parts = []
    for chunk in chunks:
        state = _state(chunk, f"{_MODULE}.ChunkStorageMetadata")
        begins: Any = state.get("offsets")
        sizes: Any = state.get("sizes")
        require(
            _is_size(begins) and _is_size(sizes) and len(begins) == len(sizes) == len(shape),
            f"its metadata has a damaged part of {name!r:.60}",
        )
        require(
            all(begin + size <= whole for begin, size, whole in zip(begins, sizes, shape, strict=True)),
            f"its metadata has a part of {name!r:.60} outside of it: {tuple(begins)} {tuple(sizes)} of {tuple(shape)}",
        )
        parts.append(of_torch.ChunkStorageMetadata(begins, sizes))
    requires_grad: Any = values[2]
    known = of_torch.TensorProperties(dtype=values[0], requires_grad=requires_grad is True)
    return of_torch.TensorStorageMetadata(known, shape, parts)


def _is_size(value: Any) -> bool:
    sound = type(value) is torch.Size and min(value, default=0) >= 0
    return sound and math.prod(max(1, size) for size in value) < _MOST_NUMBER


def _places(places: dict[Any, Any], entries: dict[str, Any]) -> dict[Any, Any]:
    """DCP's `storage_data`, with a place for each part of each tensor that it has."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import MetadataIndex

    found: dict[Any, Any] = {}
    for index, info in places.items():
        state = _state(index, f"{_MODULE}.MetadataIndex")
        name: Any = state.get("fqn")
        offset: Any = state.get("offset")
        hint: Any = state.get("index")
        require(type(name) is str and name in entries, "its metadata has a place for what it does not describe")
        require(offset is None or _is_size(offset), f"its metadata has a damaged place of {name!r:.60}")
        require(hint is None or type(hint) is int, f"its metadata has a damaged place of {name!r:.60}")
        known = MetadataIndex(name, offset, hint)
        require(known not in found, f"its metadata has two places for {name!r:.60}")
        place = _state(info, _INFO)
        file: Any = place.get("relative_path")
        begin: Any = place.get("offset")
        nbytes: Any = place.get("length")
        transforms: Any = place.get("transform_descriptors")
        require(plain_file_name(file), f"its metadata names no file beside it for {name!r:.60}: {file!r:.60}")
        require(
            type(begin) is int and type(nbytes) is int and 0 <= begin < _MOST_NUMBER and 0 <= nbytes < _MOST_NUMBER,
            f"its metadata has a damaged place of {name!r:.60}",
        )
        require(
            transforms is None or (type(transforms) in (list, tuple) and all(type(one) is str for one in transforms)),
            f"its metadata has a damaged place of {name!r:.60}",
        )
        found[known] = _StorageInfo(file, begin, nbytes, list(transforms or ()) or None)
    return found


def _check_room(entries: dict[str, Any], places: dict[Any, Any]) -> None:
    """Each part of a tensor has a place that can hold it, and no two items share bytes of a file."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

    for name, about in entries.items():
        if isinstance(about, BytesStorageMetadata):
            continue
        for chunk in about.chunks:
            place = places.get(MetadataIndex(name, chunk.offsets)) or places.get(MetadataIndex(name))
            if place is None:
                raise Refused(f"its metadata says not where {name!r:.60} is")
            require(
                math.prod(chunk.sizes) * about.properties.dtype.itemsize <= place.length,
                "its metadata has a tensor that is larger than its place",
            )
    taken = sorted((one.relative_path, one.offset, one.offset + one.length) for one in places.values() if one.length)
    require(
        all(one[0] != two[0] or one[2] <= two[1] for one, two in pairwise(taken)),
        "its metadata has tensors one over another",
    )


def _storage_meta(value: Any) -> Any:
    from torch.distributed.checkpoint.metadata import StorageMeta

    if value is None:
        return None
    fields = _state(value, f"{_MODULE}.StorageMeta")
    place: Any = fields.get("checkpoint_id")
    if type(place) is Record and place.name in map(".".join, _PATHS):
        require(all(type(part) is str for part in place.arguments), "its metadata has a damaged path")
        place = "/".join(place.arguments).replace("//", "/")
    texts = [place, fields.get("save_id"), fields.get("load_id")]
    require(all(text is None or type(text) is str for text in texts), "its metadata has a damaged name of its save")
    modules: Any = fields.get("modules", [])
    require(
        type(modules) is list and all(type(one) is str for one in modules), "its metadata has a damaged list of modules"
    )
    return StorageMeta(texts[0], texts[1], texts[2], modules)


def _state(record: Any, name: str) -> dict[str, Any]:
    require(type(record) is Record and record.name == name, f"its metadata lacks a {name}")
    state: dict[str, Any] = {} if record.state is None else record.state
    require(type(state) is dict, f"its metadata lacks a {name}")
    return state
