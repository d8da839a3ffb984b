"""Makes the kept data anew: ``python -m tests.golden.support.remake PART...`` in the checkout.

Parts: specs, plans, tables, configs, drawn. Each rewrites its file below data/ from what the code gives now. A
golden test that fails says that behaviour changed; remake its data only if the change is meant, and look at the diff.
"""

from __future__ import annotations

import json
import lzma
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.golden.support import adapters
from tests.golden.support.drawing import drawn_names, drawn_numbers
from tests.golden.support.plans import CONFIGS, PLANS, planned, workflow
from tests.golden.support.tables import CONFIG_FILES, PANELS, collected, config_values

DATA = Path(__file__).resolve().parents[1] / "data"
HAND_MADE: list[tuple[str, dict[str, Any]]] = [
    ("run", {"drain_each": True, "repetition": 3, "seed": 9}),
    ("run", {"data": "/some where/data", "device": "cuda", "scale": "gpu"}),
    ("run", {"ranks": 4, "nodes": 1, "parallel": "fsdp2"}),
    ("run", {"ranks": 4, "nodes": 2, "parallel": "zero1", "kills": 2}),
    ("run", {"ranks": 4, "nodes": 2, "parallel": "zero2"}),
    ("run", {"ranks": 4, "nodes": 4, "parallel": "zero3", "workload": "opt", "scale": "paper"}),
    ("run", {"ranks": 2, "nodes": 2, "parallel": "pipeline", "workload": "bloom", "scale": "paper"}),
    ("run", {"ranks": 2, "nodes": 2, "parallel": "ddp", "system": "gemini", "system_options": {}}),
    ("run", {"ranks": 2, "nodes": 2, "parallel": "ddp", "system": "checkmate", "system_options": {}, "shadows": 4}),
    ("run", {"system": "checkmate", "system_options": {}, "shadows": 1, "interval_steps": 1, "proof": False}),
    ("run", {"system": "tuned", "system_options": {"writer_cpus": [0, 1], "pool_bytes": None}}),
    ("run", {"system": "torchsnapshot", "system_options": {}}),
    ("run", {"system": "none", "system_options": {}, "interval_steps": 0, "proof": False}),
    ("run", {"workload": "blob", "workload_options": {"megabytes": 300}, "drain_each": True}),
    ("goodput", {"failures_s": [], "trace_failures": 0}),
    ("goodput", {"failures_s": [1.5, 1.5, 7.25], "stretch_start_s": 0.0}),
    ("optimizer", {"optimizer": "sgd", "threads": [1], "shadows": [1], "updates": 1}),
    ("optimizer", {"optimizer": "adam", "model": "vgg11", "threads": [1, 2, 64], "repetition": 2}),
]
"""Changes to a plain spec of the kind."""


def _plain() -> dict[str, dict[str, Any]]:
    run = {
        "machine": "testbox",
        "scale": "laptop",
        "workload": "vgg16",
        "workload_options": {"batch_size": 2},
        "system": "pccheck",
        "system_options": {"max_in_flight": 2, "writer_threads": 3},
        "method": 1,
        "interval_steps": 10,
        "warmup_steps": 3,
        "measured_steps": 40,
        "proof": True,
        "device": "cpu",
        "threads": 2,
        "seed": 0,
        "repetition": 0,
    }
    trace = {"trace_name": "example", "trace_sha256": "a" * 64, "trace_s": 4000.0, "trace_failures": 10}
    stretch = {"window_s": 40.0, "stretch_start_s": 63.0, "stretch_s": 400.0}
    goodput = {"run": run, "failures_s": [20.0], **trace, **stretch}
    points = {"threads": [1, 2], "shadows": [1, 3], "updates": 3, "repetition": 0}
    optimizer = {"machine": "testbox", "scale": "laptop", "model": "resnet50", "optimizer": "adamw", **points}
    return {"run": run, "goodput": goodput, "optimizer": optimizer}


def specs() -> list[dict[str, Any]]:
    """Hand-made ones, and from each plan the first of every kind, workload, system and number of ranks."""
    plain = _plain()
    made = [adapters.parse_spec(kind, json.dumps({**plain[kind], **changes})) for kind, changes in HAND_MADE]
    seen = set()
    for name in CONFIGS:
        config = adapters.configure(CONFIGS[name], ["machine=testbox", "threads=2"])
        for figure in adapters.plan_names():
            for spec in adapters.plan_figure(config, figure):
                parts = spec.record_path().parts
                key = (name, figure, *parts[1:-2][-3:-1], parts[2] == "goodput")
                if key not in seen:
                    seen.add(key)
                    made.append(spec)
    # One of three of the planned: every kind of each figure is among them, and the file stays small.
    made = [*made[: len(HAND_MADE)], *made[len(HAND_MADE) :: 3]]
    made += [spec for spec in _all_planned() if adapters.kind_of(spec) == "optimizer"][:3]
    found = {}
    for spec in made:
        kept = {
            "kind": adapters.kind_of(spec),
            "path": str(spec.record_path()),
            "hash": spec.cell_hash,
            "title": spec.title(),
            "spec": json.loads(spec.canonical_json()),
        }
        found[spec.canonical_json()] = kept
    return list(found.values())


def _all_planned() -> list[Any]:
    found = []
    for name in CONFIGS:
        config = adapters.configure(CONFIGS[name], ["machine=testbox", "threads=2"])
        for figure in adapters.plan_names():
            found += adapters.plan_figure(config, figure)
    return found


def _lines(values: list[Any]) -> str:
    """A list as JSON with an element on a line."""
    return "[\n" + ",\n".join(json.dumps(value) for value in values) + "\n]\n"


def main(parts: list[str]) -> None:
    """Rewrite the parts named."""
    if "specs" in parts:
        (DATA / "specs.json").write_text(_lines(specs()))
    if "plans" in parts:
        plans = {name: {figure: planned(name, figure) for figure in adapters.plan_names()} for name in CONFIGS}
        kept = {"plans": plans, "workflows": {name: workflow(name) for name in CONFIGS}}
        PLANS.write_bytes(lzma.compress(json.dumps(kept).encode()))
    if "configs" in parts:
        found = {name: config_values(name) for name in CONFIG_FILES}
        (DATA / "configs.json").write_text(json.dumps(found, indent=1) + "\n")
    if "tables" in parts:
        for figure, panel in PANELS:
            with tempfile.TemporaryDirectory() as folder:
                for name, content in collected(figure, panel, Path(folder)).items():
                    (DATA / "tables" / name).write_bytes(content)
    if "drawn" in parts:
        for name in drawn_names():
            (DATA / "drawn" / f"{name}.json").write_text(json.dumps(drawn_numbers(name)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
