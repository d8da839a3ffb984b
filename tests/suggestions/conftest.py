"""Many of the commands that are followed measure, and take their turn on the machine."""

from __future__ import annotations

import pytest

from tests.support.folder_marks import mark_folder


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_folder(items, __file__, pytest.mark.measures)
