"""Which services a run needs, and what its ranks ask of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from lastgood.checkpointers.registry import system_traits
from lastgood.checkpointers.traits import Helper
from lastgood.experiments.records.spec import RunSpec
from lastgood.experiments.services.gemini_peers import GeminiPeers
from lastgood.experiments.services.service import Meter, Service
from lastgood.experiments.services.shadows import Shadows

__all__ = ["begin_meters", "services_of", "trainer_options"]

_SERVICES: Final[Mapping[Helper, Callable[[RunSpec], Service]]] = {"shadows": Shadows, "peers": GeminiPeers}
"""By what a system's traits name."""


def services_of(spec: RunSpec) -> list[Service]:
    """What must run beside the training of `spec`."""
    helper = system_traits(spec.system).helper
    return [] if helper is None else [_SERVICES[helper](spec)]


def trainer_options(spec: RunSpec, checkpoints: Path) -> dict[str, Any]:
    """Options that a rank's checkpointer needs beside those of `spec`. Raises LastgoodError, as `Service.options`."""
    return {name: value for service in services_of(spec) for name, value in service.options(checkpoints).items()}


def begin_meters(spec: RunSpec, checkpoints: Path) -> Meter:
    """Begin to count what all services of `spec` use. Raises HostError for one that does not answer."""
    meters = [service.meter(checkpoints) for service in services_of(spec)]
    return lambda: {name: value for meter in meters for name, value in meter().items()}
