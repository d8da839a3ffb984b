"""One life of a job on the recording disk: saves with the real store, and reports each step once it is durable.

Run as: crash_writer.py DIRECTORY REPORTS LIFE BREAKAGE. A life is one process; the test runs several, one after
another. A breakage takes one promise of the store away, so that the test can show that it would be seen.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "storage" / "support"))

from slot_helpers import TIMEOUT_S, commit, content_of, give, open_store

import lastgood.files
from lastgood.storage import SlotStore, files, opening, slots, write
from lastgood.storage import format as fmt
from lastgood.storage.medium import DirectFile

CHUNK = 8192
KEEP = 2


def stream_bytes(step: int) -> int:
    """Streams grow every few steps, so that slots must grow; one is empty."""
    return 0 if step == 4 else 5000 + 4500 * (step // 5) + 911 * (step % 4)


class Life:
    """A store, and the reports of what it made durable."""

    def __init__(self, directory: Path, reports: Path, slots: int, keep: int = KEEP) -> None:
        self.store = open_store(
            directory, slots=slots, keep=keep, chunk_bytes=CHUNK, pool_bytes=6 * CHUNK, writer_threads=2
        )
        self._reports = os.open(reports, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._turn = threading.Lock()
        self.step = max((info.step for info in self.store.committed()), default=0)

    def begin(self) -> write.SlotWrite:
        """Steps grow with sequences, as in a training."""
        with self._turn:
            self.step += 1
            slot = self.store.begin(self.step, stream_bytes(self.step), TIMEOUT_S, later=True)
        slot.void()  # others may begin and commit before
        return slot

    def finish(self, slot: write.SlotWrite) -> str:
        outcome = commit(slot)
        if outcome == "durable":
            os.write(self._reports, f"durable {slot.step} {slot.sequence}\n".encode())
        return outcome

    def save(self) -> str:
        slot = self.begin()
        give(slot, content_of(slot.step, slot.stream_bytes))
        return self.finish(slot)

    def save_in_threads(self, threads: int, saves: int) -> None:
        failures: list[BaseException] = []

        def run() -> None:
            try:
                for _ in range(saves):
                    self.save()
            except BaseException as error:
                failures.append(error)

        running = [threading.Thread(target=run, daemon=True) for _ in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join(120)
            if thread.is_alive():
                raise TimeoutError("waited 120 s for a saving thread")
        if failures:
            raise failures[0]


def first(directory: Path, reports: Path) -> None:
    """Everything from nothing, three in flight; a superseded checkpoint and an abandoned one."""
    life = Life(directory, reports, slots=5)
    with life.store:
        life.save()
        life.save_in_threads(3, 4)
        older, newer = life.begin(), life.begin()
        for slot in (older, newer):
            give(slot, content_of(slot.step, slot.stream_bytes))
        assert (life.finish(newer), life.finish(older)) == ("durable", "superseded")
        abandoned = life.begin()
        give(abandoned, content_of(abandoned.step, abandoned.stream_bytes)[: CHUNK + 5])
        abandoned.abort()
        life.save()


def second(directory: Path, reports: Path) -> None:
    """Another process goes on with one slot less, and with room reserved for more."""
    life = Life(directory, reports, slots=4)
    with life.store:
        life.save_in_threads(2, 2)
        life.store.reserve(stream_bytes(life.step + 12))
        life.save_in_threads(2, 4)


def third(directory: Path, reports: Path) -> None:
    """A slot more again."""
    life = Life(directory, reports, slots=5)
    with life.store:
        life.save_in_threads(3, 3)


def killed_before_the_flush_of_a_record(directory: Path, reports: Path) -> None:
    """Dies with a commit record that was written and is not flushed: the next life sees it, a power cut may take it."""
    life = Life(directory, reports, slots=4)
    life.save()
    die_before_the_flush_of_a_record()
    life.save()


def killed_after_a_rename(directory: Path, reports: Path) -> None:
    """Dies when new slot files have their names, which are not flushed."""
    life = Life(directory, reports, slots=5)
    files.sync_directory = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(3):  # the free slots first, then the one that is not there yet
        life.begin()


def brief(directory: Path, reports: Path) -> None:
    """A short life, one save after another, long enough for slots to be used again with and without growing."""
    life = Life(directory, reports, slots=3)
    with life.store:
        for _ in range(9):
            life.save()


def keeps_one(directory: Path, reports: Path) -> None:
    """As the paper: one checkpoint is kept."""
    life = Life(directory, reports, slots=2, keep=1)
    with life.store:
        for _ in range(3):
            life.save()


def keeps_one_and_is_killed(directory: Path, reports: Path) -> None:
    """As `killed_before_the_flush_of_a_record`, with nothing to fall back on."""
    life = Life(directory, reports, slots=2, keep=1)

    die_before_the_flush_of_a_record()
    life.save()


LIVES = {
    life.__name__: life
    for life in (
        first,
        second,
        third,
        brief,
        killed_before_the_flush_of_a_record,
        killed_after_a_rename,
        keeps_one,
        keeps_one_and_is_killed,
    )
}

# -- taking promises away ----------------------------------------------------------------------------------------------

WRITTEN: dict[int, str] = {}
"""What was last written as a block, by descriptor: header, void, record or table."""


def _what(content: bytes, offset: int) -> str:
    if offset == fmt.COMMIT_OFFSET:
        record = fmt.CommitRecord.decode(content)
        return "void" if record is not None and record.kind is fmt.RecordKind.WRITING else "record"
    return "header" if offset == fmt.HEADER_OFFSET else "table"


def watch_writes(skip: Callable[[str], bool] = lambda what: False) -> None:
    real = DirectFile.write_block

    def watched(file: DirectFile, content: bytes, offset: int) -> None:
        WRITTEN[file.descriptor] = _what(content, offset)
        if not skip(WRITTEN[file.descriptor]):
            real(file, content, offset)

    DirectFile.write_block = watched  # type: ignore[method-assign]


def die_before_the_flush_of_a_record() -> None:
    real = DirectFile.flush

    def die(file: DirectFile) -> None:
        if WRITTEN.get(file.descriptor) == "record":
            os.kill(os.getpid(), signal.SIGKILL)
        real(file)

    DirectFile.flush = die  # type: ignore[method-assign]


def flush_all_but(unflushed: str) -> None:
    real = DirectFile.flush

    def flush(file: DirectFile) -> None:
        if WRITTEN.get(file.descriptor) != unflushed:
            real(file)

    DirectFile.flush = flush  # type: ignore[method-assign]


def flush_nothing() -> None:
    files.flush = lambda descriptor: None


def sync_no_directory() -> None:
    for module in (lastgood.files, files, opening, slots):
        module.sync_directory = lambda directory: None


def void_nothing() -> None:
    watch_writes(lambda what: what == "void")


def protect_no_kept_slot() -> None:
    def free_slots(store: SlotStore) -> list[object]:
        return [slot for slot in store._all if not slot.busy]

    SlotStore._free_slots = free_slots  # type: ignore[assignment]


def commit_record_before_data() -> None:
    """The record goes out together with the table, and one flush follows for all."""
    real_record = fmt.CommitRecord.committed
    newest = threading.local()  # a commit makes its record, and writes its table, in one thread

    def remember(void: fmt.CommitRecord, *fields: object) -> fmt.CommitRecord:
        record = real_record(void, *fields)  # type: ignore[arg-type]
        newest.content = record.encode()
        return record

    real_write = DirectFile.write_block

    def write_both(file: DirectFile, content: bytes, offset: int) -> None:
        real_write(file, content, offset)
        if _what(content, offset) == "table":
            real_write(file, newest.content, fmt.COMMIT_OFFSET)

    fmt.CommitRecord.committed = remember  # type: ignore[method-assign, assignment]
    DirectFile.write_block = write_both  # type: ignore[method-assign]


BREAKAGES: dict[str, Callable[[], None]] = {
    "none": lambda: None,
    "flush_nothing": flush_nothing,
    "no_flush_of_the_void_record": lambda: flush_all_but("void"),
    "no_flush_of_the_data": lambda: flush_all_but("table"),
    "no_flush_of_the_record": lambda: flush_all_but("record"),
    "void_nothing": void_nothing,
    "commit_record_before_data": commit_record_before_data,
    "sync_no_directory": sync_no_directory,
    "protect_no_kept_slot": protect_no_kept_slot,
}


def main(directory: Path, reports: Path, life: str, breakage: str) -> None:
    watch_writes()
    BREAKAGES[breakage]()
    LIVES[life](directory, reports)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4])
