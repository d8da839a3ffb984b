"""docs/seed-map.md: what it tells people to type exists, and so do the tests that it names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer.main

from lastgood.cli import app

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "seed-map.md").read_text()
ROWS = [
    [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| there ")
]
TARGETS = set(
    re.findall(r"^\s*rule (\w+)", "\n".join(p.read_text() for p in (ROOT / "workflow").rglob("*.smk")), re.M)
) | {path.parent.name for path in ROOT.glob("evaluation/*/grid.yaml")}
PROGRAMS = {"lastgood", "snakemake", "bash", "python3", "ansible-playbook", "sbatch", "torchrun", "pip"}


def wrong(command: str, root: Path = ROOT) -> str | None:
    """What is wrong with a command line, if anything is."""
    first, *words = command.split()
    if first == "torchrun":
        return wrong(command.partition(" -m ")[2], root)
    if first == "lastgood":
        return wrong_words(typer.main.get_command(app), words)
    if first == "snakemake":
        return None if words[0] in TARGETS else f"no target {words[0]}"
    if first == "pip":
        return None
    path = first if first not in PROGRAMS else words[0]
    return None if (root / path).is_file() else f"no file {path}"


def wrong_words(command: Any, words: list[str]) -> str | None:
    while words and getattr(command, "commands", {}):
        if words[0] not in command.commands:
            return f"no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    known = {name for one in command.params for name in (*one.opts, *one.secondary_opts)} | {"--help"}
    missing = [word for word in words if word.startswith("--") and word not in known]
    return f"{command.name} has no option {missing[0]}" if missing else None


def commands(cell: str) -> list[str]:
    found = re.findall(r"`([^`]+)`", cell)
    return [one for one in found if one.split()[0] in PROGRAMS or one.startswith("./")]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("lastgood shadow offsets 1", "no command offsets"),
        ("lastgood shadow bench --modell x", "bench has no option --modell"),
        ("torchrun --nnodes=2 -m lastgood dcp savings", "no command savings"),
        ("snakemake fig80", "no target fig80"),
        ("bash uninstall.sh", "no file uninstall.sh"),
        ("./test_script.py --rank 0", "no file ./test_script.py"),
    ],
)
def test_wrong_commands_are_found(command: str, said: str) -> None:
    assert wrong(command) == said


def test_every_command_exists() -> None:
    typed = [command for _, here, _ in ROWS for command in commands(here)]
    assert len(typed) > 50 and {one.split()[0] for one in typed} > PROGRAMS
    assert [(one, found) for one in typed if (found := wrong(one))] == []


def test_every_row_has_a_test_or_says_why_not() -> None:
    for there, here, tried in ROWS:
        assert there and here
        if here.startswith("*no need*:"):
            assert not tried or tried.startswith("tests/"), there
        else:
            assert re.match(r"tests/|\*by hand\*: ", tried), there


def test_every_test_that_is_named_exists() -> None:
    named = {tried for *_, tried in ROWS if tried.startswith("tests/")}
    assert len(named) > 25
    for one in sorted(named):
        path, _, name = one.partition("::")
        text = (ROOT / path).read_text() if (ROOT / path).exists() else ""
        assert re.search(rf"^def {name}\(" if name else "^def test_", text, re.M), one
