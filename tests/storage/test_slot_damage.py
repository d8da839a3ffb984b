"""Damage of every kind: it is seen, or an older checkpoint is taken; never other bytes than those that were saved."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from reference_reader import read_directory
from slot_helpers import CHUNK, content_of, flip, load, open_store, save, steps

from lastgood.errors import CorruptCheckpoint, LastgoodError, MismatchError
from lastgood.storage import SlotInfo, SlotState, SlotStore, SlotView
from lastgood.storage import format as fmt

STATE = 4 * CHUNK + 1000
TABLE_AT, TABLE_BYTES, NEEDED = fmt.stream_layout(STATE, CHUNK)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pristine") / "job"
    with open_store(directory, slots=3, job_id=bytes(range(16))) as store:
        for step in (1, 2, 3):
            save(store, step, STATE)
    return directory


@pytest.fixture()
def job(pristine: Path, tmp_path: Path) -> Path:
    shutil.copytree(pristine, tmp_path / "job")
    return tmp_path / "job"


def slot_of(view: SlotView, step: int) -> Path:
    return next(info.path for info in view.committed() if info.step == step)


def restore(view: SlotView) -> tuple[int, list[str]]:
    """What a restart does: the newest checkpoint that holds, and what was refused before it."""
    refused = []
    for info in view.committed():
        try:
            content = load(view, info)
        except CorruptCheckpoint as error:
            refused.append(str(error))
            continue
        assert content == content_of(info.step, STATE)
        return info.step, refused
    raise AssertionError(f"nothing left: {refused}")


FALLS_BACK = {
    "commit record: magic": fmt.COMMIT_OFFSET + 3,
    "commit record: version": fmt.COMMIT_OFFSET + 8,
    "commit record: length": fmt.COMMIT_OFFSET + 12,
    "commit record: job id": fmt.COMMIT_OFFSET + 20,
    "commit record: kind": fmt.COMMIT_OFFSET + 32,
    "commit record: step": fmt.COMMIT_OFFSET + 40,
    "commit record: sequence": fmt.COMMIT_OFFSET + 57,
    "commit record: stream length": fmt.COMMIT_OFFSET + 66,
    "commit record: table digest": fmt.COMMIT_OFFSET + 160,
    "commit record: zeros": fmt.COMMIT_OFFSET + 400,
    "commit record: checksum": fmt.COMMIT_OFFSET + 510,
    "table: first byte": TABLE_AT,
    "table: last byte": TABLE_AT + TABLE_BYTES - 1,
    "data: first byte": fmt.DATA_OFFSET,
    "data: middle": fmt.DATA_OFFSET + 2 * CHUNK + 77,
    "data: meta data": fmt.DATA_OFFSET + STATE - 5,
    "data: last byte": fmt.DATA_OFFSET + STATE - 1,
    "padding of the last chunk": fmt.DATA_OFFSET + STATE,
    "padding: last byte": TABLE_AT - 1,
}
HARMLESS = {
    "header: magic": 1,
    "header: job id": 18,
    "header: checksum": 509,
    "behind the header": 600,
    "behind the commit record": fmt.COMMIT_OFFSET + 512,
    "between record and data": fmt.COMMIT_OFFSET + 2 * fmt.BLOCK,
    "behind the table": TABLE_AT + TABLE_BYTES,
}


@pytest.mark.parametrize("offset", FALLS_BACK.values(), ids=FALLS_BACK)
def test_flipped_bytes_that_matter(job: Path, offset: int) -> None:
    flip(slot_of(SlotStore.peek(job), 3), offset)
    step, _ = restore(SlotStore.peek(job))
    assert step == 2
    assert [seen.step for seen in read_directory(job)] == [2, 1]
    with open_store(job, slots=3) as store:
        assert restore(store)[0] == 2
        save(store, 4, STATE)
        assert restore(store)[0] == 4
        assert restore(SlotStore.peek(job))[0] == 4


@pytest.mark.parametrize("offset", HARMLESS.values(), ids=HARMLESS)
def test_flipped_bytes_that_do_not(job: Path, offset: int) -> None:
    flip(slot_of(SlotStore.peek(job), 3), offset)
    assert restore(SlotStore.peek(job)) == (3, [])
    assert [seen.step for seen in read_directory(job)] == [3, 2, 1]
    with open_store(job, slots=3) as store:
        for step in (4, 5, 6):
            save(store, step, STATE)
    assert all(status.header_ok for status in SlotStore.peek(job).statuses())


def test_random_flips(job: Path, pristine: Path) -> None:
    chance = random.Random(5)
    path = slot_of(SlotStore.peek(job), 3)
    for _ in range(150):
        place = chance.choice(
            (chance.randrange(512), fmt.COMMIT_OFFSET + chance.randrange(512), chance.randrange(NEEDED))
        )
        mask = 1 << chance.randrange(8)
        flip(path, place, mask)
        assert restore(SlotStore.peek(job))[0] in (2, 3)
        flip(path, place, mask)
    assert path.read_bytes() == (pristine / path.name).read_bytes()


def test_message_names_file_chunk_and_checksums(job: Path) -> None:
    view = SlotStore.peek(job)
    info = view.newest()
    flip(info.path, fmt.DATA_OFFSET + 2 * CHUNK)
    with pytest.raises(CorruptCheckpoint, match=rf"{info.path}: step 3, chunk 2 of 5: checksum 0x\w+ instead of 0x\w+"):
        view.verify(info)
    with pytest.raises(CorruptCheckpoint, match="chunk 2"):
        load(view, info)
    assert len(view.read_meta(info)) == 10  # lies in another chunk


def test_a_corrupt_checkpoint_is_kept_no_longer(job: Path) -> None:
    flip(slot_of(SlotStore.peek(job), 3), fmt.DATA_OFFSET)
    with open_store(job, slots=3) as store:
        assert restore(store)[0] == 2
        assert steps(store) == [2, 1]
        write = store.try_begin(4, STATE)
        assert write is not None and write.path == job / fmt.slot_name(2)
        assert steps(store) == [2, 1]


@pytest.mark.parametrize(
    "length",
    [0, 1, 100, fmt.BLOCK, fmt.COMMIT_OFFSET, fmt.COMMIT_OFFSET + 300, fmt.DATA_OFFSET, fmt.DATA_OFFSET + CHUNK + 5,
     TABLE_AT, TABLE_AT + 8, NEEDED - 1],
)  # fmt: skip
def test_cut_files(job: Path, length: int) -> None:
    path = slot_of(SlotStore.peek(job), 3)
    with path.open("r+b") as file:
        file.truncate(length)
    assert restore(SlotStore.peek(job)) == (2, [])
    status = next(status for status in SlotStore.peek(job).statuses() if status.path == path)
    assert status.state is SlotState.TORN and status.detail
    with open_store(job, slots=3) as store:
        for step in (4, 5, 6):
            save(store, step, STATE)
        assert restore(store) == (6, [])


def test_missing_files(job: Path) -> None:
    slot_of(SlotStore.peek(job), 3).unlink()
    assert restore(SlotStore.peek(job)) == (2, [])
    with open_store(job, slots=3) as store:
        save(store, 4, STATE)
        assert steps(store) == [4, 2, 1]


def test_swapped_files(job: Path) -> None:
    view = SlotStore.peek(job)
    first, second = slot_of(view, 3), slot_of(view, 1)
    first.rename(job / "aside")
    second.rename(first)
    (job / "aside").rename(second)
    assert restore(view) == (3, [])
    assert {status.detail for status in view.statuses()} == {"", f"made as {first.name}", f"made as {second.name}"}
    with open_store(job, slots=3) as store:
        assert steps(store) == [3, 2, 1]
        save(store, 4, STATE)
        assert steps(store) == [4, 3, 2]
        assert restore(store) == (4, [])


def test_swapped_data(job: Path) -> None:
    """The data of one checkpoint under the records of another of the same size: misplaced writes, all of them."""
    view = SlotStore.peek(job)
    newest, oldest = slot_of(view, 3), slot_of(view, 1)
    content = bytearray(newest.read_bytes())
    content[fmt.DATA_OFFSET : TABLE_AT] = oldest.read_bytes()[fmt.DATA_OFFSET : TABLE_AT]
    newest.write_bytes(content)
    step, refused = restore(view)
    assert step == 2 and "chunk 0" in refused[0]


def test_misplaced_chunk_of_equal_content(tmp_path: Path) -> None:
    """A chunk written to another's place is seen although both had the right checksum for their content."""
    with open_store(tmp_path) as store:
        write = store.begin(1, 2 * CHUNK)
        from slot_helpers import commit, give

        give(write, bytes(CHUNK) + b"\1" * CHUNK)
        commit(write)
        (info,) = store.committed()
        content = bytearray(info.path.read_bytes())
        table_at = info.record.table_offset
        one, two = content[table_at : table_at + 4], content[table_at + 4 : table_at + 8]
        assert one != two
        data = fmt.DATA_OFFSET
        content[data : data + CHUNK], content[data + CHUNK : data + 2 * CHUNK] = b"\1" * CHUNK, bytes(CHUNK)
        info.path.write_bytes(content)
        with pytest.raises(CorruptCheckpoint, match="chunk 0"):
            store.verify(info)


