"""The switch between two nodes: the trainers send what the plain ring sends, and the shadows get every byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from lastgood.cluster.testbed.testbed import Testbed

pytestmark = [pytest.mark.root, pytest.mark.slow]


def test_trainers_send_no_more_than_by_a_plain_ring(
    bed: Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    from ring_egress import WAYS, measure_on

    order = [(0, way) for way in WAYS]
    options = {"elements": 2_000_003, "shadows": 2, "repeats": 3, "order": order}
    rows, counters = measure_on(bed, tmp_path, options)
    assert len({row["digest"] for rank in rows for row in rank if row["way"] != "gloo"}) == 1
    for rank in rows:
        egress = {row["way"]: row["egress_bytes"] for row in rank}
        # Bytes of the interface: that of two ranks is one tensor, and less than 2 % more with all headers.
        assert 1 <= egress["switch"] / (2_000_003 * 4) < 1.02
        assert egress["switch"] / egress["gloo"] < 1.02
    assert counters["last_iteration_whole"]
    assert not counters["copies"].get("dropped_records")
    assert counters["copies"]["sent_bytes"] > 4 * 2_000_003 * 4
