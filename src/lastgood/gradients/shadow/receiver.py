"""What fills a shadow's gradient slots: trainers' connections, or whoever else knows where gradients belong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from lastgood import _native
from lastgood.gradients.layout.layout import GradientLayout
from lastgood.gradients.shadow.memory import ShadowMemory
from lastgood.gradients.shadow.settings import ShadowSettings

__all__ = ["GradientReceiver", "OpenReceiver", "ReceiverEvent", "open_native_receiver"]


class ReceiverEvent(Protocol):
    """What happened; see `_native.ReceiverEvent`."""

    @property
    def kind(self) -> Literal["complete", "end", "closed"]:
        """A bucket is held; a rank sends nothing more of an iteration; a connection is read no more."""

    @property
    def connection(self) -> int:
        """The number that `add` gave."""

    @property
    def rank(self) -> int:
        """The connection's."""

    @property
    def bucket(self) -> int:
        """Of ``complete``."""

    @property
    def iteration(self) -> int:
        """Of ``complete`` and ``end``."""

    @property
    def cause(self) -> str:
        """Of ``closed``, if it was not the other side's wish."""


class GradientReceiver(Protocol):
    """Brings gradients into the slots of a `ShadowMemory`. All methods may be called from any thread."""

    def add(self, fd: int, rank: int) -> int:
        """Read records of a rank from a connection. Raises MismatchError if gradients come another way."""

    def set_first(self, bucket: int, first: int) -> bool:
        """From now on a bucket holds iteration `first` and those after it; False if those may have been forgotten."""

    def reset(self, bucket: int) -> None:
        """From now on a bucket holds the newest iterations, whatever they are."""

    def begin(self, epoch: int, *, keep: bool) -> None:
        """Another incarnation: forget what is not complete; without `keep`, all."""

    def complete(self, bucket: int, iteration: int) -> bool:
        """Whether all bytes of a bucket are held for an iteration."""

    def poll(self, timeout_s: float) -> Sequence[ReceiverEvent]:
        """What happened, oldest first; waits for the first event."""

    def counters(self) -> Mapping[str, float]:
        """What was received so far, by name."""

    def refused(self) -> Mapping[str, int]:
        """What was refused, by cause."""

    def close(self, timeout_s: float) -> bool:
        """Write to memory no more; False if that does not end in time."""


class OpenReceiver(Protocol):
    """Makes the receiver for a layout's memory, which it may write to until it is closed."""

    def __call__(
        self, job: str, incarnation: int, layout: GradientLayout, memory: ShadowMemory, settings: ShadowSettings
    ) -> GradientReceiver:
        """`job` in hex; bucket b of iteration i lies in slot i mod `settings.slots` of `memory`."""


def open_native_receiver(
    job: str, incarnation: int, layout: GradientLayout, memory: ShadowMemory, settings: ShadowSettings
) -> GradientReceiver:
    """Of records on trainers' connections."""
    return _native.Receiver(
        int.from_bytes(bytes.fromhex(job)[:8], "little"),
        incarnation,
        [(bucket, layout.buckets[bucket].nbytes, layout.buckets[bucket].dtype) for bucket in memory.owned],
        memory.slot_addresses(),
        threads=settings.receive_threads,
        cpus=settings.receive_cpus,
        stall_s=settings.timeout_s,
        owner=memory,
    )
