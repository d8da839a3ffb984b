"""Replays the power cuts of a recording: builds the disk after each, mounts it, and asks both readers what is there.

A program of its own, started by `unshare --mount`: its mounts end with it, however it ends, and with them their loop
devices and the memory file system that the disks are built in.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import random
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from reference_reader import read_directory
from slot_helpers import content_of, load, open_store, save
from vm_guest import KEEP, state_bytes
from vm_log import apply, crash_states, ext4_records, read_disk, read_epochs

from lastgood.errors import CorruptCheckpoint, LastgoodError, NoCheckpoint
from lastgood.processes import die_with_parent
from lastgood.storage import SlotStore

_COMMAND_S = 60.0
_RESTARTS = 0.2
_SHOWN = 20
"""Findings of each kind that are told in words; all are counted."""


@dataclass
class Outcome:
    """What a replay found. `lost`: a promise was broken; `wrong`: something was given back that nobody saved."""

    epochs: int = 0
    states: int = 0
    restarts: int = 0
    promising: int = 0
    """States in which at least KEEP checkpoints had been reported durable."""
    empty: int = 0
    """States without a checkpoint, and rightly so."""
    ahead: int = 0
    """States whose newest checkpoint was not reported yet."""
    same_disk: bool = False
    """Whether the whole log makes the disk that the virtual machine left."""
    lost_states: int = 0
    wrong_states: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


@dataclass
class Finding:
    """What one crash state holds, and what is amiss."""

    steps: list[int] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


@functools.lru_cache(maxsize=128)
def expected(step: int) -> bytes:
    return content_of(step, state_bytes(step))


def look(directory: Path, reported: list[int]) -> Finding:
    """Judge a directory after a power cut; `reported` are the steps that had been reported durable before it."""
    found = Finding()
    try:
        _read(directory, found)
    except (LastgoodError, OSError, AssertionError) as error:
        found.lost.append(f"{type(error).__name__}: {error}")
    for place, step in enumerate(sorted(reported, reverse=True)[:KEEP]):
        if len(found.steps) <= place or found.steps[place] < step:
            found.lost.append(f"step {step} was reported durable, and there are steps {found.steps}")
    return found


def _read(directory: Path, found: Finding) -> None:
    if not directory.exists():
        return
    view = SlotStore.peek(directory)
    committed = view.committed()
    for info in committed:
        try:
            content = load(view, info)
            view.verify(info)
        except CorruptCheckpoint as error:
            found.lost.append(f"committed and not whole: {error}")
            continue
        found.steps.append(info.step)
        if content != expected(info.step):
            found.wrong.append(f"step {info.step}: {len(content)} bytes that nobody saved")
    if not committed:
        with contextlib.suppress(NoCheckpoint):
            found.wrong.append(f"no checkpoint, and yet newest() gives step {view.newest().step}")
    others = read_directory(directory)
    if [one.step for one in others] != found.steps:
        found.wrong.append(f"the reference reader sees steps {[one.step for one in others]}, we {found.steps}")
    for one in others:
        if one.stream != expected(one.step):
            found.wrong.append(f"the reference reader gives other bytes for step {one.step}")


def restart(directory: Path, found: Finding) -> None:
    """A new life on that disk: what was left half made goes, what was there stays, and saving goes on."""
    next_step = max(found.steps, default=0) + 1
    with open_store(directory, slots=5, keep=KEEP) as store:
        if [info.step for info in store.committed()] != found.steps or list(directory.glob("*.lastgood-tmp")):
            found.lost.append("a new life finds other checkpoints than a reader, or leaves half-made files")
        save(store, next_step, state_bytes(next_step))
    again = look(directory, [*found.steps[: KEEP - 1], next_step])
    found.lost += again.lost
    found.wrong += again.wrong


class Replay:
    """One recording, replayed in `workplace`, a folder on a memory file system."""

    def __init__(self, workplace: Path, seed: int) -> None:
        self.image = workplace / "crash.img"
        self.mount_point = workplace / "disk"
        self.mount_point.mkdir()
        self.chance = random.Random(seed)
        self.outcome = Outcome()

    def run(self, before: Path, after: Path, log_file: Path, reports: list[tuple[int, int]], seeded: int) -> None:
        disk = read_disk(before)
        epochs = read_epochs(log_file, disk.nbytes)
        log = read_disk(log_file)
        records = ext4_records(disk)
        assert len(records) == 2, f"an ext4 with {len(records) - 1} journals"
        for number, epoch in enumerate(epochs):
            reported = [step for step, log_bytes in reports if log_bytes <= epoch.log_end]
            for name, state in crash_states(disk, log, epoch, seeded, self.chance, records):
                self._judge(f"epoch {number} of {len(epochs)}, {name}", memoryview(state).cast("B"), reported)
            apply(disk, log, epoch)
        self.outcome.epochs = len(epochs)
        self.outcome.same_disk = bool((disk == read_disk(after)).all())

    def _judge(self, name: str, disk: memoryview, reported: list[int]) -> None:
        with self.image.open("r+b" if self.image.exists() else "w+b") as file:
            file.write(disk)
        found = self._mount_and_look(reported)
        count = self.outcome
        count.states += 1
        count.promising += len(reported) >= KEEP
        count.empty += not found.steps and not reported
        count.ahead += bool(found.steps) and found.steps[0] > max(reported, default=0)
        count.lost_states += bool(found.lost)
        count.wrong_states += bool(found.wrong)
        count.lost += [f"{name}: {text}" for text in found.lost][: _SHOWN - len(count.lost)]
        count.wrong += [f"{name}: {text}" for text in found.wrong][: _SHOWN - len(count.wrong)]

    def _mount_and_look(self, reported: list[int]) -> Finding:
        try:
            # Each mount gets a fresh loop device, which remembers nothing of the disk before, and ends with the mount.
            _command("mount", "-t", "ext4", "-o", "loop", str(self.image), str(self.mount_point))
        except subprocess.CalledProcessError as error:
            return Finding(lost=[f"ext4 cannot be mounted: {error.stderr.strip()}"])
        try:
            found = look(self.mount_point / "job", reported)
            if not found.lost and not found.wrong and self.chance.random() < _RESTARTS:
                self.outcome.restarts += 1
                restart(self.mount_point / "job", found)
        finally:
            _command("umount", str(self.mount_point))
        return found


def _command(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=_COMMAND_S)


def main(order: Path, parent: int) -> None:
    die_with_parent(parent)
    logging.disable(logging.WARNING)  # half-made files are what a power cut leaves
    wanted = json.loads(order.read_text())
    workplace = Path(wanted["workplace"])
    files = [Path(wanted[name]) for name in ("before", "after", "log")]
    _command("mount", "-t", "tmpfs", "-o", f"size={2 * files[0].stat().st_size}", "tmpfs", str(workplace))
    replay = Replay(workplace, wanted["seed"])
    reports = [(step, log_bytes) for step, log_bytes in wanted["reports"]]
    replay.run(files[0], files[1], files[2], reports, wanted["seeded"])
    sys.stdout.write(json.dumps(asdict(replay.outcome)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
