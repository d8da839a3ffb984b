"""Calls of `lastgood hosts check` on a testbed."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from lastgood.cli import app
from lastgood.cluster.testbed.testbed import Testbed

PORTS = "29620-29622"


def check(bed: Testbed, *arguments: object) -> tuple[int, dict[str, Any]]:
    """Its exit code and report. Later arguments replace earlier ones."""
    words = ["hosts", "check", bed.folder / "hostfile", "--ssh-config", bed.ssh_config, "--json", "--ports", PORTS]
    words += ["--min-free", "1 MiB", *arguments]
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code in (0, 1), done.output
    return done.exit_code, json.loads(done.stdout)


def faults(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Hosts, and what is wrong there."""
    return [(one["host"], one["what"]) for one in report["findings"] if one["verdict"] == "fault"]
