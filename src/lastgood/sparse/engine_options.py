"""What an engine can be given, and what it cannot."""

from __future__ import annotations

from lastgood.errors import ConfigError

__all__ = ["check_options", "least_of"]

_LEAST_COMPRESSION = 0.9


def check_options(
    staleness: int, partial: bool, buffers: str, accumulate: int, threads: int, compression: float, timeout_s: float
) -> None:
    """Raise ConfigError for options of `Engine` that cannot be."""
    if staleness not in (0, 1) or (partial and staleness == 0):
        raise ConfigError(f"staleness={staleness}, partial={partial}: staleness is 0 or 1, and partial needs 1")
    if buffers not in ("first", "own"):
        raise ConfigError(f"buffers={buffers!r}: choose first or own")
    if accumulate < 1 or threads < 1 or not 0 <= compression < 1 or timeout_s <= 0:
        raise ConfigError(
            f"accumulate={accumulate}, threads={threads}, compression={compression}, timeout_s={timeout_s}: "
            "the first two are at least 1, compression is at least 0 and below 1, and timeout_s is above 0"
        )


def least_of(compression: float, least: float | None, *, follows: bool) -> float:
    """The least compression that an engine may come to have, if it `follows` settings. Raises ConfigError."""
    if not follows:
        if least is not None:
            raise ConfigError("least_compression is a limit for settings that telemetry brings, and there is none")
        return compression
    found = min(compression, _LEAST_COMPRESSION) if least is None else least
    if not 0 <= found <= compression:
        raise ConfigError(f"least_compression={least} is not from 0 to the compression, {compression}")
    return found
