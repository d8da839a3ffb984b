"""What is planned, as text that no machine has a part in."""

from __future__ import annotations

import hashlib
import json
import lzma
import re
from pathlib import Path

from tests.golden.support.adapters import ROOT, command, configure, plan_workflow, without_machine_checks

CONFIGS = {name: ROOT / "config" / f"{name}.yaml" for name in ("laptop", "gpu", "paper")}
CONFIGS["tiny"] = ROOT / "tests" / "workflow" / "tiny.yaml"
PLANS = Path(__file__).resolve().parents[1] / "data" / "plans.json.xz"
WITH_TABLE = ("tiny", "laptop")
BEFORE_PAIRS = {
    "laptop": ("repetitions=2", *(f"fig{number}={{repetitions: 2}}" for number in (12, 13, 14))),
    "gpu": ("repetitions=2",),
}
"""What the configurations said when these plans were kept: one stretch of steps in each run, and more of them."""
FIXED = ("machine=testbox", "threads=2", "results_dir=no-results", "scratch=no-scratch")


def planned(name: str, figure: str) -> list[str]:
    """`lastgood plan` of a figure: its table, and after it record, seconds and the spec's digest of each run.

    The table is asked for where plans are short; loading a configuration takes the longest. To be called in the
    checkout's folder.
    """
    arguments = ("plan", figure, "--configfile", str(CONFIGS[name]), "--config", *settings(name))
    with without_machine_checks():
        table = command(*arguments) if name in WITH_TABLE else ""
        found = json.loads(command(*arguments, "--json"))
    del found["minutes_of_workflow"]  # came later than the kept plans
    lines = [re.sub(r" +", " ", line).strip() for line in table.splitlines()]
    runs = []
    for run in found.pop("runs"):
        text = json.dumps(run.pop("spec"), sort_keys=True, separators=(",", ":"))
        runs.append(" ".join(map(str, [*run.values(), hashlib.sha256(text.encode()).hexdigest()[:12]])))
    return [*lines, *runs, json.dumps(found)]


def settings(name: str) -> tuple[str, ...]:
    """Overrides of a configuration, of which no machine and no later default has a part."""
    simple = () if name == "tiny" else ("simple={interval: 50, iterations: 100}",)
    batches = "vgg16: {batch_size: 4}, opt: {batch_size: 2}"
    if name == "laptop":
        batches += ", bert: {batch_size: 4}, transformer_xl: {batch_size: 4}"
    if name == "tiny":
        batches += ", bert: {batch_size: 2}, transformer_xl: {batch_size: 2}"
    sizes = (f"workloads={{{batches}}}",) if name in ("tiny", "laptop") else ()
    return (*FIXED, "pairs={rounds: 0}", *sizes, *simple, *BEFORE_PAIRS.get(name, ()))


def kept_plans(part: str) -> dict[str, dict[str, list[str]]]:
    """Of ``plans`` or ``workflows``, by configuration and figure, the kept lines."""
    found: dict[str, dict[str, list[str]]] = json.loads(lzma.decompress(PLANS.read_bytes()))[part]
    return found


def workflow(name: str) -> dict[str, list[str]]:
    """All that the workflow measures: by figure and model, its records in order, each with its priority."""
    plan = plan_workflow(configure(CONFIGS[name], list(settings(name))))
    return {
        "_".join(place): [f"{record} {plan.priorities[record]} {plan.specs[record].proof}" for record in records]
        for place, records in plan.records.items()
    }
