"""What the ranks of torch.distributed began at: none of them must begin again while others resume.

Ranks that keep their checkpoints on disks of their own see no folder but theirs. Each notes where it begins in the
key-value store of torch's process group when it attaches, and looks at what the others noted in its first steps: the
first exchange of gradients is over by then, so that every rank which attaches has done so. Nobody waits, so a rank
alone may attach as well.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lastgood.errors import CorruptCheckpoint, MismatchError
from lastgood.text import parse_json
from lastgood.world import world_of_torch

__all__ = ["Beginnings"]

_log = logging.getLogger("lastgood")

_LOOKS = 4
_MOST_NAMED = 4
_MOST_BYTES = 64 << 10


class Beginnings:
    """Where one rank begins, told to those that attach the same system to parts of the same names.

    Without torch.distributed it does nothing.
    """

    def __init__(self, system: str, parts: Iterable[str], directory: Path, step: int | None) -> None:
        """`step` is what was resumed; None if the training begins again."""
        self._system = system
        self._mine = "anew" if step is None else str(step)
        self._looks_left = _LOOKS
        self._fault: str | None = None
        self._store: Any = None
        self._rank, self._ranks = world_of_torch()
        if self._ranks == 1:
            return
        try:
            from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

            store = PrefixStore(f"lastgood/beginnings/{system}/{','.join(sorted(parts))}", _get_default_store())
            # One after another in a process; ranks make as many.
            number = store.add(f"made/{self._rank}", 1)
            self._store = PrefixStore(str(number), store)
            self._store.set(f"of/{self._rank}", json.dumps([step, str(directory)]))
            self._store.add(f"at/{self._mine}", 1)
            self._store.add("all", 1)  # last: whoever is counted here can be read
        except Exception as error:  # torch's own, of many kinds: without a store nothing can be compared
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        _log.debug("%s: the ranks' beginnings are not compared: %s", self._system, error)
        self._store = None

    def compare(self) -> None:
        """Raise MismatchError if some ranks resumed and others began again; the first calls look.

        Ranks that resumed at different steps are only told: systems that do not agree on a step cannot do better.
        """
        if self._fault is not None:
            raise MismatchError(self._fault)
        if self._store is None:
            return
        self._looks_left -= 1
        try:
            alike = self._store.add("all", 0) <= self._store.add(f"at/{self._mine}", 0)
            began = {} if alike else self._began()
        except Exception as error:  # as above
            self._give_up(error)
            return
        if began:
            self._judge(began)
        if not self._looks_left:
            self._store = None

    def _began(self) -> dict[int, tuple[int | None, str]]:
        """Step (None: anew) and directory of each rank that has attached."""
        keys = {rank: f"of/{rank}" for rank in range(self._ranks)}
        return {rank: _read(self._store.get(key), rank) for rank, key in keys.items() if self._store.check([key])}

    def _judge(self, began: dict[int, tuple[int | None, str]]) -> None:
        anew = [f"rank {rank} ({where})" for rank, (step, where) in began.items() if step is None]
        resumed = [f"rank {rank} at step {step} ({where})" for rank, (step, where) in began.items() if step is not None]
        if anew and resumed:
            self._fault = (
                f"{self._system}: {_listed(anew)} found no checkpoint and began at step 0, while others resumed: "
                f"{_listed(resumed)}. Bring the checkpoints of the first ones back; or, to begin again, move those of "
                "all ranks away"
            )
            raise MismatchError(self._fault)
        if len({step for step, _ in began.values()}) > 1:
            self._looks_left = 0
            _log.warning(
                "%s: ranks resumed at different steps: %s; with attach(resume_step=...) all take the same one, while "
                "each still has it",
                self._system,
                _listed(resumed),
            )


def _read(note: bytes, rank: int) -> tuple[int | None, str]:
    what = f"what rank {rank} noted of its beginning"
    match parse_json(note, what, most_bytes=_MOST_BYTES, half_pairs=True):
        case [None | int() as step, str(where)]:
            return step, where
    raise CorruptCheckpoint(f"{what}: {note[:80]!r} is no step with its directory")


def _listed(ranks: list[str]) -> str:
    more = len(ranks) - _MOST_NAMED
    return ", ".join(ranks[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
