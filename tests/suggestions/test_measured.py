"""Suggestions about measurements, their records and files, followed to the letter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from lastgood.checkpointers.pccheck.tuning_file import TUNING_FILE, read_tuning
from lastgood.cli import app
from lastgood.experiments.machine import lock as lock_module
from lastgood.experiments.tables.refuse import shared_notes
from lastgood.experiments.tables.runs import collect_files
from lastgood.locks import FileLock
from tests.experiments.support.records import make_ceilings, make_record
from tests.suggestions.following import advice, follows, hear, refusal
from tests.suggestions.places import Places
from tests.suggestions.source_texts import ROOT

NUMBERS = ["--iteration-s", "0.05", "--state-bytes", "1.5MB", "--budget-s", "0.01"]


@pytest.fixture(autouse=True)
def own_turn(tmp_path, monkeypatch):
    """Neither waits for a measurement on this machine nor holds one up."""
    monkeypatch.setattr(lock_module, "machine_lock", lambda: FileLock(tmp_path / "machine.lock", "the test's turn"))


def lastgood(line: str, *more: object) -> str:
    done = CliRunner().invoke(app, [*line.split(), *map(str, more)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output if "--json" not in line else done.stdout


@follows(
    "{}; `lastgood tune` makes such a file",
    "{}: {}: is missing; `lastgood tune` writes it",
    "not tried, for lack of time or memory: {} combinations; --json names them",
)
def test_settings_that_are_not_there(tmp_path):
    path = tmp_path / TUNING_FILE
    command = advice(refusal(lambda: read_tuning(path)), r"`lastgood (tune)`")
    output = hear(" ".join(lastgood(command, tmp_path, *NUMBERS).split()))
    read_tuning(path)
    settings = yaml.safe_load(path.read_text())
    del settings["interval_steps"]
    path.write_text(yaml.safe_dump(settings))
    again = advice(refusal(lambda: read_tuning(path)), r"interval_steps: is missing; `lastgood (tune)` writes it")
    found = json.loads(lastgood(f"{again} {advice(output, '--json')}", tmp_path, *NUMBERS))
    assert len(found["not_tried"]) >= 1
    read_tuning(path)


@follows("{} is not made of runs; `lastgood collect {}` knows how it is")
def test_a_figure_of_other_records(tmp_path):
    records = sorted((Places.golden / "records" / "fig9_transformer_xl").rglob("*.json"))
    ceilings = make_ceilings(machine="testbox")
    ceilings.write(tmp_path / "ceilings.json")
    message = refusal(lambda: collect_files("fig9", "transformer_xl", records, tmp_path / "ceilings.json"))
    out = ["--out-tidy", tmp_path / "tidy.csv", "--out-wide", tmp_path / "wide.csv"]
    line = advice(message, r"`lastgood (collect fig9)`")
    lastgood(line, "transformer_xl", *records, "--ceilings", tmp_path / "ceilings.json", *out)
    assert Path(tmp_path / "tidy.csv").read_text()


@follows("ceilings were measured with --quick")
def test_ceilings_of_a_quick_look():
    records = [make_record("none", 0, 0)]
    (note,) = [one for one in shared_notes(records, make_ceilings(quick=True)) if "--quick" in one]
    hear(note)
    assert not any("--quick" in one for one in shared_notes(records, make_ceilings(quick=False)))


@follows(
    "nothing to run: give --spec and --out, or --plan (`lastgood plan FIGURE --json` prints it)",
    "is no plan; make one with `lastgood plan FIGURE --json`",
    "--plan: its runs have their own specs and records; leave --spec, --out and the like out",
)
def test_runs_of_a_plan(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = refusal(lambda: lastgood("run"))
    option = advice(message, r"or (--plan)")
    Path("plan.json").write_text("{}")
    again = refusal(lambda: lastgood(f"run {option} plan.json"))
    asks = r"`lastgood (plan FIGURE --json)`"
    assert advice(again, asks) == advice(message, asks)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("lastgood.experiments.runs.probe.probe_machine", lambda *_, **__: None)  # it takes its time
    plan = lastgood(advice(message, asks).replace("FIGURE", "fig8"))
    monkeypatch.chdir(tmp_path)
    Path("plan.json").write_text(plan)
    runs = json.loads(plan)["runs"]
    for record in (Path(run["record"]) for run in runs):  # so that none is left to be made
        record.parent.mkdir(parents=True, exist_ok=True)
        record.touch()
    advice(refusal(lambda: lastgood(f"run {option} plan.json --out x.json")), "leave --spec, --out and the like out")
    lastgood(f"run {option} plan.json")
    assert runs
