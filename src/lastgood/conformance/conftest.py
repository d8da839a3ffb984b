"""The systems that `--checkpointer` names, for the tests of this folder."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lastgood.checkpointers.base import Checkpointer
from lastgood.checkpointers.registry import checkpointer_class
from lastgood.conformance.fixtures import answer_s, declared_limit, device, file_size_limit, opened

__all__ = ["answer_s", "declared_limit", "device", "file_size_limit", "opened"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test once for each system."""
    if "system_name" in metafunc.fixturenames:
        metafunc.parametrize("system_name", metafunc.config.getoption("--checkpointer"))


@pytest.fixture
def system(system_name: str) -> type[Checkpointer]:
    """The class that is tested."""
    kind = checkpointer_class(system_name)
    reason = kind.unavailable()
    if reason is not None:
        pytest.fail(f"{system_name} cannot be tested here: {reason}")
    return kind


@pytest.fixture
def kills(pytestconfig: pytest.Config) -> int:
    """How often a training is killed."""
    return int(pytestconfig.getoption("--kills"))


@pytest.fixture
def run_program() -> Callable[[list[str], float], tuple[int, str]]:
    """Runs a program of Python with its arguments, for so many seconds at most; its exit status and what it said."""

    def run(words: list[str], timeout_s: float) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s, text=True
        )
        return done.returncode, done.stdout

    return run


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a system there is nothing to test, and that must not look like success."""
    here = Path(__file__).parent
    if any(item.path.is_relative_to(here) for item in items) and not config.getoption("--checkpointer"):
        raise pytest.UsageError("name the system to test: pytest --pyargs lastgood.conformance --checkpointer NAME")
