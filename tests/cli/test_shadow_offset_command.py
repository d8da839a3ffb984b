"""`lastgood shadow offset`: two and three numbers, a table for people, JSON for programs, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from lastgood.cli import app, shadow_offset
from lastgood.errors import ConfigError


def offset(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["shadow", "offset", *arguments], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def offset_json(*arguments: str) -> dict[str, Any]:
    found = json.loads(offset(*arguments, "--json"))
    assert isinstance(found, dict)
    return found


def test_two_numbers_mean_elements_of_four_bytes() -> None:
    assert offset_json("1024", "4") == offset_json("1024", "4", "4")


def test_table_holds_the_published_example() -> None:
    lines = offset("1024", "4", "--cover", "artefact").splitlines()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert [(link, step, chunk, elements) for link, _, _, step, chunk, elements, *_ in rows] == [
        ("0 to 1", "3", "0", "0-255"),
        ("3 to 0", "3", "3", "768-1023"),
        ("3 to 0", "4", "2", "512-767"),
        ("3 to 0", "5", "1", "256-511"),
    ]
    assert lines[-1] == "marked on each link: 0 to 1: 1 KiB, 3 to 0: 3 KiB"


def test_json_says_where_each_marked_chunk_lies() -> None:
    found = offset_json("1000", "2", "4")
    assert [(row["from"], row["first_element"], row["elements"], row["offset_bytes"]) for row in found["marked"]] == [
        (0, 0, 256, 0),
        (1, 256, 256, 512),
        (2, 512, 256, 1024),
        (3, 768, 232, 1536),
    ]
    assert [row["bytes"] for row in found["marked_bytes"]] == [512, 512, 512, 464]


def test_several_channels_take_a_version() -> None:
    found = offset_json("100000", "4", "--channels", "4", "--nccl", "2.30.1")
    assert found["channels"] == 4
    assert sum(row["elements"] for row in found["marked"]) == 100_000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["5"], "not 1 numbers"),
        (["1", "2", "3", "4"], "not 4 numbers"),
        (["100", "4", "--channels", "3"], "version"),
        (["100", "4", "--buffsize", "much"], "--buffsize"),
        (["1000000000000", "4"], "more than 1000 rows"),
    ],
)
def test_refuses(arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadow_offset, "_MAX_ROWS", 1000)
    with pytest.raises(ConfigError, match=words):
        CliRunner().invoke(app, ["shadow", "offset", *arguments], catch_exceptions=False)
