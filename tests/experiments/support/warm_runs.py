"""`lastgood` commands, and scripts, in processes that begin with torch and what a run needs imported."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from tests.support.warm import WarmProcess

_COMMAND = "import sys; sys.argv[0] = 'lastgood'; from lastgood.cli import main; main()"


class WarmRun(WarmProcess):
    """As subprocess.Popen of ``lastgood *arguments`` (or of a Python script), both outputs in one pipe, as text.

    Standard error goes to an open file instead where `stderr` is one. No file of it may grow beyond `file_bytes`.
    """

    preloaded = (*WarmProcess.preloaded, "lastgood.workloads.vision", "lastgood.experiments.runs.measure")

    def __init__(
        self,
        arguments: Sequence[object],
        script: Path | None = None,
        file_bytes: int | None = None,
        stderr: int | IO[bytes] = subprocess.STDOUT,
        env: dict[str, str] | None = None,
    ) -> None:
        words = ["-c", _COMMAND] if script is None else [script]
        if file_bytes is not None:
            assert script is None
            limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({file_bytes}, {file_bytes}))"
            words = ["-c", f"{limit}; {_COMMAND}"]
        super().__init__([*words, *arguments], stderr=stderr, env=env)
