"""A flow of NCCL: its messages, what it may be, and how far it is then. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from lastgood.mirror.conversation.nccl_plan import NcclMessage, Role
from lastgood.mirror.streams.messages import Flow

__all__ = ["Cursor", "NcclFlow"]


@dataclass
class Cursor:
    """How far a flow is, if it has a certain role."""

    collective: int = 0
    """Index of the collective whose message comes next."""
    message: int = 0
    """Which of its messages."""
    at: int = 0
    """Which message of the flow."""
    newest: int = 0
    """The collective of the message before it, whose bytes may still come."""

    @property
    def passed(self) -> int:
        """All collectives before this one are complete in the flow, as far as it carries them."""
        return self.newest if self.at else self.collective


@dataclass
class NcclFlow:
    """One channel of one rank; which, is one of `roles`."""

    flow: Flow
    sizes: list[int | None] = field(default_factory=list)
    """Of data messages; None: its head is lost."""
    due: int = 0
    """Number of the message that comes next."""
    first: int = 0
    """Number, among data messages, of the first one in `sizes`."""
    numbers: dict[int, int] = field(default_factory=dict)
    """Message number to number among data messages."""
    roles: dict[Role, Cursor] = field(default_factory=dict)
    places: dict[int, tuple[int, NcclMessage]] = field(default_factory=dict)
    """Of data messages, once the role is certain."""
    placed: int = 0
    closed: bool = False

    @property
    def heard(self) -> int:
        """Data messages that have come, those that are forgotten too."""
        return self.first + len(self.sizes)

    def take(self, message: int, nbytes: int | None) -> None:
        """The next data message."""
        self.numbers[message] = self.heard
        self.sizes.append(nbytes)

    def trim(self, places: int) -> None:
        """Forget sizes that no role needs any more, and places but the newest."""
        done = min((cursor.at for cursor in self.roles.values()), default=0) - self.first
        del self.sizes[:done]
        self.first += done
        for message in list(self.numbers)[: max(0, len(self.numbers) - places)]:
            self.places.pop(self.numbers.pop(message), None)
