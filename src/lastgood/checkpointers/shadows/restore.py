"""What a training under Checkmate or FlowCheck goes on from: the newest step that all shadows hold, to the bit."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, ClassVar, Protocol

from lastgood._lazy import torch
from lastgood.checkpointers.ranks.exchange import RankExchange
from lastgood.checkpointers.recovery.checkmate_job import JOB_FILE, note_job, noted_job
from lastgood.errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpoint,
    LastgoodError,
    MismatchError,
    NoCheckpoint,
)
from lastgood.gradients.layout.entries import Entry
from lastgood.gradients.layout.layout import GradientLayout
from lastgood.gradients.protocol import client as asking
from lastgood.gradients.protocol.messages import Status
from lastgood.gradients.trainer.parameters import TrackedParameters
from lastgood.gradients.trainer.rank_record import SIDE_VERSIONS, open_side, restored_tree
from lastgood.state import check_tree, load_tree
from lastgood.state.shards import local_part
from lastgood.tokens import read_token as read_token_file
from lastgood.world import world_of_torch

__all__ = [
    "AskingOptions",
    "Restored",
    "TreeMaker",
    "check_held",
    "find_newest",
    "job_of",
    "ranks_together",
    "read_token",
    "restore_together",
]

_log = logging.getLogger("lastgood")

_SLOWEST_READ_BYTES_PER_S = 50e6
"""A restore waits for a shadow, beyond the usual timeout, as long as a disk of this speed needs."""
_RESTORE_READ_FACTOR = 8
"""Bytes read during a restore, as a multiple of a shadow's parameter bytes (parameters and 3 state tensors, read
twice)."""
_Declared = tuple[str, tuple[int, ...], str]
_STATUS_POLLS = 20
"""Status polls while training runs, until all shadows report the same iteration."""


class AskingOptions(Protocol):
    """Options of a system whose state is with shadows."""

    system: ClassVar[str]
    """Its name, for messages."""
    wants: ClassVar[str]
    """What to give if no shadow is named."""
    wants_token: ClassVar[str]
    """What to give if there is no secret."""
    one_side: ClassVar[bool]
    """Whether all ranks take the side record of rank 0, so that any number of them can restore."""

    @property
    def token_file(self) -> str | None:
        """The file with the secret that shadows want to see."""

    @property
    def timeout_s(self) -> float:
        """A shadow that does not answer for so long counts as stuck."""

    @property
    def shadows(self) -> tuple[str, ...]:
        """``host:port`` of every shadow, in their order."""


class TreeMaker(Protocol):
    """Makes the tree of a whole state, as `apply_tree` takes it, of a side record and of what shadows gave."""

    def __call__(
        self,
        state: Mapping[str, Any],
        tracked: TrackedParameters,
        side: Mapping[str, Any],
        tensors: Mapping[tuple[int, str], torch.Tensor],
        where: str,
    ) -> dict[str, Any]:
        """Raises MismatchError if they do not fit the state."""


@dataclass(frozen=True)
class Restored:
    """What was restored: a start after it continues from there."""

    job: str
    incarnation: int
    iteration: int
    step: int


@dataclass(frozen=True)
class _Plan:
    """What rank 0 found out, for all ranks."""

    job: str
    incarnation: int
    choice: asking.Choice
    ranks: int
    timeout_s: float
    """For a shadow's answer, while it applies updates or reads a spill back for all that ask."""


# -- where shadows are -------------------------------------------------------------------------------------------------


def read_token(options: AskingOptions) -> bytes:
    """The secret that shadows want to see. Raises ConfigError if there is none, no shadow, or others may read it."""
    if not options.shadows:
        raise ConfigError(f"{options.system}: {options.wants}")
    if options.token_file is None:
        raise ConfigError(f"{options.system}: {options.wants_token}")
    return read_token_file(Path(options.token_file))


def ranks_together() -> tuple[int, int, RankExchange | None]:
    """This rank, the number of ranks, and how they tell each other what one found (None for one alone).

    All of them call it together.
    """
    rank, ranks = world_of_torch()
    return rank, ranks, None if ranks == 1 else RankExchange("shadows", rank, ranks, 600.0)


