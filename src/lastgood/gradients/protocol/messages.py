"""What trainers, shadows and those who ask about them say on control connections: JSON messages, each checked.

Bytes (a side record, a seed, what a restore fetches) follow their message as chunks of `CHUNK_BYTES`, whose offsets
count from the first byte of the first entry; their checksums begin with the iteration (`wire.frames.chunk_checksum`).
An incarnation of the job is called `epoch` here, as in records and files: the formats keep that name.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from lastgood.errors import CorruptCheckpoint
from lastgood.gradients.layout.entries import Entry, FrozenModel, Iteration, Number, Saved, Side
from lastgood.units import MIB

__all__ = [
    "CHUNK_BYTES",
    "GREETING",
    "MAX_MESSAGE_BYTES",
    "MAX_SPOILED",
    "PROTOCOL_VERSION",
    "PROVES_FIRST",
    "VERSION_ADVICE",
    "Absent",
    "Applied",
    "Complete",
    "Declare",
    "Diverged",
    "Fence",
    "Fetch",
    "FetchSide",
    "Have",
    "Hello",
    "Message",
    "Refused",
    "Seed",
    "Seeded",
    "Spilled",
    "Status",
    "StatusAsked",
    "Step",
    "Tensors",
    "Torn",
    "Verify",
    "Welcome",
    "parse_message",
]

PROTOCOL_VERSION = 4
"""Of these messages and of side records: another one if one side would not understand what the other one says."""
GREETING = b"lastgood shadow %d\n" % PROTOCOL_VERSION
"""Opens every connection to a shadow (`wire.frames.prove_trainer`)."""
PROVES_FIRST = 3
"""From this version on the one who connects proves first; older ones wait for the shadow's proof."""
VERSION_ADVICE = "use the same Lastgood on both sides; what a shadow holds in memory ends with its process"
MAX_MESSAGE_BYTES = 64 * MIB
"""Once the other side has shown that it knows the token; a layout of a million parameters fits."""
CHUNK_BYTES = 4 * MIB
MAX_SPOILED = 64
"""So many spoiled iterations are told one by one; before them nothing is promised."""

_Epoch = Annotated[int, Field(ge=0, lt=1 << 32)]
"""Of a request: as records carry it."""
_Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_Job = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
_Text = Annotated[str, Field(max_length=10_000)]


class Seeded(FrozenModel):
    """A bucket's seed has arrived completely: nothing older can be given back. Said before what Have it makes possible.

    `whole`: no bucket of this shadow waits for one any more.
    """

    kind: Literal["seeded"] = "seeded"
    bucket: Number
    iteration: Iteration
    whole: bool


# -- opening -----------------------------------------------------------------------------------------------------------


class Hello(FrozenModel):
    """The first message of every connection, after the proof."""

    kind: Literal["hello"] = "hello"
    role: Literal["data", "control", "asker"]
    """`data` carries records; `control` is a rank of the training; `asker` is a client (status, restore)."""
    job: _Job | None = None
    """None: whatever job the shadow has (a client)."""
    epoch: _Epoch = 0
    rank: Number = 0
    layout: _Digest | None = None
    """What `data` records refer to; must be the declared one."""


class Welcome(FrozenModel):
    """The shadow's answer. Behind it a data connection carries records only."""

    kind: Literal["welcome"] = "welcome"
    shadow: Number
    shadows: Number
    job: _Job | None
    epoch: Number
    layout: _Digest | None
    gradient_slots: Number
    """Iterations beyond the applied one that it can hold."""
    unseeded: tuple[Number, ...] = ()
    """Its buckets that wait for a Seed, or for the rest of one."""
    seeds: tuple[Seeded, ...] = ()
    """The newest of each bucket that came in this incarnation: who was away has not heard of them."""
    spills: tuple[Saved, ...] = ()
    """What lies on its disk."""
    spilling: tuple[Iteration, ...] = ()
    """Iterations that it was asked to spill, and will say Spilled of."""


