"""The shadows of a run, as its trainers see them: where they are, and what they have used. Needs no torch."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families

from lastgood.errors import HostError, LastgoodError
from lastgood.experiments.records.run import ShadowFacts
from lastgood.gradients.shadow.metric_names import CPU_S, OPTIMIZER_S, PEAK_RSS_BYTES, PREFIX, RECEIVED_BYTES
from lastgood.models import FrozenModel
from lastgood.text import read_model
from lastgood.units import MIB

__all__ = ["ShadowPlaces", "places_path", "shadow_meter", "shadow_options"]

_ANSWER_S: Final = 10.0
_MAX_ANSWER_BYTES: Final = 1 << 20


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
