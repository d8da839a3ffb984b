"""Record paths and cell hashes of kept specs: a change orphans every record that was ever measured.

data/specs.json holds specs of every kind with what they gave when they were kept. It is remade, deliberately, by
``python -m tests.golden.support.remake specs``; say in the commit why old records may be lost.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.golden.support.adapters import parse_spec

SPECS = json.loads(Path(__file__).with_name("data").joinpath("specs.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("kept", SPECS, ids=[f"{kept['kind']}-{kept['hash']}-{n}" for n, kept in enumerate(SPECS)])
def test_a_kept_spec_has_its_path_and_its_hash(kept):
    spec = parse_spec(kept["kind"], json.dumps(kept["spec"]))
    assert str(spec.record_path()) == kept["path"]
    assert spec.cell_hash == kept["hash"]
    assert spec.title() == kept["title"]
    assert json.loads(spec.canonical_json()) == kept["spec"]
    assert parse_spec(kept["kind"], spec.canonical_json()) == spec


def test_all_kinds_and_shapes_are_among_them():
    kinds = [kept["kind"] for kept in SPECS]
    assert len(SPECS) >= 30
    assert {kind: kinds.count(kind) >= 3 for kind in ("run", "goodput", "optimizer")} == dict.fromkeys(set(kinds), True)
    runs = [kept["spec"] for kept in SPECS if kept["kind"] == "run"]
    later = ("drain_each", "ranks", "nodes", "parallel", "shadows", "kills")
    assert all(any(name in run for run in runs) for name in later)
    assert any(not set(later) & set(run) for run in runs)
    assert {run["scale"] for run in runs} == {"laptop", "gpu", "paper"}
