"""The mirror node of a measurement: ``lastgood mirror run`` on a node of a testbed, asked for its status."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Final

from typing_extensions import Self

from lastgood.cluster.testbed.net import namespace_of, program
from lastgood.cluster.testbed.testbed import Testbed
from lastgood.errors import LaunchError
from lastgood.experiments.flowcheck.model import SHAPE_VARIABLE
from lastgood.experiments.records.flowcheck import TrainingSettings
from lastgood.files import read_end
from lastgood.mirror.job.description import read_job
from lastgood.mirror.node.status import STATUS_FILE, NodeStatus, read_status

__all__ = ["MirrorNodeProcess"]

_PATIENCE_S: Final = 60.0
_POLL_S: Final = 0.1
_HELD_S: Final = 20.0
_PORT: Final = 7300


class MirrorNodeProcess:
    """``lastgood mirror run`` on a node that sees a watched one's frames; it ends with the context."""

    def __init__(
        self, bed: Testbed, node: str, watched: str, settings: TrainingSettings, place: Path, logs: Path
    ) -> None:
        self._directory = place / "held"
        self.address = f"{bed.address(node)}:{_PORT}"
        self._log = logs / "mirror-node.log"
        environment = {**os.environ, SHAPE_VARIABLE: settings.shape.model_dump_json()}
        lastgood = [sys.executable, "-m", "lastgood", "mirror"]
        self._job = job = place / "job.json"
        factory = "lastgood.experiments.flowcheck.model:make_described"
        describe = [*lastgood, "describe", "--factory", factory, "--ranks", str(settings.ranks), "--out", str(job)]
        done = subprocess.run(
            describe, env=environment, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
        )
        if done.returncode:
            raise LaunchError(f"`lastgood mirror describe` failed: {done.stderr.strip()[-2000:]}")
        inside = [program("ip"), "netns", "exec", namespace_of(bed.name, node)]
        run = [*lastgood, "run", "--job", str(job), "--interface", "mir0", "--watch", bed.address(watched)]
        self.token_file = self._directory / "token"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*inside, *run, "--dir", str(self._directory), "--listen", self.address],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Self:
        end = time.monotonic() + _PATIENCE_S
        while not (self._directory / STATUS_FILE).exists():
            self._look(end, "come up")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.terminate()
        try:
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def parameters(self) -> int:
        """Elements of all parameters of the training that it follows."""
        return sum(one.elements for one in read_job(self._job).parameters)

    def status(self) -> NodeStatus:
        """What it says of itself."""
        return read_status(self._directory)

    def wait_held(self, step: int) -> int | None:
        """The newest step that it holds, once that is `step`, or the patience is over."""
        end = time.monotonic() + _HELD_S
        while True:
            held = self.status().held
            newest = max(held) if held else None
            if newest == step or time.monotonic() > end or self._process.poll() is not None:
                return newest
            time.sleep(_POLL_S)

    def _look(self, end: float, what: str) -> None:
        if self._process.poll() is not None:
            words = read_end(self._log, 2000).decode(errors="replace").strip()
            raise LaunchError(f"the mirror node ended with {self._process.returncode}: {words}")
        if time.monotonic() > end:
            raise LaunchError(f"the mirror node did not {what} within {_PATIENCE_S:g} s; its log: {self._log}")
        time.sleep(_POLL_S)
