"""Commands that measure take their turn on the machine; a real S3 server for those that need one."""

from __future__ import annotations

import pytest

from tests.support.folder_marks import mark_folder
from tests.support.s3_server import server

__all__ = ["server"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_folder(items, __file__, pytest.mark.measures)
