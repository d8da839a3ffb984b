"""Suggestions of the command line: a command is called wrongly, and then as its error says (calls.yaml)."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from lastgood.cli import app
from lastgood.errors import LastgoodError
from lastgood.ports import free_ports
from tests.suggestions.following import FOLLOWED, is_said_in
from tests.suggestions.source_texts import ROOT

CALLS = yaml.safe_load((Path(__file__).parent / "calls.yaml").read_text())
FOLLOWED.update({one["said"]: "test_a_call_and_its_correction" for one in CALLS})


@pytest.fixture
def places(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("LASTGOOD_PEER_TOKEN", raising=False)
    monkeypatch.setenv("COLUMNS", "300")
    contents = {"hosts": "a slots=1\n", "nohosts": "", "token": "x" * 32, "file": ""}
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o600)
    return {"tmp": tmp_path, "root": ROOT, "port": free_ports()[0], **{name: tmp_path / name for name in contents}}


def called(line: str, places: dict[str, Any]) -> tuple[int, str]:
    done = CliRunner().invoke(app, shlex.split(line.format(**places)))
    said = str(done.exception) if isinstance(done.exception, LastgoodError) else done.output
    assert done.exception is None or isinstance(done.exception, LastgoodError | SystemExit), done.exception
    return done.exit_code, said


@pytest.mark.parametrize("row", CALLS, ids=[one["wrong"] for one in CALLS])
def test_a_call_and_its_correction(row, places):
    code, message = called(row["wrong"], places)
    assert code != 0 and is_said_in(row["said"], message), message
    for end in ("done", "next"):
        for right in row.get(end, []):
            code, answer = called(right, places)
            assert not is_said_in(row["said"], answer), answer
            assert not re.search(r"No such option|Missing|Usage:|Traceback", answer), answer
            assert (code == 0) == (end == "done"), answer
