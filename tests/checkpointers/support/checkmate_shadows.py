"""A set of real shadows for a test, some of which it stops or kills."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from lastgood.ports import free_ports
from tests.gradients.support.shadow_processes import ShadowProcess


class Shadows:
    """`count` shadows below `folder`. Arguments may hold {shadow}, the number of each."""

    def __init__(self, folder, count, *arguments):
        self.folder = folder
        self.arguments = arguments
        self.ports = free_ports(count)
        self.processes = []
        folder.mkdir(parents=True, exist_ok=True)
        token = folder / "token"
        token.write_text("a secret of this test")
        token.chmod(0o600)
        try:
            self.processes += [self._launch(number) for number in range(count)]
            for number in range(count):
                self._ready(number)
        except BaseException:
            self.end()
            raise

    @property
    def addresses(self):
        return [process.address for process in self.processes]

    @property
    def knobs(self):
        return {"shadows": self.addresses, "token_file": str(self.folder / "token"), "timeout_s": 60}

    def _launch(self, number):
        own = [argument.format(shadow=number) for argument in self.arguments]
        return ShadowProcess(self.folder, number, len(self.ports), *own, port=self.ports[number])

    def _ready(self, number):
        self.processes[number].wait_ready(200)

    def kill(self, number):
        self.processes[number].kill()

    def restart(self, number):
        """A new process at the old address, with nothing in its memory."""
        self.processes[number] = self._launch(number)
        self._ready(number)

    def pause(self, number):
        process = self.processes[number].process
        process.send_signal(signal.SIGSTOP)
        status = Path(f"/proc/{process.pid}/stat")
        deadline = time.monotonic() + 30
        while status.read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline, f"shadow {number} did not stop within 30 s"
            time.sleep(0.01)

    def resume(self, number):
        self.processes[number].process.send_signal(signal.SIGCONT)

    def end(self):
        for process in self.processes:
            process.kill()
