"""A shadow's durable side: one iteration of all its buckets and side records as a stream in a slot file.

What is written is a copy, so that applying goes on meanwhile. With each spill comes the word which older one all
shadows hold (`SpillPlan`); that one is not overwritten, so that there always is one that all of them can read back.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from lastgood.addresses import memory_address
from lastgood.errors import CheckpointError, CorruptCheckpoint, LastgoodError, NoCheckpoint, WaitTimeout
from lastgood.gradients.layout.entries import Entry, Saved, Side
from lastgood.gradients.layout.layout import GradientLayout
from lastgood.gradients.protocol.spills import is_left_behind, retained
from lastgood.state.layout import MAX_LAYOUT_BYTES
from lastgood.storage import SlotInfo, SlotStore, Verdict
from lastgood.text import parse_json
from lastgood.units import MIB

__all__ = ["SideRecord", "Spill", "SpillCopy", "SpillStore"]

_log = logging.getLogger("lastgood.shadow")
_SLOTS = 3
"""One that is durable everywhere, one that is being written, and one more, so that no damaged file stops it."""
_POOL_BYTES = 32 * MIB
_CHUNK_BYTES = 4 * MIB
_FORMAT = "lastgood-shadow-spill"
_ENTRIES: TypeAdapter[tuple[Entry, ...]] = TypeAdapter(tuple[Entry, ...])


@dataclass(frozen=True)
class SideRecord:
    """A rank's own state after an iteration, with the layout that describes it."""

    message: Side
    content: bytes


@dataclass
class SpillCopy:
    """A copy of one iteration, made bucket by bucket while others may already be further."""

    saved: Saved
    keep: Saved | None = None
    """The spill that must stay meanwhile: all shadows hold it."""
    buckets: dict[int, tuple[tuple[Entry, ...], bytearray]] = field(default_factory=dict)
    sides: dict[int, SideRecord] = field(default_factory=dict)


@dataclass(frozen=True)
class Spill:
    """A durable iteration."""

    saved: Saved
    job: str
    layout: GradientLayout
    shadow: int
    buckets: dict[int, tuple[Entry, ...]]
    sides: tuple[Side, ...]
    info: SlotInfo
    """Buckets lie in the stream one after another, in rising order; then the side records, by rank."""


