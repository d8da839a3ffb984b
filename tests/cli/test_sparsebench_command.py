"""`lastgood sparsebench`: every compressor beside its bound, and the refusal of what does not fit."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from lastgood.cli import app
from lastgood.errors import ConfigError
from lastgood.sparse.compressors import COMPRESSORS

SMALL = ["--elements", "50000", "--rounds", "2", "--threads", "1"]

pytestmark = pytest.mark.measures


def sparsebench(*arguments):
    done = CliRunner().invoke(app, ["sparsebench", *arguments], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def test_every_compressor_has_its_bound_and_its_energy():
    found = json.loads(sparsebench(*SMALL, "--json"))
    rows = {row["name"]: row for row in found["rows"]}
    assert found["count"] == 500
    assert set(rows) == {"read", "pass", "torch.topk"} | {
        way for name in COMPRESSORS for way in (name, f"{name}, residual")
    }
    for name, row in rows.items():
        assert len(row["seconds"]) == 2
        assert row["bound"] == ("pass" if "residual" in name or name == "pass" else "read")
        assert row["of_bound"] == pytest.approx(rows[row["bound"]]["median_s"] / row["median_s"])
    assert rows["none"]["energy_kept"] == pytest.approx(1)
    assert 1 > rows["topk"]["energy_kept"] > rows["v16"]["energy_kept"] > rows["randomk"]["energy_kept"] > 0


def test_the_table_names_them():
    shown = sparsebench(*SMALL)
    for name in COMPRESSORS:
        assert name in shown


def test_what_does_not_fit_is_refused_before_it_is_made(monkeypatch):
    monkeypatch.setattr("lastgood.experiments.optbench.sparse.available_memory_bytes", lambda: 1000)
    with pytest.raises(ConfigError, match=r"50000 elements need 1.* of memory, and 1000"):
        sparsebench(*SMALL)