class Refused(FrozenModel):
    """Why a request, or a whole connection, is refused; the connection is closed after it if it was a hello."""

    kind: Literal["refused"] = "refused"
    why: _Text
    fenced: Number | None = None
    """The incarnation that has taken over; the last message to a trainer that it fenced off."""


# -- from rank 0 -------------------------------------------------------------------------------------------------------


class Declare(FrozenModel):
    """The layout of this incarnation. Answered by Welcome, or Refused.

    `adopt` is the iteration that the shadow must stand at, with the same layout, to keep its state; the incarnation's
    first iteration comes after it. Otherwise (or with None) all of its buckets are unseeded then, and wait for Seed.
    Said again in one incarnation with the same layout it changes nothing: a conductor that connects again may do so.
    """

    kind: Literal["declare"] = "declare"
    layout: dict[str, Any]
    adopt: Iteration | None


class Step(FrozenModel):
    """What one iteration needs beside gradients; after the update, before the next iteration's first record."""

    kind: Literal["step"] = "step"
    iteration: Iteration
    rule: dict[str, Any] | None
    """What `optim.UpdateRule` writes; None: nothing was applied (a skipped step)."""
    saved: bool
    """Whether the training saved here: then side records of all ranks belong to it, and it can be given back."""
    step: Number | None
    """The training's own number of the saved step."""
    absent: tuple[Number, ...] = ()
    """Parameters that had no gradient, and that the optimizer left alone; zeros stand for them in records."""
    void: bool = False
    """The update did not use the gradients that were sent: they count as lost, and all buckets want a Seed."""
    apart: bool = False
    """Each rank has parameters of its own: `absent` are rank 0's, and all other ranks say theirs by Absent."""
    spill: bool = False
    """Make this iteration durable, once applied. Every shadow answers by Spilled before another one is asked for.

    A step that is sent again, on another connection, asks for none.
    """
    keep: Saved | None = None
    """With `spill`: the newest spill that all shadows hold. It stays; all other ones may be overwritten from now on."""


class Complete(FrozenModel):
    """Every shadow has all of every iteration up to this one: apply. Shadows tell it to all control connections.

    The newest one says all: a rank that was away when others were said hears it once it is back.
    """

    kind: Literal["complete"] = "complete"
    iteration: Iteration
    lost: tuple[Number, ...] = ()
    """Shadows that are not waited for any more: nothing can be given back from memory until they are complete."""
    floor: Iteration = 0
    """Nothing before this iteration is promised: a shadow was seeded after it, or it was complete without one."""
    spoiled: Annotated[tuple[Iteration, ...], Field(max_length=MAX_SPOILED)] = ()
    """From `floor` on, those that cannot be given back, since side records are missing permanently."""

    def promises(self, iteration: int) -> bool:
        """Whether what was saved in an iteration up to `iteration`, or something newer, can be given back."""
        return iteration >= self.floor and iteration not in self.spoiled


class Seed(FrozenModel):
    """All of one bucket as it is after iteration `iteration`; its chunks follow. Answered by Seeded."""

    kind: Literal["seed"] = "seed"
    bucket: Number
    iteration: Iteration
    entries: tuple[Entry, ...]


class Verify(FrozenModel):
    """CRC32C over a bucket after an iteration.

    For each parameter of it, in the bucket's order: the parameter's bytes, then its optimizer state's tensors by sorted
    key. Wrong ones are answered by Diverged.
    """

    kind: Literal["verify"] = "verify"
    iteration: Iteration
    bucket: Number
    checksum: Number


# -- from every rank ---------------------------------------------------------------------------------------------------


class Absent(FrozenModel):
    """This rank's parameters that had no gradient in an iteration; from all but rank 0, where its Step is `apart`.

    Nothing is made of that iteration before all of them have said so, none included.
    """

    kind: Literal["absent"] = "absent"
    iteration: Iteration
    parameters: tuple[Number, ...]
    updated: bool
    """Whether its optimizer did an update."""
    void: bool = False
    """As in Step."""


# -- from shadows ------------------------------------------------------------------------------------------------------


