"""A digest of a live state, from the objects themselves: the proof's own view, apart from flatten and its layout."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from lastgood._lazy import torch
from lastgood.errors import StateError
from lastgood.state.flatten import is_stateful
from lastgood.state.shards import is_sharded, local_part

__all__ = ["state_digest"]


def state_digest(state: Mapping[str, Any]) -> str:
    """SHA-256, as hex, over every name, value and tensor byte in `state`.

    Two states have one digest exactly if they agree to the bit: keys, types, dtypes, shapes and contents. Memory layout
    (strides, aliases, device) does not count, nor does the order of a mapping's keys. Of a tensor that is spread over
    ranks, this rank's part and its place count: the digests of all ranks together are those of the whole.
    """
    hasher = hashlib.sha256()
    _feed(hasher, state)
    return hasher.hexdigest()


def _feed(hasher: Any, value: Any) -> None:
    if is_sharded(value):
        spread = (tuple(value.shape), tuple(value.device_mesh.shape), value.device_mesh.get_coordinate())
        hasher.update(f"shard {spread} {value.placements};".encode())
        _feed(hasher, local_part(value))
    elif isinstance(value, torch.Tensor):
        dense = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        # A zero-dimensional tensor, or one element with a stride of its own, cannot be viewed as bytes as it is.
        flat = dense.as_strided((dense.numel(),), (1,))
        hasher.update(f"tensor {value.dtype} {tuple(value.shape)};".encode())
        hasher.update(flat.view(torch.uint8).numpy().data)
    elif isinstance(value, np.ndarray):
        hasher.update(f"array {value.dtype.str} {value.shape};".encode())
        hasher.update(value.tobytes())
    elif is_stateful(value):
        hasher.update(b"stateful;")
        _feed(hasher, value.state_dict())
    elif isinstance(value, Mapping):
        hasher.update(f"mapping {len(value)};".encode())
        for key in sorted(value, key=lambda item: (type(item).__name__, repr(item))):
            _feed(hasher, key)
            _feed(hasher, value[key])
    elif isinstance(value, (list, tuple)):
        hasher.update(f"{'list' if isinstance(value, list) else 'tuple'} {len(value)};".encode())
        for item in value:
            _feed(hasher, item)
    elif isinstance(value, float):
        hasher.update(b"float " + struct.pack(">d", value))
    elif isinstance(value, complex):
        hasher.update(b"complex " + struct.pack(">dd", value.real, value.imag))
    elif isinstance(value, (bytes, bytearray)):
        hasher.update(f"bytes {len(value)};".encode() + bytes(value))
    elif isinstance(value, (set, frozenset)):
        hasher.update(f"set {sorted(map(repr, value))};".encode())
    elif value is None or isinstance(value, (bool, int, str, np.generic, torch.dtype, torch.device)):
        text = repr(value)
        hasher.update(f"{type(value).__name__} {len(text)} {text};".encode())
    else:
        raise StateError(f"cannot take the digest of a {type(value).__module__}.{type(value).__qualname__}")
