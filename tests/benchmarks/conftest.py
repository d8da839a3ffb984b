from __future__ import annotations

from pathlib import Path

import pytest

from lastgood.mounts import lies_in_memory
from tests.support.folder_marks import mark_folder

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_folder(items, __file__, pytest.mark.measures)


@pytest.fixture(autouse=True)
def _neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks import one another by their plain names, as scripts do."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A folder on a disk: benchmarks refuse memory."""
    if lies_in_memory(tmp_path):
        pytest.skip(f"{tmp_path} lies in memory, where benchmarks refuse to measure; set --basetemp to a disk")
    return tmp_path
