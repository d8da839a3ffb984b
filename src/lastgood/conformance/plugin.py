"""What pytest loads of Lastgood in every session (entry point ``pytest11``): the suite's options and markers."""

from __future__ import annotations

import pytest

__all__ = ["pytest_addoption", "pytest_configure"]

pytest.register_assert_rewrite(
    *(
        f"lastgood.conformance.{name}"
        for name in ("promises", "fixtures", "workload_promises", "trace_promises", "machine_promises")
    )
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Which systems are tested, and how often they are killed."""
    group = parser.getgroup("lastgood", "Lastgood's conformance suite (pytest --pyargs lastgood.conformance)")
    group.addoption(
        "--checkpointer",
        action="append",
        default=[],
        metavar="NAME",
        help="Test this checkpointing system, by its name among the entry points of lastgood.checkpointers; may be "
        "given several times.",
    )
    group.addoption(
        "--workload",
        action="append",
        default=[],
        metavar="MODULE:FUNCTION",
        help="Test the workload that this function makes of a seed and a device; may be given several times.",
    )
    group.addoption(
        "--trace-file", action="append", default=[], metavar="FILE", help="Test this trace of a cluster's machines."
    )
    group.addoption(
        "--machine",
        action="append",
        default=[],
        metavar="FOLDER",
        help="Test this machine, with a folder on the disk that will hold its checkpoints.",
    )
    group.addoption(
        "--kills", type=int, default=4, metavar="N", help="How often a training is killed and restored (default: 4)."
    )
    group.addoption(
        "--answer-s",
        type=float,
        default=60.0,
        metavar="S",
        help="Seconds after which a wait counts as one without an end (default: 60).",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Name the markers of the suite."""
    config.addinivalue_line("markers", "promise: the promise of a checkpointing system that is tested")
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
