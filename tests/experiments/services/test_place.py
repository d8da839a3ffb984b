"""Ranks as processes of this machine: which one a failure is blamed on. Real runs: multirank/test_execute.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lastgood.cluster.hostfile import parse_hostfile
from lastgood.errors import LaunchError
from lastgood.experiments.services import place as rank_hosts
from lastgood.experiments.services.place import Place


@pytest.mark.parametrize("killed", [0, 1])
def test_of_ranks_that_ended_since_the_last_look_the_killed_one_is_named(
    killed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one ends with an error because it has lost it."""
    started: list[subprocess.Popen[bytes]] = []
    really_start = rank_hosts._start

    def start(*arguments: Any) -> subprocess.Popen[bytes]:
        started.append(really_start(*arguments))
        if len(started) == 2:
            for process in started:
                process.wait(60)
        return started[-1]

    monkeypatch.setattr(rank_hosts, "_start", start)
    code = f"import os\nif os.environ['RANK'] == '{killed}': os.kill(os.getpid(), 9)\nraise SystemExit('lost it')"
    here = Place("ssh", parse_hostfile("here slots=2\n"), None, None)
    with pytest.raises(LaunchError, match=rf"^rank {killed} on .* ended with signal SIGKILL"):
        here.start([sys.executable, "-c", code], {}, tmp_path, 60, print)
