"""Suggestions of the command line: a command is called wrongly, and then as its error says (calls.yaml)."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from lastgood.cli import app
from lastgood.errors import LastgoodError
from tests.suggestions.following import FOLLOWED, is_said_in
from tests.suggestions.places import Places
from tests.suggestions.source_texts import ROOT

CALLS = yaml.safe_load((Path(__file__).parent / "calls.yaml").read_text())
FOLLOWED.update({one["said"]: "test_a_call_and_its_correction" for one in CALLS})


class _With(dict[str, object]):
    """A row's names: the places, and what was cut out of the message."""

    def __init__(self, places: Places, cut: tuple[str, ...]) -> None:
        super().__init__(cut=cut)
        self._places = places

    def __missing__(self, name: str) -> object:
        return getattr(self._places, name)


@pytest.fixture
def places(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("LASTGOOD_PEER_TOKEN", raising=False)
    monkeypatch.setenv("COLUMNS", "300")
    return Places(tmp_path)


def called(line: str, places: Places, cut: tuple[str, ...]) -> tuple[int, str]:
    words: list[str] = []
    for word in shlex.split(line):
        # A place is one word, also with a blank in its path; records, and what was cut out of a message, are several.
        filled = word.format_map(_With(places, cut))
        words += shlex.split(filled) if "{cut" in word or word == "{records}" else [filled]
    done = CliRunner().invoke(app, words)
    said = str(done.exception) if isinstance(done.exception, LastgoodError) else done.output
    assert done.exception is None or isinstance(done.exception, LastgoodError | SystemExit), done.exception
    return done.exit_code, said


@pytest.mark.parametrize("row", CALLS, ids=[one["wrong"] for one in CALLS])
def test_a_call_and_its_correction(row, places):
    code, message = called(row["wrong"], places, ())
    assert code != 0 and is_said_in(row["said"], message), message
    found = re.search(row.get("cut", ""), message, re.MULTILINE)
    assert found, message
    for end in ("done", "next"):
        for right in row.get(end, []):
            code, answer = called(right, places, found.groups())
            assert not is_said_in(row["said"], answer), answer
            assert not re.search(r"No such option|Missing|Usage:|Traceback", answer), answer
            assert (code == 0) == (end == "done"), answer
