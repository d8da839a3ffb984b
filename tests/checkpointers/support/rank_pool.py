"""Processes that take the parts of ranks, started once for many tests."""

from __future__ import annotations

import json
import queue
import subprocess
import threading
import time
from pathlib import Path

from tests.support.warm import WarmProcess

LIMIT_S = 250


class RankPool:
    """Up to `size` ranks, that stay for all worlds of a module."""

    def __init__(self, size, folder, script="reshard_rank.py"):
        script = Path(__file__).with_name(script)
        self.folder = folder
        self.meetings = 0
        self.errors = [folder / f"rank-{rank}.err" for rank in range(size)]
        self.processes, self.answers, self.readers = [], [], []
        for path in self.errors:
            with path.open("wb") as errors:
                process = WarmProcess([script], stdin=subprocess.PIPE, stderr=errors)
            self.processes.append(process)
            answers = queue.SimpleQueue()
            self.answers.append(answers)
            reader = threading.Thread(target=self._read, args=(process, answers), daemon=True)
            reader.start()
            self.readers.append(reader)

    @staticmethod
    def _read(process, answers):
        for line in process.stdout:
            if line.startswith("{"):
                answers.put(line)
        answers.put("")

    def ask(self, world, work, **what):
        """Let ranks 0 to world - 1 do `work` together; what each of them answers, errors as they are."""
        self.meetings += 1
        meeting = self.folder / f"meeting-{self.meetings}"
        for rank in range(world):
            self.send(rank, {"work": work, "rank": rank, "world": world, "meeting": str(meeting), **what})
        deadline = time.monotonic() + LIMIT_S
        found = []
        for rank in range(world):
            try:
                line = self.answers[rank].get(timeout=max(0.1, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"waited {LIMIT_S} s for rank {rank} of {world} to {work}") from None
            assert line, f"rank {rank} ended: {self.errors[rank].read_text()[-3000:]}"
            found.append(json.loads(line))
        return found

    def send(self, rank, asked):
        self.processes[rank].stdin.write(json.dumps(asked) + "\n")
        self.processes[rank].stdin.flush()

    def run(self, world, work, **what):
        """As `ask`, where all must succeed."""
        found = self.ask(world, work, **what)
        for rank, answer in enumerate(found):
            assert "ok" in answer, f"rank {rank}: {answer}\n{self.errors[rank].read_text()[-3000:]}"
        return [answer["ok"] for answer in found]

    def end(self):
        for process in self.processes:
            process.kill()
            process.wait(30)
            process.stdin.close()
        for reader in self.readers:
            reader.join(30)
        for process in self.processes:
            process.stdout.close()
