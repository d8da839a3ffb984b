"""A testbed of two nodes for all tests of a session; each test gets it whole, whatever the one before did to it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from lastgood.cluster.testbed.testbed import Testbed, why_no_testbed
from tests.multinode.support.slurm_fixture import slurm  # noqa: F401 - a fixture
from tests.support.folder_marks import mark_folder


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_folder(items, __file__, pytest.mark.measures)


@pytest.fixture(scope="session")
def no_testbed() -> str | None:
    """Why there can be no testbed here, or None; looked at once."""
    return why_no_testbed()


@pytest.fixture
def needs_testbed(no_testbed: str | None) -> None:
    """Skips a test that makes testbeds of its own, where there can be none."""
    if no_testbed is not None:
        pytest.skip(no_testbed)


@pytest.fixture(scope="session")
def shared_bed(no_testbed: str | None) -> Iterator[Testbed]:
    """Not for tests: `bed` is."""
    if no_testbed is not None:
        pytest.skip(no_testbed)
    # A user's testbed, or that of another test session, has another name. The guard ends it if this process is killed.
    with Testbed.up(2, name=f"t{os.getpid()}", guarded=True) as made:
        yield made


@pytest.fixture
def bed(shared_bed: Testbed) -> Testbed:
    """Nodes vm1 and vm2, both up."""
    return Testbed.up(2, name=shared_bed.name)
