"""What CI runs: each test in one of its parts, and parts that there are."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
MEASURES = re.compile(r"warm_runs|slurm_cluster|workflow_folder|mark\.slurm\b|\"-m\", \"snakemake\"|import snakemake")
"""What shows that a module takes its turn on the machine, or starts Slurm or Snakemake."""


def marked(path: Path) -> bool:
    above = [folder / "conftest.py" for folder in path.parents if folder.is_relative_to(ROOT / "tests")]
    return any(one.is_file() and "mark.measures" in one.read_text() for one in [path, *above])


def test_what_measures_carries_the_marker() -> None:
    measuring = [
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if path != Path(__file__) and MEASURES.search(path.read_text())
    ]
    assert len(measuring) > 10
    assert [path for path in measuring if not marked(path)] == []


def test_workflows_name_parts_that_there_are() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    (known,) = re.findall(r"^known=\((.*)\)$", script, re.MULTILINE)
    named: set[str] = set()
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            (command,) = [step["run"] for step in job["steps"] if "run" in step]
            variants = job.get("strategy", {}).get("matrix", {}).get("include", [{}])
            for variant in variants:
                called = command.replace("${{ matrix.parts }}", variant.get("parts", "")).split()
                assert called[:2] == ["bash", ".ci/run"]
                named |= set(called[2:])
    assert named == set(known.split())


def lists_of(part: str) -> list[list[Path]]:
    (lines,) = re.findall(rf"^{part}_lists=\(\n(.*?)^\)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE | re.DOTALL)
    found = [re.fullmatch(r" +'(.*)'", line)[1].split() for line in lines.splitlines()]  # type: ignore[index]
    return [[Path(folder) for folder in one] for one in found]


@pytest.mark.parametrize("part", ["library", "harness"])
def test_no_list_hides_what_a_later_one_has(part: str) -> None:
    """Each leaves out what those before it have."""
    folders = [folder for one in lists_of(part) for folder in one]
    assert all(any((ROOT / folder).rglob("test_*.py")) for folder in folders)
    for number, folder in enumerate(folders):
        assert not any(folder.is_relative_to(earlier) for earlier in folders[:number])


def test_every_test_is_in_a_list() -> None:
    assert lists_of("library")[-1] == [Path("tests")]
    harness = [ROOT / folder for one in lists_of("harness") for folder in one]
    for path in (ROOT / "tests").rglob("test_*.py"):
        if path != Path(__file__) and marked(path):
            assert any(path.is_relative_to(folder) for folder in harness), path


def test_all_tests_in_the_folders_of_harness_measure() -> None:
    """So that library need not look into them."""
    for folder in (folder for one in lists_of("harness") for folder in one):
        assert "mark_folder(items, __file__, pytest.mark.measures)" in (ROOT / folder / "conftest.py").read_text()


def test_every_list_begins_once() -> None:
    (lines,) = re.findall(r"^order=\((.*?)^\)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE | re.DOTALL)
    every = [f"{part} {number}" for part in ("library", "harness") for number in range(len(lists_of(part)))]
    assert sorted(re.findall(r"'(\w+ \d+)'", lines)) == sorted(every)


def test_an_unknown_part_is_refused_by_name() -> None:
    done = subprocess.run(["bash", ".ci/run", "lint", "libary"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "unknown part libary (known: lint smoke library harness sanitize site nightly wheels)" in done.stderr
