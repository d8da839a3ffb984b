"""The texts that the source says: literals that are raised, logged, returned, passed on or named."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "lastgood"
TREES = {path.relative_to(SOURCE): ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}

_DESCRIBING = {"Option", "Argument", "Field", "Typer", "compile", "add_argument", "ArgumentParser"}
"""Their texts describe what may be given; nobody reads them as the answer to an error."""
_VERBS = re.compile(
    r"\b(add|attach|begin|brings?|call|capture|choose|clone|close|copy|export|follows|for|free|give|initialise|install"
    r"|iterate|know|knows|leave|look|makes?|name|needed|needs?|next|pass|put|raise|redistribute|remove|replace|restart"
    r"|restore|run|see|set|skips|starts?|such as|takes?|try|use|wants?|with|without|works|writes?)\b",
    re.IGNORECASE,
)
_COMMAND = r"lastgood|snakemake|pip install|bash|apt-get install|python -m|openssl|chmod|ssh-keygen"
_THINGS = re.compile(
    rf"`(?:{_COMMAND})\b[^`]*`|\b(?:{_COMMAND}) [a-z'\-./\[{{]"  # commands
    r"|`\{\}`|`\{\} --|\bset \{\}"  # commands and variables that a constant names
    r"|(?:^|[\s(`{,])[a-z][a-z_]+=(?=[\w'\"\[{.,;)]|$)"  # keywords
    r"|\b[A-Za-z_.]+\([^()]*\)"  # calls
    r"|(?<![\w$])[A-Z][A-Z0-9]*_[A-Z0-9_]+\b"  # variables
    r"|(?<![\w-])--[a-z][a-z-]*"  # options
)


def text_of(node: ast.AST) -> str | None:
    """A literal's text; what an f-string fills in stands as {}."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "{}" for part in node.values)
    return None


def literals(node: ast.AST) -> Iterator[tuple[int, str]]:
    text = text_of(node)
    if text is not None:
        yield getattr(node, "lineno", 0), text
        return
    for child in ast.iter_child_nodes(node):
        yield from literals(child)


def _says(node: ast.AST) -> bool:
    return isinstance(node, ast.Raise | ast.Return | ast.Assign | ast.AnnAssign | ast.Call)


def _is_sentence(text: str) -> bool:
    """Not a word, nor a program for another machine, or an answer of a protocol."""
    return " " in text and text.count("\n") < 3


def said() -> list[tuple[str, str]]:
    """Every sentence, with the place where it stands."""
    found = {}
    for path, tree in TREES.items():
        for node in filter(_says, ast.walk(tree)):
            found |= {(f"{path}:{line}", text): None for line, text in literals(node) if _is_sentence(text)}
    return list(found)


def _describing(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in _DESCRIBING


def _described() -> set[tuple[str, str]]:
    return {
        (f"{path}:{line}", text)
        for path, tree in TREES.items()
        for node in filter(_describing, ast.walk(tree))
        for line, text in literals(node)
    }


@cache
def suggestions() -> dict[str, list[str]]:
    """Texts that tell a reader to write something (a command, an option, a keyword, a call, a variable), and where."""
    found: dict[str, list[str]] = {}
    described = _described()
    for where, text in said():
        if (where, text) not in described and _THINGS.search(text) and _VERBS.search(text):
            found.setdefault(text, []).append(where)
    return found
