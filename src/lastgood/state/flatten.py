"""Flatten any training state into a layout and blocks of bytes, to the bit; `build` makes it again."""

from __future__ import annotations

import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lastgood._lazy import torch
from lastgood.errors import StateError
from lastgood.state.layout import LAYOUT_VERSION, RANKS_VERSION, Layout, Node
from lastgood.state.layout_rules import MAX_DEPTH, MAX_DIMENSIONS
from lastgood.state.numpy_values import describe_numpy
from lastgood.state.optimizers import optimizers_of, state_of
from lastgood.state.shards import describe_shard, is_sharded, local_part

__all__ = [
    "FlatState",
    "changed_while_copied",
    "flatten",
    "is_stateful",
]


@dataclass(frozen=True)
class FlatState:
    """A layout, and the live memory that it describes.

    `blocks[i]` is a one-dimensional uint8 tensor over the live bytes of block `i`, on the state's own device. The first
    `layout.deferred_blocks` change only in optimizer steps. Holding this object keeps the memory alive.
    """

    layout: Layout
    blocks: tuple[torch.Tensor, ...]
    names: tuple[str, ...]
    """For each block the path to the first of its views."""
    watched: Mapping[int, tuple[tuple[str, torch.Tensor, int], ...]]
    """For deferred blocks and weights, by number: path, tensor and version counter of every view."""
    weights: frozenset[int] = frozenset()
    """Numbers of the immediate blocks that hold nothing but parameters of modules, which no optimizer updates."""
    sharded: tuple[Any, ...] = ()
    """The DTensors that H nodes stand for, in the order of the tree."""

    def check_versions(self, number: int) -> None:
        """Raise StateError, naming the tensor, if one in a watched block was changed in place since `flatten`.

        torch counts in-place changes of every tensor. What an optimizer's step pre-hook does not see (an embedding with
        max_norm, weights that are swapped for an evaluation, an optimizer that steps under another name) is seen here.
        """
        for path, tensor, version in self.watched.get(number, ()):
            if tensor._version != version:
                raise changed_while_copied(path)


def changed_while_copied(path: str) -> StateError:
    """What to raise for a tensor that something else than an optimizer's step changed too early."""
    return StateError(
        f"{path} was changed while it was being copied, though not by optimizer.step(); call before_update() of the "
        "checkpointer before such a change"
    )


def is_stateful(value: Any) -> bool:
    """Whether `value` is an object that follows torch's Stateful protocol."""
    if isinstance(value, type):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def flatten(state: Mapping[str, Any], *, spread: bool = False) -> FlatState:
    """Describe `state` and find its bytes. Copies nothing but numpy arrays and lazily conjugated tensors.

    Tensors may be of any dtype, on any device, and views of one another: memory that several share becomes one block.

    With `spread`, tensors that are spread over ranks (DTensor) are described by their parts on this rank; only what can
    put such parts back may ask for it.

    Raises StateError, naming the path in the state, for what cannot be stored to the bit and given back (functions,
    open files, sparse or quantised tensors, devices other than CPU and CUDA, containers and arrays of unknown classes,
    containers that hold themselves, sets of tensors), and for objects whose state_dict fails.
    """
    unnamed = [name for name in state if type(name) is not str]
    if unnamed:
        raise StateError(f"the entries of a state have names, texts, and one is called {unnamed[0]!r}")
    walker = _Walker(_updated_extents(state), spread)
    try:
        tree = walker.mapping(dict(state), "state")
    except RecursionError as error:
        raise StateError("state: containers are nested too deep to be stored; flatten them") from error
    return walker.finish(tree)


# -- walking -----------------------------------------------------------------------------------------------------------

_Extent = tuple[str, int, int]
"""(device, first address, address after the last byte)."""


def _extent(tensor: torch.Tensor) -> _Extent:
    start = tensor.data_ptr()
    device = tensor.device
    where = "cpu" if device.type == "cpu" else str(device)  # a text of each tensor's device would take a while
    if tensor.is_contiguous():
        return (where, start, start + tensor.nbytes)
    if tensor.numel() == 0:
        return (where, start, start)
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (where, start, start + (reach + 1) * tensor.element_size())


