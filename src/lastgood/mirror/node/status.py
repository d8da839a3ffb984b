"""How a mirror node stands, as a file in its folder: for `mirror status`, and for whoever else looks."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lastgood.errors import CheckpointError, CorruptCheckpoint, LastgoodError
from lastgood.files import read_bounded, storage_errors, write_atomically
from lastgood.locks import lock_holders
from lastgood.text import parse_json

__all__ = ["LOCK_FILE", "STATUS_FILE", "NodeStatus", "Stands", "read_status", "runs_here", "write_status"]

STATUS_FILE = "status.json"
LOCK_FILE = "lock"
_VERSION = 1
_MOST_BYTES = 1 << 20
STALE_S = 10.0
"""A node that has not written its status for so long has ended, or is stuck."""

Stands = Literal["waits", "follows", "blind", "ended"]


@dataclass(frozen=True)
class NodeStatus:
    """What a node says of itself."""

    pid: int
    address: str
    """Where it serves."""
    stands: Stands
    """``waits``: no training was seen yet."""
    job: str | None
    incarnation: int
    iteration: int
    """The newest step whose gradients are all there."""
    held: tuple[int, ...]
    """Steps that can be given back from memory."""
    durable: tuple[int, ...]
    blind: str = ""
    """Since which step, and why."""
    ranks: tuple[tuple[str, int], ...] = ()
    """Addresses and ranks, as the traffic shows them."""
    counters: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Of each stage."""
    written: float = 0.0
    """Seconds since 1970."""

    @property
    def stale(self) -> bool:
        """Whether the node has ended without saying so, or is stuck."""
        return self.stands != "ended" and (time.time() - self.written > STALE_S or not _alive(self.pid))


def write_status(directory: Path, status: NodeStatus) -> None:
    """Raises StorageError."""
    content = {"version": _VERSION, **status.__dict__, "written": time.time()}
    path = directory / STATUS_FILE
    with storage_errors(path, "writing the status"):
        write_atomically(path, (json.dumps(content) + "\n").encode())


def read_status(directory: Path) -> NodeStatus:
    """Raises CheckpointError if there is none, or it cannot be read."""
    path = directory / STATUS_FILE
    try:
        content: dict[str, Any] = parse_json(read_bounded(path, _MOST_BYTES), str(path), most_bytes=_MOST_BYTES)
        if content.pop("version") != _VERSION:
            raise ValueError("another version")
        for key in ("held", "durable"):
            content[key] = tuple(content[key])
        content["ranks"] = tuple((str(address), int(rank)) for address, rank in content["ranks"])
        return NodeStatus(**content)
    except FileNotFoundError as error:
        raise CheckpointError(f"{directory}: no mirror node has run here") from error
    except (OSError, LastgoodError, CorruptCheckpoint, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def runs_here(directory: Path, pid: int) -> bool:
    """Whether this process holds the folder of a node."""
    try:
        with (directory / LOCK_FILE).open("rb") as file:
            return pid in lock_holders(file.fileno())
    except OSError:
        return False


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
