"""What one rank sends: numbers iterations, and sends runs of gradients to the shadows that own them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal

from lastgood.gradients.layout.layout import GradientLayout
from lastgood.gradients.layout.spans import Span
from lastgood.gradients.link.data_link import DataLink, Ticket

__all__ = ["GradientStream", "Phase", "keep_for_ever"]

_COUNTED = 1024
"""Iterations whose bytes are remembered until somebody asks."""
Phase = Literal["closed", "reduced", "updated"]
"""Of the newest iteration: nothing is open; its gradients are (being) reduced; the optimizer's step has begun."""
_kept_for_ever: list[Any] = []


def keep_for_ever(owners: Iterable[Any]) -> None:
    """Never free this memory: the thread of a connection that was given up has not ended, and may read it still."""
    _kept_for_ever.extend(owners)


class GradientStream:
    """The iterations of one incarnation, on one rank. `base` is the last one before it.

    `close_open` is called if an iteration begins while the one before was neither saved nor closed.
    """

    def __init__(
        self, layout: GradientLayout, links: Sequence[DataLink], base: int, close_open: Callable[[], None]
    ) -> None:
        self.layout = layout
        self.iteration = base
        self.phase: Phase = "closed"
        self.fault: str | None = None
        """Why what was sent for the newest iteration is not what the training used."""
        self.in_order: Callable[[Callable[[], None]], None] = lambda call: call()
        """Calls, after everything that is on its way to `send` now."""
        self._links = links
        self._close_open = close_open
        self._ended = True
        self._lock = threading.Lock()
        self._kept: list[Any] = []
        self._sent: dict[int, int] = {}

    def begin(self) -> int:
        """A new iteration's gradients come now; returns its number."""
        if self.phase != "closed":
            self._close_open()
        self.settle()
        self.iteration += 1
        self.phase, self.fault, self._ended = "reduced", None, False
        with self._lock:
            self._sent.pop(self.iteration - _COUNTED, None)
        # Behind what is on its way still: a connection that is new is not for that, and would end it before it comes.
        for link in self._links:
            self.in_order(partial(link.begin_iteration, self.iteration))
        return self.iteration

    def send(
        self, iteration: int, spans: Iterable[Span], address: int, *, borrowed: bool, keep: Any = None
    ) -> list[Ticket]:
        """Send runs of the memory at `address`, which `keep` owns.

        Borrowed memory is read until its tickets have returned (`settle` waits for all that is kept); other memory is
        copied. Callable from several threads at once. Never raises for a shadow that is slow or gone.
        """
        tickets = []
        count = 0
        for span in spans:
            link = self._links[self.layout.shadow_of(span.bucket)]
            ticket = link.put(iteration, span, address + span.source, borrowed=borrowed)
            if ticket is not None:
                tickets.append(ticket)
                count += span.nbytes
        with self._lock:
            self._sent[iteration] = self._sent.get(iteration, 0) + count
            if keep is not None:
                self._kept.append(keep)
        return tickets

    def take_sent(self, iteration: int) -> int:
        """Bytes of an iteration's gradients that were given to connections since this was asked last.

        All of them once shadows hold the iteration: from a device they come long after its step. Those of many
        iterations ago are forgotten.
        """
        with self._lock:
            return self._sent.pop(iteration, 0)

    def end(self) -> None:
        """This rank sends nothing more for the newest iteration."""
        if not self._ended:
            self._ended = True
            for link in self._links:
                self.in_order(partial(link.end, self.iteration))

    @property
    def lends(self) -> bool:
        """Whether memory was lent since `settle`; it may be read still."""
        return bool(self._kept)

    def settle(self) -> None:
        """Return when no borrowed memory is read any more: it may be overwritten."""
        if self._kept:
            returned = [link.wait_returned() for link in self._links]  # each of them is waited for
            if not all(returned):
                keep_for_ever(self._kept)
            self._kept = []

    @property
    def waited_s(self) -> float:
        """How long the training has waited for room in connections."""
        return sum(link.waited_s for link in self._links)
