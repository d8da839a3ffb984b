"""Values of numpy as a description of their dtype, their shape and their bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from lastgood.errors import StateError
from lastgood.state.layout_rules import numpy_dtype

__all__ = ["array_of_bytes", "describe_numpy"]


def describe_numpy(dtype: np.dtype[Any], path: str) -> str:
    """What a file calls `dtype`. Raises StateError, naming `path`, where its values are not their bytes alone."""
    if dtype.hasobject or dtype.fields is not None or dtype.subdtype is not None or np.dtype(dtype.str) != dtype:
        raise StateError(
            f"{path}: numpy values of dtype {dtype} cannot be stored to the bit; store plain numeric arrays"
        )
    return dtype.str


def array_of_bytes(content: bytes | bytearray | memoryview, description: Any, shape: Any) -> np.ndarray:
    """A new array of `content`, which must be exactly its bytes. Raises ValueError."""
    dtype = numpy_dtype(description)
    if not isinstance(shape, Sequence) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError("the shape of an array is no list of sizes")
    if math.prod(shape) * dtype.itemsize != len(content):
        raise ValueError(f"{len(content)} bytes for an array of {description} {list(shape)}"[:200])
    if not len(content):
        if 0 not in shape and shape:  # numpy would give each empty text a byte
            raise ValueError(f"an array of {description} {list(shape)} has no bytes"[:200])
        return np.zeros(tuple(shape), dtype)
    return np.frombuffer(content, dtype).reshape(tuple(shape)).copy()
