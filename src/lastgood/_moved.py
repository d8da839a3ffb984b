"""Imports that earlier documentation shows, whose modules or names are elsewhere now. To be removed in version 0.2.

Each raises an ImportError that says what to write instead.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["MOVED", "install"]

MOVED = {
    "checkpointers.agreement.rank_directory": "from lastgood.checkpointers.rank_directory import rank_directory",
    "checkpointers.archive": "from lastgood.checkpointers.export.archive import Archive",
    "checkpointers.export.load_exported": "from lastgood.checkpointers.export.formats import load_exported",
    "checkpointers.gemini_memory": "from lastgood.checkpointers.gemini import marked_all_reduce",
    "checkpointers.reshard": "from lastgood.checkpointers.ranks.reshard import restore_ranks",
    "checkpointers.snapshot": "from lastgood.checkpointers.copies.host import CopyFence, HostSnapshot",
    "checkpointers.torch_files.TorchFiles": "from lastgood.checkpointers.torch_files.files import TorchFiles",
    "checkpointers.tuned": "from lastgood.checkpointers.pccheck import read_tuning, write_tuning",
    "cluster.launch.launch": "from lastgood.cluster.launch.job import launch",
    "cluster.remote": "from lastgood.cluster.ssh.remote import Remote",
    "cluster.testbed.Testbed": "from lastgood.cluster.testbed.testbed import Testbed",
    "experiments.record": "from lastgood.experiments.records.run import RunRecord",
    "gradients.ddp": "from lastgood.checkpointers.checkmate import checkmate_hook",
    "gradients.ring_hook": "from lastgood.checkpointers.checkmate import RingReducer, ring_all_reduce",
}
"""What was imported, below `lastgood`: a module, or a name of a module that is still there; and the line to write."""


class _Finder:
    """Asked last; also for a name that ``from package import name`` does not find in the package."""

    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raise ImportError for what has moved."""
        del path, target
        package, _, name = fullname.partition(".")
        if package == "lastgood" and name in MOVED:
            raise ImportError(f"{fullname} has moved; write: {MOVED[name]}", name=fullname)
        return None


def install() -> None:
    """Let such imports say what to write."""
    if _Finder not in sys.meta_path:
        sys.meta_path.append(_Finder)
