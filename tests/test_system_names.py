"""No part of the source outside a system's own room asks for that system by name: what it is stands on its class.

Quoted names of systems are looked for in comparisons, dictionaries, sets, `match` and subscripts, where a name decides
something, and in constants. Names in texts are free.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import lastgood
from lastgood.checkpointers.known import BUILT_IN

ROOT = Path(lastgood.__file__).parent
REGISTRY = ROOT / "checkpointers" / "known.py"
NAMES = frozenset({*BUILT_IN, "flowcheck", "stellatrain"})
WORDS = frozenset({"none", "sync"})
"""Names that are ordinary values too: they count only beside an expression that speaks of a system."""

ALLOWED = {
    ("checkpointers/export/formats.py", "dcp"): "the name of a format",
    ("integrations/dcp/writer.py", "dcp"): "the name of a layout of files",
    ("experiments/figures/registry.py", "checkmate"): "a figure's name",
    ("experiments/figures/registry.py", "dcp"): "a figure's name",
    ("experiments/figures/registry.py", "flowcheck"): "a figure's name",
    ("experiments/figures/registry.py", "stellatrain"): "a figure's name",
    ("experiments/records/dcp.py", "dcp"): "the name of a figure's panel",
    ("experiments/plan/node_checks.py", "checkmate"): "a figure's section of the configuration",
    ("experiments/plan/variants.py", "checkmate"): "a figure's section of the configuration",
}
PAPERS = {
    "claims": "rules on the numbers that a paper states of a system",
    "config/schema.py": "figures 12 to 14 need PCcheck's options",
    "plan/machine_checks.py": "figure 14 varies PCcheck's pool",
    "plan/variants.py": "figures 11 to 14 vary PCcheck's options",
    "plots/captions.py": "captions of figures 11 to 14",
    "tables/checkmate.py": "Checkmate's figure",
    "flowcheck": "FlowCheck's figure",
    "tables/flowcheck.py": "FlowCheck's figure",
    "tables/goodput.py": "PCcheck's published gains",
    "tables/optimizer.py": "Checkmate's figure",
}
"""Who may ask which system a paper is about (experiments/systems/papers.py)."""


QUOTED = re.compile(f"[\"']({'|'.join(sorted(NAMES))})[\"']")


def rooms_of(system: str) -> tuple[Path, ...]:
    """The file of a system, or its folder if it has one of its own."""
    path = ROOT.parent.joinpath(*BUILT_IN[system].partition(":")[0].split(".")) if system in BUILT_IN else ROOT
    return (path.parent,) if path.name == "system" else (path.with_suffix(".py"),)


def strings(node: ast.AST | None) -> Iterator[str]:
    """Quoted texts of a value, and of a tuple, list or set of values."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.Tuple | ast.List | ast.Set):
        for one in node.elts:
            yield from strings(one)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("frozenset", "set"):
        for argument in node.args:
            yield from strings(argument)


def decisions(tree: ast.AST) -> Iterator[tuple[int, str, ast.AST]]:
    """Line, quoted text, and where it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            for side in sides:
                yield from ((node.lineno, text, node) for text in strings(side))
        elif isinstance(node, ast.BinOp):
            yield from ((node.lineno, text, node) for side in (node.left, node.right) for text in sets(side))
        elif isinstance(node, ast.Dict):
            both = [*(key for key in node.keys if key is not None), *node.values]
            yield from ((node.lineno, text, node) for one in both for text in strings(one))
        elif isinstance(node, ast.MatchValue):
            yield from ((node.lineno, text, node) for text in strings(node.value))
        elif isinstance(node, ast.Subscript):
            yield from ((node.lineno, text, node) for text in strings(node.slice))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("get", "pop", "startswith", "setdefault", "__contains__", "isin", "eq"):
                yield from ((node.lineno, text, node) for one in node.args[:1] for text in strings(one))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            yield from ((node.lineno, text, node) for text in strings(node.value))


def sets(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Set):
        yield from strings(node)


def branches_in(path: Path, text: str) -> list[str]:
    """``file:line: name`` for each decision by a system's name."""
    found: list[str] = []
    if not QUOTED.search(text):
        return found
    where = path.relative_to(ROOT).as_posix()
    for line, name, against in decisions(ast.parse(text)):
        if name not in NAMES or (where, name) in ALLOWED or path == REGISTRY:
            continue
        if name in WORDS and "system" not in ast.unparse(against).lower():
            continue
        if any(path == room or room in path.parents for room in rooms_of(name) if room != ROOT):
            continue
        if where == "experiments/systems/papers.py":
            continue
        found.append(f"{where}:{line}: {name}")
    return found


def test_nothing_is_decided_by_a_systems_name() -> None:
    assert [found for path in sorted(ROOT.rglob("*.py")) for found in branches_in(path, path.read_text())] == []


def test_systems_of_papers_are_asked_for_where_papers_are_compared_only() -> None:
    asking = {
        path.relative_to(ROOT / "experiments").as_posix()
        for path in ROOT.rglob("*.py")
        if "systems.papers" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and node.module == "lastgood.experiments.systems.papers"
    }
    allowed = {file for file in asking if file in PAPERS or file.split("/")[0] in PAPERS}
    assert asking == allowed
    assert {one for one in PAPERS if not any(file == one or file.startswith(f"{one}/") for file in asking)} == set()


def test_what_is_allowed_is_there() -> None:
    there = {(file, name) for file, _ in ALLOWED for _, name, _ in decisions(ast.parse((ROOT / file).read_text()))}
    assert ALLOWED.keys() - there == set()


@pytest.mark.parametrize(
    "line",
    [
        'if system == "gemini": pass',
        'if spec.system != "none": pass',
        'if "checkmate" == name: pass',
        'if system in ("gpm", "dcp"): pass',
        'if system in {"sync", "x"}: pass',
        'costs = {"pccheck": 1}',
        'label = {1: "gpm"}[number]',
        'seconds = costs["gemini"]',
        'found.pop("gemini", None)',
        'SWEPT = "pccheck"',
        '_EARLIER: Final = frozenset({"checkfreq"})',
        'shown = set(systems) - {"none"}',
        'match system:\n    case "checkfreq": pass',
    ],
)
def test_a_branch_is_found(line: str) -> None:
    assert branches_in(ROOT / "experiments" / "x.py", line) != []


@pytest.mark.parametrize(
    "line",
    ['if spec.parallel == "none": pass', 'if mode == "sync": pass', 'raise Error("gemini needs a peer")', "a = b - c"],
)
def test_what_is_no_branch_is_left_alone(line: str) -> None:
    assert branches_in(ROOT / "experiments" / "x.py", line) == []


def test_a_systems_own_room_may_name_it() -> None:
    assert branches_in(ROOT / "checkpointers" / "gemini" / "x.py", 'if name == "gemini": pass') == []
    assert branches_in(ROOT / "checkpointers" / "pccheck" / "x.py", 'if name == "gemini": pass') != []
