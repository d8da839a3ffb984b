from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lastgood.workloads.data.prepare import DATASETS, prepare_dataset


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All data sets, prepared once."""
    folder = tmp_path_factory.mktemp("data")
    for kind in DATASETS:
        prepare_dataset(kind, folder)
    return folder


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
