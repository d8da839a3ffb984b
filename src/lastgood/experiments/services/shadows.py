"""Shadows for a run under Checkmate: processes on its hosts, outside of the training, for as long as the run lasts.

They outlive every kill of the trainers. If there are as many hosts or more, each is on a host of its own.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from lastgood.errors import LastgoodError
from lastgood.experiments.records.spec import RunSpec
from lastgood.experiments.services.service import Meter, Seat, Service
from lastgood.experiments.services.shadow_usage import ShadowPlaces, places_path, shadow_meter, shadow_options
from lastgood.text import is_whole, parse_json

__all__ = ["Shadows"]

_MAX_ADDRESS_BYTES: Final = 1 << 16
_SERVE: Final = (sys.executable, "-m", "lastgood", "shadow", "serve")


class Shadows(Service):
    """As many shadows as the spec says; a file beside the checkpoints names them."""

    name = "shadow"
    directory = "shadows"

    def __init__(self, spec: RunSpec) -> None:
        self._shadows, self._trainers = spec.helpers, spec.ranks

    def hosts(self, names: Sequence[str]) -> Sequence[str]:
        """One after the other, and again from the first if there are fewer than shadows."""
        return [names[number % len(names)] for number in range(self._shadows)]

    def secrets(self, folder: Path) -> Mapping[Path, bytes]:
        """The token that trainers and shadows share."""
        return {self._token_file(folder): f"{secrets.token_hex(32)}\n".encode()}

    def command(self, seat: Seat, folder: Path) -> Sequence[str]:
        """`lastgood shadow serve`, at ports that are free."""
        return [
            *_SERVE,
            *("--shadow", str(seat.number), "--shadows", str(self._shadows), "--trainers", str(self._trainers)),
            *("--host", seat.address, "--port", "0", "--metrics-host", seat.address, "--metrics-port", "0"),
            *("--token-file", str(self._token_file(folder))),
            *("--address-file", str(self.ready_file(seat.number, folder))),
            *("--spill-dir", str(folder / self.directory / f"spill-{seat.number}")),
        ]

    def ready_file(self, number: int, folder: Path) -> Path:
        """Its address file."""
        return folder / self.directory / f"shadow-{number}.json"

    def announce(self, ready: Sequence[tuple[Seat, bytes]], folder: Path) -> Mapping[Path, bytes]:
        """Where all of them are. Raises LastgoodError for something else than the address of a shadow."""
        found = [
            (seat.host, _read(content, f"{seat.host}: {self.ready_file(seat.number, folder)}"))
            for seat, content in ready
        ]
        places = ShadowPlaces(
            hosts=[host for host, _ in found],
            addresses=[f"{one['host']}:{one['port']}" for _, one in found],
            metrics=[str(one["metrics"]) for _, one in found],
            token_file=str(self._token_file(folder)),
        )
        return {places_path(folder / "checkpoints"): places.model_dump_json().encode()}

    def options(self, checkpoints: Path) -> Mapping[str, Any]:
        """Where they are, for Checkmate."""
        return shadow_options(checkpoints)

    def meter(self, checkpoints: Path) -> Meter:
        """What each of them uses."""
        return shadow_meter(checkpoints)

    def _token_file(self, folder: Path) -> Path:
        return folder / self.directory / "token"


def _read(text: bytes, where: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = parse_json(text, where, most_bytes=_MAX_ADDRESS_BYTES, error=LastgoodError)
        if not isinstance(found["host"], str) or not is_whole(found["port"], 1, 65535):
            raise ValueError("host or port is none")
        if not isinstance(found["metrics"], str):
            raise ValueError("no place of its metrics")
    except (ValueError, KeyError, TypeError) as error:
        raise LastgoodError(f"{where}: not the address of a shadow: {error!r}") from error
    return found
