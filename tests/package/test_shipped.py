"""What is shipped: a source distribution that builds from its own files, and a wheel that works by itself."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.support.bare import make_environment

ROOT = Path(__file__).resolve().parents[2]
BUILD_SDIST = "import sys; from scikit_build_core.build import build_sdist; print(build_sdist(sys.argv[1]))"


def test_importing_it_loads_nothing_large() -> None:
    code = "import sys; before = set(sys.modules); import lastgood; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = set(done.stdout.split())
    assert {name for name in loaded if name.startswith("lastgood")} <= {"lastgood", "lastgood._lazy", "lastgood._moved"}
    assert len(loaded) < 60, loaded
    assert not loaded & {"numpy", "pydantic", "psutil", "yaml", "rich", "typer", "torch", "safetensors", "asyncio"}


def test_one_wheel_serves_all_later_pythons() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert 'build = ["cp310-manylinux_*", "cp311-manylinux_*", "cp312-manylinux_*"]' in project
    assert 'wheel.py-api = "cp312"' in project
    text = (ROOT / "native" / "CMakeLists.txt").read_text()
    assert "STABLE_ABI" in text and "${SKBUILD_SABI_COMPONENT}" in text


def test_the_workflows_folder_says_what_its_catalog_asks() -> None:
    catalog = yaml.safe_load((ROOT / ".snakemake-workflow-catalog.yml").read_text())
    assert catalog["usage"]["report"] is True
    page = (ROOT / "config" / "README.md").read_text()
    keys = yaml.safe_load((ROOT / "config" / "default.yaml").read_text())
    assert [key for key in keys if f"`{key}`" not in page] == []
    assert (ROOT / "config" / "schema.json").is_file()


def pip(*words: object, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, words)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_source_distribution_builds_a_wheel_that_works_alone(tmp_path: Path) -> None:
    """Without a network, and with nothing of this checkout."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD_SDIST, tmp_path], cwd=ROOT, capture_output=True, text=True, check=True, timeout=600
    )
    name = done.stdout.split()[-1]
    with tarfile.open(tmp_path / name) as archive:
        archive.extractall(tmp_path, filter="data")
    source = tmp_path / name.removesuffix(".tar.gz")
    for needed in ("README.md", "LICENSE", "native/CMakeLists.txt", "src/lastgood/py.typed", "examples/fsdp2/train.py"):
        assert (source / needed).is_file(), needed
    assert not (source / "build").exists() and not (source / ".venv").exists()
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", tmp_path, source, folder=tmp_path)
    (wheel,) = tmp_path.glob("lastgood-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {
        "lastgood/py.typed",
        "lastgood/__init__.pyi",
        "lastgood/_native.pyi",
        "lastgood/conformance/conftest.py",
    } <= names
    assert any(re.fullmatch(r"lastgood/_native\..*\.so", one) for one in names)
    assert not [one for one in names if one.startswith(("tests/", "benchmarks/")) or "/src/" in one]
    python = make_environment(tmp_path / "environment", ("cli",))
    (site,) = (tmp_path / "environment").glob("lib/python*/site-packages")
    for path in site.iterdir():
        if "lastgood" in path.name:
            path.unlink()  # a link to the checkout's own
    (python.parent / "lastgood").unlink()
    pip("--python", python, "install", "--no-deps", "--no-index", wheel, folder=tmp_path)
    tried = subprocess.run(
        [python, source / "install" / "try_installation.py"], cwd=tmp_path, capture_output=True, text=True, timeout=900
    )
    assert tried.returncode == 0, tried.stdout + tried.stderr
    assert "gpt_ddp" in tried.stdout and "step 20" in tried.stdout
