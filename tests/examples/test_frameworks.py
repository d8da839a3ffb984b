"""The examples of frameworks, killed at random places: losses and final state are those of one that never was."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import select
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 150
STEPS = 24
NEEDS = {
    ("huggingface", "accelerate"): ["transformers", "accelerate"],
    ("lightning", "fabric"): ["lightning"],
}
"""Folders of examples/, and what they need: those of one line are forks of one process, which takes long to begin."""


class Lives:
    """Speaks to lives.py, which has the libraries of `examples`."""

    def __init__(self, examples: Sequence[str], folder: Path) -> None:
        self.folder = folder
        self.count = 0
        self.errors = (folder / "parent.log").open("wb")
        self.process = subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).with_name("lives.py")),
                *(str(ROOT / "examples" / example / "train.py") for example in examples),
            ],
            cwd=folder,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        self._read("ready")

    def _read(self, word: str) -> str:
        assert self.process.stdout is not None
        while True:  # libraries print when they are imported
            ready, _, _ = select.select([self.process.stdout], [], [], LIMIT_S)
            assert ready, f"waited {LIMIT_S} s: {self._said()}"
            line = self.process.stdout.readline()
            assert line, self._said()
            if line.startswith(word):
                return line.removeprefix(word)

    def _said(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))

    def ask(self, example: str, place: Path, **kill: Any) -> dict[str, Any]:
        """A life of `example` with its checkpoints in the folder `place`; its losses go to `place` + ".txt"."""
        self.count += 1
        asked = {"example": example, "directory": str(place), "steps": STEPS, "told": f"{place}.txt", **kill}
        asked["log"] = str(self.folder / f"life-{self.count}.log")
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self._read("answer "))
        expected = [-signal.SIGKILL] if kill.get("signal") == signal.SIGKILL else [0]
        # A signal near the end may come after it.
        expected += [0, 128 + signal.SIGTERM, -signal.SIGTERM] if kill.get("signal") == signal.SIGTERM else []
        assert answer["code"] in expected, (answer, self._said())
        return answer

    def end(self) -> None:
        self.process.kill()
        self.process.wait(60)
        for stream in (self.process.stdin, self.process.stdout, self.errors):
            assert stream is not None
            stream.close()


def losses(path: Path) -> dict[int, set[str]]:
    found: dict[int, set[str]] = defaultdict(set)
    for line in path.read_text().splitlines():
        step, loss = line.split()
        found[int(step)].add(loss)
    return found


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Lives]]:
    """The process of an example, begun when it is asked for first. Skips without its libraries."""
    begun: dict[tuple[str, ...], Lives] = {}

    def of(example: str) -> Lives:
        (examples,) = (one for one in NEEDS if example in one)
        for package in NEEDS[examples]:
            if importlib.util.find_spec(package) is None:
                pytest.skip(f"{package} is not installed")
        if examples not in begun:
            begun[examples] = Lives(examples, tmp_path_factory.mktemp("lives"))
        return begun[examples]

    yield of
    for one in begun.values():
        one.end()


def ends_as_one_that_was_never_killed(
    lives: Lives, example: str, folder: Path, seed: int, kinds: Sequence[signal.Signals]
) -> None:
    print(f"LIVES_SEED={seed}")
    draw = random.Random(seed)
    straight = lives.ask(example, folder / "straight")
    expected = losses(folder / "straight.txt")
    assert sorted(expected) == list(range(1, STEPS + 1)) and all(len(one) == 1 for one in expected.values())
    at = 0
    for kind in kinds:
        at += draw.randrange(2, 6)
        lives.ask(example, folder / "broken", signal=kind, at=at, after_s=draw.uniform(0, 0.03))
    ended = lives.ask(example, folder / "broken")
    assert losses(folder / "broken.txt") == expected
    assert ended["digest"] == straight["digest"] is not None


needs_311 = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="Hugging Face's Trainer that is known needs Python 3.11"
)
each_example = pytest.mark.parametrize("example", [example for examples in NEEDS for example in examples])


@needs_311
@each_example
def test_an_example_that_is_ended_twice_ends_as_one_that_never_was(lives, example, tmp_path):
    ends_as_one_that_was_never_killed(lives(example), example, tmp_path, 3, (signal.SIGKILL, signal.SIGTERM))


@pytest.mark.slow
@needs_311
@each_example
def test_a_killed_example_ends_as_one_that_was_never_killed(lives, example, tmp_path):
    seed = int(os.environ.get("LIVES_SEED", random.randrange(10**6)))
    kinds = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGKILL)
    ends_as_one_that_was_never_killed(lives(example), example, tmp_path, seed, kinds)