def job_of(directory: Path, options: AskingOptions, token: bytes) -> str | None:
    """The job that belongs to this directory, or else to the shadows. None for neither.

    Raises MismatchError if shadows keep another job, CheckpointError if one cannot be asked.
    """
    on_disk = noted_job(directory)
    noted = None if on_disk is None else on_disk.job
    kept = {status.job for status in _statuses(options, token) if status.job is not None}
    if len(kept) > 1 or (noted is not None and kept and kept != {noted}):
        raise MismatchError(
            f"{options.system}: {directory} belongs to job {noted or '(none yet)'}, and the shadows keep "
            f"{', '.join(sorted(kept))}; give the shadows of this job, or start them again"
        )
    return noted or (kept.pop() if kept else None)


def _statuses(options: AskingOptions, token: bytes) -> list[Status]:
    answers = asking.ask_all(options.shadows, token, options.timeout_s, asking.ShadowClient.status)
    failures = [str(answer) for answer in answers if isinstance(answer, LastgoodError)]
    if failures:
        raise CheckpointError(f"{options.system}: " + "; ".join(failures))
    return [answer for answer in answers if not isinstance(answer, LastgoodError)]


def find_newest(directory: Path, options: AskingOptions) -> int | None:
    """The newest step that all shadows hold, or None. Fences nobody off."""
    token = read_token(options)
    job_of(directory, options, token)
    try:
        return _choose(directory, options, token, None).step
    except (NoCheckpoint, CorruptCheckpoint):
        return None


def _choose(directory: Path, options: AskingOptions, token: bytes, step: int | None) -> asking.Choice:
    """What all shadows hold now. Raises NoCheckpoint, and CorruptCheckpoint if they held something and lost it.

    A training that goes on (or what it has left in connections) moves one shadow on before another one answers. Once an
    iteration is applied anywhere, all hold it, so a second answer tells, unless all have moved on again.
    """
    before: list[Status] | None = None
    polls = 0
    while True:
        statuses = _statuses(options, token)
        polls += 1
        try:
            return asking.choose(statuses, step)
        except NoCheckpoint as error:
            if polls <= _STATUS_POLLS and (before is None or _held(statuses) != _held(before)):
                before = statuses
                continue
            signs, anew = asking.signs_of_loss(statuses), []
            if signs:
                anew.append("end all shadows and start them with other folders for spills")
            noted = noted_job(directory)
            if noted is not None and noted.promised is not None:
                signs.append(f"{directory / JOB_FILE} says that step {noted.promised}, at least, was complete on all")
                anew.append(f"move {directory / JOB_FILE} away, or give another directory")
            if step is not None or not signs:
                raise
            raise CorruptCheckpoint(
                f"{options.system}: {error}, and a training would begin again after steps that were complete: "
                f"{'; '.join(signs)}. Start the shadows with the folders for spills that they had, if they spilled; to "
                f"begin again, {', and '.join(anew)}"
            ) from error


def _held(statuses: Sequence[Status]) -> list[tuple[Any, ...]]:
    return [(status.epoch, status.memory, status.durable) for status in statuses]


# -- restoring ---------------------------------------------------------------------------------------------------------


def restore_together(
    directory: Path,
    state: Mapping[str, Any],
    options: AskingOptions,
    step: int | None,
    tree: TreeMaker = restored_tree,
) -> Restored:
    """Fence, choose and load, on all ranks together. Raises as `Checkmate.restore`."""
    token = read_token(options)
    rank, ranks, together = ranks_together()
    plan: _Plan = _found_by_first(rank, together, lambda: _find(directory, options, token, step))
    if plan.ranks != ranks and not options.one_side:
        raise MismatchError(
            f"{options.system}: step {plan.choice.step} was saved by {plan.ranks} ranks, and there are {ranks} now; "
            "this system restores on as many"
        )
    load = _Load(state, options, token, plan, 0 if options.one_side else rank, tree)
    # Loading may need all ranks itself (ZeRO's weights are gathered), so no rank begins before all can.
    for part in (load.fetch, load.apply):
        _all_do(part, together, plan.choice.step)
    return Restored(plan.job, plan.incarnation, plan.choice.iteration, plan.choice.step)


