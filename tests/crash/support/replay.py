"""Runs the writer on the recording disk, and replays its log: every crash point, many states, each checked."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from crash_check import Checker, Seen, Violation, check_promise
from crash_writer import CHUNK, KEEP, stream_bytes
from disk_model import Disk, Event, State, read_log
from disk_states import StateDirectory, states

HERE = Path(__file__).parent
JOB = Path("runs", "job")
"""Two directories deep: the names of both must survive."""


def build_shim(source: str, place: Path) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a C compiler")
    if sys.maxsize < 1 << 62 or not sys.platform.startswith("linux"):
        pytest.skip("needs a 64-bit Linux")
    library = place / source.replace(".c", ".so")
    subprocess.run(
        [
            compiler,
            *["-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", "-o"],
            str(library),
            str(HERE / source),
            "-lpthread",
        ],
        check=True,
        timeout=120,
    )
    return library


class Recording(NamedTuple):
    root: Path
    root_inode: int
    events: list[Event]


def record(shim: Path, place: Path, lives: list[str], breakage: str = "none") -> Recording:
    """Run these lives of one job, one after another, from nothing."""
    root = (place / "root").resolve()
    root.mkdir()
    log, reports = place / "log", place / "reports"
    environment = {
        **os.environ,
        "LD_PRELOAD": str(shim),
        "RECORD_ROOT": str(root),
        "RECORD_LOG": str(log.resolve()),
        "RECORD_REPORTS": str(reports.resolve()),
    }
    for life in lives:
        done = subprocess.run(
            [sys.executable, str(HERE / "crash_writer.py"), str(root / JOB), str(reports.resolve()), life, breakage],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        expected = -signal.SIGKILL if "killed" in life else 0
        assert done.returncode == expected, f"life {life}: exit {done.returncode}\n{done.stderr}"
    return Recording(root, root.stat().st_ino, read_log(log))


class Outcome(NamedTuple):
    events: int
    states: int
    """Different ones."""
    lives: int
    """Of them, those in which a new life was begun."""
    violations: list[str]


_FEWEST_DRAWS = 4
"""At every crash point, however many states were seen before it."""


def replay(
    recording: Recording,
    place: Path,
    *,
    wanted: int,
    seed: int,
    keep: int = KEEP,
    new_life_every: int = 0,
    most_violations: int = 1,
) -> Outcome:
    """Check states of all crash points, about `wanted` different ones over all. Ends at `most_violations`."""
    chance = random.Random(seed)
    disk = Disk(str(recording.root))
    directory = StateDirectory(place)
    scratch = place / "scratch"
    scratch.mkdir()
    checker = Checker(directory.path / JOB, scratch, stream_bytes, CHUNK)
    seen: dict[int, list[Seen] | None] = {}
    """By the hash of a state's names and contents (two states with one hash: less likely than a broken machine)."""
    lives = 0
    violations: list[str] = []
    prefix = f"{JOB}/"
    try:
        for number, event in enumerate(recording.events):
            disk.follow(event, recording.root_inode)
            # What points with little under way could not give, later ones do; how much that is differs with the order
            # in which the recorded threads came.
            left = len(recording.events) - number
            draws = max(_FEWEST_DRAWS, -(-2 * (wanted - len(seen)) // left))
            for state in states(disk, chance, draws):
                there = directory.take(disk, state)
                signatures = {name[len(prefix) :]: at for name, at in there.items() if name.startswith(prefix) and at}
                key = hash(frozenset(there.items()))
                try:
                    if key not in seen:
                        seen[key] = None
                        seen[key] = checker.look(signatures)
                        if new_life_every and len(seen) % new_life_every == 0:
                            checker.go_on(seen[key])
                            lives += 1
                    found = seen[key]
                    if found is not None:
                        check_promise(found, disk.reports, keep)
                except Violation as violation:
                    violations.append(f"{violation}; after event {number} ({describe(event)}), {explain(state, disk)}")
                    if len(violations) >= most_violations:
                        return Outcome(number + 1, len(seen), lives, violations)
        return Outcome(len(recording.events), len(seen), lives, violations)
    finally:
        directory.close()


def describe(event: Event) -> str:
    if event.kind == "rename":
        return f"rename {event.name} to {(event.data or b'').decode()}"
    return f"{event.kind} {event.name} of inode {event.inode}, offset {event.offset}, {event.length} bytes"


def explain(state: State, disk: Disk) -> str:
    """What of the pending changes reached the disk, in words short enough for a message."""
    words = [f"{count} changes of names in directory {folder.number}" for folder, count in state.folders.items()]
    for path, file in state.files(disk):
        sectors = state.sectors.get(file, {})
        shown = ", ".join(map(str, sorted(sectors)[:8])) + (", ..." if len(sectors) > 8 else "")
        if file.pending or len(file.sizes) > 1:
            words.append(f"{path}: length {file.sizes[state.sizes.get(file, 0)].value}, {len(sectors)} of ")
            words[-1] += f"{len(file.pending)} pending sectors ({shown})"
    return "on the disk: " + ("; ".join(words) or "nothing pending")


def check_final_state(recording: Recording, place: Path) -> int:
    """The oracle of the recording: with everything done, the model's disk is the real directory. Returns the files."""
    disk = Disk(str(recording.root))
    for event in recording.events:
        disk.follow(event, recording.root_inode)
    directory = StateDirectory(place)
    last = list(states(disk, random.Random(0), 0))[1]
    directory.take(disk, last)
    directory.close()
    real = {path.relative_to(recording.root): path for path in recording.root.rglob("*")}
    model = {path.relative_to(directory.path): path for path in directory.path.rglob("*")}
    assert real.keys() == model.keys()
    files = [name for name, path in real.items() if path.is_file()]
    for name in files:
        assert real[name].read_bytes() == model[name].read_bytes(), f"{name} differs"
    return len(files)
