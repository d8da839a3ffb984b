"""What a rank's own part of a run is made of; runs over ranks are in test_execute.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from lastgood.checkpointers.gemini.system import Gemini, GeminiOptions
from lastgood.experiments.multirank import part as rank_part
from lastgood.experiments.multirank.part import JoinedPart
from tests.experiments.support.rank_runs import spec_of


def test_ranks_with_peers_agree_in_each_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill between two ranks' saves left them at different steps if they did not."""
    monkeypatch.setattr(rank_part, "dist", SimpleNamespace(get_rank=lambda: 1))
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    found = JoinedPart(spec_of("gemini", nodes=2), restoring=False).checkpointer(tmp_path)
    assert isinstance(found, Gemini) and isinstance(found.options, GeminiOptions)
    assert (found.options.machine, found.options.machines, found.options.peers) == (1, 2, "own")
