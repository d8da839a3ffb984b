"""Public names, and names of modules and functions in text: each of them can be imported.

A text is any file of the repository that names modules. Nothing here is kept data but the list of public names.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import lastgood

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = [
    "CheckFreq",
    "Checkmate",
    "Checkpointer",
    "PCcheck",
    "RngState",
    "SyncCheckpointer",
    "checkpointer_class",
    "checkpointer_names",
    "state_digest",
]
PLACES = (
    *("src", "tests", "docs", "workflow", "benchmarks", "evaluation", "install", "config", "profiles", ".ci"),
    *("pyproject.toml", "README.md", "CONTRIBUTING.md", "Snakefile", "install.sh", ".github"),
)
TEXTS = (".py", ".md", ".yaml", ".yml", ".toml", ".smk", ".sh", ".rst", ".sbatch", ".json", "")

FUNCTION = re.compile(r"\blastgood(?:\.\w+)*:[A-Za-z_]\w*(?![\w/])")
RUN_MODULE = re.compile(r"""-m["',\s]+(lastgood(?:\.\w+)+)""")
QUOTED = re.compile(r"""["'](lastgood\.\w+\.\w+(?:\.\w+)*)["']""")
IMPORT = re.compile(r"(?:^|[\s\"'>;])(?:from|import) +(lastgood(?:\.\w+)*)")
IMPORTED = re.compile(r"from +(lastgood(?:\.\w+)*) +import +(\((?:[^()]*)\)|[\w, ]+)")
NO_MODULE = re.compile(r"lastgood\.block\.\w+")  # a key in checkpoints


def texts() -> Iterator[tuple[Path, str]]:
    for place in PLACES:
        top = ROOT / place
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            if path.suffix in TEXTS and path.is_file() and "tests/golden" not in path.as_posix():
                yield path.relative_to(ROOT), path.read_text(encoding="utf-8", errors="replace")


def found(pattern: re.Pattern[str], *suffixes: str) -> dict[str, Path]:
    """What the first group (else all) of `pattern` matches, and the first file with it."""
    names: dict[str, Path] = {}
    for path, text in texts():
        if not suffixes or path.suffix in suffixes:
            for match in pattern.finditer(text):
                names.setdefault(match[match.lastindex or 0], path)
    return names


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def resolves(name: str) -> bool:
    """Whether ``module`` or ``module.attribute...`` or ``module:attribute`` is there."""
    module, _, attribute = name.partition(":")
    attributes = [attribute] if attribute else []
    while not is_module(module):
        module, _, last = module.rpartition(".")
        attributes.insert(0, last)
        if not module:
            return False
    here = importlib.import_module(module) if attributes else None
    for one in attributes:
        if not hasattr(here, one):
            return False
        here = getattr(here, one)
    return True


def test_the_public_names_are_there():
    assert set(PUBLIC) <= set(lastgood.__all__)
    assert all(hasattr(lastgood, name) for name in lastgood.__all__)


@pytest.mark.parametrize(("pattern", "at_least"), [(FUNCTION, 20), (RUN_MODULE, 6), (QUOTED, 20), (IMPORT, 100)])
def test_what_texts_name_is_there(pattern, at_least):
    names = {name: path for name, path in found(pattern).items() if not NO_MODULE.fullmatch(name)}
    assert len(names) >= at_least, "the pattern no longer finds what it is for"
    assert [f"{path}: {name}" for name, path in names.items() if not resolves(name)] == []


def test_what_documentation_imports_is_there():
    wanted = {}
    for path, text in texts():
        if path.suffix == ".md":
            for module, names in IMPORTED.findall(text):
                for name in re.findall(r"\w+", re.sub(r" as \w+", "", names)):
                    wanted[f"{module}:{name}"] = path
    assert len(wanted) >= 10
    assert [f"{path}: {name}" for name, path in wanted.items() if not resolves(name)] == []


def test_what_is_not_there_is_found_out():
    assert resolves("lastgood.cli:main") and resolves("lastgood.units.MIB") and resolves("lastgood.units")
    for name in ("lastgood.cli:nothing", "lastgood.nothing", "lastgood.units.NOTHING", "lastgood.nothing:main"):
        assert not resolves(name)
