"""Specs of made-up runs."""

from __future__ import annotations

from typing import Any

from lastgood.experiments.records.spec import RunSpec


def make_spec(**changes: Any) -> RunSpec:
    values: dict[str, Any] = {
        "machine": "testbox",
        "scale": "laptop",
        "workload": "vgg16",
        "workload_options": {"batch_size": 2},
        "system": "pccheck",
        "system_options": {"max_in_flight": 4, "writer_threads": 2, "keep": 2},
        "method": 1,
        "interval_steps": 10,
        "warmup_steps": 3,
        "measured_steps": 50,
        "threads": 2,
        "seed": 0,
        "repetition": 1,
    }
    return RunSpec.model_validate({**values, **changes})
