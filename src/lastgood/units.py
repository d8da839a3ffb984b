"""Sizes and times as people write them. Binary units only: a MiB is 2**20 bytes."""

from __future__ import annotations

import re

from lastgood.errors import ConfigError

__all__ = [
    "GIB",
    "KIB",
    "MIB",
    "format_bytes",
    "format_rate",
    "format_seconds",
    "option_bytes",
    "option_seconds",
    "parse_bytes",
]

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_SUFFIXES = {"": 1, "B": 1, "KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": GIB << 10, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_DURATIONS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | int) -> int:
    """Read a size such as ``"4 MiB"``, ``"1.5GiB"``, ``"100MB"`` or a plain count of bytes.

    Raises ValueError for anything else, naming the units that are known.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise ValueError(f"a size cannot be negative: {text}")
        return text
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if match is None or match[2].upper() not in _SUFFIXES:
        known = ", ".join(["B", "KiB", "MiB", "GiB", "TiB", "kB", "MB", "GB"])
        raise ValueError(f"not a size: {text!r} (a number and one of {known})")
    return int(float(match[1]) * _SUFFIXES[match[2].upper()])


def option_bytes(option: str, text: str) -> int:
    """As `parse_bytes`, of an option of a command. Raises ConfigError, naming the option."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from error


def option_seconds(option: str, text: str) -> float:
    """Read a duration such as ``30m``, ``1.5 h``, ``2d`` or a plain number of seconds, of an option of a command.

    Raises ConfigError, naming the option and the units that are known.
    """
    match = _SIZE.fullmatch(text)
    if match is None or match[2] not in _DURATIONS:
        raise ConfigError(f"{option}: not a duration: {text[:80]!r} (a number and one of s, m, h, d)")
    return float(match[1]) * _DURATIONS[match[2]]


def format_bytes(count: float) -> str:
    """Write a number of bytes with three significant digits and a binary unit."""
    for unit, size in (("TiB", GIB << 10), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(count) >= size:
            return f"{count / size:.3g} {unit}" if count / size < 1000 else f"{count / size:.0f} {unit}"
    return f"{count:.0f} B"


def format_rate(bytes_per_s: float) -> str:
    """Write a bandwidth."""
    return f"{format_bytes(bytes_per_s)}/s"


def format_seconds(seconds: float) -> str:
    """Write a duration in the unit that a person would choose."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 120:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s"
