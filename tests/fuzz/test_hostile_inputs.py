"""Every decoder of bytes from outside on hostile content under sound checksums: a right state or a LastgoodError.

All in bounded memory (4 times the input and 64 MiB) and time, in a process of its own, so that a crash is one fault.
A fault names its seed; ``python -m tests.fuzz.support.child NAME SEED`` reads that input again.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz.support.broken import BROKEN
from tests.fuzz.support.child import MOST_CPU_S, MOST_FAULTS, load_decoders
from tests.fuzz.support.registry import DECODERS

load_decoders()
NAMES = sorted(set(DECODERS) - set(BROKEN))
EVERY_DAY = 2_000
MANY = 100_000
SILENCE_S = 300.0
"""Of the process, until it counts as stuck: it tells after each `BATCH`."""
BATCH = 500
MIRRORED = (
    "pcap file",
    "pcapng file",
    "kernel's block",
    "ring of frames",
    "mirrored Gloo",
    "mirrored NCCL sockets",
    "RoCEv2 frames",
    "parsed messages",
    "extracted messages",
)
"""Parsers of what a mirror node sees, and readers of captures."""
MIRRORED_S = 600.0
FIRST = int(os.environ.get("LASTGOOD_FUZZ_SEED", "0"))
NATIVE_ONLY = "LASTGOOD_SANITIZED" in os.environ
ROOT = Path(__file__).parents[2]


class Child:
    """The process of tests/fuzz/support/child.py; started again after a crash."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._at = folder / "at"
        self._at.write_bytes(bytes(8))
        self._errors = folder / "errors"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exception: object) -> None:
        self._end()

    def read(self, name: str, first: int, count: int | None, most_cpu_s: float = MOST_CPU_S) -> dict[str, Any]:
        """What became of the inputs from seed `first` on; with no `count`, of the sound samples."""
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        order = {"decoder": name, "first": first, "count": count, "most_cpu_s": most_cpu_s}
        process.stdin.write(json.dumps(order).encode() + b"\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], SILENCE_S)
        line = process.stdout.readline() if ready else b""
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        seed = int.from_bytes(self._at.read_bytes(), "little")
        what = "said nothing any more" if not ready else f"died with {process.wait(30)}"
        self._end()
        said = self._errors.read_text(errors="replace")[-3000:]
        return {"taken": 0, "absent": False, "faults": [f"{name} {seed}: the process {what}: {said}"], "cpu_s": 0.0}

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            with self._errors.open("wb") as errors:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "tests.fuzz.support.child", f"--at={self._at}"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    cwd=ROOT,
                    bufsize=0,
                    env={**os.environ, "TMPDIR": str(self._folder)},
                )
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
            self._process = None


@pytest.fixture(scope="module")
def child(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    with Child(tmp_path_factory.mktemp("fuzz")) as started:
        yield started


def counts(total: int) -> dict[str, int]:
    """How many inputs of `total` each decoder gets, by its share."""
    shares = sum(DECODERS[name].share for name in NAMES)
    return {name: max(1, round(total * DECODERS[name].share / shares)) for name in NAMES}


def check(child: Child, name: str, first: int, count: int) -> None:
    faults: list[str] = []
    deadline = time.monotonic() + 3600
    for begin in range(first, first + count, BATCH):
        faults += child.read(name, begin, min(BATCH, first + count - begin))["faults"]
        if len(faults) >= MOST_FAULTS or time.monotonic() > deadline:
            break
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("name", [name for name in NAMES if DECODERS[name].native or not NATIVE_ONLY])
def test_hostile_inputs(child: Child, name: str) -> None:
    sound = child.read(name, 0, None)
    if sound["absent"]:
        pytest.skip("what writes such files is not installed")
    assert not sound["faults"] and sound["taken"] > 0, f"its own samples: {sound['faults']}"
    check(child, name, FIRST, counts(EVERY_DAY)[name])


@pytest.mark.fuzz
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", NAMES)
def test_very_many_hostile_inputs(child: Child, name: str) -> None:
    if child.read(name, 0, None)["absent"]:
        pytest.skip("what writes such files is not installed")
    check(child, name, FIRST + EVERY_DAY, counts(MANY)[name])


@pytest.mark.fuzz
@pytest.mark.timeout(7200)
def test_ten_minutes_of_mirrored_traffic(child: Child) -> None:
    """All of them in turns, with inputs that no other test has."""
    read = dict.fromkeys(MIRRORED, 0)
    end = time.monotonic() + MIRRORED_S
    while time.monotonic() < end:
        for name in MIRRORED:
            found = child.read(name, FIRST + EVERY_DAY + MANY + read[name], BATCH // 5)
            assert not found["faults"], "\n".join(found["faults"])
            read[name] += BATCH // 5
    print(f"read: {read}")


def test_there_are_as_many_as_promised() -> None:
    assert sum(counts(EVERY_DAY).values()) >= EVERY_DAY - len(NAMES)
    assert sum(counts(MANY).values()) >= MANY - len(NAMES)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        (BROKEN[0], "(TypeError|ValueError|OverflowError)"),
        (BROKEN[1], "MemoryError: .* MiB for"),
        (BROKEN[2], "the process died"),
        (BROKEN[3], "TooLong"),
    ],
)
@pytest.mark.skipif(NATIVE_ONLY, reason="a crash on purpose is a report of the sanitizers")
def test_the_harness_notices(child: Child, name: str, what: str) -> None:
    import re

    assert child.read(name, 0, None)["taken"] == 1
    most_cpu_s = 0.2 if name == BROKEN[3] else MOST_CPU_S
    found = child.read(name, 0, 60, most_cpu_s)["faults"]
    assert found and re.search(what, found[0]), found
    seed = found[0].removeprefix(name).split(":")[0]
    assert child.read(name, int(seed), 1, most_cpu_s)["faults"] != []
