"""What trainers, shadows and those who ask about them say on control connections: JSON messages, each checked.

Bytes (a side record, a seed, what a restore fetches) follow their message as chunks of `CHUNK_BYTES`, whose offsets
count from the first byte of the first entry; their checksums begin with the iteration (`wire.frames.chunk_checksum`).
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from lastgood.errors import CorruptCheckpoint
from lastgood.units import MIB
from lastgood.wire.records import MAX_ITERATION

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
    "Entry",
    "Fence",
    "Fetch",
    "FetchSide",
    "Have",
    "Hello",
    "Message",
    "Refused",
    "Saved",
    "Seed",
    "Seeded",
    "Side",
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
"""Of these messages and of side records: another one where one side would not understand what the other one says."""
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

_Number = Annotated[int, Field(ge=0, lt=1 << 63)]
_Iteration = Annotated[int, Field(ge=0, lt=MAX_ITERATION)]
_Epoch = Annotated[int, Field(ge=0, lt=1 << 32)]
"""Of a request: as records carry it."""
_Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_Job = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
_Text = Annotated[str, Field(max_length=10_000)]


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def content(self) -> dict[str, Any]:
        """As `Wire.send_message` takes it."""
        return self.model_dump(mode="json")


class Saved(_Message):
    """An iteration that a shadow could give back."""

    kind: Literal["saved"] = "saved"
    epoch: _Number
    """In which it was made: what two lives of a training made under one number is not one thing."""
    iteration: _Iteration
    step: _Number


class Seeded(_Message):
    """A bucket's seed has arrived whole: nothing older can be given back. Said before what Have it makes possible.

    `whole`: no bucket of this shadow waits for one any more.
    """

    kind: Literal["seeded"] = "seeded"
    bucket: _Number
    iteration: _Iteration
    whole: bool


# -- opening -----------------------------------------------------------------------------------------------------------


class Hello(_Message):
    """The first message of every connection, behind the proof."""

    kind: Literal["hello"] = "hello"
    role: Literal["data", "control", "asker"]
    """`data` carries records from here on; `control` is a rank of the training; `asker` only asks (status, restore)."""
    job: _Job | None = None
    """None: whatever job the shadow has (an asker)."""
    epoch: _Epoch = 0
    rank: _Number = 0
    layout: _Digest | None = None
    """What `data` records refer to; must be the declared one."""


class Welcome(_Message):
    """The shadow's answer. Behind it a data connection carries records only."""

    kind: Literal["welcome"] = "welcome"
    shadow: _Number
    shadows: _Number
    job: _Job | None
    epoch: _Number
    layout: _Digest | None
    gradient_slots: _Number
    """Iterations beyond the applied one that it can hold."""
    unseeded: tuple[_Number, ...] = ()
    """Its buckets that wait for a Seed, or for the rest of one."""
    seeds: tuple[Seeded, ...] = ()
    """The newest of each bucket that came in this epoch: who was away has not heard of them."""
    spills: tuple[Saved, ...] = ()
    """What lies on its disk."""
    spilling: tuple[_Iteration, ...] = ()
    """Iterations that it was asked to spill, and will say Spilled of."""


class Refused(_Message):
    """Why a request, or a whole connection, is refused; the connection is closed behind it if it was a hello."""

    kind: Literal["refused"] = "refused"
    why: _Text
    fenced: _Number | None = None
    """The epoch of another life of the job that has taken over; the last word to a trainer that it fenced off."""


# -- from rank 0 -------------------------------------------------------------------------------------------------------


class Declare(_Message):
    """The layout of this epoch. Answered by Welcome, or Refused.

    `adopt` is the iteration that the shadow must stand at, with the same layout, to keep its state; the epoch's first
    iteration is the one behind it. Otherwise (or with None) all of its buckets are unseeded then, and wait for Seed.
    Said again in one epoch with the same layout it changes nothing: a conductor that connects again may do so.
    """

    kind: Literal["declare"] = "declare"
    layout: dict[str, Any]
    adopt: _Iteration | None


class Step(_Message):
    """What one iteration needs beside gradients; behind the update, before the next iteration's first record."""

    kind: Literal["step"] = "step"
    iteration: _Iteration
    rule: dict[str, Any] | None
    """What `optim.UpdateRule` writes; None: nothing was applied (a skipped step)."""
    saved: bool
    """Whether the training saved here: then side records of all ranks belong to it, and it can be given back."""
    step: _Number | None
    """The training's own number of the saved step."""
    absent: tuple[_Number, ...] = ()
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


class Complete(_Message):
    """Every shadow has all of every iteration up to this one: apply. Shadows tell it to all control connections.

    The newest one says all: a rank that was away when others were said hears it once it is back.
    """

    kind: Literal["complete"] = "complete"
    iteration: _Iteration
    lost: tuple[_Number, ...] = ()
    """Shadows that are not waited for any more: nothing can be given back from memory until they are whole."""
    floor: _Iteration = 0
    """Nothing before this iteration is promised: a shadow was seeded behind it, or it was complete without one."""
    spoiled: Annotated[tuple[_Iteration, ...], Field(max_length=MAX_SPOILED)] = ()
    """From `floor` on, those that cannot be given back, since side records are missing for good."""

    def promises(self, iteration: int) -> bool:
        """Whether what was saved in an iteration up to `iteration`, or something newer, can be given back."""
        return iteration >= self.floor and iteration not in self.spoiled


