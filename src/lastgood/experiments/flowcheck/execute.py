"""Measures one part of FlowCheck's figure, and makes a record of it."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from lastgood.experiments.machine.facts import where_run
from lastgood.experiments.records.flowcheck import FlowcheckRecord, FlowcheckSpec
from lastgood.experiments.records.kinds import load_function

__all__ = ["execute_flowcheck"]

_PARTS: Final = {
    "training": "lastgood.experiments.flowcheck.training:measure_training",
    "lives": "lastgood.experiments.flowcheck.lives:measure_lives",
    "capture": "lastgood.experiments.flowcheck.capture:measure_capture",
    "recovery": "lastgood.experiments.flowcheck.recovery:measure_recovery",
    "stages": "lastgood.experiments.flowcheck.stages:measure_stages",
    "sizing": "lastgood.experiments.flowcheck.sizing:measure_sizing",
}


def execute_flowcheck(
    spec: FlowcheckSpec, _data_dir: Path, scratch: Path, logs: Path, report: Callable[[str], None]
) -> FlowcheckRecord:
    """Measure the part that `spec` asks for and return the record. Logs of a training that fails are in `logs` then."""
    started_at = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    began = time.monotonic()
    measure: Callable[..., Any] = load_function(_PARTS[spec.part])
    result = measure(spec.settings, spec.seed, scratch, logs, report)
    return FlowcheckRecord(
        spec=spec,
        started_at=started_at,
        wall_s=time.monotonic() - began,
        where=where_run(scratch),
        result=result,
    )