def _found_by_first(rank: int, together: RankExchange | None, find: Callable[[], Any]) -> Any:
    """What rank 0 finds, on all ranks; what it raises, all raise."""
    told: tuple[Any, LastgoodError | None] = (None, None)
    if rank == 0:
        try:
            told = (find(), None)
        except LastgoodError as one:
            told = (None, one)  # the others wait for what this rank tells
    if together is not None:
        told = together.tell(told)[0]
    found, error = told
    if error is not None:
        raise error
    return found


def _all_do(part: Callable[[], None], together: RankExchange | None, step: int) -> None:
    """Do a part of a restore. Raises what this rank's raises, or CheckpointError for another rank's."""
    fault: LastgoodError | None = None
    try:
        part()
    except LastgoodError as one:
        if together is None:
            raise
        fault = one
    if together is not None:  # no rank changes anything before all have got theirs
        faults = [(number, one) for number, one in enumerate(together.tell(fault)) if one is not None]
        if fault is not None:
            raise fault
        if faults:
            raise CheckpointError(f"rank {faults[0][0]} could not restore step {step}: {faults[0][1]}")


def check_held(directory: Path, options: AskingOptions, step: int | None) -> None:
    """Raise as `restore_together` would now, if it would find nothing; all ranks call it. Fences nobody off."""
    rank, _, together = ranks_together()
    _found_by_first(rank, together, lambda: _look(directory, options, read_token(options), step))


def _look(directory: Path, options: AskingOptions, token: bytes, step: int | None) -> str:
    """The job, if all shadows hold something of it. Raises as `_choose` and `job_of`."""
    job = job_of(directory, options, token)
    if job is None:
        raise NoCheckpoint(f"{directory}: no shadow of {', '.join(options.shadows)} has kept anything yet")
    try:
        _choose(directory, options, token, step)
    except NoCheckpoint as error:
        _log.warning("%s: %s", options.system, error)  # attach() goes on from nothing
        raise
    return job


def _find(directory: Path, options: AskingOptions, token: bytes, step: int | None) -> _Plan:
    """On rank 0: fence all older incarnations off, and choose."""
    job = _look(directory, options, token, step)  # nobody is fenced off for nothing
    statuses = asking.fence(options.shadows, token, job=job, timeout_s=options.timeout_s)
    incarnation = max(status.epoch for status in statuses)
    choice = asking.choose(statuses, step)
    side, _ = asking.fetch_side(
        options.shadows, token, choice, job=job, incarnation=incarnation, rank=0, timeout_s=options.timeout_s
    )
    note_job(directory, job)
    layout = _layout_in(side.layout, f"step {choice.step}")
    most = max(layout.bytes_of(shadow) for shadow in range(layout.shadows))
    return _Plan(
        job,
        incarnation,
        choice,
        layout.ranks,
        options.timeout_s + _RESTORE_READ_FACTOR * most / _SLOWEST_READ_BYTES_PER_S,
    )


def _layout_in(described: Mapping[str, Any] | None, where: str) -> GradientLayout:
    try:
        if described is None or described["version"] not in SIDE_VERSIONS:
            raise ValueError("of another version")
        return GradientLayout.from_data(described["gradients"], where)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptCheckpoint(f"{where}: its side record is described by no layout: {error!r}") from error


