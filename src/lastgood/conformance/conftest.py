"""What `--checkpointer`, `--workload`, `--trace-file` and `--machine` name, for the tests of this folder."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lastgood.checkpointers.base import Checkpointer
from lastgood.checkpointers.registry import checkpointer_class
from lastgood.conformance.fixtures import answer_s, declared_limit, device, file_size_limit, opened
from lastgood.conformance.workload_promises import Build

__all__ = ["answer_s", "declared_limit", "device", "file_size_limit", "opened"]


_NAMED = {
    "system_name": "--checkpointer",
    "workload_name": "--workload",
    "trace_name": "--trace-file",
    "machine_name": "--machine",
}
"""The option that gives what a test is about, by the fixture that asks for it."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test once for each system, workload, trace and machine that is named."""
    for fixture, option in _NAMED.items():
        if fixture in metafunc.fixturenames:
            metafunc.parametrize(fixture, metafunc.config.getoption(option))


@pytest.fixture
def system(system_name: str) -> type[Checkpointer]:
    """The class that is tested."""
    kind = checkpointer_class(system_name)
    reason = kind.unavailable()
    if reason is not None:
        pytest.fail(f"{system_name} cannot be tested here: {reason}")
    return kind


@pytest.fixture
def build(workload_name: str, device: str) -> Build:
    """Makes the workload that ``MODULE:FUNCTION`` names."""
    module, _, function = workload_name.partition(":")
    if not function:
        pytest.fail(f"--workload {workload_name}: give MODULE:FUNCTION, a function of a seed and a device")
    make = getattr(importlib.import_module(module), function)
    return lambda seed: make(seed, device)


@pytest.fixture
def trace_path(trace_name: str) -> Path:
    """The file that is tested."""
    return Path(trace_name)


@pytest.fixture
def place(machine_name: str) -> Iterator[Path]:
    """A fresh folder where the machine keeps its checkpoints."""
    with tempfile.TemporaryDirectory(prefix="lastgood-conformance-", dir=machine_name) as folder:
        yield Path(folder)


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
    """Tests of a kind that is not named are left out. With nothing to test at all, that must not look like success."""
    here = Path(__file__).parent
    given = {fixture for fixture, option in _NAMED.items() if config.getoption(option)}
    ours = [item for item in items if item.path.is_relative_to(here)]
    if ours and not given:
        raise pytest.UsageError("name the system to test: pytest --pyargs lastgood.conformance --checkpointer NAME")
    absent = _NAMED.keys() - given
    unasked = [item for item in ours if absent.intersection(getattr(item, "fixturenames", ()))]
    config.hook.pytest_deselected(items=unasked)
    items[:] = [item for item in items if item not in unasked]
