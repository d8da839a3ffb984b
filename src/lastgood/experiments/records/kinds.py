"""The kinds of measurement: what each is asked for, what it gives, and what makes it. Needs no torch.

The command `lastgood run`, plans and the workflow ask here, so a kind is one entry. Functions are ``module:function``,
imported only when they are called.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lastgood.errors import ConfigError, LastgoodError
from lastgood.experiments.records.base import MOST_RECORD_BYTES, Record, Spec
from lastgood.experiments.records.dcp import DcpRecord, DcpSpec
from lastgood.experiments.records.flowcheck import FlowcheckRecord, FlowcheckSpec
from lastgood.experiments.records.goodput import GoodputRecord, GoodputSpec
from lastgood.experiments.records.optimizer import OptimizerRecord, OptimizerSpec
from lastgood.experiments.records.remote import RemoteRecord, RemoteSpec
from lastgood.experiments.records.run import RunRecord
from lastgood.experiments.records.spec import RunSpec
from lastgood.experiments.records.stellatrain import StellatrainRecord, StellatrainSpec
from lastgood.text import parse_json, parse_model, read_bytes
from lastgood.units import MIB

__all__ = [
    "DCP",
    "FLOWCHECK",
    "GOODPUT",
    "OPTIMIZER",
    "REMOTE",
    "RUN",
    "STELLATRAIN",
    "MeasurementKind",
    "kind_of_file",
    "kind_of_spec",
    "load_function",
    "parse_spec",
]


@dataclass(frozen=True)
class MeasurementKind:
    """One kind of measurement."""

    name: str
    """In messages: ``a goodput run``."""
    spec: type[Spec]
    record: type[Record[Any]]
    execute: str
    """``(spec, data_dir, scratch, logs, report, **options) -> record``. `report` is told each stage."""
    modelled_s: str
    """``(spec, prediction) -> seconds`` that a measurement takes, by the grid's model."""
    collect: str
    """What makes the CSV files of a figure of these records; see `FigureKind.collect`."""
    options: frozenset[str] = frozenset()
    """Options of `lastgood run` that not every kind has."""

    def function(self, field: str) -> Callable[..., Any]:
        """The function that `execute`, `modelled_s` or `collect` names."""
        return load_function(getattr(self, field))


RUN = MeasurementKind(
    "a run",
    RunSpec,
    RunRecord,
    execute="lastgood.experiments.multirank.any_ranks:execute_run",
    modelled_s="lastgood.experiments.plan.cells:modelled_s",
    collect="lastgood.experiments.tables.runs:collect_files",
    options=frozenset({"check", "timeline", "hosts"}),
)
GOODPUT = MeasurementKind(
    "a goodput run",
    GoodputSpec,
    GoodputRecord,
    execute="lastgood.experiments.goodput.execute:execute_goodput",
    modelled_s="lastgood.experiments.plan.cells:goodput_modelled_s",
    collect="lastgood.experiments.tables.goodput:collect_goodput_files",
)
OPTIMIZER = MeasurementKind(
    "a run of updates",
    OptimizerSpec,
    OptimizerRecord,
    execute="lastgood.experiments.optbench.execute:execute_optimizer",
    modelled_s="lastgood.experiments.plan.cells:optimizer_modelled_s",
    collect="lastgood.experiments.tables.optimizer:collect_updates_files",
)
DCP = MeasurementKind(
    "a run of DCP saves and loads",
    DcpSpec,
    DcpRecord,
    execute="lastgood.experiments.dcp_runs.execute:execute_dcp",
    modelled_s="lastgood.experiments.plan.cells:dcp_modelled_s",
    collect="lastgood.experiments.tables.dcp:collect_dcp_files",
)
FLOWCHECK = MeasurementKind(
    "a part of FlowCheck's figure",
    FlowcheckSpec,
    FlowcheckRecord,
    execute="lastgood.experiments.flowcheck.execute:execute_flowcheck",
    modelled_s="lastgood.experiments.plan.flowcheck:flowcheck_modelled_s",
    collect="lastgood.experiments.tables.flowcheck:collect_flowcheck_files",
)
REMOTE = MeasurementKind(
    "a run of remote checkpoints",
    RemoteSpec,
    RemoteRecord,
    execute="lastgood.experiments.remote_runs.execute:execute_remote",
    modelled_s="lastgood.experiments.plan.cells:remote_modelled_s",
    collect="lastgood.experiments.tables.remote:collect_remote_files",
)
STELLATRAIN = MeasurementKind(
    "a part of StellaTrain's figure",
    StellatrainSpec,
    StellatrainRecord,
    execute="lastgood.experiments.stellatrain_runs.execute:execute_stellatrain",
    modelled_s="lastgood.experiments.plan.stellatrain:stellatrain_modelled_s",
    collect="lastgood.experiments.tables.stellatrain:collect_stellatrain_files",
)
_KINDS = (RUN, GOODPUT, OPTIMIZER, DCP, FLOWCHECK, REMOTE, STELLATRAIN)


def kind_of_spec(spec: Spec) -> MeasurementKind:
    """The kind that `spec` asks for."""
    return next(kind for kind in _KINDS if type(spec) is kind.spec)


def parse_spec(text: str, what: str) -> tuple[MeasurementKind, Spec]:
    """A spec of any kind from its JSON. Raises ConfigError, whose message begins with `what` and names wrong keys."""
    kind = _kind_of_keys(parse_json(text, f"{what}: not a run", most_bytes=MIB, error=ConfigError))
    return kind, parse_model(kind.spec, text, f"{what}: not {kind.name}", most_bytes=MIB)


def kind_of_file(path: Path) -> MeasurementKind:
    """Which kind of record a file is meant for, valid or not."""
    try:
        found = parse_json(read_bytes(path, MOST_RECORD_BYTES), str(path), most_bytes=MOST_RECORD_BYTES)
    except LastgoodError:
        return RUN  # whoever loads it as one says what is wrong with it
    return _kind_of_keys(found.get("spec") if isinstance(found, dict) else None)


def _kind_of_keys(found: object) -> MeasurementKind:
    """The kind with most of these keys: a spec names no kind, and all keys of a valid one are its own kind's."""
    keys = found.keys() if isinstance(found, dict) else set()
    return max(_KINDS, key=lambda kind: len(keys & kind.spec.model_fields.keys()))


def load_function(target: str) -> Callable[..., Any]:
    """The function that ``module:name`` stands for."""
    module, _, name = target.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found
