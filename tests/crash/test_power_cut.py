"""A simulated power cut at every instant: no state of the disk gives a wrong checkpoint or loses a durable one."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from crash_writer import BREAKAGES
from replay import Outcome, build_shim, check_final_state, record, replay

_PREFIX = "lastgood-crash-"
_SHARED_MEMORY = Path("/dev/shm")
_NEEDED_BYTES = 256 << 20


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_shim("recording_disk.c", tmp_path_factory.mktemp("shim"))


@pytest.fixture()
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is room; what a killed test left there is removed by the next one."""
    try:
        usage = os.statvfs(_SHARED_MEMORY)
        roomy = usage.f_bavail * usage.f_frsize >= _NEEDED_BYTES and os.access(_SHARED_MEMORY, os.W_OK)
    except OSError:
        roomy = False
    if not roomy:
        yield tmp_path
        return
    for left in _SHARED_MEMORY.glob(f"{_PREFIX}*"):
        _remove_if_left(left)
    folder, lock = _make_and_lock()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
        os.close(lock)


def _make_and_lock() -> tuple[Path, int]:
    """A folder and a lock on it; one that another run of the tests took for a left one in between is made anew."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_SHARED_MEMORY))
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:
            return folder, lock
        os.close(lock)


def _remove_if_left(folder: Path) -> None:
    """Remove a folder whose maker has ended: a living one holds a lock on it."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        pass
    else:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def cut_power(
    shim: Path,
    place: Path,
    lives: list[str],
    *,
    breakage: str = "none",
    wanted: int,
    keep: int = 2,
    seed: int = 1,
    new_life_every: int = 40,
) -> Outcome:
    recording = record(shim, place, lives, breakage)
    for folder in ("final", "states"):
        (place / folder).mkdir()
    assert check_final_state(recording, place / "final") >= 3
    return replay(recording, place / "states", wanted=wanted, seed=seed, keep=keep, new_life_every=new_life_every)


def assert_safe(outcome: Outcome, wanted: int) -> None:
    assert not outcome.violations, outcome.violations[0]
    assert outcome.states >= wanted
    assert outcome.lives >= wanted // 500


@pytest.mark.timeout(900)
@pytest.mark.parametrize("lives", [["first", "second", "third"]], ids=["three-lives"])
def test_power_cut(shim: Path, place: Path, lives: list[str]) -> None:
    assert_safe(cut_power(shim, place, lives, wanted=1_600), 1_500)


@pytest.mark.parametrize(
    "lives",
    [
        pytest.param(["brief", "killed_before_the_flush_of_a_record", "second"], marks=pytest.mark.slow),
        ["brief", "killed_before_the_flush_of_a_record", "killed_before_the_flush_of_a_record", "third"],
        pytest.param(["brief", "killed_after_a_rename", "third"], marks=pytest.mark.slow),
    ],
    ids=["unflushed-record", "two-unflushed-records", "unflushed-name"],
)
def test_power_cut_after_a_kill(shim: Path, place: Path, lives: list[str]) -> None:
    """What a killed process wrote and did not flush can be read, and a power cut still takes it."""
    assert_safe(cut_power(shim, place, lives, wanted=850), 750)


def test_power_cut_where_one_checkpoint_is_kept(shim: Path, place: Path) -> None:
    lives = ["keeps_one", "keeps_one_and_is_killed", "keeps_one"]
    assert_safe(cut_power(shim, place, lives, wanted=2_000, keep=1), 250)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_power_cut_in_very_many_states(shim: Path, place: Path) -> None:
    lives = [
        "first",
        "second",
        "killed_after_a_rename",
        "third",
        "killed_before_the_flush_of_a_record",
        "killed_before_the_flush_of_a_record",
        "second",
    ]
    assert_safe(cut_power(shim, place, lives, wanted=225_000, seed=7, new_life_every=400), 200_000)


LOST = r"reported durable and is lost as the"
NOT_WHOLE = r"has a commit record and is not whole"
FOUND = {
    "flush_nothing": f"{LOST}|{NOT_WHOLE}",
    "no_flush_of_the_void_record": NOT_WHOLE,
    "no_flush_of_the_data": NOT_WHOLE,
    "no_flush_of_the_record": LOST,
    "void_nothing": NOT_WHOLE,
    "commit_record_before_data": NOT_WHOLE,
    "sync_no_directory": LOST,
    "protect_no_kept_slot": LOST,
}
"""What each breakage does."""


def test_all_breakages_are_tried() -> None:
    assert FOUND.keys() | {"none"} == BREAKAGES.keys()


@pytest.mark.parametrize("breakage", FOUND)
def test_broken_stores_are_found(shim: Path, place: Path, breakage: str) -> None:
    """The same replay must see what a store does wrong that breaks one of its rules."""
    outcome = cut_power(shim, place, ["brief"], breakage=breakage, wanted=2_000)
    assert outcome.violations, f"{outcome.states} states showed nothing"
    assert re.search(FOUND[breakage], outcome.violations[0]), outcome.violations[0]


def test_the_same_life_of_the_unbroken_store_is_safe(shim: Path, place: Path) -> None:
    """So that the test above cannot pass for another reason."""
    assert_safe(cut_power(shim, place, ["brief"], wanted=2_000), 300)
