"""What is wrong in a configuration, said with the file or the command line that each value came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from lastgood.names import nearest

__all__ = ["Sources", "show_errors"]


class Sources:
    """Which source a value came from, for messages."""

    def __init__(self, files: Sequence[tuple[Path, Mapping[str, Any]]], overrides: Mapping[str, Any]) -> None:
        """`files` as `load_files` returns them: the last one is the file that the user named."""
        self._files = files
        self._overrides = overrides

    def overridden(self, location: tuple[str | int, ...]) -> bool:
        """Whether the value at `location` was given on the command line."""
        given = _look_up(self._overrides, location)
        # A section that both sources have is merged, and its faults lie in its entries.
        merged = isinstance(given, Mapping) and any(
            isinstance(_look_up(values, location), Mapping) for _, values in self._files
        )
        return given is not _ABSENT and not merged

    def problem(self, location: tuple[str | int, ...], text: str) -> str:
        """One line of a message: source, key and what is wrong."""
        source = "--config" if self.overridden(location) else str(self._file_of(location))
        return f"{source}: {_dotted(location)}: {text}"

    def _file_of(self, location: tuple[str | int, ...]) -> Path:
        """The last file that gives `location`; the user's own if none does."""
        holding = [path for path, values in self._files if _look_up(values, location) is not _ABSENT]
        return holding[-1] if holding else self._files[-1][0]


_ABSENT = object()


def _look_up(values: Any, location: tuple[str | int, ...]) -> Any:
    """The value at `location`; or what is no mapping on the way there."""
    for key in location:
        if not isinstance(values, Mapping):
            break
        if key not in values:
            return _ABSENT
        values = values[key]
    return values


def _dotted(location: tuple[str | int, ...]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def show_errors(
    error: ValidationError, model: type[BaseModel], sources: Sources, prefix: tuple[str | int, ...] = ()
) -> list[str]:
    """One line for each thing that pydantic refused: source, key, value, and what is allowed."""
    lines: dict[str, None] = {}
    for detail in error.errors(include_url=False, include_context=False):
        inner = tuple(part for part in detail["loc"] if part != "[key]")
        location = (*prefix, *inner)
        owner, field = _find_field(model, inner)
        known = list(owner.model_fields)
        if detail["type"] == "extra_forbidden":
            name = str(inner[-1])
            text = f"unknown key{nearest(name, known)}; known: {', '.join(known) or 'no keys at all'}"
        elif detail["type"] == "missing":
            text = f"is missing; allowed: {_allowed(field)}"
        else:
            message = detail["msg"].removeprefix("Value error, ")
            text = f"{detail['input']!r}: {message[:1].lower()}{message[1:]}"
            if "known: " not in message:
                text += f"; allowed: {_allowed(field)}"
        lines[sources.problem(location, text)] = None
    return list(lines)


def _find_field(model: type[BaseModel], location: tuple[str | int, ...]) -> tuple[type[BaseModel], FieldInfo | None]:
    """The model that holds the last named key of `location`, and that key's field if it has one."""
    owner = model
    field: FieldInfo | None = None
    for key in location:
        found = owner.model_fields.get(str(key))
        if found is None:
            return owner, None
        field = found
        inner = field.annotation
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            break
        if key != location[-1]:
            owner = inner
    return owner, field


def _allowed(field: FieldInfo | None) -> str:
    if field is None:
        return "see docs/workflow.md"
    if field.description:
        return field.description
    kind = field.annotation.__name__ if isinstance(field.annotation, type) else str(field.annotation)
    words = (("ge", "at least"), ("gt", "more than"), ("le", "at most"), ("lt", "less than"))
    bounds = [f"{word} {getattr(rule, name)}" for rule in field.metadata for name, word in words if hasattr(rule, name)]
    return ", ".join([_KINDS.get(kind, kind.replace("typing.", "")), *bounds])


_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}
