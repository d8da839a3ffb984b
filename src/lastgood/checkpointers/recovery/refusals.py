"""A rank of torch.distributed that `attach` refuses tells the others, which would else wait for it in a collective.

It notes why in the key-value store of torch's process group. A rank that comes later raises it in its own `attach`; one
that has attached looks there in a thread, until all ranks have: in a collective no Python code of its main thread runs.
If the refused rank does not attach after all within `RETRY_S`, the next `step` or `save` raises; a process that does
not come to one either ends as by SIGTERM, with the reason in its log. Nobody waits for ranks that never attach.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
import time
import weakref
from typing import Any

from lastgood.errors import CorruptCheckpoint, MismatchError
from lastgood.text import parse_json
from lastgood.world import world_of_torch

__all__ = ["HEARD_S", "RETRY_S", "Refusals"]

_log = logging.getLogger("lastgood")

RETRY_S = 10.0
"""For a rank that was refused to be attached after all, for instance with another option."""
HEARD_S = 5.0
"""For the others to hear of a refusal, before the process that was refused may end, and torch's store with it."""
_RAISE_S = 2.0
"""For the training's thread to come to a step, or a save, and raise."""
_POLL_S = 0.2
_MOST_REASON = 2000
_MOST_BYTES = 64 << 10


class Refusals:
    """What ranks tell each other of refusals; one for each call of `attach`. Without torch.distributed it does nothing.

    Making one takes back what this rank told before: it tries again.
    """

    def __init__(self, system: str) -> None:
        self._system = system
        self._fault: str | None = None
        self._ended = threading.Event()
        """The training was attached no longer, or has raised it."""
        self._store: Any = None
        self._rank, self._ranks = world_of_torch()
        if self._ranks == 1:
            return
        try:
            self._store = _own_store()
            if self._reason(self._rank) is not None:
                self._store.set(f"refused/{self._rank}", "")
                self._store.add("refusals", -1)
        except Exception as error:  # torch's own, of many kinds: without a store nothing can be told
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        _log.debug("%s: ranks do not hear of refusals: %s", self._system, error)
        self._store = None

    def raise_earlier(self) -> None:
        """Raise MismatchError if another rank was refused before, and does not try again within `RETRY_S`."""
        try:
            if self._store is not None:
                self._fault = self._lasting(self._ended)
        except Exception as error:  # as above
            self._give_up(error)
        self.raise_fault()

    def raise_fault(self) -> None:
        """Raise MismatchError if it is known that another rank was refused."""
        if self._fault is not None:
            self._ended.set()
            raise MismatchError(self._fault)

    def tell(self, why: Exception) -> None:
        """This rank was refused: tell the others, and wait until those that have come so far know it. Never raises."""
        if self._store is None or self._fault is not None:  # what another told is known
            return
        try:
            reason = f"{type(why).__name__}: {why}"[:_MOST_REASON]
            self._store.set(f"refused/{self._rank}", json.dumps(reason))
            self._store.add("refusals", 1)
            self._wait_heard()
        except Exception as error:  # as above
            self._give_up(error)

    def _wait_heard(self) -> None:
        """Until all others know it, or were refused as well: torch's store may end with this process."""
        others = {rank for rank in range(self._ranks) if rank != self._rank}
        deadline = time.monotonic() + HEARD_S
        while others and time.monotonic() < deadline:
            others -= {
                rank
                for rank in others
                if self._store.check([f"heard/{rank}"]) or self._store.check([f"refused/{rank}"])
            }
            time.sleep(_POLL_S / 4)

    def watch(self) -> None:
        """This rank is attached: look for refusals of others until all are, or `close`."""
        if self._store is None:
            return
        try:
            self._store.set(f"attached/{self._rank}", "")
        except Exception as error:  # as above
            self._give_up(error)
            return
        threading.Thread(
            target=_watch, args=(weakref.ref(self), self._ended), name="lastgood-ranks", daemon=True
        ).start()

    def close(self) -> None:
        """The training ends, or no rank can be missing any more."""
        self._ended.set()

    # -- in the thread ---------------------------------------------------------------------------------------------

    def look(self) -> bool:
        """Whether there is nothing more to look for."""
        try:
            if self._store is None:
                return True
            found = self._lasting(self._ended)
            if found is None:
                keys = [f"attached/{rank}" for rank in range(self._ranks)]
                return bool(self._store.check(keys))
        except Exception as error:  # as above; also the end of the process that has the store
            self._give_up(error)
            return True
        self._fault = found
        _log.error("%s", found)
        if not self._ended.wait(_RAISE_S):
            with contextlib.suppress(Exception):  # torch's own; the store may have ended first
                self._wait_heard()
            os.kill(os.getpid(), signal.SIGTERM)
        return True

    def _lasting(self, ended: threading.Event) -> str | None:
        """What to say of ranks that are refused, and stay so for `RETRY_S`; None if there are none."""
        refused = self._refused()
        if not refused:
            return None
        rank, why = next(iter(refused.items()))
        _log.warning("%s: rank %d of %d was refused: %s", self._system, rank, self._ranks, why)
        deadline = time.monotonic() + RETRY_S
        try:
            self._store.set(f"heard/{self._rank}", "")
            while refused and time.monotonic() < deadline:
                if ended.wait(_POLL_S):
                    return None
                refused = self._refused()
        except Exception as error:  # the store has ended with its process, and no rank tries again
            self._give_up(error)
        if not refused:
            return None
        rank, why = next(iter(refused.items()))
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        return (
            f"{self._system}: rank {rank} of {self._ranks}{more} was refused when it attached, and this rank "
            f"{self._rank} ends as well: {why}"
        )

    def _refused(self) -> dict[int, str]:
        """The other ranks that are refused now, and why."""
        if self._store.add("refusals", 0) <= 0:
            return {}
        reasons = {rank: self._reason(rank) for rank in range(self._ranks) if rank != self._rank}
        return {rank: why for rank, why in reasons.items() if why is not None}

    def _reason(self, rank: int) -> str | None:
        key = f"refused/{rank}"
        content = self._store.get(key) if self._store.check([key]) else b""
        if not content:
            return None
        what = f"what rank {rank} was refused for"
        reason = parse_json(content, what, most_bytes=_MOST_BYTES, half_pairs=True)
        if not isinstance(reason, str):
            raise CorruptCheckpoint(f"{what}: {content[:80]!r} is no text")
        return reason


def _own_store() -> Any:
    """Torch's store under a prefix of its own; over a connection of its own, as others wait on theirs in calls."""
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    store = _get_default_store()
    if isinstance(getattr(store, "_underlying_non_prefix_store", None), TCPStore):
        store = store.clone()
    return PrefixStore("lastgood/refusals", store)


def _watch(alive: weakref.ref[Refusals], ended: threading.Event) -> None:
    """In a thread; it keeps nothing alive that was dropped without `close`."""
    while not ended.wait(_POLL_S):
        refusals = alive()
        if refusals is None or refusals.look():
            return
        del refusals
