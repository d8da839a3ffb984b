"""`lastgood status` tells the newest durable checkpoint; `lastgood prune` removes only what nobody needs."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lastgood.checkpointers.registry import checkpointer_class
from lastgood.cli import app
from lastgood.errors import CheckpointError, ConfigError, LockHeld, NoCheckpoint
from lastgood.storage import SlotView, Verdict, VerdictBook
from tests.checkpointers.support.small_training import SmallTraining
from tests.storage.support.craft import dense, entries, put, record

SYSTEMS = ("sync", "pccheck", "dcp")


def put_job(job: Path, steps: tuple[int, ...]) -> None:
    """Two ranks that hold checkpoints of these steps, each in a slot of its own."""
    for rank in (0, 1):
        for number, step in enumerate(steps):
            made = record(rank=rank, world_size=2, step=step, sequence=number + 1)
            put(job / f"rank-{rank:05d}", entries(w=dense([4])), [bytes([65 + step]) * 16], made, slot=number)


def call(*words):
    """Exit code, stdout and the error of a command."""
    done = CliRunner().invoke(app, [*map(str, words)])
    if done.exception is not None and not isinstance(
        done.exception, (SystemExit, CheckpointError, ConfigError, LockHeld)
    ):
        raise done.exception
    return done.exit_code, done.stdout, done.exception


def saved(directory: Path, system: str, steps: int, **options: int) -> dict[int, str]:
    """What `steps` checkpoints of a small training leave: each step's digest."""
    training = SmallTraining(8)
    kind = checkpointer_class(system)
    checkpointer = kind(directory, kind.Options(**options))
    checkpointer.start(training.state)
    digests = {}
    for _ in range(steps):
        training.step()
        digests[training.step_number] = training.digest()
        checkpointer.save(training.step_number)
        checkpointer.drain()
    checkpointer.close()
    return digests


def restored(directory: Path, system: str) -> tuple[int, str]:
    training = SmallTraining(8, seed=1)
    step = checkpointer_class(system)(directory).restore(training.state)
    return step, training.digest()


def test_status_tells_the_last_failed_save_of_the_file_of_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, checkpointer = SmallTraining(8), checkpointer_class("sync")(tmp_path / "job")
    events = checkpointer.write_events()
    checkpointer.start(training.state)
    training.step()
    checkpointer.save(1)
    assert call("status", tmp_path / "job")[1].endswith("last failure: none that can be seen here\n")

    def full(event: object) -> None:
        raise OSError(errno.ENOSPC, "No space\x1b[31m left")

    with monkeypatch.context() as patch:
        patch.setattr(checkpointer, "_save", full)
        for step in (2, 3):
            training.step()
            checkpointer.save(step)
    checkpointer.close()
    expected = f"{events}: step 3 failed: "
    others = (
        b'{"outcome": "failed"}',
        b"[1]",
        b"\xff",
        b'{"time": 9000000000.5, "step": true, "outcome": "failed", "error": "x"}',
    )
    with events.open("ab") as file:  # what a crash or another program leaves there
        file.write(b"\n".join([*others, b'{"ti']))
    code, told, _ = call("status", tmp_path / "job")
    assert code == 0 and told.startswith(f"{tmp_path / 'job'}: step 1, ")
    last = told.splitlines()[-1]
    assert last.startswith(f"last failure: {expected}") and "\x1b" not in last, last
    assert json.loads(call("status", tmp_path / "job", "--json")[1])["last_failure"].startswith(expected)


def age_all(directory: Path, seconds: float) -> None:
    for path in directory.rglob("*"):
        before = path.stat().st_mtime
        os.utime(path, (before - seconds, before - seconds))


@pytest.mark.parametrize("system", SYSTEMS)
def test_status_of_each_kind_of_system(system, tmp_path):
    saved(tmp_path, system, 3)
    code, text, _ = call("status", tmp_path, "--json")
    found = json.loads(text)
    assert (code, found["step"], found["in_use"], found["late"]) == (0, 3, False, False)
    assert found["durable_steps"][:2] == [3, 2]
    assert 0 <= found["age_s"] < 600
    assert found["bytes"] > 8 * 8 * 4 * 3
    assert found["last_failure"] is None
    code, text, _ = call("status", tmp_path)
    assert code == 0 and "step 3, written" in text and "last failure: none" in text


