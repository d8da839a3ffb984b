"""Systems of several files save to, and restore from, a store that is no folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lastgood.checkpointers.base import Outcome
from lastgood.checkpointers.directory_system import DirectorySystem
from lastgood.checkpointers.registry import checkpointer_class
from lastgood.errors import CorruptCheckpoint
from tests.checkpointers.directories.support.memory_store import MemoryStore

WAYS = [("dcp", {"mode": "sync"}), ("dcp", {"mode": "async_thread"}), ("torchsnapshot", {}), ("nvrx", {})]


@pytest.mark.parametrize(("name", "options"), WAYS)
def test_a_state_goes_through_a_store_in_memory(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    kind = checkpointer_class(name)
    reason = kind.unavailable()
    if reason is not None:
        pytest.skip(reason)
    store = MemoryStore(2)

    def made() -> DirectorySystem:
        checkpointer = kind(tmp_path, **options)
        assert isinstance(checkpointer, DirectorySystem)
        checkpointer._store = store
        return checkpointer

    state = {"x": torch.arange(1000.0), "text": "kept"}
    checkpointer = made()
    checkpointer.start(state)
    for step in (1, 2, 3):
        state["x"] += 1
        checkpointer.save(step)
        checkpointer.drain()
    checkpointer.close()
    assert [event.outcome for event in checkpointer.events] == [Outcome.DURABLE] * 3, checkpointer.events
    assert [one.step for one in store.found()] == [3, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    fresh: dict[str, Any] = {"x": torch.zeros(1000), "text": ""}
    assert made().restore(fresh) == 3
    assert torch.equal(fresh["x"], state["x"]) and fresh["text"] == "kept"
    newest = store._checkpoints[store.found()[0]]
    damaged = max(newest, key=lambda file: len(newest[file]))
    newest[damaged] = newest[damaged][:-1] + bytes([newest[damaged][-1] ^ 1])
    assert made().restore(fresh) == 2
    assert torch.equal(fresh["x"], state["x"] - 1)
    with pytest.raises(CorruptCheckpoint, match="no checkpoint can be read"):
        made().restore(fresh, 3)
