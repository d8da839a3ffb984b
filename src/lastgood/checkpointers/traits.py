"""What a system is, for figures, captions, plans and advice. Declared on the system's class; needs no torch.

Everything that another part of Lastgood would otherwise know by a system's name stands here. All fields have defaults,
so a system that declares nothing is shown too: under its name, after the others, in a colour that is free, with nothing
claimed of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple, get_args

from lastgood.sinks import Sink

__all__ = [
    "LAST",
    "CostModel",
    "Keeps",
    "Limit",
    "LossFormula",
    "Promise",
    "RanksWrite",
    "Traits",
    "traits_of_class",
]

LAST: Final = 1000
"""The order of a system that declares none: after all that do."""

RanksWrite = Literal["nobody", "first", "each", "peers", "shadows"]
"""Whose state is written if several ranks train together.

``nobody``: nothing is written. ``first``: rank 0 writes for all, which hold the same state; the others wait for it in
the next exchange of gradients. ``each``: every rank writes its own, and they agree on each checkpoint; Options then has
`rank` and `world_size`. ``peers``: every rank sends its own to the memory of other machines; Options then has
`machine`, `machines` and `peers`, the system `watch`, which takes a DistributedDataParallel module, and a `traffic`
that DeepSpeed's communication is reported to. ``shadows``: every rank sends its part of the gradients to shadows; the
system then has `watch`.
"""

Keeps = Literal["files", "folders", "slots", "shadows"]
"""``files``: checkpoint-*.pt (checkpointers/torch_files). ``folders``: checkpoint-*-step-* (checkpointers/directories).
``slots``: slot-*.lgs (storage). ``shadows``: in the memory of shadows, with the job's id in the directory."""

LossFormula = Literal["interval", "half_interval", "half_interval_and_writes"]
"""What a failure costs, by the formulas of PCcheck's artefact (experiments/formulas/goodput.py): the interval (one
checkpoint at a time, written in the background), half of it (durable when `save` returns), or half of it and what
writes in flight are late."""


Promise = Literal["exactness", "kills", "damage", "full disk", "two writers", "bounded waits", "paths", "durable"]
"""What `lastgood.conformance` tests of every system."""


class Limit(NamedTuple):
    """A promise that a system does not keep, and why. It is tested as well: a limit that is none is a failure."""

    promise: Promise
    why: str


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """What a checkpoint costs on a machine that reaches its ceilings (experiments/advise/model.py)."""

    waits: bool
    """Whether training stands still until the checkpoint is durable. If not, the copy overlaps with training."""
    takes: Literal["write", "slower", "both"]
    """The seconds that one takes: those of the write alone, the longer one of copy and write, or both together."""
    over: Literal[Sink.DISK, Sink.LINK] = Sink.DISK
    """Where the write goes. With ``LINK`` the copies are in peers' memory: a job that loses both begins again."""


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a system is.

    Raises ValueError for a colour that is not ``#RRGGBB``, a `safe_in` that is no Sink, a limit of no promise, and for
    `over_shards` or a `helper` of another form.
    """

    label: str = ""
    """Its name in print; the registry's name if empty."""
    colour: str | None = None
    """Its colour in figures, ``#RRGGBB``; None, or one that another system of a figure has: one that is free."""
    order: int = LAST
    """Its place in figures, tables and reports: lower ones first, systems of one order by name."""
    safe_in: Sink | None = None
    """Where a durable checkpoint is; None: captions say that it is durable by its own word."""
    safe_words: str = ""
    """Where that is in a caption, after "it is", for a system that is not safe on a disk: ``in its peers' memory``."""
    keeps: Keeps | None = None
    """How its checkpoints lie in its directory, by which a message says whose a directory may be."""
    marker: str = ""
    """The file in each of its folders that no other system writes, if it keeps ``folders``."""
    ranks_write: RanksWrite | None = None
    """Who writes over several ranks; None: it is measured in one process only."""
    over_shards: str | None = None
    """``module:name`` of the Checkpointer that does the same for a state of which each rank holds shards (fully_shard),
    with all ranks together; None: as `ranks_write` says."""
    helper: str | None = None
    """The processes that a run must start before the training: ``shadows`` (a configured number of them), ``peers``
    (one of Gemini's on every host of a run over several ranks), or ``module:name`` of what makes a `Service`
    (experiments/services/service.py) from a RunSpec."""
    takes_gradients: bool = False
    """Whether it is given gradients instead of state: nothing copies the state, and a checkpoint writes none of it."""
    only_interval: int | None = None
    """The one interval, in iterations, at which it is measured: 1 if it saves each step, and refuses to be told
    another interval; 0 if it never saves. None: at the configured ones."""
    maps_storage: bool = False
    """Whether its files are mapped, so that on a CPU they count as the process's own memory."""
    cost: CostModel | None = None
    """None: advice needs measured runs of it."""
    loss: LossFormula = "interval"
    """The default is the most careful one."""
    limits: tuple[Limit, ...] = ()
    """Promises of `lastgood.conformance` that it does not keep, by its nature."""

    def __post_init__(self) -> None:
        if self.colour is not None and not re.fullmatch(r"#[0-9A-Fa-f]{6}", self.colour):
            raise ValueError(f"a system's colour is written as #RRGGBB, not {self.colour!r}")
        if self.safe_in is not None and not isinstance(self.safe_in, Sink):
            raise ValueError(f"a system is safe in a Sink, as Sink.DISK, not in {self.safe_in!r}")
        if self.over_shards is not None and not re.fullmatch(r"[\w.]+:[\w.]+", str(self.over_shards)):
            raise ValueError(f"what a system uses over shards is module:name, not {self.over_shards!r}")
        if self.helper not in (None, "shadows", "peers") and not re.fullmatch(r"[\w.]+:[\w.]+", str(self.helper)):
            raise ValueError(f"a system's helper is shadows, peers or module:name, not {self.helper!r}")

        unknown = [limit for limit in self.limits if limit[0] not in get_args(Promise)]
        if unknown:
            raise ValueError(f"limits name promises ({', '.join(get_args(Promise))}), not {unknown[0][0]!r}")

    def limit_of(self, promise: str) -> str | None:
        """Why it does not keep a promise; None if it does."""
        return next((limit.why for limit in self.limits if limit.promise == promise), None)

    @property
    def hides_copy(self) -> bool:
        """Whether its copy off the device is known to overlap with training."""
        return self.cost is not None and not self.cost.waits


def traits_of_class(kind: type) -> Traits:
    """The traits of a Checkpointer class.

    A class that inherits another system's does what that one does, and is another one: it has no label, colour and
    order until it declares its own. Raises TypeError if `traits` is something else.
    """
    found = getattr(kind, "traits", None)
    if not isinstance(found, Traits):
        raise TypeError(f"{kind.__module__}.{kind.__qualname__}.traits is {type(found).__name__}, not Traits")
    if "traits" in vars(kind):
        return found
    return replace(found, label="", colour=None, order=LAST)
