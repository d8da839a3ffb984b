"""Text that came from outside (a file, a connection, a command line), read strictly: bounded, finite, or refused.

The usual readers of JSON and YAML take Infinity and 1e999, numbers of any length, keys given twice, lone surrogates
that no file can be written with, and nesting that ends in a RecursionError; YAML's makes dates of plain text as well,
and many megabytes of one line of aliases. Every number that is taken must still be compared with its own range by
whoever uses it: 10^30 is a number.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lastgood.errors import ConfigError, CorruptCheckpoint, LastgoodError

if TYPE_CHECKING:
    from pydantic import BaseModel

    _Model = TypeVar("_Model", bound=BaseModel)

__all__ = [
    "is_whole",
    "parse_csv",
    "parse_json",
    "parse_model",
    "parse_number",
    "parse_yaml",
    "read_bytes",
    "read_model",
]

_MAX_DEPTH = 64
_MAX_DIGITS = 40
"""Enough for 128 bits; what takes a number must still check its range."""
_SHOWN = 80
"""Characters of a text that an error shows."""
_MOST_NUMBER = 1 << 64
"""Of a model: nothing that is counted or measured here comes near it, and it fits into a float."""


def read_bytes(path: Path, most_bytes: int, error: type[LastgoodError] = ConfigError) -> bytes:
    """The content of a file that a user names, which may be a link or a pipe.

    Raises `error`, naming the file, if it cannot be read or is larger than `most_bytes`.
    """
    try:
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
    except (OSError, ValueError) as refused:  # ValueError: a NUL byte in the name
        raise error(f"{path}: cannot be read: {getattr(refused, 'strerror', None) or refused}") from refused
    if len(content) > most_bytes:
        raise error(f"{path}: longer than {most_bytes} bytes, the most that such a file may have")
    return content


# -- JSON --------------------------------------------------------------------------------------------------------------

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_DIGITS = re.compile(rb"[0-9]+")
_TO_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(sorted(set(range(256)) - set(b"[]{}")))


def parse_json(
    text: bytes | bytearray | str,
    what: str,
    *,
    most_bytes: int,
    most_depth: int = _MAX_DEPTH,
    most_digits: int = _MAX_DIGITS,
    half_pairs: bool = False,
    error: type[LastgoodError] = CorruptCheckpoint,
) -> Any:
    """The value of one JSON document in UTF-8.

    Raises `error`, whose message begins with `what`, if it is no JSON, longer than `most_bytes`, nested deeper than
    `most_depth`, gives a key of an object twice, or holds a number that is not finite or has more than `most_digits`
    digits, or text that UTF-8 cannot hold (unless `half_pairs`: what Python's text may hold is taken).
    """
    try:
        content = text.encode() if isinstance(text, str) else text
        if len(content) > most_bytes:
            raise ValueError(f"{len(content)} bytes, over the limit of {most_bytes}")
        decoded = text if isinstance(text, str) else content.decode()
        plain = _outside_strings(content)
        _check_depth(plain, most_depth)
        if re.search(rb"[0-9]{%d}" % (most_digits + 1), plain):
            longest = max(map(len, _DIGITS.findall(plain)))
            raise ValueError(f"a number of {longest} digits, over the limit of {most_digits}")
        value = json.loads(decoded, object_pairs_hook=_object, parse_float=_finite, parse_constant=_not_finite)
        if not half_pairs and _SURROGATE.search(content):
            # Half of a pair can be in no file and no terminal: encoding it raises a ValueError.
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError) as refused:
        raise error(f"{what}: cannot be read as JSON: {_told(refused)}") from refused


def parse_model(
    model: type[_Model],
    text: bytes | bytearray | str,
    what: str,
    *,
    most_bytes: int,
    advice: str = "",
    error: type[LastgoodError] = ConfigError,
) -> _Model:
    """A pydantic model from one JSON document that `parse_json` takes, with no number beyond 2^64.

    Raises `error`: `what`, each wrong key with what is wrong there, and `advice`.
    """
    ending = f"; {advice}" if advice else ""
    try:
        _check_numbers(parse_json(text, what, most_bytes=most_bytes, error=error))
    except LastgoodError as refused:
        raise error(f"{refused}{ending}") from refused.__cause__
    except ValueError as refused:
        raise error(f"{what}: {refused}{ending}") from refused
    try:
        # Not from the parsed value: only from JSON a strict model takes a list for a tuple.
        return model.model_validate_json(text)
    except ValueError as refused:  # a ValidationError is one
        raise error(f"{what}: {_wrong_keys(refused)}{ending}") from refused


def read_model(
    model: type[_Model],
    path: Path,
    what: str,
    *,
    most_bytes: int,
    advice: str = "",
    error: type[LastgoodError] = ConfigError,
) -> _Model:
    """`parse_model` of a file; `what` says what it should be, in ``PATH: not WHAT``."""
    ending = f"; {advice}" if advice else ""
    try:
        content = read_bytes(path, most_bytes, error)
    except LastgoodError as refused:
        raise error(f"{refused}{ending}") from refused.__cause__
    return parse_model(model, content, f"{path}: not {what}", most_bytes=most_bytes, advice=advice, error=error)


def _check_numbers(value: Any) -> None:
    if isinstance(value, (int, float)):
        if not -_MOST_NUMBER <= value <= _MOST_NUMBER:
            raise ValueError(f"the number {str(value)[:_SHOWN]} is out of all bounds")
    elif isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            _check_numbers(inner)


def _outside_strings(content: bytes | bytearray) -> bytes:
    """A JSON document without what its strings hold. Meaningless for what is none."""
    if b"\\" in content:
        content = content.replace(b"\\\\", b"").replace(b'\\"', b"")
    return b'"'.join(content.split(b'"')[::2])


def _check_depth(plain: bytes, most: int) -> None:
    brackets = plain.translate(_TO_BRACKETS, _NO_BRACKETS)
    # Each round takes the innermost pairs away: as many rounds as there are levels.
    for _ in range(most):
        if not brackets:
            return
        left = brackets.replace(b"[]", b"")
        if len(left) == len(brackets) <= most:
            return  # they do not match, so it is no JSON
        brackets = left
    if brackets:
        raise ValueError(f"nested deeper than {most} levels")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice[:_SHOWN]!r} is given twice")
    return found


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"the number {digits[:_SHOWN]} is not finite")
    return number


def _not_finite(name: str) -> float:
    raise ValueError(f"the number {name} is not finite")


def _told(refused: Exception) -> str:
    return "nested too deeply" if isinstance(refused, RecursionError) else str(refused)


def _wrong_keys(refused: ValueError) -> str:
    errors = getattr(refused, "errors", None)
    if errors is None:
        return _told(refused)
    details = errors(include_url=False, include_context=False)
    shown = [f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}".removeprefix(": ") for detail in details[:8]]
    return "; ".join(shown) + (f"; and {len(details) - len(shown)} more" if len(details) > len(shown) else "")


# -- YAML --------------------------------------------------------------------------------------------------------------

_YAML_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_YAML_FLOAT = re.compile(r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+][0-9]+)?")
_YAML_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_YAML_NULL = frozenset(("", "~", "null", "Null", "NULL"))
_YAML_BOOL = {
    spelt: value
    for value, words in ((True, ("yes", "true", "on")), (False, ("no", "false", "off")))
    for word in words
    for spelt in (word, word.capitalize(), word.upper())
}


class _Refused(ValueError):
    """What this reader of YAML does not take, and the line where it stands, from 1."""

    def __init__(self, line: int, text: str) -> None:
        super().__init__(text)
        self.line = line


def parse_yaml(text: bytes | str, what: str, *, most_bytes: int) -> Any:
    """The value of one YAML document in UTF-8: mappings with keys of text, lists, text, numbers, booleans, null.

    What would surprise stays text: dates, 0x10, 1_10, 1:30. Raises ConfigError, whose message begins with `what` and
    the line, for what is no YAML, for anchors, aliases, merge keys and tags, for a key given twice, for a second
    document, and beyond the limits of `parse_json`.
    """
    import yaml

    try:
        if isinstance(text, bytes):
            text = text.decode()
        if len(text) > most_bytes or len(text.encode()) > most_bytes:
            raise ValueError(f"over the limit of {most_bytes} bytes")
        # The parser in C, where PyYAML has it: a megabyte takes the other one half a minute.
        events = yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        return _YamlReader(events).document()
    except _Refused as refused:
        raise ConfigError(f"{what}, line {refused.line}: {refused}") from refused
    except yaml.YAMLError as refused:
        mark = getattr(refused, "problem_mark", None)
        where = what if mark is None else f"{what}, line {mark.line + 1}"
        told = " ".join(filter(None, (getattr(refused, "context", None), getattr(refused, "problem", None))))
        raise ConfigError(f"{where}: not valid YAML: {told or refused}") from refused
    except (ValueError, RecursionError) as refused:
        raise ConfigError(f"{what}: not valid YAML: {_told(refused)}") from refused


class _YamlReader:
    """Makes a value of PyYAML's events, which know nothing of types."""

    def __init__(self, events: Iterator[Any]) -> None:
        self._events = events

    def document(self) -> Any:
        """The one document; None if there is none."""
        value, begun = None, False
        for event in self._events:
            if type(event).__name__ == "DocumentStartEvent":
                if begun:
                    raise _Refused(_line(event), "a second document begins; one is allowed")
                value, begun = self._node(next(self._events), 1), True
        return value

    def _node(self, event: Any, depth: int) -> Any:
        name = type(event).__name__
        if name == "AliasEvent" or event.anchor is not None:
            raise _Refused(_line(event), "anchors (&) and aliases (*) are not taken; write the value out")
        if event.tag is not None and not (name == "ScalarEvent" and event.tag == "!" and event.style):
            raise _Refused(_line(event), f"the tag {str(event.tag)[:_SHOWN]!r}: tags are not taken; leave it out")
        if name == "ScalarEvent":
            return self._scalar(event)
        if depth > _MAX_DEPTH:
            raise _Refused(_line(event), f"nested deeper than {_MAX_DEPTH} levels")
        if name == "SequenceStartEvent":
            values = []
            while type(following := next(self._events)).__name__ != "SequenceEndEvent":
                values.append(self._node(following, depth + 1))
            return values
        return self._mapping(depth)

    def _mapping(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while type(event := next(self._events)).__name__ != "MappingEndEvent":
            if type(event).__name__ != "ScalarEvent":
                raise _Refused(_line(event), "a key that is not text")
            key = self._node(event, depth)
            if not isinstance(key, str):
                raise _Refused(_line(event), f"the key {event.value[:_SHOWN]!r} is not text; put it in quotes")
            if key == "<<" and not event.style:
                raise _Refused(_line(event), "merge keys (<<) are not taken; write the keys out")
            if key in found:
                raise _Refused(_line(event), f"key {key[:_SHOWN]!r} is given twice")
            found[key] = self._node(next(self._events), depth + 1)
        return found

    def _scalar(self, event: Any) -> Any:
        text: str = event.value
        text.encode()  # an escape may be half of a pair
        if event.style:  # quoted, or a block
            return text
        if text in _YAML_NULL:
            return None
        if text in _YAML_BOOL:
            return _YAML_BOOL[text]
        number = _YAML_INT.fullmatch(text) or _YAML_FLOAT.fullmatch(text)
        if number and sum(map(str.isdigit, text)) > _MAX_DIGITS:
            raise _Refused(_line(event), f"a number of more than {_MAX_DIGITS} digits")
        if _YAML_INT.fullmatch(text):
            return int(text)
        if number or _YAML_NOT_FINITE.fullmatch(text):
            value = float(text) if number else math.inf
            if not math.isfinite(value):
                raise _Refused(_line(event), f"the number {text[:_SHOWN]} is not finite")
            return value
        return text


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1


# -- CSV, and single numbers -------------------------------------------------------------------------------------------

_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,4})?")


