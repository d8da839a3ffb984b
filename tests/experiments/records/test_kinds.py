"""Kinds of measurement: which one a spec or a file is of, and what the one command refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lastgood.cli import app
from lastgood.errors import ConfigError, LastgoodError
from lastgood.experiments.records.kinds import GOODPUT, OPTIMIZER, RUN, MeasurementKind, kind_of_file, parse_spec

SPECS = json.loads((Path(__file__).parents[2] / "golden" / "data" / "specs.json").read_text(encoding="utf-8"))
KINDS = {"run": RUN, "goodput": GOODPUT, "optimizer": OPTIMIZER}


def first(name: str) -> str:
    return json.dumps(next(kept["spec"] for kept in SPECS if kept["kind"] == name))


@pytest.mark.parametrize("kept", SPECS, ids=str)
def test_a_spec_says_its_kind(kept: dict[str, Any]) -> None:
    kind, spec = parse_spec(json.dumps(kept["spec"]), "--spec")
    assert kind is KINDS[kept["kind"]]
    assert type(spec) is kind.spec


@pytest.mark.parametrize("name", KINDS)
def test_a_key_too_many_or_too_few_is_told_of_the_right_kind(name: str) -> None:
    kind, spec = KINDS[name], json.loads(first(name))
    missing = next(key for key, field in kind.spec.model_fields.items() if field.is_required())
    for wrong, key in (({**spec, "further": 1}, "further"), ({k: v for k, v in spec.items() if k != missing}, missing)):
        with pytest.raises(ConfigError, match=rf"^--spec: not {kind.name}: .*{key}"):
            parse_spec(json.dumps(wrong), "--spec")


@pytest.mark.parametrize("text", ["", "[]", "1", "null", "{}", '{"spec": {}}', "{"])
def test_nonsense_is_no_run(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--spec: not a run"):
        parse_spec(text, "--spec")


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (json.dumps({"spec": json.loads(first("goodput"))}), GOODPUT),
        (json.dumps({"spec": json.loads(first("optimizer"))}), OPTIMIZER),
        (json.dumps({"spec": json.loads(first("run"))}), RUN),
        ("{", RUN),
        ("[]", RUN),
        ('{"spec": 3}', RUN),
    ],
)
def test_a_file_is_of_a_kind_valid_or_not(content: str, kind: MeasurementKind, tmp_path: Path) -> None:
    path = tmp_path / "r0.json"
    path.write_text(content)
    assert kind_of_file(path) is kind
    assert kind_of_file(tmp_path / "not there") is RUN


@pytest.mark.parametrize(
    ("name", "given", "refused"),
    [
        ("goodput", ["--check"], "--check"),
        ("goodput", ["--hostfile", "x", "--timeline", "t"], "--hostfile, --ssh-config, --how or --rate, --timeline"),
        ("optimizer", ["--rate", "1gbit"], "--hostfile, --ssh-config, --how or --rate"),
    ],
)
def test_options_of_another_kind_are_refused(name: str, given: list[str], refused: str, tmp_path: Path) -> None:
    arguments = ["run", "--spec", first(name), "--out", str(tmp_path / "r0.json"), "--scratch", str(tmp_path), *given]
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception).startswith(f"{refused}: ")
    assert f"is {KINDS[name].name}, which has no such option" in str(done.exception)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("command", "now"),
    [
        ("goodput run --spec {} --out r0.json", "run"),
        ("optimizers --help", "run"),
        ("storage serve --token-file token", "shadow"),
        ("offset 64 4 --json", "shadow offset"),
        ("switch --link a:1=b:2", "shadow switch"),
        ("optbench --model vgg11", "shadow bench"),
    ],
)
def test_commands_of_earlier_versions_name_the_one_to_call(command: str, now: str) -> None:
    done = CliRunner().invoke(app, command.split())
    assert isinstance(done.exception, ConfigError) and done.exception.exit_code == 2
    assert f"`lastgood {command.split()[0]}` is replaced: call `lastgood {now}` with" in str(done.exception)
    assert CliRunner().invoke(app, [*now.split(), "--help"]).exit_code == 0


def test_a_misplaced_record_is_refused_where_its_place_matters(tmp_path: Path) -> None:
    sample = next((Path(__file__).parents[2] / "golden").rglob("f*/*/r0.json"))
    moved = tmp_path / "r0.json"
    moved.write_bytes(sample.read_bytes())
    kind = kind_of_file(moved)
    assert kind.record.load(moved) == kind.record.load_placed(sample)
    with pytest.raises(LastgoodError, match="belong at"):
        kind.record.load_placed(moved)