class SpillStore:
    """The slot files of one shadow. Raises LockHeld, MismatchError and StorageError as `SlotStore` does."""

    def __init__(self, directory: Path, job: str | None, shadow: int) -> None:
        self._store = SlotStore(
            directory,
            slots=_SLOTS,
            keep=1,
            pool_bytes=_POOL_BYTES,
            chunk_bytes=_CHUNK_BYTES,
            job_id=None if job is None else bytes.fromhex(job),
        )
        self.directory = directory
        self.job = self._store.job.job_id.hex()
        """The job whose spills lie here."""
        self._shadow = shadow
        self._lock = threading.Lock()
        self._durable: list[Spill] = []
        self._thread: threading.Thread | None = None
        self._fenced = 0
        for info in self._store.committed():
            if self._store.book().is_bad(info.sequence):
                continue  # left behind
            try:
                self._durable.append(self._read_spill(info))
            except CheckpointError as error:
                _log.error("%s", error)

    def durable(self) -> list[Spill]:
        """What can be read back, newest first."""
        with self._lock:
            return list(self._durable)

    def find(self, saved: Saved) -> Spill:
        """Raises NoCheckpoint, naming what there is."""
        for spill in self.durable():
            if spill.saved == saved:
                return spill
        held = ", ".join(f"{one.saved.iteration} of incarnation {one.saved.epoch}" for one in self.durable()) or "none"
        raise NoCheckpoint(
            f"{self.directory}: iteration {saved.iteration} of incarnation {saved.epoch} is not spilled here; "
            f"held: {held}"
        )

    # -- writing ---------------------------------------------------------------------------------------------------

    def fence(self, incarnation: int) -> None:
        """From here on nothing of older incarnations becomes durable: who fences relies only on what is."""
        with self._lock:
            self._fenced = incarnation

    def begin_incarnation(self, incarnation: int, adopt: int | None, restored: Saved | None) -> None:
        """Trainers go on after iteration `adopt`, or begin again. Spills that they left behind are not given back.

        All others stay for now: only rank 0, which hears of those of all shadows, knows which one they share.
        Raises WaitTimeout, StorageError.
        """
        if not self.wait(0.0):
            raise WaitTimeout(f"{self.directory}: a spill is still being written; try again")
        left = [spill for spill in self.durable() if is_left_behind(spill.saved, incarnation, adopt, restored)]
        self._disown(left, "made by an incarnation that was left")
        self._store.incarnation = incarnation

    def write(self, copy: SpillCopy, layout: GradientLayout, over: Callable[[int, str | None], None]) -> None:
        """Write a copy in the background; `over` is called at its end, with an error or None.

        Only what it says must stay does; if that is not here, the newest that is.
        """
        self._thread = threading.Thread(target=self._write, args=(copy, layout, over), name="spill", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the write that is in progress; False if it takes longer."""
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Give up what is being written, and the directory."""
        try:
            self._store.close(10.0)
        except CheckpointError as error:
            _log.error("%s", error)

    def _write(self, copy: SpillCopy, layout: GradientLayout, over: Callable[[int, str | None], None]) -> None:
        iteration = copy.saved.iteration
        try:
            self._write_stream(copy, layout)
        except Exception as error:  # whatever it is, rank 0 waits for an answer before it asks for another spill
            expected = isinstance(error, (LastgoodError, OSError, MemoryError))
            _log.error("iteration %d is not durable here: %r", iteration, error, exc_info=not expected)
            over(iteration, (str(error) or repr(error))[:10_000])
        else:
            over(iteration, None)

    def _keep_only(self, saved: Saved | None) -> None:
        with self._lock:
            kept = retained([spill.saved for spill in self._durable], saved)
            dropped = [spill for spill in self._durable if spill.saved != kept]
            self._durable = [spill for spill in self._durable if spill.saved == kept]
        for spill in dropped:
            self._store.drop(spill.info)

    def distrust(self, iteration: int) -> None:
        """Spills from this iteration on are not the trainers' state: they are not given back. Raises StorageError."""
        wrong = [spill for spill in self.durable() if spill.saved.iteration >= iteration]
        self._disown(wrong, "not the trainers' state")

    def _disown(self, spills: Sequence[Spill], why: str) -> None:
        """They must not come back when this process is started again."""
        for spill in spills:
            self._store.judge(spill.info.sequence, Verdict(spill.info.step, False, why))
            with self._lock:
                self._durable = [one for one in self._durable if one is not spill]
            self._store.drop(spill.info)

    def _write_stream(self, copy: SpillCopy, layout: GradientLayout) -> None:
        self._keep_only(copy.keep)
        order = sorted(copy.buckets)
        ranks = sorted(copy.sides)
        meta = json.dumps(
            {
                "format": _FORMAT,
                "version": 1,
                "saved": copy.saved.content(),
                "shadow": self._shadow,
                "layout": layout.to_data(),
                "buckets": [[number, [entry.content() for entry in copy.buckets[number][0]]] for number in order],
                "sides": [copy.sides[rank].message.content() for rank in ranks],
            },
            separators=(",", ":"),
        ).encode()
        buffers: list[bytes | bytearray] = [copy.buckets[number][1] for number in order]
        buffers += [copy.sides[rank].content for rank in ranks]
        data_bytes = sum(len(buffer) for buffer in buffers)
        write = self._store.try_begin(copy.saved.step, data_bytes + len(meta))
        if write is None:
            raise CheckpointError(
                f"{self.directory}: no slot is free; spills are being read, or the disk does not let go of older writes"
            )
        try:
            for buffer in [*buffers, meta]:
                if buffer:
                    address, keep = _address(buffer)
                    write.copy_host([(address, len(buffer))])
                    del keep
            digest = hashlib.sha256(layout.digest.encode()).digest()
            outcome = write.commit(data_bytes, len(meta), digest)
        except BaseException:
            write.abort()
            raise
        if outcome != "durable" or write.info is None:
            raise CheckpointError(f"{self.directory}: the spill was overtaken by a newer one")
        spill = self._read_spill(write.info)
        with self._lock:
            fenced = copy.saved.epoch < self._fenced
            alive = {info.sequence for info in self._store.committed()}
            new = [] if fenced else [spill]
            self._durable = [*new, *(one for one in self._durable if one.info.sequence in alive)]
        if fenced:
            self._disown([spill], "made by an incarnation that was left")
            raise CheckpointError(f"{self.directory}: incarnation {copy.saved.epoch} was fenced off meanwhile")

    # -- reading ---------------------------------------------------------------------------------------------------

    def read(self, spill: Spill, take: Callable[[int, tuple[Entry, ...]], list[memoryview]]) -> None:
        """Read all buckets into the memory that `take` gives for each, entry by entry.

        Raises CorruptCheckpoint (file, chunk, both checksums), StorageError.
        """
        ranges = []
        held = []
        for number in sorted(spill.buckets):
            for view in take(number, spill.buckets[number]):
                if len(view):
                    address, keep = _address(view)
                    held.append(keep)
                    ranges.append((address, len(view)))
        with self._reading(spill):
            self._store.read_into(spill.info, ranges)

    def verify(self, spill: Spill) -> None:
        """Read and check all of it. Raises CorruptCheckpoint, StorageError."""
        with self._reading(spill):
            self._store.verify(spill.info)

    def read_side(self, spill: Spill, rank: int) -> SideRecord:
        """A rank's side record. Raises NoCheckpoint if it is not here, CorruptCheckpoint, StorageError."""
        offset = sum(entry.nbytes for entries in spill.buckets.values() for entry in entries)
        for side in spill.sides:
            if side.rank == rank:
                with self._reading(spill):
                    return SideRecord(side, self._store.read_bytes(spill.info, offset, side.nbytes))
            offset += side.nbytes
        raise NoCheckpoint(f"{self.directory}: iteration {spill.saved.iteration} holds no side record of rank {rank}")

    @contextlib.contextmanager
    def _reading(self, spill: Spill) -> Iterator[None]:
        """Nobody overwrites it meanwhile. One that is found damaged is not offered again: an older one may be valid."""
        try:
            with self._store.hold(spill.info):
                yield
        except CorruptCheckpoint as error:
            with self._lock:
                self._durable = [one for one in self._durable if one is not spill]
            _log.error("%s; this spill is not offered any more", error)
            raise

    def _read_spill(self, info: SlotInfo) -> Spill:
        spill = spill_in(self._store.read_meta(info), info)
        if spill.shadow != self._shadow:
            raise CorruptCheckpoint(
                f"{info.path}, step {info.step}: it is shadow {spill.shadow}'s, and this is shadow {self._shadow}"
            )
        return spill


def is_spill(meta: bytes) -> bool:
    """Whether a slot's meta data call themselves a spill's."""
    return meta.startswith(b'{"format":"%s"' % _FORMAT.encode())


def spill_in(meta: bytes, info: SlotInfo) -> Spill:
    """The spill that a slot's meta data describe. Raises CorruptCheckpoint."""
    where = f"{info.path}, step {info.step}"
    try:
        document: dict[str, Any] = parse_json(meta, where, most_bytes=MAX_LAYOUT_BYTES)
        if document["format"] != _FORMAT or document["version"] != 1:
            raise ValueError("another format")
        layout = GradientLayout.from_data(document["layout"], where)
        buckets = {int(number): _ENTRIES.validate_json(json.dumps(entries)) for number, entries in document["buckets"]}
        sides = tuple(Side.model_validate_json(json.dumps(side)) for side in document["sides"])
        saved = Saved.model_validate_json(json.dumps(document["saved"]))
        shadow = int(document["shadow"])
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpoint(f"{where}: no spill of a shadow: {error!r}") from error
    held_bytes = sum(entry.nbytes for entries in buckets.values() for entry in entries)
    held_bytes += sum(side.nbytes for side in sides)
    if held_bytes != info.meta_offset or set(buckets) != set(layout.buckets_of(shadow)):
        raise CorruptCheckpoint(f"{where}: its entries are not what the stream holds")
    return Spill(saved, info.record.job_id.hex(), layout, shadow, buckets, sides, info)


def _address(buffer: bytes | bytearray | memoryview) -> tuple[int, Any]:
    """Where the bytes lie, and what keeps them there."""
    buffer = bytearray(buffer) if isinstance(buffer, bytes) else buffer
    return memory_address(buffer, 0, len(buffer))
