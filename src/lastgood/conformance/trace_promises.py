"""What a trace of a cluster's machines must hold to be lived through, as tests. docs/conformance.md lists them.

Whoever collects this class gives the fixture `trace_path`.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from lastgood.errors import LastgoodError
from lastgood.experiments.traces.trace import SpotTrace, load_trace, parse_trace

__all__ = ["TestTrace"]

_WINDOW_S = 60.0
_FAILURES = 5


@pytest.fixture
def trace(trace_path: Path) -> SpotTrace:
    """The trace, read as every command reads it."""
    try:
        return load_trace(trace_path)
    except LastgoodError as error:
        pytest.fail(str(error))


class TestTrace:
    """A trace is read, says where it comes from, and has failures that a run can live through."""

    def test_it_reads_back_as_it_is_written(self, trace: SpotTrace) -> None:
        """So nothing of the file was passed over."""
        assert parse_trace(trace.text(), "the trace as it is written") == trace

    def test_it_says_where_it_comes_from(self, trace: SpotTrace) -> None:
        """In a comment: a cluster and its time, or the rule and the seed that made it."""
        assert any(line.strip() for line in trace.comments), "no comment says where the trace comes from: # TEXT"

    def test_it_has_failures_in_their_order(self, trace: SpotTrace) -> None:
        """One at least, each within the trace."""
        times = trace.failure_times_s()
        assert times, "no failure: between no two samples do four GPUs or more come or go"
        assert len(times) == trace.failures
        assert all(before <= after for before, after in pairwise(times))
        assert times[0] > 0 and times[-1] <= trace.duration_s

    def test_a_run_can_live_through_a_part_of_it(self, trace: SpotTrace) -> None:
        """Pressed into a minute it has failures, and time to train between them."""
        stretch = trace.stretch(_WINDOW_S, _FAILURES)
        assert 1 <= len(stretch.failures_s) <= _FAILURES, "no part of it has one to five failures"
        gaps = [after - before for before, after in pairwise((0.0, *stretch.failures_s, _WINDOW_S))]
        assert min(gaps) > 0.01 * _WINDOW_S, f"too close to train between them: {gaps} s apart in a minute"
