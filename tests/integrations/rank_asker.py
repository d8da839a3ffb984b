"""The process that forks ranks (`forked_ranks`), as tests speak to it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from lastgood.ports import free_ports

LIMIT_S = 250
KILLED = -signal.SIGKILL


class Ranks:
    """Asks the process that forks ranks; its log is kept for what goes wrong."""

    def __init__(self, folder, script):
        self.folder = folder
        self.works = 0
        self.errors = (folder / "parent.log").open("wb")
        python_path = filter(None, [os.environ.get("PYTHONPATH")])
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / script)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [Path(__file__).parents[2], *python_path]))},
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )

    def ask(self, work, world=2, **what):
        """Exit codes, answers, and the folder with the ranks' logs."""
        self.works += 1
        folder = self.folder / f"{self.works}-{work}"
        folder.mkdir()
        (port,) = free_ports()
        asked = {"work": work, "world": world, "port": port, "folder": str(folder), **what}
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        while True:  # DeepSpeed prints when it is imported
            ready, _, _ = select.select([self.process.stdout], [], [], LIMIT_S)
            assert ready, f"waited {LIMIT_S} s for {work}: {self.logs(folder)}"
            line = self.process.stdout.readline()
            assert line, f"ended during {work}: {(self.folder / 'parent.log').read_text()[-3000:]}"
            if line.startswith('{"codes"'):
                answer = json.loads(line)
                return answer["codes"], answer["answers"], folder

    def run(self, work, world=2, **what):
        """The answers, where all ranks end well."""
        codes, answers, folder = self.ask(work, world, **what)
        assert codes == [0] * world, self.logs(folder)
        return answers

    @staticmethod
    def logs(folder):
        return "\n".join(f"{path.name}: {path.read_text()[-3000:]}" for path in sorted(folder.glob("*.log")))

    def end(self):
        self.process.kill()  # its ranks end with it
        self.process.wait(60)
        self.process.stdin.close()
        self.process.stdout.close()
        self.errors.close()
