"""Short ways to put a state into a slot directory and to take it out again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from lastgood.state import flatten, is_stateful, state_digest
from lastgood.storage import SlotInfo, SlotStore

CHUNK = 16384


def open_store(directory: Path, **knobs) -> SlotStore:
    return SlotStore(directory, **{"slots": 4, "keep": 2, "chunk_bytes": CHUNK, "pool_bytes": 8 * CHUNK, **knobs})


def put(store: SlotStore, step: int, state) -> SlotInfo:
    """Write one checkpoint as PCcheck does, but without a training."""
    flat = flatten(state)
    meta = flat.layout.to_json()
    stream = torch.zeros(flat.layout.stream_bytes + len(meta), dtype=torch.uint8)
    for offset, block in zip(flat.layout.block_offsets(), flat.blocks, strict=True):
        stream[offset : offset + block.numel()] = block
    stream[flat.layout.stream_bytes :] = torch.frombuffer(bytearray(meta), dtype=torch.uint8)
    write = store.begin(step, stream.numel(), 60)
    write.copy_host([(stream.data_ptr(), stream.numel())], 60)
    assert write.commit(flat.layout.stream_bytes, len(meta), flat.layout.digest(), 60) == "durable"
    return next(info for info in store.committed() if info.sequence == write.sequence)


def stored_state(directory: Path, state, step: int = 1) -> SlotInfo:
    """A directory that holds one checkpoint and is not in use."""
    with open_store(directory, slots=2, keep=1) as store:
        return put(store, step, state)


def hard_tensors() -> dict:
    """What formats of tensors find hard: widths, strides, views, aliases, empty and zero-dimensional ones."""
    torch.manual_seed(5)
    base = torch.randn(40, 6)
    return {
        "bf16": torch.randn(3, 5).bfloat16(),
        "fp8": [torch.randn(7).to(torch.float8_e4m3fn), torch.randn(2, 2).to(torch.float8_e5m2)],
        "scale": torch.tensor([120, 127, 0], dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "nan": torch.tensor([0x7FC00001, 0x7F800001, -1], dtype=torch.int32).view(torch.float32),
        "odd bool": torch.tensor([0, 1, 2, 255], dtype=torch.uint8).view(torch.bool),
        "complex": torch.randn(3, dtype=torch.complex64),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "base": base,
        "alias": base,
        "row": base[3],
        "transposed": base.t(),
        "overlapping": [base[2:20], base[10:30, 1:4]],
        "channels_last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "expanded": torch.randn(1, 4).expand(6, 4),
        "bytes of it": base.view(torch.uint8)[1, :8],
        "one": torch.randn(9)[4:5].as_strided((1, 1), (7, 5)),
    }


def plain_values() -> dict:
    return {
        "none": None,
        "flag": True,
        "number": 1 << 70,
        "float": [float("nan"), -0.0, 1.5],
        "text": "a\nb ☃",
        "bytes": b"\x00\xff",
        "tuple": (1, (2, "x")),
        "set": {1, 2},
        3: {"deep": {}},
        "dtype": torch.bfloat16,
        "array": np.arange(6, dtype="<i2").reshape(2, 3),
        "scalar": np.float32(2.5),
    }


def differences(found, expected, path: str = "") -> list[str]:
    """Paths of all leaves that differ; shorter to read than two digests."""
    if state_digest({"x": found}) == state_digest({"x": expected}):
        return []
    if is_stateful(expected):
        return differences(found, expected.state_dict(), path)
    if isinstance(expected, dict) and isinstance(found, dict) and found.keys() == expected.keys():
        return [place for key in expected for place in differences(found[key], expected[key], f"{path}.{key}")]
    if isinstance(expected, (list, tuple)) and isinstance(found, type(expected)) and len(found) == len(expected):
        pairs = enumerate(zip(found, expected, strict=True))
        return [place for number, pair in pairs for place in differences(*pair, f"{path}.{number}")]
    return [path]
