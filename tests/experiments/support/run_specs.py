"""Specs of small runs of one process, and the command that runs them."""

from __future__ import annotations

import sys

from lastgood.experiments.records.spec import RunSpec

COMMAND = [sys.executable, "-c", "from lastgood.cli import main; main()", "run"]


def spec_of(system="pccheck", interval=2, **changed):
    values = {
        "machine": "testbox",
        "scale": "laptop",
        "workload": "vgg16",
        "workload_options": {"batch_size": 1, "image_size": 32, "classes": 10, "classifier_width": 8},
        "system": system,
        "method": 1,
        "interval_steps": interval,
        "warmup_steps": 1,
        "measured_steps": 4,
        "threads": 1,
        "seed": 3,
        "repetition": 0,
        "proof": system != "none",
    }
    return RunSpec.model_validate({**values, **changed})
