"""A working folder that is on a disk and has blanks in its name."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lastgood.mounts import lies_in_memory
from tests.multinode.support.slurm_fixture import slurm  # noqa: F401 - a fixture
from tests.support.folder_marks import mark_folder
from tests.workflow.support.workflow_folder import ROOT, WorkflowFolder


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_folder(items, __file__, pytest.mark.measures)


@pytest.fixture(scope="module")
def flow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkflowFolder]:
    if importlib.util.find_spec("snakemake") is None:
        pytest.skip("snakemake is not installed (it needs Python 3.11)")
    base = tmp_path_factory.mktemp("workflow")
    if lies_in_memory(base):
        (ROOT / "build").mkdir(exist_ok=True)
        base = Path(tempfile.mkdtemp(dir=ROOT / "build", prefix="workflow."))
    folder = base / "a folder with blanks"
    folder.mkdir()
    made = WorkflowFolder(folder)
    yield made
    made.end()
    shutil.rmtree(base, ignore_errors=True)