class Entry(_Message):
    """One tensor in a stream of chunks, contiguous; streams hold their entries one after another without gaps."""

    kind: Literal["entry"] = "entry"
    parameter: _Number
    key: Annotated[str, Field(max_length=100)]
    """`parameter` for the parameter itself, else the key in the optimizer's state of it."""
    dtype: Annotated[str, Field(max_length=20)]
    shape: Annotated[tuple[_Number, ...], Field(max_length=64)]
    nbytes: _Number


class Seed(_Message):
    """All of one bucket as it is behind iteration `iteration`; its chunks follow. Answered by Seeded."""

    kind: Literal["seed"] = "seed"
    bucket: _Number
    iteration: _Iteration
    entries: tuple[Entry, ...]


class Verify(_Message):
    """CRC32C over a bucket behind an iteration.

    For each parameter of it, in the bucket's order: the parameter's bytes, then its optimizer state's tensors by sorted
    key. Wrong ones are answered by Diverged.
    """

    kind: Literal["verify"] = "verify"
    iteration: _Iteration
    bucket: _Number
    checksum: _Number


# -- from every rank ---------------------------------------------------------------------------------------------------


class Absent(_Message):
    """This rank's parameters that had no gradient in an iteration; from all but rank 0, where its Step is `apart`.

    Nothing is made of that iteration before all of them have said so, none included.
    """

    kind: Literal["absent"] = "absent"
    iteration: _Iteration
    parameters: tuple[_Number, ...]
    updated: bool
    """Whether its optimizer did an update."""
    void: bool = False
    """As in Step."""


class Side(_Message):
    """A rank's own state behind an iteration: what gradients do not carry. Its chunks follow."""

    kind: Literal["side"] = "side"
    rank: _Number
    iteration: _Iteration
    step: _Number
    layout: dict[str, Any] | None
    """How the rank's whole state is laid out; None: as in this rank's side record before."""
    nbytes: _Number


# -- from shadows ------------------------------------------------------------------------------------------------------


class Have(_Message):
    """This shadow can be brought to exactly this iteration (to rank 0).

    Each bucket holds all gradients up to it, or a seed. It may jump over iterations that are torn here. What is torn
    behind it takes nothing back; Torn of it or of an older one does, and Diverged.
    """

    kind: Literal["have"] = "have"
    iteration: _Iteration


class Applied(_Message):
    """This shadow's buckets are all behind this iteration's update (to rank 0)."""

    kind: Literal["applied"] = "applied"
    iteration: _Iteration


class Torn(_Message):
    """Bytes of these buckets are missing for good since this iteration: they want a Seed (to rank 0).

    Without buckets: a side record of this iteration is missing for good, so it cannot be given back.
    """

    kind: Literal["torn"] = "torn"
    iteration: _Iteration
    buckets: tuple[_Number, ...]
    why: _Text


class Diverged(_Message):
    """A Verify failed: this bucket is not the trainer's, and wants a Seed."""

    kind: Literal["diverged"] = "diverged"
    iteration: _Iteration
    bucket: _Number


class Spilled(_Message):
    """An iteration is durable on this shadow; or `error` says why it could not be made so."""

    kind: Literal["spilled"] = "spilled"
    iteration: _Iteration
    error: _Text | None = None


# -- from askers -------------------------------------------------------------------------------------------------------


class Fence(_Message):
    """Begin a new epoch: connections and partial iterations of older ones end. Answered by Status."""

    kind: Literal["fence"] = "fence"
    epoch: _Epoch


class StatusAsked(_Message):
    """Answered by Status."""

    kind: Literal["status?"] = "status?"


class Status(_Message):
    """What a shadow holds."""

    kind: Literal["status"] = "status"
    shadow: _Number
    shadows: _Number
    job: _Job | None
    epoch: _Number
    layout: _Digest | None
    whole: bool
    """No bucket waits for a seed, and all stand at one iteration."""
    applied: _Iteration
    have: _Iteration
    memory: tuple[Saved, ...]
    """Saved iterations from `applied` to `have`: any of them can be given back if all shadows hold it."""
    durable: tuple[Saved, ...]
    """Spilled iterations, newest first."""
    promised: _Number | None = None
    """The newest step of which rank 0 has said that all shadows have it, held still or not; None: of none."""
    refused: dict[str, _Number]
    """Records and connections that were refused, by cause."""


class Fetch(_Message):
    """Give back this iteration: all tensors of the shadow's buckets. Answered by Tensors and chunks, or Refused.

    From memory it is applied first (its epoch must be fenced: `epoch` is the asker's); from `durable` it is read back
    from the spill, and becomes the shadow's state, if it is not that already.
    """

    kind: Literal["fetch"] = "fetch"
    epoch: _Number
    iteration: _Iteration
    made: _Number
    """`Saved.epoch` of it."""
    source: Literal["memory", "durable"]


class FetchSide(_Message):
    """Give back a rank's side record of this iteration. Answered by Side (with its layout) and chunks, or Refused."""

    kind: Literal["fetch_side"] = "fetch_side"
    epoch: _Number
    iteration: _Iteration
    made: _Number
    rank: _Number
    source: Literal["memory", "durable"]


class Tensors(_Message):
    """What a Fetch gives; its chunks follow."""

    kind: Literal["tensors"] = "tensors"
    iteration: _Iteration
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
