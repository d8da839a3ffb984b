"""Shadows for a run under Checkmate: processes on its hosts, outside of the training, for as long as the run lasts.

They outlive every kill of the trainers. If there are as many hosts or more, each is on a host of its own.
"""

from __future__ import annotations

import http.client
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families

from lastgood.errors import HostError, LastgoodError
from lastgood.experiments.records.run import ShadowFacts
from lastgood.experiments.records.spec import RunSpec
from lastgood.experiments.services.service import Meter, Seat, Service
from lastgood.gradients.shadow.metric_names import CPU_S, OPTIMIZER_S, PEAK_RSS_BYTES, PREFIX, RECEIVED_BYTES
from lastgood.models import FrozenModel
from lastgood.text import is_whole, parse_json, read_model
from lastgood.units import MIB

__all__ = ["ShadowPlaces", "Shadows", "places_path", "shadow_meter", "shadow_options"]

_MAX_ADDRESS_BYTES: Final = 1 << 16
_ANSWER_S: Final = 10.0
_MAX_ANSWER_BYTES: Final = 1 << 20
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


# -- as trainers see them ------------------------------------------------------------------------------------------


class ShadowPlaces(FrozenModel):
    """Where the shadows of a run are; a file of this lies beside its checkpoints, on every host."""

    hosts: list[str]
    addresses: list[str]
    """HOST:PORT of each, in the order of their numbers."""
    metrics: list[str]
    """HOST:PORT where each tells its metrics."""
    token_file: str


def places_path(checkpoints: Path) -> Path:
    """The file of a run that keeps its checkpoints in `checkpoints`."""
    return checkpoints / "shadows.json"


def _places(checkpoints: Path) -> ShadowPlaces:
    path = places_path(checkpoints)
    what = "the list of this run's shadows"
    return read_model(ShadowPlaces, path, what, most_bytes=MIB, advice="run again", error=LastgoodError)


def shadow_options(checkpoints: Path) -> dict[str, Any]:
    """Options of Checkmate that say where a run's shadows are. Raises LastgoodError if nobody has started them."""
    places = _places(checkpoints)
    return {"shadows": places.addresses, "token_file": places.token_file}


def shadow_meter(checkpoints: Path) -> Callable[[], dict[str, list[ShadowFacts]]]:
    """Ask all of a run's shadows what they have used; the meter asks again, and tells what came on top since.

    Both raise HostError for a shadow that does not answer, or tells no such number.
    """
    places = _places(checkpoints)
    earlier = [_metrics(address) for address in places.metrics]

    def used() -> dict[str, list[ShadowFacts]]:
        found = []
        for host, address, before in zip(places.hosts, places.metrics, earlier, strict=True):
            now = _metrics(address)
            found.append(
                ShadowFacts(
                    host=host,
                    cpu_s=_since(now, before, CPU_S, address),
                    received_bytes=round(_since(now, before, RECEIVED_BYTES, address)),
                    optimizer_s=_since(now, before, OPTIMIZER_S, address),
                    peak_rss_bytes=round(_value(now, PEAK_RSS_BYTES, address)),
                )
            )
        return {"shadows": found}

    return used


def _since(now: Mapping[str, float], before: Mapping[str, float], name: str, address: str) -> float:
    return _value(now, name, address) - _value(before, name, address)


def _value(metrics: Mapping[str, float], name: str, address: str) -> float:
    try:
        return metrics[PREFIX + name]
    except KeyError:
        raise HostError(f"shadow at {address}: tells no metric {PREFIX + name}; is it of another version?") from None


def _metrics(address: str) -> dict[str, float]:
    """Prometheus's text format; of a metric with several label sets, the sum."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=_ANSWER_S)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        text = answer.read(_MAX_ANSWER_BYTES).decode(errors="replace")
        if answer.status != http.client.OK:
            raise HostError(f"shadow at {address}: answers {answer.status} when asked for metrics")
    except (OSError, http.client.HTTPException) as error:
        raise HostError(f"shadow at {address}: no metrics within {_ANSWER_S:.0f} s: {error}") from error
    finally:
        connection.close()
    found: dict[str, float] = {}
    try:
        for metric in text_string_to_metric_families(text):
            for sample in metric.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    except ValueError as error:
        raise HostError(
            f"shadow at {address}: tells no metrics: {error}; does another service answer there?"
        ) from error
    return found
