"""Real shadows (`lastgood storage serve`) for a test, on loopback, which end with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

START_S = 90


class Shadows:
    """`count` shadow processes below `folder`; `addresses` in their order. Arguments may hold {shadow}, its number."""

    def __init__(self, folder: Path, count: int, *arguments: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.count = count
        self.token_file = folder / "token"
        self.token_file.write_text("a secret of this test\n")
        self.token_file.chmod(0o600)
        self.arguments = arguments
        self.processes: list[subprocess.Popen] = []
        self.ports = [0] * count
        try:
            for number in range(count):
                self.processes.append(self._launch(number))
            for number in range(count):
                self._wait_ready(number)
        except BaseException:
            self.end()
            raise

    @property
    def addresses(self):
        return [f"127.0.0.1:{port}" for port in self.ports]

    @property
    def knobs(self):
        return {"shadows": self.addresses, "token_file": str(self.token_file)}

    def _launch(self, number):
        self._address_file(number).unlink(missing_ok=True)
        command = [
            *(sys.executable, "-c", "from lastgood.cli import main; main()", "storage", "serve"),
            *("--shadow", str(number), "--shadows", str(self.count), "--token-file", str(self.token_file)),
            *("--port", str(self.ports[number]), "--address-file", str(self._address_file(number))),
            *(argument.format(shadow=number) for argument in self.arguments),
        ]
        with (self.folder / f"shadow-{number}.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def _address_file(self, number):
        return self.folder / f"shadow-{number}.json"

    def _wait_ready(self, number):
        deadline = time.monotonic() + START_S
        path = self._address_file(number)
        while not path.exists():
            assert self.processes[number].poll() is None, self.log(number)
            assert time.monotonic() < deadline, f"shadow {number} was not ready within {START_S} s: {self.log(number)}"
            time.sleep(0.02)
        self.ports[number] = json.loads(path.read_text())["port"]

    def log(self, number):
        return (self.folder / f"shadow-{number}.log").read_text()

    def kill(self, number):
        self.processes[number].kill()
        self.processes[number].wait(30)

    def restart(self, number):
        """A new process at the old address, with nothing in its memory."""
        self.processes[number] = self._launch(number)
        self._wait_ready(number)

    def pause(self, number):
        self.processes[number].send_signal(signal.SIGSTOP)

    def resume(self, number):
        self.processes[number].send_signal(signal.SIGCONT)

    def end(self):
        for process in self.processes:
            process.kill()
            process.wait(30)
