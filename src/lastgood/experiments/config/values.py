"""Values of a configuration: how each is read from YAML or the command line, and what is refused. Needs no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field

from lastgood.checkpointers.registry import BASELINE, checkpointer_names
from lastgood.cluster.testbed.state import parse_rate
from lastgood.errors import ConfigError
from lastgood.names import nearest
from lastgood.workloads.registry import workload_names

__all__ = [
    "BASELINE",
    "Count",
    "CountOrZero",
    "FolderPath",
    "Interval",
    "Label",
    "Listed",
    "ModelName",
    "Rate",
    "SystemName",
    "Systems",
    "UserPath",
]


def _plain_integer(value: Any) -> Any:
    """Accept 10 and "10"; refuse "1_10", which Python would read as 110, as well as booleans and fractions."""
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError("not a whole number")
    if isinstance(value, str):
        if not re.fullmatch(r"\s*[+-]?[0-9]+\s*", value):
            raise ValueError("not a whole number, written with digits only")
        return int(value)
    return value


def _split(value: Any) -> Any:
    """Take a list, or a text with commas as ``--config`` gives it; texts inside a list are split as well."""
    items = [value] if isinstance(value, str | int | float) else value
    if not isinstance(items, list | tuple):
        return value
    parts: list[Any] = []
    for item in items:
        parts += [part.strip() for part in item.split(",")] if isinstance(item, str) else [item]
    return parts


def _distinct(values: list[Any]) -> list[Any]:
    twice = sorted({str(value) for value in values if values.count(value) > 1})
    if twice:
        raise ValueError(f"listed more than once: {', '.join(twice)}")
    return values


def _known(what: str, name: str, names: Iterable[str]) -> str:
    known = list(names)
    if name not in known:
        raise ValueError(f"unknown {what} {name!r}{nearest(name, known)}; known: {', '.join(known)}")
    return name


def _positive_interval(value: int) -> int:
    if value == 0:
        raise ValueError(f"interval 0 is the run without checkpoints, which the system {BASELINE} makes by itself")
    if value < 0:
        raise ValueError("below 1")
    if value > _MOST:
        raise ValueError(f"more than {_MOST} steps")
    return value


def _with_baseline(systems: list[str]) -> list[str]:
    """`systems`, with the baseline before them if they lack it."""
    return systems if BASELINE in systems else [BASELINE, *systems]


def _existing_path(value: str) -> str:
    path = Path(_expanded(value)).absolute()
    if not os.access(path, os.F_OK):  # Path.exists raises for what is too long to be one
        raise ValueError("there is no such file or folder")
    return str(path)


def _expanded(value: str) -> str:
    if "\0" in value:
        raise ValueError("a path holds no NUL")
    try:
        return str(Path(value).expanduser())
    except RuntimeError as error:  # a user whom nobody knows
        raise ValueError(str(error)) from error


_MOST = 10**12
"""More than anything here is counted to, and a number of 64 bits."""
_Integer = BeforeValidator(_plain_integer)
Count = Annotated[int, _Integer, Field(ge=1, le=_MOST)]
CountOrZero = Annotated[int, _Integer, Field(ge=0, le=_MOST)]
Interval = Annotated[int, _Integer, AfterValidator(_positive_interval)]
ModelName = Annotated[str, AfterValidator(lambda name: _known("model", name, workload_names()))]
SystemName = Annotated[str, AfterValidator(lambda name: _known("system", name, checkpointer_names()))]
UserPath = Annotated[str, Field(min_length=1), AfterValidator(_existing_path)]
FolderPath = Annotated[str, Field(min_length=1), AfterValidator(_expanded)]
Label = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
_Item = TypeVar("_Item")
Listed = Annotated[list[_Item], BeforeValidator(_split), AfterValidator(_distinct), Field(min_length=1)]
"""A list of at least one, none twice; or a text with commas."""
Systems = Annotated[Listed[SystemName], AfterValidator(_with_baseline)]


def _rate(text: str) -> str:
    try:
        parse_rate(text)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return text


Rate = Annotated[str, AfterValidator(_rate)]
"""Of a link, as tc writes it: 100mbit."""
