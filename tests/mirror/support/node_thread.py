"""A mirror node without stages before it: events go in, and it serves at a port of this process."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

from lastgood.gradients.shadow.settings import ShadowSettings
from lastgood.mirror.node.follower import Follower
from lastgood.mirror.node.service import MirrorService
from lastgood.mirror.node.settings import NodeSettings
from lastgood.tokens import read_token
from lastgood.wire.gate import open_listener

__all__ = ["NodeThread", "node_thread"]


class NodeThread:
    """A service in a thread, and a follower for this one."""

    def __init__(self, job, folder: Path, spills: Path | None = None, **settings):
        listener = open_listener("127.0.0.1", 0)
        self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        self.token_file = folder / "token"
        shadow = ShadowSettings(0, 1, spill_directory=spills, timeout_s=30.0)
        self.service = MirrorService(shadow, read_token(self.token_file, make=True), listener)
        given = NodeSettings(**{"bucket_bytes": 512, "wait_s": 30.0, **settings})
        self.follower = Follower(job, self.service.core, self.service.ear, given, "ab" * 16)
        self._thread = threading.Thread(target=self.service.run, daemon=True)
        self._thread.start()

    def hear(self, events) -> None:
        self.follower.hear(events)

    def settle(self) -> None:
        """Return once all that was heard is in the shadow."""
        self.follower.wait_idle(30.0)

    def held(self) -> list[int]:
        self.settle()
        return [saved.step for saved in self.service.core.status().memory]

    @property
    def options(self):
        return {"nodes": [self.address], "token_file": str(self.token_file), "patience_s": 2.0, "timeout_s": 30.0}

    def close(self) -> None:
        self.follower.close()
        self.service.stop()
        self._thread.join(60)
        assert not self._thread.is_alive()


@contextlib.contextmanager
def node_thread(job, folder: Path, **settings):
    node = NodeThread(job, folder, **settings)
    try:
        yield node
    finally:
        node.close()
