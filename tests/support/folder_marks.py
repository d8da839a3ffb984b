"""A marker for all tests of a folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest


def mark_folder(items: Iterable[pytest.Item], conftest: str, mark: pytest.MarkDecorator) -> None:
    """Mark the tests that lie in the folder of a conftest or below it.

    To be called by its `pytest_collection_modifyitems`, before pytest selects by marker (tryfirst).
    """
    folder = Path(conftest).parent
    for item in items:
        if item.path.is_relative_to(folder):
            item.add_marker(mark)