class Have(FrozenModel):
    """This shadow can be brought to exactly this iteration (to rank 0).

    Each bucket holds all gradients up to it, or a seed. It may jump over iterations that are torn here. What is torn
    after it takes nothing back; Torn of it or of an older one does, and Diverged.
    """

    kind: Literal["have"] = "have"
    iteration: Iteration


class Applied(FrozenModel):
    """This shadow's buckets are all after this iteration's update (to rank 0)."""

    kind: Literal["applied"] = "applied"
    iteration: Iteration


class Torn(FrozenModel):
    """Bytes of these buckets are missing permanently since this iteration: they want a Seed (to rank 0).

    Without buckets: a side record of this iteration is missing permanently, so it cannot be given back.
    """

    kind: Literal["torn"] = "torn"
    iteration: Iteration
    buckets: tuple[Number, ...]
    why: _Text


class Diverged(FrozenModel):
    """A Verify failed: this bucket is not the trainer's, and wants a Seed."""

    kind: Literal["diverged"] = "diverged"
    iteration: Iteration
    bucket: Number


class Spilled(FrozenModel):
    """An iteration is durable on this shadow; or `error` says why it could not be made so."""

    kind: Literal["spilled"] = "spilled"
    iteration: Iteration
    error: _Text | None = None


# -- from clients ------------------------------------------------------------------------------------------------------


class Fence(FrozenModel):
    """Begin a new incarnation: connections and partial iterations of older ones end. Answered by Status."""

    kind: Literal["fence"] = "fence"
    epoch: _Epoch


class StatusAsked(FrozenModel):
    """Answered by Status."""

    kind: Literal["status?"] = "status?"


class Status(FrozenModel):
    """What a shadow holds."""

    kind: Literal["status"] = "status"
    shadow: Number
    shadows: Number
    job: _Job | None
    epoch: Number
    layout: _Digest | None
    whole: bool
    """No bucket waits for a seed, and all stand at one iteration."""
    applied: Iteration
    have: Iteration
    memory: tuple[Saved, ...]
    """Saved iterations from `applied` to `have`: any of them can be given back if all shadows hold it."""
    durable: tuple[Saved, ...]
    """Spilled iterations, newest first."""
    promised: Number | None = None
    """The newest step of which rank 0 has said that all shadows have it, held still or not; None: of none."""
    refused: dict[str, Number]
    """Records and connections that were refused, by cause."""


class Fetch(FrozenModel):
    """Give back this iteration: all tensors of the shadow's buckets. Answered by Tensors and chunks, or Refused.

    From memory it is applied first (its incarnation must be fenced: `epoch` is the client's); from `durable` it is read
    back from the spill, and becomes the shadow's state, if it is not that already.
    """

    kind: Literal["fetch"] = "fetch"
    epoch: Number
    iteration: Iteration
    made: Number
    """`Saved.epoch` of it."""
    source: Literal["memory", "durable"]


class FetchSide(FrozenModel):
    """Give back a rank's side record of this iteration. Answered by Side (with its layout) and chunks, or Refused."""

    kind: Literal["fetch_side"] = "fetch_side"
    epoch: Number
    iteration: Iteration
    made: Number
    rank: Number
    source: Literal["memory", "durable"]


class Tensors(FrozenModel):
    """What a Fetch gives; its chunks follow."""

    kind: Literal["tensors"] = "tensors"
    iteration: Iteration
    entries: tuple[Entry, ...]


Message = (
    Hello
    | Welcome
    | Refused
    | Declare
    | Step
    | Complete
    | Seed
    | Verify
    | Absent
    | Side
    | Have
    | Applied
    | Torn
    | Diverged
    | Seeded
    | Spilled
    | Fence
    | StatusAsked
    | Status
    | Fetch
    | FetchSide
    | Tensors
)
_ADAPTER: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])


def parse_message(content: dict[str, Any], other: str) -> Message:
    """Check a message that `other` sent. Raises CorruptCheckpoint for whatever is none."""
    try:
        # From JSON, tuples come as lists: strict in everything else.
        return _ADAPTER.validate_json(json.dumps(content))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CorruptCheckpoint(f"{other} sent no message of this protocol: {where}: {first['msg']}") from error
