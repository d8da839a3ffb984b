"""Each suggestion of the source is followed by a test of this folder, or not_followed.yaml says why it is not."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from typer.testing import CliRunner

from lastgood.cli import app
from tests.suggestions.following import FOLLOWED
from tests.suggestions.source_texts import ROOT, suggestions

HERE = Path(__file__).parent
NOT_FOLLOWED: dict[str, list[str]] = yaml.safe_load((HERE / "not_followed.yaml").read_text())


@pytest.fixture(scope="module")
def followed() -> list[str]:
    """Parts of texts. Modules say so when they are loaded, whichever tests are chosen."""
    for path in sorted(HERE.parent.rglob("test_*.py")):
        if path != Path(__file__) and "tests.suggestions.following import" in path.read_text():
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    return list(FOLLOWED)


def test_every_suggestion_is_followed_or_has_a_reason(followed):
    reasons = {text for texts in NOT_FOLLOWED.values() for text in texts}
    missing = {
        text: where
        for text, where in suggestions().items()
        if text not in reasons and not any(part in text for part in followed)
    }
    assert missing == {}


def test_reasons_are_given_for_texts_that_are_there_and_not_followed(followed):
    texts = [text for texts in NOT_FOLLOWED.values() for text in texts]
    assert len(texts) == len({*texts})
    assert {text for text in texts if text not in suggestions()} == set()
    assert {text for text in texts if any(part in text for part in followed)} == set()


def test_what_is_followed_is_one_text_each(followed):
    assert {part: found for part in followed if (found := sum(part in text for text in suggestions())) != 1} == {}


def test_commands_are_taken_by_the_parser():
    """All of them with all of their options, also those that cannot run here."""
    lines = {
        found
        for text in suggestions()
        for pair in re.findall(r"`lastgood ([a-z][^`]*)`|(?:make them|next): lastgood ([^,;]*)", text)
        for found in pair
        if found
    }
    assert len(lines) > 10
    for line in sorted(lines):
        words = line.replace("{}", "3").split()
        at = next((place for place, word in enumerate(words) if word.startswith("-")), len(words))
        # Asked for first, so that no option takes it as its value and nothing is run.
        asked = [*words[:at], "--help", *words[at:]]
        done = CliRunner().invoke(app, asked)
        if done.exit_code != 0:  # its last option may lack a value
            assert CliRunner().invoke(app, [*asked, "3"]).exit_code == 0, (line, done.output)


def test_requirements_are_taken_by_pip():
    found = [
        name
        for text in suggestions()
        for name in re.findall(r"pip install (?:--[a-z-]+ )?'?([a-z][\w.-]*(?:\[\w+\])?)", text)
        if name != "-e"
    ]
    assert len(found) > 4
    assert all(Requirement(name).name for name in found)