def test_copied_slot_counts_once(job: Path) -> None:
    newest = slot_of(SlotStore.peek(job), 3)
    shutil.copy(newest, job / fmt.slot_name(7))
    assert steps(SlotStore.peek(job)) == [3, 2, 1]
    with open_store(job, slots=4) as store:
        assert steps(store) == [3, 2, 1]
        for step in (4, 5):
            save(store, step, STATE)
        assert not (job / fmt.slot_name(7)).exists()
        assert restore(store) == (5, [])


def break_by_flip(path: Path) -> None:
    flip(path, path.read_bytes().index(b"job_id") + 12, 1)


def break_by_cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def break_by_removal(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("harm", [break_by_flip, break_by_cut, break_by_removal])
def test_job_description_is_made_anew_from_the_slots(job: Path, harm: Callable[[Path], None]) -> None:
    harm(job / fmt.JOB_FILE)
    assert restore(SlotStore.peek(job)) == (3, [])
    with pytest.raises(MismatchError, match=bytes(range(16)).hex()):
        open_store(job, job_id=bytes(16))
    with open_store(job, slots=3) as store:
        assert store.job.job_id == bytes(range(16))
        assert restore(store) == (3, [])
    assert fmt.decode_job((job / fmt.JOB_FILE).read_bytes()).job_id == bytes(range(16))


def test_slots_of_two_jobs_without_a_description(job: Path, tmp_path: Path) -> None:
    with open_store(tmp_path / "other") as store:
        save(store, 9, STATE)
    shutil.copy(tmp_path / "other" / fmt.slot_name(0), job / fmt.slot_name(5))
    (job / fmt.JOB_FILE).unlink()
    for opening in (lambda: open_store(job), lambda: SlotStore.peek(job).committed()):
        with pytest.raises(MismatchError, match="belongs to job"):
            opening()


def test_noise_as_a_slot_file(job: Path) -> None:
    chance = random.Random(1)
    (job / fmt.slot_name(3)).write_bytes(chance.randbytes(2 * fmt.DATA_OFFSET))
    (job / fmt.slot_name(4)).write_bytes(b"")
    assert restore(SlotStore.peek(job)) == (3, [])
    with open_store(job, slots=5) as store:
        for step in range(4, 12):
            save(store, step, STATE)
        assert restore(store) == (11, [])


def test_record_that_lies_about_lengths(job: Path) -> None:
    """Sound checksums over absurd numbers must not make a reader allocate or read them."""
    from slot_helpers import rewrite_record

    path = slot_of(SlotStore.peek(job), 3)
    for position, value in (
        (64, 1 << 62),
        (72, STATE),
        (80, 1 << 40),
        (88, 12),
        (96, 0),
        (104, 1 << 50),
        (112, 1 << 40),
    ):
        before = path.read_bytes()
        rewrite_record(path, fmt.COMMIT_OFFSET, position, value.to_bytes(8, "little"))
        try:
            assert restore(SlotStore.peek(job)) == (2, [])
        except LastgoodError as error:
            raise AssertionError(f"field at {position}: {error}") from error
        path.write_bytes(before)


def test_stale_info_is_refused(job: Path) -> None:
    with open_store(job, slots=3) as store:
        oldest: SlotInfo = store.committed()[-1]
        save(store, 4, STATE)
        with pytest.raises(CorruptCheckpoint, match="overwritten; the slot now holds step 4"):
            load(store, oldest)
        assert steps(store) == [4, 3, 2]
