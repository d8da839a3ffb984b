"""What a conversation tells of messages: where their bytes belong, and what happens in the training.

A *conversation* follows the collectives of one data-parallel training. It is given the heads of messages, in the order
in which they were captured, and answers for each message which bytes of which collective it carries. Collectives are
numbered from 0 in the order in which they were recognised. Steps count the updates of one incarnation from 0, so a
restarted training begins again at 0.

The answer to `place` may be that it is not known yet; the caller keeps pieces of such a message (a bounded number of
them) and asks again after the next head. An answer that was given never changes: a collective that turns out to be
another one than was said costs the step, as `LostStep` says.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from lastgood.mirror.streams.messages import Flow

__all__ = [
    "CONTENT_KINDS",
    "IGNORED",
    "Answer",
    "Buckets",
    "Closed",
    "Contradiction",
    "Conversation",
    "Event",
    "Expect",
    "Ignored",
    "Incarnation",
    "Kind",
    "Learned",
    "LostStep",
    "Place",
    "StepOpen",
]

Kind = Literal["gradient", "buffers", "parameters", "used", "bucket-order", "bucket-sizes", "sizes", "count", "other"]
CONTENT_KINDS: Final = frozenset({"bucket-order", "bucket-sizes", "sizes", "count"})
"""Kinds whose bytes the conversation itself needs (`Conversation.content`)."""


class Ignored(enum.Enum):
    """The type of `IGNORED`."""

    IGNORED = "ignored"


IGNORED: Final = Ignored.IGNORED
"""A message's bytes belong nowhere: an announcement, a partial sum, a stranger, a step that is lost."""


@dataclass(frozen=True)
class Place:
    """A message's payload is bytes `begin` to `end` of the buffer of a collective."""

    collective: int
    begin: int
    end: int
    final: bool
    """Whether these are the collective's result; True: partial sums are IGNORED."""


Answer = Place | Ignored | None


@dataclass(frozen=True)
class Incarnation:
    """The training began (again): what was open before is over. All collectives after it belong to it."""

    number: int
    """From 0, for each start that was seen."""
    complete: bool
    """Whether it was seen from its first collective on: then its parameters come, and its steps are numbered.

    Otherwise steps have numbers of their own, in order, once it is found where one begins: nothing says how many there
    were before, nor (but for their sizes) whether the buckets are the right ones.
    """


@dataclass(frozen=True)
class Learned:
    """What the traffic shows of the group. Addresses are those of flows."""

    world: int
    ranks: tuple[tuple[str, int], ...]
    """(address, rank) of those that are known, by rank."""


@dataclass(frozen=True)
class Buckets:
    """From this step on gradients come in these buckets, in this order.

    Each bucket holds indices into the *trainable* parameters of the job description, in the order of its bytes.
    """

    step: int
    buckets: tuple[tuple[int, ...], ...]
    rebuilt: bool
    """Whether they came over the wire; False: those that DDP's rule makes, first ones or (after a late start) later."""


@dataclass(frozen=True)
class StepOpen:
    """The first collective of a step was seen."""

    step: int


@dataclass(frozen=True)
class Expect:
    """A collective was recognised; its bytes may be placed from now on.

    `nbytes` is the size of its buffer. Bytes of a gradient bucket are those of its parameters one after another, each
    in memory order, in the wire's dtype. If a step has several reductions, those of the last one are its gradients, and
    hold the others already; the others are "other". Buffers of step t are those that opened its first forward: as they
    were after step t - 1.
    """

    collective: int
    kind: Kind
    nbytes: int
    dtype: str
    """Torch's name, without `torch.`."""
    step: int
    """-1 before the first step."""
    bucket: int | None = None
    """Gradients only: the index in `Buckets`."""
    tensors: tuple[str, ...] = ()
    """Parameters and buffers only: the tensors in it, one after another, each in row-major order (as contiguous())."""


@dataclass(frozen=True)
class Closed:
    """No further byte of this collective will be placed: what is not there will not come.

    It counts from when the pieces have been placed that were parsed together with the heads before it.
    """

    collective: int


@dataclass(frozen=True)
class LostStep:
    """The gradients of this step, or the buffers that opened it, cannot be told. Said once for each step and kind."""

    step: int
    why: str
    what: Literal["gradients", "buffers"] = "gradients"


@dataclass(frozen=True)
class Contradiction:
    """The traffic is not that of the job description, or of the watched addresses. Nothing more is placed."""

    text: str


Event = Incarnation | Learned | Buckets | StepOpen | Expect | Closed | LostStep | Contradiction


class Conversation(Protocol):
    """Follows one training. Not thread-safe; memory is bounded, whatever is said by heads."""

    def opened(self, flow: Flow) -> None:
        """A flow was found. All its heads come later."""

    def closed(self, flow: int) -> None:
        """Nothing more comes in this flow."""

    def head(self, flow: int, message: int, slot: int, opcode: int, nbytes: int) -> None:
        """A message begins; each once, in the order of its flow, when all before it in the flow is there or lost."""

    def lost(self, flow: int, message: int, offset: int, nbytes: int) -> None:
        """Bytes of a message will never come in this flow (all of it: `nbytes` 0); another one may carry them too."""

    def resynced(self, flow: int, why: str) -> None:
        """The flow went on after bytes of unknown content: an unknown number of messages is missing.

        Said before the heads that were parsed together with it. It is meant for every gap in the numbers of the flow's
        messages up to the next `take`; without it, a gap means that only announcements are missing.
        """

    def place(self, flow: int, message: int) -> Answer:
        """Where the payload of a message belongs, whose head was given. None: not known yet, ask again later."""

    def content(self, collective: int, data: bytes) -> None:
        """All bytes of a collective of one of `CONTENT_KINDS`, as soon as they are complete."""

    def finish(self) -> None:
        """The capture has ended: what is open is closed."""

    def take(self) -> Sequence[Event]:
        """What happened since the last call, in order."""
