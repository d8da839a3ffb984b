"""Which services a run needs, and what its ranks ask of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from lastgood.checkpointers.registry import system_traits
from lastgood.errors import ConfigError
from lastgood.experiments.records.kinds import load_function
from lastgood.experiments.records.spec import RunSpec
from lastgood.experiments.services.gemini_peers import GeminiPeers
from lastgood.experiments.services.service import Meter, Service
from lastgood.experiments.services.shadows import Shadows

__all__ = ["begin_meters", "services_of", "trainer_options"]

_OWN: Final[Mapping[str, Callable[[RunSpec], Service]]] = {"shadows": Shadows, "peers": GeminiPeers}


def services_of(spec: RunSpec) -> list[Service]:
    """What must run beside the training of `spec`, by the traits of its system.

    Raises ConfigError for a helper of another package that cannot be imported.
    """
    helper = system_traits(spec.system).helper
    if helper is None:
        return []
    if helper in _OWN:
        return [_OWN[helper](spec)]
    try:
        make = load_function(helper)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"system {spec.system!r}: its helper {helper} cannot be imported: {error}") from error
    return [make(spec)]


def trainer_options(spec: RunSpec, checkpoints: Path) -> dict[str, Any]:
    """Options that a rank's checkpointer needs beside those of `spec`. Raises LastgoodError, as `Service.options`."""
    return {name: value for service in services_of(spec) for name, value in service.options(checkpoints).items()}


def begin_meters(spec: RunSpec, checkpoints: Path) -> Meter:
    """Begin to count what all services of `spec` use. Raises HostError for one that does not answer."""
    meters = [service.meter(checkpoints) for service in services_of(spec)]
    return lambda: {name: value for meter in meters for name, value in meter().items()}