def _updated_extents(state: Mapping[str, Any]) -> frozenset[_Extent]:
    """Memory that only optimizer steps change: the parameters of every optimizer in the state, and its own tensors."""
    found: set[_Extent] = set()
    for optimizer in optimizers_of(state):
        for group in optimizer.param_groups:
            found.update(_extent(local_part(parameter)) for parameter in group["params"])
        for entry in optimizer.state.values():
            found.update(_extent(local_part(item)) for item in _tensors_in(entry))
    return frozenset(found)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors of an optimizer's entry: also one that belongs to no parameter, and lists (SOAP's preconditioners)."""
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) in _MAPPING_TAGS:
        for item in value.values():
            yield from _tensors_in(item)
    elif type(value) in _SEQUENCE_TAGS:
        for item in value:
            yield from _tensors_in(item)


@dataclass
class _View:
    tensor: torch.Tensor
    extent: _Extent
    path: str
    node: Node
    """Its block and offset are filled in once all views are known."""
    key: tuple[str, int]
    """Device and begin of its storage."""
    number: int
    """Its place in the tree, among all views."""


class _Walker:
    def __init__(self, updated: frozenset[_Extent], spread: bool) -> None:
        self._updated = updated
        self._spread = spread
        self._views: list[_View] = []
        self._open: set[int] = set()
        self._version = LAYOUT_VERSION
        self._sharded: list[Any] = []
        self._parameters: set[_Extent] = set()
        """Of all modules that were met."""

    def finish(self, tree: Node) -> FlatState:
        """Join overlapping and touching views of one storage into blocks; deferred blocks first.

        Blocks come in the order of the tree: memory addresses decide what is joined, and leave no trace in the layout.
        """
        groups: list[list[_View]] = []
        end: tuple[Any, int] | None = None
        ordered = sorted(self._views, key=lambda view: (view.key, view.extent[1], view.extent[2]))
        for view in ordered:
            key, (_, start, stop) = view.key, view.extent
            if end is not None and end[0] == key and start <= end[1]:
                groups[-1].append(view)
                end = (key, max(end[1], stop))
            else:
                groups.append([view])
                end = (key, stop)

        def deferred(group: list[_View]) -> bool:
            return all(view.extent in self._updated for view in group)

        groups.sort(key=lambda group: (not deferred(group), min(view.number for view in group)))
        blocks = []
        for number, group in enumerate(groups):
            first, block = _block_over(group)
            blocks.append(block)
            for view in group:
                view.node[1] = number
                view.node[2] = view.extent[1] - first
        count = sum(deferred(group) for group in groups)
        weights = frozenset(
            number
            for number, group in enumerate(groups)
            if number >= count
            and all(view.extent in self._parameters and not view.tensor.is_inference() for view in group)
        )
        watched = {
            number: tuple(
                (view.path, view.tensor, view.tensor._version) for view in group if not view.tensor.is_inference()
            )
            for number, group in enumerate(groups)
            if number < count or number in weights
        }
        names = tuple(min(group, key=lambda view: view.number).path for group in groups)
        layout = Layout(tree, tuple(block.numel() for block in blocks), count, self._version)
        return FlatState(layout, tuple(blocks), names, watched, weights, tuple(self._sharded))

    def node(self, value: Any, path: str) -> Node:
        encode = _PLAIN.get(type(value))
        if encode is not None:
            if encode is _text and not value.isascii() and _PAIR.search(value):
                raise StateError(
                    f"{path}: a text in it holds both halves of a surrogate pair as two characters, which would come "
                    "back as one; text.encode('utf-16', 'surrogatepass').decode('utf-16') makes one of them"
                )
            return encode(value)
        if isinstance(value, torch.Tensor):
            if self._spread and is_sharded(value):
                self._version = RANKS_VERSION
                self._sharded.append(value)
                return ["H", self._tensor(local_part(value), path), *describe_shard(value, path).node()]
            return self._tensor(value, path)
        if isinstance(value, np.ndarray):
            return self._array(value, path)
        if isinstance(value, np.generic):
            return ["N", describe_numpy(value.dtype, path), value.tobytes().hex()]
        if isinstance(value, torch.dtype):
            return ["D", str(value).removeprefix("torch.")]
        if isinstance(value, torch.device):
            return ["V", str(value)]
        if type(value) is torch.Size:
            return ["S", list(value)]
        if id(value) in self._open:
            raise StateError(f"{path}: a container holds itself; break the cycle before saving")
        if len(self._open) == MAX_DEPTH:
            raise StateError(f"{path}: containers lie more than {MAX_DEPTH} deep in each other; flatten them")
        self._open.add(id(value))
        try:
            return self._container(value, path)
        finally:
            self._open.discard(id(value))

    def _container(self, value: Any, path: str) -> Node:
        kind = type(value)
        if kind in _SEQUENCE_TAGS:
            return [_SEQUENCE_TAGS[kind], [self.node(item, f"{path}[{i}]") for i, item in enumerate(value)]]
        if kind in (set, frozenset):
            for item in value:
                if not _is_set_item(item):
                    raise StateError(f"{path}: an item of type {type(item).__name__} in a set cannot be stored")
            items = sorted((self.node(item, f"{path}{{}}") for item in value), key=repr)
            return ["e" if kind is set else "E", items]
        if kind in _MAPPING_TAGS:
            return self.mapping(value, path)
        if is_stateful(value):
            try:
                inner = state_of(value, path)
            except StateError:
                raise
            except Exception as error:  # of the user's own; whatever it raises, this state cannot be stored
                raise StateError(
                    f"{path}: state_dict() of {kind.__module__}.{kind.__qualname__} failed: "
                    f"{type(error).__name__}: {error}"
                ) from error
            if isinstance(value, torch.nn.Module):
                # Of a lazy module's parameters not even the size is known; they are refused by name below.
                known = (one for one in value.parameters() if not torch.nn.parameter.is_lazy(one))
                self._parameters.update(_extent(local_part(one)) for one in known)
            return ["m", self.node(inner, path)]
        raise StateError(
            f"{path}: cannot store a {kind.__module__}.{kind.__qualname__} to the bit; give it state_dict and "
            "load_state_dict, or keep it out of the state"
        )

    def mapping(self, value: Mapping[Any, Any], path: str) -> Node:
        pairs = []
        for key, item in value.items():
            if not _is_plain_key(key):
                raise StateError(f"{path}: a key of type {type(key).__name__} ({key!r}) cannot be stored")
            pairs.append([self.node(key, path), self.node(item, f"{path}.{key}")])
        return [_MAPPING_TAGS[type(value)], pairs]

    def _tensor(self, tensor: torch.Tensor, path: str) -> Node:
        if is_sharded(tensor):
            raise StateError(f"{path}: this system cannot keep a tensor that is spread over ranks; PCcheck can")
        if torch.nn.parameter.is_lazy(tensor):
            raise StateError(f"{path}: the tensor has no shape yet (a lazy module); run one forward pass first")
        tensor = tensor.detach()
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise StateError(
                f"{path}: tensors of class {type(tensor).__name__} are not supported; store a plain tensor"
            )
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type not in ("cpu", "cuda"):
            raise StateError(
                f"{path}: a tensor with layout {tensor.layout}, dtype {tensor.dtype}, on {tensor.device} has no plain "
                "bytes; store its dense parts"
            )
        if tensor.dim() > MAX_DIMENSIONS:
            raise StateError(
                f"{path}: a tensor of {tensor.dim()} dimensions; torch copies none beyond {MAX_DIMENSIONS}"
            )
        tensor = tensor.resolve_conj().resolve_neg()
        node: Node = ["T", -1, 0, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), list(tensor.stride())]
        if tensor.numel():
            self._see(tensor, path, node)
        return node

    def _array(self, array: np.ndarray, path: str) -> Node:
        if type(array) is not np.ndarray:
            raise StateError(
                f"{path}: arrays of class {type(array).__module__}.{type(array).__qualname__} cannot be stored; store "
                "a plain numpy array"
            )
        node: Node = ["A", -1, 0, describe_numpy(array.dtype, path), list(array.shape)]
        if array.nbytes:
            self._see(torch.frombuffer(bytearray(array.tobytes(order="C")), dtype=torch.uint8), path, node)
        return node

    def _see(self, tensor: torch.Tensor, path: str, node: Node) -> None:
        extent = _extent(tensor)
        key = (extent[0], tensor.untyped_storage().data_ptr())
        self._views.append(_View(tensor, extent, path, node, key, len(self._views)))


def _block_over(group: Sequence[_View]) -> tuple[int, torch.Tensor]:
    """The first address of a block over all views of one storage, and a uint8 view of its bytes.

    The block starts at a multiple of 16 bytes of its storage, so that a view of any dtype lies aligned in it.
    """
    # Two storage objects can begin at one address (torch.from_numpy called twice); the larger one holds every view.
    storage = group[0].tensor.untyped_storage()
    if len(group) > 1:
        storage = max((view.tensor.untyped_storage() for view in group), key=lambda item: item.nbytes())
    begin = group[0].key[1]
    start = min(view.extent[1] for view in group) - begin
    start -= start % 16
    stop = max(view.extent[2] for view in group) - begin
    block = torch.empty(0, dtype=torch.uint8, device=group[0].tensor.device)
    block.set_(storage, start, (stop - start,), (1,))
    return begin + start, block


def _float_bits(value: float) -> str:
    return struct.pack(">d", value).hex()


_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
"""What every reader of JSON takes for one character. Halves alone are texts of Python's, and come back."""


