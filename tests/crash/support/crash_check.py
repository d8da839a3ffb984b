"""What must hold in every state that a power cut may leave, asked of two readers that share no code."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import reference_reader
from disk_states import Signature
from slot_helpers import content_of, load, open_store, save

from lastgood.errors import LastgoodError, NoCheckpoint
from lastgood.storage import SlotStore


class Violation(AssertionError):
    """A state in which the store breaks a promise."""


class Seen(NamedTuple):
    sequence: int
    step: int


class Checker:
    """Judges one directory again and again. Reading a slot file is a function of its bytes alone, so what the readers
    found in a content is kept by its signature; which slots count is decided anew in every state."""

    def __init__(self, directory: Path, scratch: Path, stream_bytes: Callable[[int], int], chunk_bytes: int) -> None:
        self.directory = directory
        self._scratch = scratch
        self._stream_bytes = stream_bytes
        self._chunk_bytes = chunk_bytes
        self._reference: dict[Signature, Seen | None] = {}
        self._whole: dict[tuple[Signature, int], bool] = {}

    def look(self, signatures: dict[str, Signature]) -> list[Seen]:
        """The complete checkpoints, newest first; `signatures` by file name. Raises Violation."""
        if not self.directory.exists():
            return []
        if "job.json" in signatures:
            try:
                reference_reader.job_id(self.directory)
            except Exception as error:
                raise Violation(f"job.json is there and damaged: {error!r}") from error
        view = SlotStore.peek(self.directory)
        try:
            infos = view.committed()
        except LastgoodError as error:
            raise Violation(f"the store's reader refuses the directory: {error!r}") from error
        for info in infos:
            key = (signatures[info.path.name], info.sequence)
            if key not in self._whole:
                try:
                    content = load(view, info)
                except LastgoodError as error:
                    raise Violation(f"step {info.step} has a commit record and is not whole: {error!r}") from error
                if content != content_of(info.step, self._stream_bytes(info.step)):
                    raise Violation(f"step {info.step} has wrong content")
                self._whole[key] = True
        found = [Seen(info.sequence, info.step) for info in infos]
        expected = self._look_by_reference(signatures)
        if found != expected:
            raise Violation(f"two readers disagree: the store's sees {found}, the reference {expected}")
        try:
            newest = view.newest()
        except NoCheckpoint:
            if found:
                raise Violation("newest() finds nothing, committed() does") from None
        else:
            if (newest.sequence, newest.step) != found[0]:
                raise Violation(f"newest() gives step {newest.step}, and {found[0]} is the newest")
        return found

    def _look_by_reference(self, signatures: dict[str, Signature]) -> list[Seen]:
        found = set()
        for name, signature in signatures.items():
            if not (name.startswith("slot-") and name.endswith(".lgs")):
                continue
            if signature not in self._reference:
                one = reference_reader.read_slot(self.directory / name)
                if one is not None and one.stream != content_of(one.step, self._stream_bytes(one.step)):
                    raise Violation(f"the reference reader takes wrong content for step {one.step}")
                self._reference[signature] = None if one is None else Seen(one.sequence, one.step)
            seen = self._reference[signature]
            if seen is not None:
                found.add(seen)
        return sorted(found, reverse=True)

    def go_on(self, found: list[Seen]) -> None:
        """Open a copy of the directory for writing, as the next life of the job would, and save twice."""
        copy = self._scratch / "next-life"
        shutil.rmtree(copy, ignore_errors=True)
        if self.directory.exists():
            shutil.copytree(self.directory, copy)
        step = max((one.step for one in found), default=0)
        try:
            with open_store(copy, slots=5, chunk_bytes=self._chunk_bytes, writer_threads=1) as store:
                kept = [Seen(info.sequence, info.step) for info in store.committed()]
                if kept != found:
                    raise Violation(f"a new life finds {kept} instead of {found}")
                if list(copy.glob("*.lastgood-tmp")):
                    raise Violation("a new life leaves temporary files")
                for number in (1, 2):
                    save(store, step + number, self._stream_bytes(step + number))
                    newest = store.newest()
                    if newest.step != step + number or load(store, newest) != content_of(
                        newest.step, newest.stream_bytes
                    ):
                        raise Violation(f"a new life cannot read back what it saved as step {step + number}")
                    if newest.sequence <= max((one.sequence for one in found), default=0):
                        raise Violation("a new life's sequence is not above those found")
        except LastgoodError as error:
            raise Violation(f"a new life fails: {error!r}") from error
        newest_two = [one.step for one in reference_reader.read_directory(copy)[:2]]
        if newest_two != [step + 2, step + 1]:
            raise Violation(f"the reference reader finds {newest_two} after steps {step + 1} and {step + 2} were saved")


def check_promise(found: list[Seen], reported: list[tuple[int, int]], keep: int) -> None:
    """None of the `keep` newest that were reported durable may be lost, unless newer ones are there in their place."""
    promised = sorted(reported, reverse=True)[:keep]
    for place, (sequence, step) in enumerate(promised):
        if place >= len(found) or found[place].sequence < sequence:
            kind = "newest" if place == 0 else f"number {place + 1}"
            raise Violation(
                f"step {step} (sequence {sequence}) was reported durable and is lost as the {kind}: found {found}"
            )
