"""Calling the workflow as a user does, in a working folder of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TINY = ROOT / "tests" / "workflow" / "tiny.yaml"


def planned(output: str) -> dict[str, int]:
    """Jobs by rule, from the table that a dry run prints."""
    table = output.partition("Job stats:")[2].partition("total")[0]
    return {name: int(count) for name, count in re.findall(r"^(\w+)\s+(\d+)$", table, re.MULTILINE)}


class WorkflowFolder:
    """A working folder, and calls of Snakemake in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[subprocess.Popen[str]] = []

    def command(self, *arguments: str, configfile: Path | None = TINY) -> list[str]:
        chosen = [] if configfile is None else ["--configfile", str(configfile)]
        start = [sys.executable, "-m", "snakemake", "-s", str(ROOT / "Snakefile"), "-d", str(self.folder)]
        return [*start, *arguments, *chosen]

    def call(self, *arguments: str, configfile: Path | None = TINY) -> subprocess.CompletedProcess[str]:
        """Run to the end; stdout and stderr come together."""
        command = self.command(*arguments, configfile=configfile)
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=800)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start in a session of its own, as a terminal would."""
        log = (self.folder / "snakemake.log").open("w", encoding="utf-8")
        with log:
            started = subprocess.Popen(
                self.command(*arguments), stdout=log, stderr=subprocess.STDOUT, text=True, start_new_session=True
            )
        self._started.append(started)
        return started

    def end(self) -> None:
        """End what a failed test left running."""
        for started in self._started:
            started.kill()
            started.wait()

    def log(self) -> str:
        return (self.folder / "snakemake.log").read_text(encoding="utf-8")

    def records(self) -> list[Path]:
        return sorted(self.folder.glob("results/testbox/laptop/*/*/*/*/r*.json"))