def _text(value: str) -> Node:
    return ["s", value]


_PLAIN: dict[type, Callable[[Any], Node]] = {
    type(None): lambda _: ["n"],
    bool: lambda value: ["b", value],
    int: lambda value: ["i", value],
    float: lambda value: ["f", _float_bits(value)],
    complex: lambda value: ["c", _float_bits(value.real), _float_bits(value.imag)],
    str: _text,
    bytes: lambda value: ["y", value.hex()],
    bytearray: lambda value: ["Y", value.hex()],
}
_SEQUENCE_TAGS: dict[type, str] = {list: "l", tuple: "t"}
_MAPPING_TAGS: dict[type, str] = {dict: "d", OrderedDict: "o", Counter: "C"}


def _is_set_item(item: Any) -> bool:
    """A set keeps values, not objects: what comes back must be equal to what went in."""
    if type(item) in (tuple, frozenset):
        return all(_is_set_item(one) for one in item)
    of_torch = (torch.dtype, torch.device, torch.Size)
    return _is_plain_key(item) or type(item) is complex or isinstance(item, (np.generic, *of_torch))


def _is_plain_key(key: Any) -> bool:
    if type(key) is tuple:
        return all(_is_plain_key(item) for item in key)
    return type(key) in (type(None), bool, int, float, str, bytes)
