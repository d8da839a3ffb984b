"""config/schema.json: up to date, true of our files, and as strict as the configuration where a schema can be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from lastgood.experiments.config.editors import editor_schema
from lastgood.experiments.config.yaml_file import load_yaml

ROOT = Path(__file__).resolve().parents[3]
CONFIG = ROOT / "config"
FILES = [*sorted(CONFIG.glob("*.yaml")), ROOT / "tests" / "workflow" / "tiny.yaml"]


def test_the_schema_is_up_to_date() -> None:
    kept = (CONFIG / "schema.json").read_text()
    assert kept == editor_schema(), "make it again: lastgood config schema > config/schema.json"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_names_the_schema_and_holds_to_it(path: Path) -> None:
    start, _, schema = path.read_text().splitlines()[0].partition("=")
    assert start == "# yaml-language-server: $schema"
    assert (path.parent / schema).resolve() == CONFIG / "schema.json"
    jsonschema.validate(load_yaml(path), json.loads((CONFIG / "schema.json").read_text()))


@pytest.mark.parametrize(
    "values",
    [
        {"sede": 1},
        {"seed": -1},
        {"device": "tpu"},
        {"workloads": {"vgg": {}}},
        {"workloads": {"bert": {"layers": 0}}},
        {"options": {"pccheck": {"keeep": 1}}},
        {"fig11": {"writer_threads": 65}},
        {"base": 3},
    ],
    ids=str,
)
def test_the_schema_refuses_what_a_configuration_refuses(values: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values, json.loads(editor_schema()))