def parse_csv(
    content: bytes,
    what: str,
    columns: Sequence[str],
    *,
    most_bytes: int,
    most_rows: int,
    error: type[LastgoodError] = ConfigError,
) -> list[tuple[int, dict[str, str]]]:
    """The rows of a CSV in UTF-8 whose first line names the columns; each with the line at which it ends, from 1.

    Raises `error`, naming `what` and the line, if one of `columns` is missing, a column is there twice, a row has more
    or fewer fields than the first line, or the file is over a limit.
    """
    try:
        if len(content) > most_bytes:
            raise ValueError(f"{len(content)} bytes, over the limit of {most_bytes}")
        reader = csv.reader(io.StringIO(content.decode(), newline=""), strict=True)
        header = next(reader, [])
        lacking = [name for name in columns if name not in header]
        if lacking or len(set(header)) < len(header):
            found = f"columns are missing: {', '.join(lacking)}" if lacking else "a column is named twice"
            raise ValueError(found)
        rows: list[tuple[int, dict[str, str]]] = []
        for fields in reader:
            if not fields:
                continue  # an empty line
            if len(fields) != len(header) or len(rows) == most_rows:
                limit = "" if len(fields) != len(header) else f"; {most_rows} rows are the most"
                raise error(f"{what}:{reader.line_num}: {len(fields)} fields under {len(header)} columns{limit}")
            rows.append((reader.line_num, dict(zip(header, fields, strict=True))))
        return rows
    except (ValueError, csv.Error) as refused:
        raise error(f"{what}: not such a CSV file: {refused}") from refused


def parse_number(text: str, *, least: float, most: float) -> float:
    """A decimal number from `least` to `most`. Raises ValueError for anything else, infinity and 1_0 included."""
    if len(text) > _SHOWN or not _NUMBER.fullmatch(text) or not least <= (number := float(text)) <= most:
        raise ValueError(f"{text[:_SHOWN]!r} is no number from {least:g} to {most:g}")
    return number


def is_whole(value: object, least: int, most: int) -> bool:
    """Whether a value of JSON or YAML is a whole number (and not true or false) from `least` to `most`."""
    return type(value) is int and least <= value <= most
