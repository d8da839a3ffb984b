"""Measures one part of StellaTrain's figure, and makes a record of it."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from lastgood.cluster.testbed.state import rate_text
from lastgood.cluster.testbed.testbed import Testbed, why_no_testbed
from lastgood.errors import ConfigError, LastgoodError
from lastgood.experiments.machine.exclusive import exclusive_machine
from lastgood.experiments.machine.facts import where_run
from lastgood.experiments.records.stellatrain import ALONE, LinkBlock, StellatrainRecord, StellatrainSpec, Way
from lastgood.experiments.runs.logs import keep_logs_of_failure
from lastgood.experiments.services.place import Place
from lastgood.experiments.stellatrain_runs.order import LinksOrder, LinksResult
from lastgood.text import read_model
from lastgood.units import MIB

__all__ = ["execute_stellatrain", "order_of_ways"]

Report = Callable[[str], None]
_NODES: Final = 2
_RATE_S: Final = 3600.0
_MOST_BYTES: Final = 16 * MIB


def execute_stellatrain(
    spec: StellatrainSpec, _data_dir: Path, scratch: Path, logs: Path, report: Report
) -> StellatrainRecord:
    """Measure the part that `spec` asks for and return the record, when it is this machine's turn.

    Raises ConfigError if links are asked for and no testbed can be made; LaunchError, with its last lines, for a rank
    that fails: its log is in `logs` then.
    """
    if spec.links is not None and (reason := why_no_testbed()) is not None:
        raise ConfigError(f"{spec.title()}: links are those of a testbed, and {reason}")
    with exclusive_machine(spec, scratch.absolute(), report) as mine:
        with keep_logs_of_failure(mine.folder, logs, report, dict):
            found = _kernels(spec, report) if spec.links is None else _links(spec, mine.folder, report)
        return StellatrainRecord(
            spec=spec,
            started_at=mine.started_at,
            wall_s=time.monotonic() - mine.began_s,
            where=where_run(mine.folder.parent),
            **found,
        )


def order_of_ways(spec: StellatrainSpec, rate_bits_per_s: int) -> list[list[Way]]:
    """The ways of each round, in another order each time, so that a drift of the machine favours none."""
    assert spec.links is not None
    rounds = []
    for number in range(spec.links.rounds):
        ways = [ALONE, *spec.links.ways]
        random.Random(f"{spec.seed}/{rate_bits_per_s}/{number}").shuffle(ways)
        rounds.append(ways)
    return rounds


def _links(spec: StellatrainSpec, folder: Path, report: Report) -> dict[str, Any]:
    """A testbed for each rate, on which both ranks go through all ways."""
    settings = spec.links
    assert settings is not None
    blocks: list[LinkBlock] = []
    parameters = 0
    for rate in settings.rates_bits_per_s:
        path = folder / f"result-{rate}.json"
        order = LinksOrder(
            settings=settings,
            rate_bits_per_s=rate,
            rounds=order_of_ways(spec, rate),
            seed=spec.seed,
            result=str(path),
        )
        report(f"making a testbed of {_NODES} nodes at {rate_text(rate)}")
        with Testbed.up(_NODES, name=f"st{os.getpid()}", rate=rate_text(rate), guarded=True) as bed:
            place = Place("ssh", bed.hostfile, bed.remote(), rate)
            program = [sys.executable, "-m", "lastgood.experiments.stellatrain_runs.rank", order.model_dump_json()]
            environment = {"OMP_NUM_THREADS": str(settings.threads)}
            place.start(program, environment, folder / "ranks" / str(rate), _RATE_S, report)
        result = read_model(LinksResult, path, "the result of a rank", most_bytes=_MOST_BYTES, error=LastgoodError)
        blocks += result.blocks
        parameters = result.parameters
    return {"blocks": blocks, "parameters": parameters}


def _kernels(spec: StellatrainSpec, report: Report) -> dict[str, Any]:
    from lastgood.experiments.stellatrain_runs.kernels import measure_kernels  # torch, and so after the machine's turn

    assert spec.kernels is not None
    return {"times": measure_kernels(spec.kernels, spec.seed, report)}