def test_status_says_how_fast_checkpoints_come(tmp_path):
    saved(tmp_path, "sync", 2)
    older, newer = sorted(tmp_path.glob("checkpoint-*.pt"))
    now = time.time()
    os.utime(older, (now - 100, now - 100))
    os.utime(newer, (now - 60, now - 60))
    found = json.loads(call("status", tmp_path, "--json")[1])
    assert found["steps_per_s"] == pytest.approx(1 / 40)
    assert found["checkpoint_every_s"] == pytest.approx(40)
    assert found["age_s"] == pytest.approx(60, abs=30)


def test_a_checkpoint_that_is_too_old_exits_1(tmp_path):
    saved(tmp_path, "pccheck", 1)
    age_all(tmp_path, 45 * 60)
    assert call("status", tmp_path, "--max-age", "2h")[0] == 0
    code, _, error = call("status", tmp_path, "--max-age", "30m")
    assert code == 1 and "step 1 was written 45 min" in str(error)
    assert json.loads(call("status", tmp_path, "--max-age", "30m", "--json")[1])["late"] is True
    with pytest.raises(ConfigError, match="--max-age: not a duration: '30 parsecs'"):
        raise call("status", tmp_path, "--max-age", "30 parsecs")[2]


def test_status_without_a_checkpoint_exits_1(tmp_path):
    for place in (tmp_path, tmp_path / "none"):
        code, text, error = call("status", place, "--json")
        assert code == 1 and isinstance(error, NoCheckpoint) and str(place) in str(error)
        assert json.loads(text)["step"] is None


def test_status_names_what_failed_last(tmp_path):
    saved(tmp_path, "pccheck", 2)
    info = SlotView(tmp_path).newest()
    VerdictBook(tmp_path).judge(info.sequence, Verdict(info.step, False, "the loss is nan"))
    found = json.loads(call("status", tmp_path, "--json")[1])
    assert found["step"] == 1, "a restore takes no checkpoint that was judged bad"
    assert "step 2 was judged bad: the loss is nan" in found["last_failure"]


def test_status_of_several_ranks_takes_what_all_hold(tmp_path):
    put_job(tmp_path, (3, 4))
    assert json.loads(call("status", tmp_path, "--json")[1])["step"] == 4
    (tmp_path / "rank-00001" / "slot-0001.lgs").unlink()
    assert json.loads(call("status", tmp_path, "--json")[1])["durable_steps"] == [3]
    (tmp_path / "rank-00001" / "slot-0000.lgs").unlink()
    code, _, error = call("status", tmp_path)
    assert code == 1 and "there is no durable checkpoint" in str(error)


@pytest.mark.parametrize("system", SYSTEMS)
def test_prune_says_first_and_removes_only_with_yes(system, tmp_path):
    digests = saved(tmp_path, system, 4, keep=3)
    before = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    code, text, _ = call("prune", tmp_path, "--keep", 1, "--json")
    said = json.loads(text)
    assert code == 0 and said["would_remove"] and said["kept"][0]["step"] == 4
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == before
    code, text, _ = call("prune", tmp_path, "--keep", 1, "--json", "--yes")
    done = json.loads(text)
    assert code == 0 and done["bytes"] > 0
    assert {one["what"] for one in done["removed"]} >= {"step 3", "step 2"}
    assert restored(tmp_path, system) == (4, digests[4])
    assert json.loads(call("status", tmp_path, "--json")[1])["durable_steps"] == [4]
    # A training goes on in what is left.
    training = SmallTraining(8, seed=1)
    again = checkpointer_class(system)(tmp_path)
    assert again.restore(training.state) == 4
    again.start(training.state)
    training.step()
    again.save(5)
    again.close()
    assert restored(tmp_path, system) == (5, training.digest())


