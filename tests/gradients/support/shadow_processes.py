"""Shadows for a test, that end with it: real service processes, or services in threads where nothing is killed."""

import contextlib
import json
import os
import signal
import socket
import threading
import time
from pathlib import Path

from lastgood.gradients.shadow.service import ShadowService
from lastgood.gradients.shadow.settings import ShadowSettings
from lastgood.tokens import read_token
from tests.support.warm import WarmProcess

SERVE = "from lastgood.cli import main; main()"


class ShadowProcess:
    """One `lastgood shadow serve`."""

    def __init__(self, folder: Path, shadow: int, shadows: int, *arguments: str, port: int = 0, environment=None):
        folder.mkdir(parents=True, exist_ok=True)
        self.address_file = folder / f"address-{shadow}.json"
        self.log = folder / f"shadow-{shadow}.log"
        self.address_file.unlink(missing_ok=True)
        words = ["-c", SERVE, "shadow", "serve", "--token-file", str(folder / "token")]
        words += ["--shadow", str(shadow), "--shadows", str(shadows), "--port", str(port)]
        words += ["--address-file", str(self.address_file), "--timeout-s", "60", *arguments]
        with self.log.open("ab") as log:
            self.process = WarmProcess(words, stdout=log, env={**os.environ, **(environment or {})})

    def wait_ready(self, seconds: float = 120.0) -> "ShadowProcess":
        deadline = time.monotonic() + seconds
        while not self.address_file.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"no shadow: {self.log.read_text()}")
            time.sleep(0.02)
        self.described = json.loads(self.address_file.read_text())
        self.address = f"{self.described['host']}:{self.described['port']}"
        return self

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(60)

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextlib.contextmanager
def shadow_processes(folder: Path, count: int, *arguments: str):
    """`count` shadows with one token; each spills below its own folder where `--spill-dir` is an argument."""
    started = []
    try:
        for shadow in range(count):
            own = [word.replace("{shadow}", str(shadow)) for word in arguments]
            started.append(ShadowProcess(folder, shadow, count, *own))
            if shadow == 0 and not (folder / "token").exists():
                started[0].wait_ready()
        for process in started:
            process.wait_ready()
        yield started
    finally:
        for process in started:
            process.kill()


class ShadowThread:
    """The same service in this process."""

    def __init__(self, folder: Path, shadow: int, shadows: int, **options):
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        settings = ShadowSettings(shadow=shadow, shadows=shadows, timeout_s=60.0, **options)
        self.service = ShadowService(settings, read_token(folder / "token", make=True), listener)
        self._thread = threading.Thread(target=self.service.run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self.service.stop()
        self._thread.join(120)
        assert not self._thread.is_alive()


@contextlib.contextmanager
def shadow_threads(folder: Path, count: int, **options):
    """`count` shadows; each spills below a folder of its own in `spill_directory`, where that is given."""
    spills = options.pop("spill_directory", None)
    started = []
    try:
        for shadow in range(count):
            own = {} if spills is None else {"spill_directory": spills / str(shadow)}
            started.append(ShadowThread(folder, shadow, count, **own, **options))
        yield started
    finally:
        for shadow in started:
            shadow.end()
