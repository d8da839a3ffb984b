"""A configuration's text: a file, the files that it names as its base, and overrides from the command line.

A configuration is one file (config/laptop.yaml is the default), what it changes in the file that it names as its `base`
(config/default.yaml has all defaults), and overrides (``--config models=vgg16 intervals=1,10``), which win.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lastgood.errors import ConfigError
from lastgood.experiments.config.schema import SECTIONS
from lastgood.text import parse_yaml, read_bytes

__all__ = ["load_files", "load_yaml", "merged", "parse_overrides", "with_current_keys"]

_MOST_BYTES = 1 << 20
_MOST_FILES = 8
"""A file, its base, the base of that, and so on."""
_EARLIER_KEYS = {"knobs": "options"}
"""Configurations of users may still have them."""


def load_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds one mapping. Raises ConfigError, naming the file and the line."""
    found = parse_yaml(read_bytes(path, _MOST_BYTES), str(path), most_bytes=_MOST_BYTES)
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: holds {type(found).__name__} where a mapping of keys to values is needed")
    return found


def load_files(configfile: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Read `configfile` and the files below it; each names the next as its `base`, relative to its own folder.

    Returns each file's path and values, without `base` and under today's keys; the lowest comes first, and each changes
    what those before it say. Raises ConfigError, naming the file, if one cannot be read, names itself through others,
    has a key under two names, or there are too many.
    """
    files: list[tuple[Path, dict[str, Any]]] = []
    path, named_by = configfile, ""
    while True:
        try:
            values = load_yaml(path)
        except ConfigError as error:
            raise ConfigError(f"{named_by}{error}") from error.__cause__
        if any(path.samefile(earlier) for earlier, _ in files):
            raise ConfigError(f"{named_by}{path} is this file, or has this file as its own base")
        has_base = "base" in values
        base = values.pop("base", None)
        files.insert(0, (path, with_current_keys(values, str(path))))
        if not has_base:
            return files
        if not isinstance(base, str) or not base or "\0" in base:
            raise ConfigError(f"{path}: base: {base!r} is not the name of a file")
        named_by = f"{path}: base: "
        path = path.parent / base
        if len(files) == _MOST_FILES:
            raise ConfigError(f"{named_by}{base}: more than {_MOST_FILES} files, each the base of another")


def parse_overrides(entries: Iterable[str]) -> dict[str, Any]:
    """Turn ``["models=vgg16", "intervals=1,10"]`` into a mapping; values are YAML.

    Raises ConfigError for an entry without ``=``, a key that is no top-level name, or a key that is given twice.
    """
    found: dict[str, Any] = {}
    for entry in entries:
        key, equals, text = entry.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", key):
            section, _, rest = key.partition(".")
            hint = f"; for a key inside a section write {section}='{{{rest}: VALUE}}'" if section in SECTIONS else ""
            raise ConfigError(f"--config: {entry!r} is not KEY=VALUE with a top-level key{hint}")
        if key in found:
            raise ConfigError(f"--config: {key} is given twice; put several values into one: {key}=A,B")
        found[key] = parse_yaml(text, f"--config: {key}={text[:200]}", most_bytes=_MOST_BYTES)
    return found


def with_current_keys(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """`values` with earlier keys under today's names. Raises ConfigError, naming `source`, if both are given."""
    both = [(old, new) for old, new in _EARLIER_KEYS.items() if old in values and new in values]
    if both:
        raise ConfigError(f"{source}: {both[0][0]} is the earlier name of {both[0][1]}; put both into {both[0][1]}")
    return {_EARLIER_KEYS.get(key, key): value for key, value in values.items()}


def merged(base: Any, change: Any) -> Any:
    """`base` with `change`: of a mapping the entries that `change` names are changed, and the others kept."""
    if not isinstance(base, Mapping) or not isinstance(change, Mapping):
        return change
    return {**base, **{key: merged(base.get(key), value) for key, value in change.items()}}
