"""Where files lie: few side by side, and what tests share is in modules of its own."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST = 25
BY_NATURE_FLAT = {Path("src/lastgood/cli"), Path("benchmarks")}
"""A file for each command; a script for each thing that is measured."""


def sources() -> list[Path]:
    return [path.relative_to(ROOT) for top in ("src", "tests", "benchmarks") for path in (ROOT / top).rglob("*.py")]


def test_no_folder_has_more_files_than_one_reads_at_a_glance() -> None:
    counts = Counter(path.parent for path in sources())
    assert counts[Path("tests/checkpointers/support")] > 10, "the count finds files"
    assert {folder: count for folder, count in counts.items() if count > MOST and folder not in BY_NATURE_FLAT} == {}


IMPORT = re.compile(r"^[ \t]*(?:from[ \t][^\n(]*\([^)]*\)|(?:from|import)[ \t][^\n]*)", re.MULTILINE)


def imported(path: Path) -> list[str]:
    """The full names of modules, and of what is taken out of them, in a file's imports that speak of a test module.

    Anywhere in it, also in programs that it has as text.
    """
    text = (ROOT / path).read_text()
    statements = [one.strip() for one in IMPORT.findall(text) if "test_" in one] if "test_" in text else []
    found: list[str] = []
    for node in (node for one in statements for node in ast.walk(ast.parse(one))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def test_nothing_is_imported_out_of_a_test_module() -> None:
    tests = {".".join(path.with_suffix("").parts) for path in sources() if path.name.startswith("test_")}
    assert len(tests) > 200
    plain = {name.rpartition(".")[2] for name in tests}  # as an import by sys.path names it
    wrong = []
    for path in sources():
        for name in imported(path):
            first = name.partition(".")[0]
            if first in plain or name in tests or name.rpartition(".")[0] in tests:
                wrong.append(f"{path} imports {name}")
    assert wrong == []