def damage_newest(directory: Path) -> Path:
    newest = max(
        (path for path in directory.rglob("*") if path.stat().st_size > 4096), key=lambda one: one.stat().st_mtime_ns
    )
    content = bytearray(newest.read_bytes())
    for place in range(len(content) // 2, len(content) // 2 + 4096 * 8, 64):
        if place < len(content):
            content[place] ^= 0xFF
    newest.write_bytes(content)
    return newest


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_damaged_checkpoint_does_not_count_as_kept(system, tmp_path):
    digests = saved(tmp_path, system, 3, keep=2)
    if system == "pccheck":
        info = SlotView(tmp_path).newest()
        with info.path.open("r+b") as file:
            file.seek(info.record.data_offset + 5)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 0x40]))
        newest = info.path
    else:
        newest = damage_newest(tmp_path)
    code, text, _ = call("prune", tmp_path, "--keep", 1, "--yes", "--json")
    done = json.loads(text)
    assert code == 0 and done["left"], "the damage is told"
    assert newest.exists()
    assert [one["step"] for one in done["kept"]] == [2]
    assert restored(tmp_path, system) == (2, digests[2])


def test_nothing_is_removed_if_nothing_can_be_read(tmp_path):
    saved(tmp_path, "sync", 2)
    for path in tmp_path.glob("checkpoint-*.pt"):
        path.write_bytes(b"rubbish")
    code, _, error = call("prune", tmp_path, "--keep", 1, "--yes")
    assert code == 1 and "no checkpoint can be read, so none is removed" in str(error)
    assert len(list(tmp_path.glob("checkpoint-*.pt"))) == 2


def test_the_newest_good_one_stays_behind_bad_ones(tmp_path):
    digests = saved(tmp_path, "pccheck", 3, keep=3)
    book = VerdictBook(tmp_path)
    for info in SlotView(tmp_path).committed()[:2]:
        book.judge(info.sequence, Verdict(info.step, False, "nan"))
    done = json.loads(call("prune", tmp_path, "--keep", 1, "--yes", "--json")[1])
    assert [one["step"] for one in done["kept"]] == [1]
    assert restored(tmp_path, "pccheck") == (1, digests[1])


def test_prune_beside_a_training_is_refused(tmp_path):
    training = SmallTraining(8)
    checkpointer = checkpointer_class("pccheck")(tmp_path)
    checkpointer.start(training.state)
    training.step()
    checkpointer.save(1)
    checkpointer.drain()
    code, _, error = call("prune", tmp_path, "--yes")
    assert code == 1 and isinstance(error, LockHeld) and str(tmp_path) in str(error)
    checkpointer.close()


def test_what_a_killed_process_left_is_removed(tmp_path):
    saved(tmp_path, "sync", 1)
    left = tmp_path / ".checkpoint-00000002-step-2.pt.0123456789abcdef.lastgood-tmp"
    left.write_bytes(b"x" * 100)
    mine = tmp_path / "notes.txt"
    mine.write_text("not Lastgood's")
    assert json.loads(call("prune", tmp_path, "--json")[1])["would_remove"] == []
    assert json.loads(call("prune", tmp_path, "--yes", "--json")[1])["bytes"] == 100
    assert not left.exists() and mine.exists()


def test_prune_of_several_ranks_keeps_what_all_hold(tmp_path):
    put_job(tmp_path, (3, 4, 5))
    (tmp_path / "rank-00001" / "slot-0002.lgs").unlink()
    code, text, _ = call("prune", tmp_path, "--keep", 1, "--yes", "--json")
    assert code == 0 and [one["step"] for one in json.loads(text)["kept"]] == [4]
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("slot-*.lgs")}
    # Step 5 of rank 0 is newer than what all hold: the other rank may have been about to hold it too.
    assert left == {"rank-00000/slot-0001.lgs", "rank-00000/slot-0002.lgs", "rank-00001/slot-0001.lgs"}


def test_prune_refuses_what_is_no_folder_here(tmp_path):
    assert isinstance(call("prune", tmp_path / "none")[2], NoCheckpoint)
    assert isinstance(call("prune", "s3://bucket/job")[2], ConfigError)
