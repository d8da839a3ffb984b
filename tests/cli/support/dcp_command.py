"""Calls `lastgood dcp`, with ranks that are forked from a process that is warm; two fixtures that its tests import."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from lastgood.cli import app
from lastgood.experiments.machine import lock as lock_module
from lastgood.experiments.records.dcp import DcpRecord
from lastgood.experiments.services import place
from lastgood.locks import FileLock
from tests.support.warm import WarmProcess

SMALL = ("--model", "L7b-2MB", "--iterations", "1", "--warmup", "0")


class WarmRank(WarmProcess):
    """A rank that begins with torch and the models imported, which takes longer than all that it does."""

    preloaded = (
        *WarmProcess.preloaded,
        "lastgood.experiments.dcp_runs.bench",
        "transformers.models.llama.modeling_llama",
    )


_RANK = "import sys; from lastgood.experiments.dcp_runs.bench import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture(autouse=True)
def warm_ranks(monkeypatch):
    """Ranks are forked; `torchrun` below starts real ones."""

    def start(program, env, log):
        assert program[1:3] == ["-m", "lastgood.experiments.dcp_runs.bench"]
        # It ends with the process that forks it, which is not this one.
        order = json.dumps({**json.loads(program[3]), "parent": None})
        return WarmRank(["-c", _RANK, order], stdout=log, env=env)

    monkeypatch.setattr(place, "_start", start)


@pytest.fixture(autouse=True)
def own_lock(tmp_path, monkeypatch):
    """Tests must neither wait for a measurement on this machine nor hold one up."""
    path = tmp_path / "machine.lock"
    monkeypatch.setattr(lock_module, "machine_lock", lambda: FileLock(path, "the test's turn"))
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def dcp(tmp_path, command, *arguments, code=0):
    own = () if command == "wait" else ("--uri", tmp_path / "at", "--scratch", tmp_path / "s", "--logs", tmp_path / "l")
    words = ["dcp", command, *map(str, own), *map(str, arguments)]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done


def record_of(tmp_path):
    return DcpRecord.load(tmp_path / "record.json")
