"""The only file of these tests that imports Lastgood's modules: when they move, nothing else here changes.

What is asked of the command line (`lastgood plan`, `collect`, `plot`) needs no module's name at all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from typer.testing import CliRunner

import lastgood.experiments.plan.load as load_module
from lastgood.checkpointers.registry import checkpointer_class
from lastgood.cli import app
from lastgood.experiments.config.yaml_file import parse_overrides
from lastgood.experiments.figures import registry
from lastgood.experiments.figures.workflow_plan import SIMPLE, WorkflowPlan, plan_figure
from lastgood.experiments.figures.workflow_plan import plan_workflow as plan_all
from lastgood.experiments.plan.load import parse_config
from lastgood.experiments.records.goodput import GoodputSpec
from lastgood.experiments.records.kinds import kind_of_spec
from lastgood.experiments.records.optimizer import OptimizerSpec
from lastgood.experiments.records.spec import RunSpec
from lastgood.experiments.tables.files import load_csv
from lastgood.ports import free_ports
from lastgood.state import state_digest

__all__ = [
    "ROOT",
    "checkpointer_class",
    "command",
    "configure",
    "figure_names",
    "free_ports",
    "kind_of",
    "load_record",
    "load_table",
    "parse_spec",
    "plan_figure",
    "plan_names",
    "plan_workflow",
    "state_digest",
    "without_machine_checks",
]

ROOT = Path(__file__).resolve().parents[3]
CAME_LATER = ("dcp", "flowcheck", "remote", "stellatrain")
"""Figures that are not in the kept data."""
_SPECS: dict[str, Any] = {"run": RunSpec, "goodput": GoodputSpec, "optimizer": OptimizerSpec}


def parse_spec(kind: str, text: str) -> Any:
    """A spec of `kind` from its JSON."""
    return _SPECS[kind].model_validate_json(text)


def kind_of(spec: Any) -> str:
    """The name in these tests' data of a spec's kind."""
    return next(kind for kind, cls in _SPECS.items() if type(spec) is cls)


def load_record(kind: str, path: Path) -> Any:
    """Read a record with the loader of its kind."""
    return kind_of_spec(_SPECS[kind].model_construct()).record.load(path)


def load_table(path: Path) -> Any:
    """The data frame of a figure's tidy CSV."""
    return load_csv(path).frame


def figure_names() -> list[str]:
    """The figures that there were when plans were kept."""
    return [name for name in registry.figure_names() if name not in CAME_LATER]


def plan_workflow(config: Any) -> WorkflowPlan:
    """The workflow's plan of these figures, with priorities as if there were no others."""
    plan = plan_all(config)
    records = {place: found for place, found in plan.records.items() if place[0] not in CAME_LATER}
    kept = {record for found in records.values() for record in found}
    specs = {record: spec for record, spec in plan.specs.items() if record in kept}
    priorities = {record: len(specs) - place for place, record in enumerate(specs)}
    assert all(plan.priorities[record] - priority >= 0 for record, priority in priorities.items())
    return WorkflowPlan(specs, records, priorities, plan.hosts)


def plan_names() -> list[str]:
    """All that can be planned."""
    return [*figure_names(), SIMPLE]


def configure(file: Path, overrides: list[str]) -> Any:
    """A configuration as it is, without a look at this machine. Its values have the names of these tests' data."""
    found = parse_config(file, parse_overrides(overrides))[0]
    dump = found.model_dump
    earlier = {"options": "knobs"}
    named = lambda **given: {earlier.get(key, key): value for key, value in dump(**given).items()}  # noqa: E731
    object.__setattr__(found, "model_dump", named)
    return found


@contextmanager
def without_machine_checks() -> Iterator[None]:
    """Let commands load a configuration that this machine could not run."""
    with mock.patch.object(load_module, "check_machine", lambda *_: None):
        yield


def command(*arguments: str, environment: Mapping[str, str] = os.environ) -> str:
    """What `lastgood ARGUMENTS` prints to stdout. Raises what the command raises."""
    done = CliRunner().invoke(app, arguments, catch_exceptions=False, env=dict(environment))
    assert done.exit_code == 0, done.output
    return done.stdout
