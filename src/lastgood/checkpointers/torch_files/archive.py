"""Files of torch.save, read by a reader of Lastgood's own: no code of theirs runs, and no more memory than they have.

Such a file is a zip that holds a pickle and, uncompressed, the bytes of each storage. `torch.load` with weights_only
allows functions that take memory which no byte of the file stands for, inflates what is compressed, and compares no
checksum. Here the zip's directory is checked first (nothing compressed, nothing outside the file, nothing twice), then
the pickle builds plain values alone (lastgood.pickles), and each storage is read once, with its checksum.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lastgood._lazy import torch
from lastgood.bounds import DAMAGE, Budget, Refused, hashable, require, tree_cost
from lastgood.checkpointers.torch_files.zip import TorchZip
from lastgood.errors import CorruptCheckpoint, StateError
from lastgood.files import open_regular, storage_errors
from lastgood.pickles import Maker, Record, load_pickle
from lastgood.units import format_bytes

__all__ = [
    "TorchFile",
    "check_proportion",
    "dtype_names",
    "file_names",
    "is_zip",
    "read_torch_file",
    "reading",
    "reading_cost",
]

_MOST_SIZE = 1 << 62
_MOST_AXES = 64


def read_torch_file(path: Path, records: tuple[tuple[str, str], ...] = ()) -> Any:
    """What torch.save wrote into a file: tensors on the CPU, plain values and containers.

    `records` are names of further classes, (module, name), whose objects come as `lastgood.pickles.Record`.

    Raises CorruptCheckpoint for whatever is not read, with the `Refused` that says why as its cause, and StorageError.
    """
    with reading(path), os.fdopen(open_regular(path), "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        return TorchFile(file.fileno(), 0, nbytes, Budget(nbytes)).read(records)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """While inside, what a damaged file makes its reader raise becomes CorruptCheckpoint, and OSError StorageError."""
    with storage_errors(path, "reading"):
        try:
            yield
        except DAMAGE as error:
            raise CorruptCheckpoint(f"{path}: cannot be read: {error}") from error


def reading_cost(tree: Any, path: str) -> int:
    """What `read_torch_file` will charge for a tree, at most; for `check_proportion`.

    Raises StateError, naming the place below `path`, for what torch.save writes and `read_torch_file` does not read.
    """
    try:
        return tree_cost(tree, _leaf_cost, path, _leaf_keys())
    except Refused as error:
        raise StateError(f"{error}; keep it out of the state, or store it as plain values and tensors") from error


def check_proportion(cost: int, path: Path, name: str) -> None:
    """Raise StateError for a file that was written, and would take more memory to read than its bytes account for."""
    most = Budget(path.stat().st_size).most
    if cost > most:
        raise StateError(
            f"{name}: its plain values would take {format_bytes(cost)} of memory to read, and a file of its size may "
            f"take {format_bytes(most)}; keep long lists as tensors or numpy arrays, and expanded tensors small"
        )


def is_zip(head: bytes) -> bool:
    """Whether a file that begins so is a zip; nine bytes are needed.

    A safetensors file may begin with the same by chance, but no zip has a compression method "{".
    """
    return head.startswith(b"PK") and not head[8:].startswith(b"{")


class TorchFile:
    """One file of torch.save, or a part of a file that is one. Raises Refused and OSError."""

    def __init__(self, descriptor: int, begin: int, nbytes: int, budget: Budget) -> None:
        self._budget = budget
        self._zip = TorchZip(descriptor, begin, nbytes, budget)
        roots = [name.removesuffix("/data.pkl") for name in self._zip.entries if name.endswith("/data.pkl")]
        if len(roots) != 1 or "/" in roots[0]:
            raise Refused(f"it is a zip that holds {len(roots)} pickles of torch.save instead of one")
        self._root = roots[0]
        self._storages: dict[str, torch.Tensor] = {}

    def read(self, records: tuple[tuple[str, str], ...] = ()) -> Any:
        """What was saved. `records` as for `read_torch_file`."""
        self._check_byte_order()
        names = {
            **file_names(self._budget),
            **{(module, name): Record.maker(f"{module}.{name}") for module, name in records},
        }
        content = self._zip.read(f"{self._root}/data.pkl")
        self._budget.take(len(content))
        value = load_pickle(
            content.numpy().tobytes(),
            names,
            self._budget,
            persistent=self._storage,
            build={OrderedDict: set_metadata},
            keys=_leaf_keys(),
        )
        del content
        cost = tree_cost(
            value, lambda leaf: 0 if records and type(leaf) is Record else _leaf_cost(leaf), "it", _leaf_keys()
        )
        if cost > self._budget.most:
            raise Refused("it holds so much so many times that it would take memory out of proportion to its file")
        return value

    def _check_byte_order(self) -> None:
        if f"{self._root}/byteorder" in self._zip.entries:
            order = self._zip.read(f"{self._root}/byteorder").numpy().tobytes()
            if order != b"little":
                raise Refused(f"it was written with byte order {order[:20]!r}")

    def _storage(self, identity: Any) -> _Storage:
        """The storage for what torch.save writes in its place: its kind, the name of its entry, device and length."""
        if type(identity) is not tuple or len(identity) != 5 or identity[0] != "storage":
            raise Refused("it refers to something that is no storage")
        _, kind, key, _, count = identity
        if type(kind) is not _Kind or type(key) is not str or type(count) is not int:
            raise Refused("it refers to a storage that is none")
        if key not in self._storages:
            self._budget.take(_LEAF_BYTES)
            self._storages[key] = self._zip.read(f"{self._root}/data/{key}")
        content = self._storages[key]
        itemsize = 1 if kind.dtype is None else kind.dtype.itemsize
        if count * itemsize != content.numel():
            raise Refused(f"storage {key[:40]!r} has {content.numel()} bytes instead of {count} * {itemsize}")
        return _Storage(kind.dtype, content, self._budget)


# -- what a pickle of torch.save is made of ----------------------------------------------------------------------------

_LEAF_BYTES = 1000
"""Of memory, for a tensor or a storage beside its bytes."""
_AXIS_BYTES = 200
"""For each of its sizes and strides."""


@dataclass(frozen=True)
class _Kind:
    """Stands for a class of storages, which says the dtype; None for bytes."""

    dtype: torch.dtype | None


@dataclass(frozen=True)
class _Storage:
    dtype: torch.dtype | None
    content: torch.Tensor
    budget: Budget


@dataclass(frozen=True)
class _TensorClass:
    """Stands for a class of tensors."""

    name: str


_STORAGES = {
    "BFloat16Storage": "bfloat16",
    "BoolStorage": "bool",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "ShortStorage": "int16",
}


def file_names(budget: Budget | None = None) -> Mapping[tuple[str, str], Any]:
    """All that a file of torch.save may name. What sets hold is charged to `budget` before it is hashed."""
    budget = budget or Budget(0)
    return {
        **_names(),
        ("builtins", "set"): Maker("builtins.set", lambda items: set(hashable(_listed(items), budget, _leaf_keys()))),
        ("builtins", "frozenset"): Maker(
            "builtins.frozenset", lambda items: frozenset(hashable(_listed(items), budget, _leaf_keys()))
        ),
    }


@functools.cache
def _names() -> Mapping[tuple[str, str], Any]:
    makers: dict[tuple[str, str], Callable[..., Any]] = {
        ("torch._utils", "_rebuild_tensor_v2"): _typed_tensor,
        ("torch._utils", "_rebuild_tensor_v3"): _untyped_tensor,
        ("torch._utils", "_rebuild_parameter"): _parameter,
        ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
        ("torch._tensor", "_rebuild_from_type_v2"): _of_class,
        ("torch", "Size"): _size,
        ("torch", "device"): _device,
        ("collections", "OrderedDict"): lambda: OrderedDict(),
        ("collections", "Counter"): _counter,
        ("builtins", "complex"): _complex,
        ("builtins", "bytes"): lambda: b"",
        ("builtins", "bytearray"): _bytearray,
        ("_codecs", "encode"): _encode,
    }
    return {
        **{(module, name): Maker(f"{module}.{name}", make) for (module, name), make in makers.items()},
        **{("torch", name): _Kind(getattr(torch, dtype)) for name, dtype in _STORAGES.items()},
        ("torch.storage", "UntypedStorage"): _Kind(None),
        ("torch", "Tensor"): _TensorClass("Tensor"),
        ("torch.nn.parameter", "Parameter"): _TensorClass("Parameter"),
        **dtype_names(),
    }


@functools.cache
def dtype_names() -> Mapping[tuple[str, str], torch.dtype]:
    """Dtypes of torch by the names that pickles have for them."""
    kind = torch.dtype
    return {("torch", name): found for name, found in vars(sys.modules["torch"]).items() if type(found) is kind}


def _leaf_cost(value: Any) -> int | None:
    """What `tree_cost` is told of a tensor, dtype, device or size."""
    kind = type(value)
    if kind in (torch.dtype, torch.device):
        return _LEAF_BYTES
    if kind is torch.Size:
        return _LEAF_BYTES + _AXIS_BYTES * len(value)
    if kind not in (torch.Tensor, torch.nn.Parameter):
        return None
    if value.layout is not torch.strided or value.is_quantized or value.device.type not in ("cpu", "cuda"):
        return None
    # An expanded tensor has few bytes in the file, and a copy of it many.
    elements, stored = int(value.numel() * value.element_size()), value.untyped_storage().nbytes()
    return 3 * _LEAF_BYTES + _AXIS_BYTES * int(value.dim()) + (elements if elements > stored else 0)


def _leaf_keys() -> tuple[type, ...]:
    """Leaves that have a hash of their value: tensors are equal to nothing."""
    return (torch.dtype, torch.device, torch.Size)


def _typed_tensor(
    storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, metadata: Any = None
) -> torch.Tensor:
    require(type(storage) is _Storage and storage.dtype is not None, "a tensor in it is damaged")
    return _tensor(storage, storage.dtype, offset, size, stride, requires_grad, hooks, metadata)


def _untyped_tensor(
    storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, dtype: Any, metadata: Any = None
) -> torch.Tensor:
    plain = type(dtype) is torch.dtype and not str(dtype).startswith("torch.q")
    require(type(storage) is _Storage and storage.dtype is None and plain, "a tensor in it is damaged")
    return _tensor(storage, dtype, offset, size, stride, requires_grad, hooks, metadata)


def _tensor(
    storage: _Storage,
    dtype: torch.dtype,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any,
    hooks: Any,
    metadata: Any,
) -> torch.Tensor:
    """A tensor over its storage, of which it keeps the memory."""
    sound = type(size) is tuple and type(stride) is tuple and len(size) == len(stride) <= _MOST_AXES
    sound = sound and all(type(number) is int and 0 <= number < _MOST_SIZE for number in (offset, *size, *stride))
    require(sound and type(requires_grad) is bool, "a tensor in it is damaged")
    require(type(hooks) is OrderedDict and not hooks, "a tensor in it has hooks")
    length = storage.content.numel() // dtype.itemsize
    last = offset + sum((count - 1) * step for count, step in zip(size, stride, strict=True))
    if offset > length or (0 not in size and last >= length):
        raise Refused(f"a tensor in it reaches to element {last} of a storage of {length}")
    require(math.prod(size) < _MOST_SIZE, "a tensor in it is damaged")
    storage.budget.take(_LEAF_BYTES)
    tensor = torch.empty(0, dtype=dtype, device="cpu")
    tensor.set_(storage.content.untyped_storage(), offset, size, stride)
    for bit in metadata or ():
        require(
            type(metadata) is dict and bit in ("conj", "neg") and metadata[bit] is True, "a tensor in it is damaged"
        )
        tensor = tensor.conj() if bit == "conj" else torch._neg_view(tensor)
    return tensor.requires_grad_() if requires_grad else tensor


def _parameter(data: Any, requires_grad: Any, hooks: Any, state: Any = None) -> torch.nn.Parameter:
    """A parameter without the attributes that a program hung on it, which no restore looks at."""
    del state
    require(type(data) is torch.Tensor and type(requires_grad) is bool, "a parameter in it is damaged")
    require(type(hooks) is OrderedDict and not hooks, "a parameter in it has hooks")
    return torch.nn.Parameter(data, requires_grad)


def _of_class(maker: Any, kind: Any, arguments: Any, state: Any) -> torch.Tensor:
    """A tensor with attributes, without them."""
    del state
    rebuilds = type(maker) is Maker and maker.make in (_typed_tensor, _untyped_tensor, _parameter)
    require(rebuilds and type(kind) is _TensorClass and type(arguments) is tuple, "a tensor in it is damaged")
    tensor: torch.Tensor = maker.make(*arguments)
    require(type(tensor).__name__ == kind.name, "a tensor in it is damaged")
    return tensor


def _size(sizes: Any) -> torch.Size:
    require(type(sizes) in (tuple, list), "a size in it is damaged")
    require(all(type(size) is int and abs(size) < _MOST_SIZE for size in sizes), "a size in it is damaged")
    return torch.Size(sizes)


def _device(kind: Any, index: Any = None) -> torch.device:
    require(
        type(kind) is str and (index is None or (type(index) is int and 0 <= index < 128)), "a device in it is damaged"
    )
    return torch.device(kind) if index is None else torch.device(kind, index)


def _counter(counts: Any = None) -> Counter[Any]:
    require(counts is None or type(counts) is dict, "a Counter in it is damaged")
    return Counter(counts)


def _listed(items: Any) -> list[Any]:
    require(type(items) in (list, tuple), "a set in it is damaged")
    return list(items)


def _complex(real: Any, imaginary: Any) -> complex:
    require(type(real) is float and type(imaginary) is float, "a complex number in it is damaged")
    return complex(real, imaginary)


def _bytearray(content: Any = b"") -> bytearray:
    require(type(content) is bytes, "a bytearray in it is damaged")
    return bytearray(content)


def _encode(text: Any, encoding: Any) -> bytes:
    require(type(text) is str and encoding in ("latin1", "latin-1"), "a text of bytes in it is damaged")
    return str(text).encode("latin-1")


def set_metadata(target: Any, state: Any) -> None:
    """The versions of its modules, which the state_dict of a module carries as an attribute."""
    require(type(state) is dict and list(state) == ["_metadata"], "the state of an OrderedDict in it is damaged")
    require(type(state["_metadata"]) in (dict, OrderedDict), "the state of an OrderedDict in it is damaged")
    target._metadata = state["_metadata"]
