"""Scenarios of the slot store on the faulty disk. Run as: store_faults.py DIRECTORY SCENARIO...; needs no torch."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "storage" / "support"))

from fault_tools import ANY, EIO, ENOSPC, HANG, SHORT, fault, fill, run_scenarios, small_disk
from reference_reader import read_directory
from slot_helpers import CHUNK, TIMEOUT_S, commit, content_of, give, load, open_store, save, steps

from lastgood.errors import StorageError, WaitTimeout
from lastgood.storage import SlotStore

STATE = 3 * CHUNK + 99
WRITES = 7
"""Of one save: the void record, four chunks, the table, the record."""
FLUSHES = ["void record", "data", "commit record"]


def expect_error(words: str, action: Callable[[], object]) -> StorageError:
    try:
        action()
    except StorageError as error:
        assert re.search(words, str(error)), f"{error} does not say {words}"
        return error
    raise AssertionError("no StorageError")


def wait_until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not true():
        assert time.monotonic() < deadline, f"waited {TIMEOUT_S:g} s for {what}"
        time.sleep(0.01)


def started(directory: Path) -> SlotStore:
    store = open_store(directory, slots=3)
    store.reserve(STATE)
    save(store, 1, STATE)
    save(store, 2, STATE)
    return store


def check(store: SlotStore, expected: list[int]) -> None:
    """The store has these; the readers have them as well, and anything else that they have is right."""
    assert steps(store)[: len(expected)] == expected, f"{steps(store)} instead of {expected}"
    for view in (store, SlotStore.peek(store.directory)):
        found = view.committed()
        assert set(expected) <= {info.step for info in found}
        for info in found:
            assert load(view, info) == content_of(info.step, STATE)
    for one in read_directory(store.directory):
        assert one.stream == content_of(one.step, STATE)


def failed_writes(directory: Path, error: int, words: str) -> None:
    """Each write of a save fails once; after each, saving goes on."""
    with started(directory) as store:
        expected = [2, 1]
        for number in range(WRITES):
            step = 10 * (number + 1)
            with fault("write", "slot-", error, skip=number, hits=1):
                expect_error(
                    rf"slot-000\d\.lgs: .* of \d+ bytes .*failed: {words}", lambda step=step: save(store, step, STATE)
                )
            check(store, expected)
            assert save(store, step + 1, STATE) == "durable"
            expected = [step + 1, expected[0]]
            check(store, expected)
        assert store.pool.free == store.pool.count
    check(open_store(directory, slots=3), expected)


def failed_flush(directory: Path, number: int) -> None:
    with started(directory) as store:
        with fault("flush", "slot-", EIO, skip=number, hits=1):
            expect_error(r"slot-0002\.lgs: .*failed: Input/output error; the device", lambda: save(store, 3, STATE))
        check(store, [2, 1])
        assert save(store, 4, STATE) == "durable"
        check(store, [4, 2])


def short_writes(directory: Path) -> None:
    """Every chunk is first written by half: the rest follows."""
    with started(directory) as store:
        for number in range(1, 4):  # whole chunks
            with fault("write", "slot-", SHORT, skip=number, hits=1):
                assert save(store, 2 + number, STATE) == "durable"
        check(store, [5, 4])


def short_write_of_a_block(directory: Path) -> None:
    """Half of a single block is no progress that direct I/O could go on from: refused, as a full disk is."""
    with started(directory) as store:
        for number in (0, WRITES - 1):
            with fault("write", "slot-", SHORT, skip=number, hits=1):
                expect_error("No space left", lambda: save(store, 3, STATE))
            check(store, [2, 1])
        assert save(store, 4, STATE) == "durable"


def short_reads(directory: Path) -> None:
    """Each read while looking and loading gives half of what was asked for, in whole blocks where it was several."""
    nbytes = 3 * CHUNK  # no chunk is a single block
    with open_store(directory, slots=3) as store:
        for step in (1, 2):
            save(store, step, nbytes)
        for call in range(16):
            with fault("read", "slot-", SHORT, skip=call):
                view = SlotStore.peek(directory)
                found = view.committed()
                assert [info.step for info in found] == [2, 1], f"read {call}: {[info.step for info in found]}"
                for info in found:
                    assert load(view, info) == content_of(info.step, nbytes), f"read {call}"


def short_read_of_a_chunk_of_one_block(directory: Path) -> None:
    with started(directory) as store:
        info = store.committed()[0]
        for call in range(3, 7):  # behind the record and the table: four chunks, the last has one block
            with fault("read", info.path.name, SHORT, skip=call):
                assert load(store, info) == content_of(2, STATE), f"read {call}"


def short_read_of_a_table(directory: Path) -> None:
    """A checksum table that fills most of a block."""
    nbytes = 700 * 4096
    with open_store(directory, slots=3, chunk_bytes=4096) as store:
        save(store, 1, nbytes)
    for call in range(6):
        with fault("read", "slot-", SHORT, skip=call):
            (info,) = SlotStore.peek(directory).committed()
            assert load(SlotStore.peek(directory), info) == content_of(1, nbytes)


def failed_read_of_data(directory: Path) -> None:
    """Names file, operation and place; the checkpoint before it can be read, and so can this one afterwards."""
    with started(directory) as store:
        newest, before = store.committed()
        with fault("read", newest.path.name, EIO, skip=5, times=100):
            expect_error(
                rf"{newest.path.name}: read of \d+ bytes .*at offset \d+ failed: Input", lambda: load(store, newest)
            )
            assert load(store, before) == content_of(1, STATE)
        check(store, [2, 1])
        assert save(store, 3, STATE) == "durable"


def failed_read_of_a_record(directory: Path) -> None:
    """A slot whose records cannot be read hides no other one from a reader, and is named."""
    with started(directory) as store:
        newest = store.committed()[0]
    with fault("read", newest.path.name, EIO, times=100):
        view = SlotStore.peek(directory)
        found = view.committed()
        assert [info.step for info in found] == [1]
        assert load(view, found[0]) == content_of(1, STATE)
        details = [status.detail for status in view.statuses() if status.path == newest.path]
        assert "Input/output error" in details[0]
        # A writer must know the highest sequence, or its checkpoints would be older than those it could not read.
        expect_error(rf"{newest.path.name}: .*Input/output error", lambda: open_store(directory, slots=3))
    check(open_store(directory, slots=3), [2, 1])


def no_room_to_grow(directory: Path) -> None:
    with started(directory) as store:
        larger = STATE + 40 * CHUNK
        before = sorted(path.stat().st_size for path in directory.glob("slot-*"))
        for call, skip in (("allocate", 0), ("write", 1), ("write", 0)):
            with fault(call, "slot-", ENOSPC, skip=skip, hits=1):
                expect_error(
                    r"slot-0002\.lgs: making a slot of \d+ bytes.*No space left", lambda: store.begin(3, larger)
                )
            assert sorted(path.stat().st_size for path in directory.glob("slot-*")) == before
            check(store, [2, 1])
        write = store.begin(4, larger, TIMEOUT_S)
        give(write, content_of(4, larger))
        assert commit(write) == "durable"
        assert load(store, store.committed()[0]) == content_of(4, larger)


def no_room_for_a_new_slot(directory: Path) -> None:
    with open_store(directory, slots=3) as store:
        save(store, 1, STATE)
        for call, skip in (("allocate", 0), ("write", 0)):
            with fault(call, ".slot-0001.lgs.", ENOSPC, skip=skip, hits=1):
                expect_error(
                    r"slot-0001\.lgs: making a slot of \d+ bytes.*No space left", lambda: save(store, 2, STATE)
                )
            assert not list(directory.glob("*.lastgood-tmp"))
            check(store, [1])
        save(store, 3, STATE)
        check(store, [3, 1])


def failed_flush_of_a_new_slot(directory: Path) -> None:
    """First of the file, then of its name: a name that a power cut may take must not be used."""
    with open_store(directory, slots=3) as store:
        save(store, 1, STATE)
        for skip in (0, 1):
            # The file's own flush, and its directory's, which is the second under this path.
            with fault("flush", str(directory), EIO, skip=skip, hits=1):
                expect_error(r"slot-0001\.lgs: making a slot", lambda: save(store, 2, STATE))
            left = [path.name for path in directory.glob("slot-0001*")]
            assert not left, f"{left} stays after flush {skip} failed"
        save(store, 3, STATE)
        check(store, [3, 1])


def hanging_write(directory: Path) -> None:
    """One write hangs in the disk: others go on, and the late one is superseded once the disk lets go."""
    with started(directory) as store:
        for step in (3, 4):  # all three slots in use would leave no place for the second one
            save(store, step, STATE)
    release = directory / "release"
    with open_store(directory, slots=4) as store:
        outcomes: list[str] = []
        with fault("write", "slot-", HANG, skip=1, release=release, hits=1) as struck:
            slow = store.begin(5, STATE, TIMEOUT_S)
            give(slow, content_of(5, STATE))
            wait_until(lambda: struck() == 1, "the write that hangs")  # its thread may come late: then others would
            thread = threading.Thread(target=lambda: outcomes.append(commit(slow)))
            thread.start()
            assert save(store, 6, STATE) == "durable"
            assert outcomes == []
            release.touch()
            thread.join(TIMEOUT_S)
        assert outcomes == ["superseded"]
        check(store, [6, 4])


def hanging_write_that_nobody_waits_for(directory: Path) -> None:
    release = directory / "release"
    with started(directory) as store:
        with fault("write", "slot-", HANG, skip=1, release=release, hits=1) as struck:
            slow = store.begin(3, STATE, TIMEOUT_S)
            give(slow, content_of(3, STATE))
            wait_until(lambda: struck() == 1, "the write that hangs")

            def let_go() -> None:
                wait_until(lambda: slow._given_up, "the commit to give up")
                release.touch()

            thread = threading.Thread(target=let_go)
            try:
                thread.start()
                slow.commit(STATE - 10, 10, bytes(32), timeout_s=0.3)
            except WaitTimeout as error:
                assert "slot-0002.lgs: step 3: gave up waiting for writing" in str(error), error
            else:
                raise AssertionError("no WaitTimeout")
            thread.join()
        check(store, [2, 1])
        assert save(store, 4, STATE) == "durable"
        check(store, [4, 2])


def full_disk_from_the_start(directory: Path) -> None:
    disk = directory / "disk"
    small_disk(disk, 16)
    filler = fill(disk)
    expect_error("No space left", lambda: open_store(disk / "job", slots=3))
    filler.unlink()
    with open_store(disk / "job", slots=3) as store:
        assert save(store, 1, STATE) == "durable"


def failed_flush_when_opening(directory: Path) -> None:
    """Whatever is flushed when a directory is made and opened: if that fails, it is said, and the next try works."""
    for number in range(50):
        job = directory / str(number) / "job"
        job.parent.mkdir()
        with fault("flush", str(directory), EIO, skip=number, hits=ANY) as struck:
            try:
                open_store(job, slots=3).close()
            except StorageError as error:
                assert "Input/output error" in str(error) and str(job.parent) in str(error), error
                assert struck() == 1
            else:
                assert struck() == 0, f"flush {number} failed and nothing was said"
                break
        with open_store(job, slots=3) as store:
            save(store, 1, STATE)
            check(store, [1])
    assert number >= 2, "making a directory flushes job.json and its name at least"


SCENARIOS: dict[str, Callable[[Path], None]] = {
    "failed_writes[EIO]": lambda directory: failed_writes(directory, EIO, "Input/output error"),
    "failed_writes[ENOSPC]": lambda directory: failed_writes(directory, ENOSPC, "No space left"),
    **{
        f"failed_flush[{what}]": lambda directory, number=number: failed_flush(directory, number)  # type: ignore[misc]
        for number, what in enumerate(FLUSHES)
    },
    **{
        scenario.__name__: scenario
        for scenario in (
            short_writes,
            short_write_of_a_block,
            short_reads,
            short_read_of_a_chunk_of_one_block,
            short_read_of_a_table,
            failed_read_of_data,
            failed_read_of_a_record,
            no_room_to_grow,
            no_room_for_a_new_slot,
            failed_flush_of_a_new_slot,
            hanging_write,
            hanging_write_that_nobody_waits_for,
            full_disk_from_the_start,
            failed_flush_when_opening,
        )
    },
}

if __name__ == "__main__":
    run_scenarios(SCENARIOS)
