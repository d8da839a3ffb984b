from __future__ import annotations

import json
from pathlib import Path

import pytest
from slot_helpers import CHUNK, TIMEOUT_S, open_store, save

from lastgood.cli.inspect import inspect
from lastgood.errors import StorageError


def test_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_store(tmp_path) as store:
        store.reserve(3 * CHUNK)
        save(store, 7, 3 * CHUNK)
        save(store, 8, 3 * CHUNK)
        store.begin(9, 3 * CHUNK, TIMEOUT_S)
        inspect(tmp_path, json=True)
        described = json.loads(capsys.readouterr().out)
        assert described["in_use"] is True
        assert [slot["state"] for slot in described["slots"]] == ["whole", "whole", "being written", "void"]
        assert [slot["newest"] for slot in described["slots"]] == [False, True, False, False]
        assert [slot["step"] for slot in described["slots"]] == [7, 8, 9, None]
        inspect(tmp_path)
        shown = capsys.readouterr().out
        assert "newest" in shown and "slot-0003.lgs" in shown
        assert ", the newest was written " in shown
        assert [slot["age_s"] is None for slot in described["slots"]] == [False, False, True, True]
    inspect(tmp_path)
    assert "torn" in capsys.readouterr().out
    with pytest.raises(StorageError):
        inspect(tmp_path / "missing")
