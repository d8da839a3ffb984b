"""The configurations of the S3 connector's benchmarks, read as they are, without Hydra, as flags of `lastgood dcp`.

One file holds ``s3.region``, ``s3.uri``, ``epochs`` and, under ``hydra.sweeper.params``, keys whose values are lists
with commas: their Cartesian product is what is measured. ``???`` stands for what must be given.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from lastgood.errors import ConfigError
from lastgood.experiments.config.yaml_file import load_yaml

__all__ = ["Sweep", "read_sweep"]

_MISSING: Final = (None, "???")
_KNOWN: Final = {
    "model": "model",
    "backend": "backend",
    "world_size": "world_size",
    "thread_count": "thread_count",
    "checkpoint.storage": "storage",
    "checkpoint.sharding_strategy": "sharding",
    "checkpoint.sync_files": "sync_files",
    "checkpoint.suffix": "suffix",
    "path": "path",
}
"""The sweeper's parameters, and the flag that each is."""
_PLAIN: Final = {"s3.region": "region", "s3.uri": "uri", "epochs": "iterations"}
_MOST_RUNS: Final = 10_000


@dataclass(frozen=True)
class Sweep:
    """What a configuration asks for."""

    operation: Literal["save", "load"]
    ddp: bool
    runs: list[dict[str, Any]]
    """The flags of each run; ``uri`` is a folder for the storage ``disk``."""
    unused: list[str]
    """Parts of the configuration that have no use here."""


def read_sweep(path: Path, overrides: Iterable[str] = ()) -> Sweep:
    """Read a configuration and overrides as ``epochs=1``, ``+path=/nvme`` or ``checkpoint.suffix=NAME``.

    It loads if it has ``checkpoint.suffix``, else it saves; it is FSDP if it has ``checkpoint.sharding_strategy`` or
    its name says so, else DDP. Raises ConfigError, naming file and key, for what is missing, unknown, or given twice.
    """
    found = load_yaml(path)
    unused = [f"defaults: {entry}" for entry in _listed(path, "defaults", found.pop("defaults", []))]
    unused = [entry for entry in unused if not entry.endswith("_self_")]
    hydra = _mapping(path, "hydra", found.pop("hydra", {}))
    sweeper = _mapping(path, "hydra.sweeper", hydra.pop("sweeper", {}))
    params = _mapping(path, "hydra.sweeper.params", sweeper.pop("params", {}))
    unused += [f"hydra.{key}" for key in hydra] + [f"hydra.sweeper.{key}" for key in sweeper]
    values = {**_flat(found), **{str(key).lstrip("+"): value for key, value in params.items()}}
    values.update(_overrides(overrides))
    unknown = [key for key in values if key not in _KNOWN and key not in _PLAIN]
    if unknown:
        known = ", ".join([*_PLAIN, *_KNOWN])
        raise ConfigError(f"{path}: {', '.join(unknown)}: unknown; known: {known}")
    axes = {key: _alternatives(value) for key, value in values.items()}
    operation: Literal["save", "load"] = "load" if "checkpoint.suffix" in values else "save"
    ddp = "checkpoint.sharding_strategy" not in values and "fsdp" not in path.name
    count = 1
    for one in axes.values():
        count *= len(one)
    if count > _MOST_RUNS:
        raise ConfigError(f"{path}: {count} combinations; {_MOST_RUNS} at most")
    runs = [_run(path, dict(zip(axes, chosen, strict=True))) for chosen in itertools.product(*axes.values())]
    return Sweep(operation, ddp, runs, unused)


def _run(path: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    flags: dict[str, Any] = {}
    on_disk = values.get("checkpoint.storage", "s3") == "disk"
    for key, value in values.items():
        if value in _MISSING:
            if key in ("s3.region", "s3.uri") and on_disk:
                continue  # of no use to a folder
            raise ConfigError(f"{path}: {key} is not given (???): write {key}=VALUE after the file's name")
        flags[{**_KNOWN, **_PLAIN}[key]] = value
    folder = flags.pop("path", None)
    if on_disk:
        if folder is None:
            raise ConfigError(f"{path}: checkpoint.storage is disk: say where, with path=FOLDER after the file's name")
        flags["uri"] = str(folder)
        flags.pop("region", None)
    elif "uri" not in flags:
        raise ConfigError(f"{path}: s3.uri is not given: write s3.uri=s3://BUCKET/PREFIX after the file's name")
    return flags


def _alternatives(value: Any) -> list[Any]:
    """``"a, b"`` is two values, and a YAML list one for each entry; what looks like a number is one."""
    if isinstance(value, list):
        return [_scalar(entry) for entry in value]
    if isinstance(value, str) and "," in value:
        return [_scalar(part.strip()) for part in value.split(",")]
    return [_scalar(value)]


def _scalar(value: Any) -> Any:
    if isinstance(value, str):
        if value in ("true", "false"):
            return value == "true"
        if value.isascii() and value.isdigit():
            return int(value)
    return value


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _overrides(entries: Iterable[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for entry in entries:
        key, equals, text = entry.partition("=")
        key = key.lstrip("+")
        if not equals or not key:
            raise ConfigError(f"{entry!r} is not KEY=VALUE, for instance epochs=1 or +path=/nvme")
        if key in found:
            raise ConfigError(f"{key} is given twice; put several values into one: {key}=A,B")
        found[key] = text
    return found


def _mapping(path: Path, key: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: {key}: {type(value).__name__} in place of a mapping")
    return dict(value)


def _listed(path: Path, key: str, value: Any) -> list[str]:
    if not isinstance(value, list):
        raise ConfigError(f"{path}: {key}: {type(value).__name__} in place of a list")
    return [str(entry) for entry in value]
