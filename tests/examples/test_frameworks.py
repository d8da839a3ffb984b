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
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 150
STEPS = 24
EXAMPLES = {
    "huggingface": ["transformers", "accelerate"],
    "accelerate": ["accelerate"],
    "lightning": ["lightning"],
    "fabric": ["lightning"],
}
"""Folders of examples/, and what each needs."""


class Lives:
    """Speaks to lives.py."""

    def __init__(self, example: str, folder: Path) -> None:
        self.folder = folder
        self.count = 0
        self.errors = (folder / "parent.log").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("lives.py")), str(ROOT / "examples" / example / "train.py")],
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

    def ask(self, directory: str, told: str, **kill: Any) -> dict[str, Any]:
        self.count += 1
        asked = {"directory": str(self.folder / directory), "steps": STEPS, "told": str(self.folder / told), **kill}
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


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Hugging Face's Trainer that is known needs Python 3.11")
@pytest.mark.parametrize("example", EXAMPLES)
def test_a_killed_example_ends_as_one_that_was_never_killed(example, tmp_path):
    for package in EXAMPLES[example]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    seed = int(os.environ.get("LIVES_SEED", random.randrange(10**6)))
    print(f"LIVES_SEED={seed}")
    draw = random.Random(seed)
    lives = Lives(example, tmp_path)
    try:
        straight = lives.ask("straight", "straight.txt")
        expected = losses(tmp_path / "straight.txt")
        assert sorted(expected) == list(range(1, STEPS + 1)) and all(len(one) == 1 for one in expected.values())
        at = 0
        for kind in (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
            at += draw.randrange(2, 6)
            lives.ask("broken", "broken.txt", signal=kind, at=at, after_s=draw.uniform(0, 0.03))
        ended = lives.ask("broken", "broken.txt")
    finally:
        lives.end()
    assert losses(tmp_path / "broken.txt") == expected
    assert ended["digest"] == straight["digest"] is not None