class _Load:
    """One rank's part of a restore: its own side record, and its tensors from all shadows in parallel."""

    def __init__(
        self,
        state: Mapping[str, Any],
        options: AskingOptions,
        token: bytes,
        plan: _Plan,
        rank: int,
        make_tree: TreeMaker,
    ) -> None:
        self._state = state
        self._options = options
        self._token = token
        self._plan = plan
        self._rank = rank
        self._make_tree = make_tree
        self._where = f"step {plan.choice.step} of the shadows"
        self._tracked: TrackedParameters
        self._lock = threading.Lock()
        self._tensors: dict[tuple[int, str], torch.Tensor] = {}
        self._tree: dict[str, Any] = {}

    def fetch(self) -> None:
        """Get all of it, and change nothing. Raises MismatchError if the state is another one."""
        plan, options = self._plan, self._options
        self._tracked = TrackedParameters(self._state)
        side, record = asking.fetch_side(
            options.shadows,
            self._token,
            plan.choice,
            job=plan.job,
            incarnation=plan.incarnation,
            rank=self._rank,
            timeout_s=plan.timeout_s,
        )
        layout = _layout_in(side.layout, self._where)
        first = self._first_of(layout)
        asking.fetch(
            options.shadows,
            self._token,
            plan.choice,
            job=plan.job,
            incarnation=plan.incarnation,
            timeout_s=plan.timeout_s,
            take=lambda entry: self._take(entry, first),
        )
        missing = [name for index, name in enumerate(self._tracked.names) if (index, "parameter") not in self._tensors]
        if missing:
            raise CorruptCheckpoint(f"{self._where}: shadows gave no bytes of {', '.join(missing[:3])}")
        reduced = open_side(record, self._where)
        self._tree = self._make_tree(self._state, self._tracked, reduced, self._tensors, self._where)
        check_tree(self._state, self._tree, self._where)

    def apply(self) -> None:
        """Put it into the state."""
        load_tree(self._state, self._tree, self._where)

    def _first_of(self, layout: GradientLayout) -> int:
        """The index of this rank's first parameter, if all of them are as they were declared."""
        prefix = f"rank{self._rank}/"
        own = [(index, one) for index, one in enumerate(layout.parameters) if one.name.startswith(prefix)]
        union = bool(own)
        if not union:
            own = list(enumerate(layout.parameters))
        theirs = [(one.name.removeprefix(prefix) if union else one.name, one.shape, one.dtype.name) for _, one in own]
        for held, wanted in zip(theirs, self._tracked.declared(), strict=False):
            if not self._is_same(held, wanted):
                raise MismatchError(
                    f"{self._where}: the checkpoint holds {held[0]} as {held[2]} {held[1]}, "
                    f"the state has {wanted[0]} as {wanted[2]} {wanted[1]}"
                )
        if len(theirs) != len(self._tracked.parameters):
            raise MismatchError(
                f"{self._where}: the checkpoint's optimizer updates {len(theirs)} parameters, the state's "
                f"{len(self._tracked.parameters)}"
            )
        return own[0][0]

    def _is_same(self, held: _Declared, wanted: _Declared) -> bool:
        """Whether a parameter is the one that the checkpoint holds; who looks on does not know its part's name."""
        name, *rest = held
        named = wanted[0] == name or (self._options.one_side and wanted[0].endswith(f".{name}"))
        return named and list(wanted[1:]) == rest

    def _take(self, entry: Entry, first: int) -> memoryview | None:
        """Memory for a tensor; None for another rank's."""
        index = entry.parameter - first
        if not 0 <= index < len(self._tracked.parameters):
            return None
        dtype = getattr(torch, entry.dtype, None)
        parameter = local_part(self._tracked.parameters[index])
        limit = max(parameter.numel(), 1)
        if (
            not isinstance(dtype, torch.dtype)
            or entry.nbytes != prod(entry.shape) * dtype.itemsize
            or prod(entry.shape) > limit
        ):
            raise CorruptCheckpoint(
                f"{self._where}: {entry.key} of {self._tracked.names[index]} comes as {entry.dtype} {entry.shape} of "
                f"{entry.nbytes} bytes"
            )
        memory = torch.empty(entry.shape, dtype=dtype, device="cpu")
        ordered = memory
        if memory.dim() == parameter.dim():
            order: Sequence[int] = self._tracked.orders[index]
            ordered = memory.permute([order.index(dim) for dim in range(len(order))])
        with self._lock:
            if (index, entry.key) in self._tensors:
                raise CorruptCheckpoint(f"{self._where}: {entry.key} of {self._tracked.names[index]} comes twice")
            self._tensors[index, entry.key] = ordered
        return memoryview(memory.reshape(-1).view(torch.uint8).numpy().data)
