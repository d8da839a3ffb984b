"""A run over one rank or over several, for a command that does not know which."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lastgood.errors import ConfigError
from lastgood.experiments.records.run import RunRecord
from lastgood.experiments.records.spec import RunSpec
from lastgood.experiments.runs.execute import execute
from lastgood.processes import exit_on

if TYPE_CHECKING:
    from lastgood.experiments.services.place import RankHosts

__all__ = ["execute_run"]


def execute_run(
    spec: RunSpec,
    data_dir: Path,
    scratch: Path,
    logs: Path,
    report: Callable[[str], None],
    timeline: Path | None = None,
    hosts: RankHosts | None = None,
) -> RunRecord:
    """Measure `spec` on one rank or several and return its record. Only in the main thread of a command.

    Raises ConfigError for a timeline of several ranks, and hosts for one; and what `execute` and `execute_ranks` raise.
    """
    if not spec.over_ranks:
        if hosts is not None and hosts.hostfile is not None:
            raise ConfigError(f"--hostfile: {spec.title()} has one rank; leave it out")
        return execute(spec, data_dir, scratch, logs, report, timeline)
    if timeline is not None:
        raise ConfigError("--timeline is for runs of one rank")

    from lastgood.experiments.multirank.execute import execute_ranks  # a run on one rank needs none of it
    from lastgood.experiments.services.place import RankHosts

    # Ranks on other hosts, and a testbed, end with this.
    exit_on(signal.SIGTERM, signal.SIGHUP)
    return execute_ranks(spec, data_dir, scratch, logs, report, hosts or RankHosts())
