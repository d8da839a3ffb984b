"""The objects in DeepSpeed's states as plain data, and back: no pickle, and no class that is not listed here.

An object becomes ``{"lastgood.object": name, ...}``, where `name` is one of `_PLAIN_OBJECTS` or `_ENUMS`. Everything
else in a state is what `lastgood.state.flatten` knows.
"""

from __future__ import annotations

import enum
import importlib
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

from lastgood._lazy import torch
from lastgood.errors import CorruptCheckpoint, MismatchError, StateError
from lastgood.pickles import Record
from lastgood.state import is_stateful

__all__ = ["build_records", "decode_objects", "encode_objects", "listed_classes"]

_KEY = "lastgood.object"
_MODULE_STATE = "torch.nn.Module.state_dict"
"""An OrderedDict that carries the versions of the modules (`_metadata`)."""
_PLAIN_OBJECTS = {
    "argparse.Namespace": "argparse",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": "deepspeed.runtime.fp16.loss_scaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": "deepspeed.runtime.fp16.loss_scaler",
    "deepspeed.utils.tensor_fragment.fragment_address": "deepspeed.utils.tensor_fragment",
}
"""Classes whose instances are their attributes and nothing else, and where they live."""
_ENUMS = {"deepspeed.runtime.zero.config.ZeroStageEnum": "deepspeed.runtime.zero.config"}


def encode_objects(value: Any, path: str) -> Any:
    """`value` with plain data in place of every listed object; tensors stay live.

    `path` names the place in errors. Raises StateError for an object that is not listed.
    """
    return _Encoder().encode(value, path)


class _Encoder:
    def __init__(self) -> None:
        self._open: set[int] = set()

    def encode(self, value: Any, path: str) -> Any:
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if isinstance(value, torch.Tensor):
            return value
        if name in _ENUMS and isinstance(value, enum.Enum):
            return {_KEY: name, "value": value.value}
        if name not in _PLAIN_OBJECTS and kind not in (dict, OrderedDict, list, tuple):
            if is_stateful(value):
                raise StateError(
                    f"{path}: a live {name} would come back as a dict; give its state_dict() instead, and load that"
                )
            return value  # flatten takes it, or refuses it by its path
        if id(value) in self._open:
            raise StateError(f"{path}: a container holds itself; break the cycle before saving")
        self._open.add(id(value))
        try:
            return self._container(value, name, path)
        finally:
            self._open.discard(id(value))

    def _container(self, value: Any, name: str, path: str) -> Any:
        if name in _PLAIN_OBJECTS:
            return {_KEY: name, "attributes": self._mapping(dict(vars(value)), path)}
        if isinstance(value, (list, tuple)):
            return type(value)(self.encode(item, f"{path}[{number}]") for number, item in enumerate(value))
        if _KEY in value:
            raise StateError(f"{path}: the key {_KEY!r} is kept for Lastgood; name it otherwise")
        versions = getattr(value, "_metadata", None)
        if versions is not None:
            encoded = self.encode(versions, f"{path}._metadata")
            return {_KEY: _MODULE_STATE, "items": self._mapping(value, path), "metadata": encoded}
        return self._mapping(value, path)

    def _mapping(self, value: Mapping[Any, Any], path: str) -> Any:
        pairs = ((key, self.encode(item, f"{path}.{key}")) for key, item in value.items())
        return OrderedDict(pairs) if isinstance(value, OrderedDict) else dict(pairs)


def decode_objects(value: Any, where: str) -> Any:
    """What `encode_objects` was given. `where` names the file in errors.

    Raises MismatchError for a class that is not listed, or that the installed DeepSpeed lacks, and CorruptCheckpoint
    for what no object can be.
    """
    if type(value) in (list, tuple):
        return type(value)(decode_objects(item, where) for item in value)
    if type(value) not in (dict, OrderedDict):
        return value
    if _KEY not in value:
        return type(value)((key, decode_objects(item, where)) for key, item in value.items())
    try:
        return _object(value, where)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptCheckpoint(f"{where}: {value[_KEY]!r} cannot be built: {error!r}") from error


def _object(value: Mapping[str, Any], where: str) -> Any:
    name = value[_KEY]
    if name == _MODULE_STATE:
        items = OrderedDict(decode_objects(value["items"], where))
        items._metadata = decode_objects(value["metadata"], where)  # type: ignore[attr-defined]
        return items
    if name in _ENUMS:
        return _class_named(name, _ENUMS[name], where)(value["value"])
    if name not in _PLAIN_OBJECTS:
        raise MismatchError(f"{where}: holds a {name!r}, which this Lastgood does not know; a newer one wrote it")
    return _plain_object(name, decode_objects(value["attributes"], where), where)


def _plain_object(name: str, attributes: Mapping[str, Any], where: str) -> Any:
    kind = _class_named(name, _PLAIN_OBJECTS[name], where)
    for attribute in attributes:
        if type(attribute) is not str or callable(getattr(kind, attribute, None)):
            raise ValueError(f"{attribute!r} is no attribute of its data")
    built = kind.__new__(kind)
    vars(built).update(attributes)
    return built


def _class_named(name: str, module: str, where: str) -> Any:
    """A listed class. Only ever called with names of the two tables."""
    try:
        return getattr(importlib.import_module(module), name.rpartition(".")[2])
    except (ImportError, AttributeError) as error:
        raise MismatchError(
            f"{where}: holds a {name}, which is not in what is installed here ({error}); install the DeepSpeed that "
            "wrote it"
        ) from error


def listed_classes() -> tuple[tuple[str, str], ...]:
    """Module and name of every listed class, as pickles name them."""
    names = (name.rpartition(".") for name in (*_PLAIN_OBJECTS, *_ENUMS))
    return tuple((module, name) for module, _, name in names)


def build_records(value: Any, where: str) -> Any:
    """`value`, from a file of torch.save, with objects of listed classes in place of their records.

    `where` names the file. Raises MismatchError for a class that is not installed, CorruptCheckpoint for a record that
    none of its objects can be.
    """
    return _Records(where).built(value)


class _Records:
    def __init__(self, where: str) -> None:
        self._where = where
        self._known: dict[int, Any] = {}

    def built(self, value: Any) -> Any:
        kind = type(value)
        if kind is Record:
            if id(value) not in self._known:  # an object that is there twice is one object
                self._known[id(value)] = self._object(value)
            return self._known[id(value)]
        if kind in (dict, OrderedDict, Counter):
            for key in value:
                value[key] = self.built(value[key])
        elif kind is list:
            value[:] = [self.built(item) for item in value]
        elif kind is tuple:
            return tuple(self.built(item) for item in value)
        return value

    def _object(self, record: Record) -> Any:
        try:
            if record.name in _ENUMS:
                (number,) = record.arguments
                return _class_named(record.name, _ENUMS[record.name], self._where)(number)
            if record.arguments or type(record.state) is not dict:
                raise ValueError("its state is no dict of attributes")
            return _plain_object(record.name, self.built(record.state), self._where)
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptCheckpoint(f"{self._where}: {record.name!r} cannot be built: {error!r}") from error
