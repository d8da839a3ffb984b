"""Calling the workflow as a user does, in a working folder of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.experiments.support.warm_runs import WarmRun
from tests.support.warm import WarmProcess

ROOT = Path(__file__).resolve().parents[3]
TINY = ROOT / "tests" / "workflow" / "tiny.yaml"


def planned(output: str) -> dict[str, int]:
    """Jobs by rule, from the table that a dry run prints."""
    table = output.partition("Job stats:")[2].partition("total")[0]
    return {name: int(count) for name, count in re.findall(r"^(\w+)\s+(\d+)$", table, re.MULTILINE)}


class WarmSnakemake(WarmProcess):
    """As subprocess.Popen of ``snakemake *arguments``, both outputs in one pipe, as text."""

    preloaded = (
        *WarmRun.preloaded,
        "snakemake.cli",
        "snakemake.workflow",
        "snakemake.dag",
        "snakemake.report.html_reporter",
        "smart_open",
        "lastgood.experiments.figures.workflow_plan",
        "lastgood.checkpointers.checkmate.system",
        "lastgood.checkpointers.pccheck.system",
    )

    def __init__(self, arguments: Sequence[str]) -> None:
        super().__init__(["-c", "from snakemake.cli import main; main()", *arguments])


class WorkflowFolder:
    """A working folder, and calls of Snakemake in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[subprocess.Popen[str]] = []

    def arguments(self, *arguments: str, configfile: Path | None = TINY) -> list[str]:
        chosen = [] if configfile is None else ["--configfile", str(configfile)]
        return ["-s", str(ROOT / "Snakefile"), "-d", str(self.folder), *arguments, *chosen]

    def command(self, *arguments: str, configfile: Path | None = TINY) -> list[str]:
        return [sys.executable, "-m", "snakemake", *self.arguments(*arguments, configfile=configfile)]

    def call(self, *arguments: str, configfile: Path | None = TINY) -> subprocess.CompletedProcess[str]:
        """Run to the end; stdout and stderr come together."""
        command = self.command(*arguments, configfile=configfile)
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=800)

    def plan(self, *arguments: str, configfile: Path | None = TINY) -> subprocess.CompletedProcess[str]:
        """As `call`, from a process that has imported Snakemake; for what starts no job."""
        given = self.arguments(*arguments, configfile=configfile)
        planning = WarmSnakemake(given)
        output, _ = planning.communicate(timeout=400)
        return subprocess.CompletedProcess(given, planning.wait(), output)

    def start(self, *arguments: str, log_name: str = "snakemake.log") -> subprocess.Popen[str]:
        """Start in a session of its own, as a terminal would."""
        log = (self.folder / log_name).open("w", encoding="utf-8")
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

    def log(self, name: str = "snakemake.log") -> str:
        return (self.folder / name).read_text(encoding="utf-8")

    def records(self) -> list[Path]:
        return sorted(self.folder.glob("results/testbox/laptop/*/*/*/*/r*.json"))
