"""Made-up records of the optimizer benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lastgood.experiments.records.optimizer import (
    OptimizerPoint,
    OptimizerRecord,
    OptimizerSpec,
)
from tests.experiments.support.records import make_record


def spec_of(repetition: int = 0, **changes: Any) -> OptimizerSpec:
    values = {
        "machine": "testbox",
        "scale": "laptop",
        "model": "resnet50",
        "optimizer": "adamw",
        "threads": (1, 2),
        "shadows": (1, 3),
        "updates": 3,
        "repetition": repetition,
        **changes,
    }
    return OptimizerSpec.model_validate(values)


def record_of(repetition: int = 0, factor: float = 1.0, **changes: Any) -> OptimizerRecord:
    points = [
        OptimizerPoint(threads=threads, shadows=shadows, update_s=[factor * t / threads / shadows for t in (3, 1, 2)])
        for threads in (2, 1)
        for shadows in (1, 3)
    ]
    return OptimizerRecord(
        spec=spec_of(repetition, **changes),
        started_at="2026-01-01T00:00:00+00:00",
        wall_s=9.0,
        where=make_record().where,
        parameters=25_557_032,
        points=points,
    )


def written(folder: Path, *records: OptimizerRecord) -> list[Path]:
    paths = []
    for record in records:
        path = folder / record.spec.record_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        record.write(path)
        paths.append(path)
    return paths
