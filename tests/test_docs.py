"""Documents that a program can check: the README's example runs, every option has its row, links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lastgood.checkpointers.registry import checkpointer_class, checkpointer_names
from lastgood.workloads.registry import workload_names, workload_options_class

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("evaluation/*/*.md")])


@pytest.mark.slow
def test_the_example_of_the_readme_runs_and_goes_on_where_it_stopped(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    script = tmp_path / "train.py"
    loop = "while step < 1000:\n"
    assert loop in code
    script.write_text(code.replace(loop, f"print('from', step)\n{loop}", 1).replace("1000", "25"))

    def run():
        return subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    assert run() == "from 0\n"
    assert run() == "from 20\n"


def test_every_option_is_documented():
    rows = [line for line in (ROOT / "docs" / "options.md").read_text().splitlines() if line.startswith("|")]

    def documented(owner, option):
        return any(
            f"`{option}`" in row and re.search(rf"\b(all|{owner})\b", row.split("|")[1]) for row in rows if "`" in row
        )

    options = [(name, key) for name in checkpointer_names() for key in checkpointer_class(name).Options.model_fields]
    options += [(name, key) for name in workload_names() for key in workload_options_class(name).model_fields]
    assert [pair for pair in options if not documented(*pair)] == []


def test_every_system_has_its_row():
    lines = (ROOT / "docs" / "systems.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert {len(row) for row in rows} == {4} and all(all(row) for row in rows)
    assert [name for name in checkpointer_names() if name not in [row[0] for row in rows]] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


ELSEWHERE = {
    *("mine.py", "train.py", "run_vision.py", "run_opt_multinode.py", "ds_to_universal.py", "zero_to_fp32.py"),
    *("benchmark.py", "load.py", "newload.py", "save_and_load.py", "wait.py"),
}
"""A user's own files, and other projects'."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_modules_that_pages_name_are_there(page):
    files = {str(path.relative_to(ROOT)) for path in ROOT.glob("[!.]*/**/*.py")}
    text = page.read_text()
    named = set(re.findall(r"`([\w./]+\.py)`", text)) - ELSEWHERE
    assert [name for name in sorted(named) if not any(f"/{path}".endswith(f"/{name}") for path in files)] == []
    for dotted in sorted(set(re.findall(r"\blastgood(?:\.\w+)+", text))):
        path, *rest = [ROOT / "src" / "lastgood", *dotted.split(".")[1:]]
        while rest and (path / rest[0]).is_dir():
            path /= rest.pop(0)
        if rest and path != ROOT / "src" / "lastgood":  # else a name of the package, or a file's name as lastgood.json
            source = (path / f"{rest[0]}.py") if (path / f"{rest[0]}.py").exists() else path / "__init__.py"
            name = rest[1] if source.name != "__init__.py" and len(rest) > 1 else None
            known = source.read_text() + (path / "__init__.pyi").read_text() if (path / "__init__.pyi").exists() else ""
            known = known or source.read_text()
            assert source.name != "__init__.py" or re.search(rf"\b{rest[0]}\b", known), dotted
            assert name is None or re.search(rf"\b{name}\b", source.read_text()), dotted


def test_where_the_project_lives_is_one_placeholder_that_contributing_explains() -> None:
    placeholder = "URL-OF-THIS-REPOSITORY"
    readme, contributing, project = (
        (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md", "pyproject.toml")
    )
    assert re.findall(r"git clone (\S+)", readme) == [placeholder]
    assert f"| `{placeholder}` |" in contributing
    assert placeholder not in project and "[project.urls]" not in project


def test_the_site_leads_to_every_page_once() -> None:
    named = re.findall(r"^ +- (?:[\w ]+: )?([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(path.name for path in ROOT.glob("docs/*.md"))
