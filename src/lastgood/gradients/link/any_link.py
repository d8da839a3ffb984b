"""The way from a rank to a shadow, as the conductor uses it: over sockets, or inside one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from lastgood.gradients.layout.layout import GradientLayout
from lastgood.gradients.link.data_link import DataSettings
from lastgood.gradients.protocol.messages import Message, Welcome

__all__ = ["DataWay", "Identity", "Link", "LinkMaker", "Listener"]


@dataclass(frozen=True)
class Identity:
    """Who speaks, about what."""

    job: str
    incarnation: int
    rank: int
    layout: GradientLayout
    adopt: int | None
    """As in Declare; only rank 0 declares."""


class Listener(Protocol):
    """What is told of a shadow, in a thread of its link."""

    def connected(self, shadow: int, welcome: Welcome) -> None:
        """A control connection is open, and the layout is declared."""

    def disconnected(self, shadow: int, why: str) -> None:
        """The control connection is gone."""

    def failing(self, shadow: int, why: str) -> None:
        """A connection could not be made; it is tried again."""

    def refused(self, shadow: int) -> None:
        """Nobody listens at its address: its process has ended."""

    def heard(self, shadow: int, message: Message) -> None:
        """A message of the shadow."""

    def fenced_off(self, shadow: int, incarnation: int) -> None:
        """Another incarnation of this job has begun; this link has ended."""


class DataWay(Protocol):
    """The part of a link that gradients take."""

    patient: bool
    """Whether the training waits for it."""
    cuts: int
    """Connections that were given up."""
    waits: int
    """Times that the training waited for room."""

    @property
    def connected(self) -> bool:
        """Whether the shadow takes gradients."""

    @property
    def sent_bytes(self) -> int:
        """Of gradients."""


class Link(Protocol):
    """One shadow, from one rank. Nothing here waits for it."""

    address: str
    """For messages."""
    sent_bytes: int
    """Of side records and seeds."""

    @property
    def data(self) -> DataWay:
        """How gradients go."""

    def start(self) -> None:
        """Begin to connect; the listener hears `connected`."""

    def post(self, message: Message, iteration: int = 0, payload: memoryview = ..., arrives: Any = None) -> None:
        """Let a message go out, with its bytes after it, once `arrives` (a CUDA event) has come."""

    def completed(self, iteration: int) -> None:
        """Nothing up to this iteration will have to be said again."""

    def close(self) -> None:
        """End it, within a bounded time."""


class LinkMaker(Protocol):
    """Makes the link to one shadow; it begins at `Link.start`."""

    def __call__(
        self,
        shadow: int,
        address: str,
        token: bytes,
        identity: Identity,
        listener: Listener,
        timeout_s: float,
        data: DataSettings,
    ) -> Link:
        """The arguments of `ShadowLink`."""
