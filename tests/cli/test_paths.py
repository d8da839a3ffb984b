"""What commands do with paths that are URLs, FIFOs or links."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lastgood.cli import app
from lastgood.errors import ConfigError, LastgoodError

COMMANDS = {
    "inspect": ["inspect", "gs://b/r"],
    "verify": ["verify", "gs://b/r"],
    "status": ["status", "gs://b/r"],
    "prune": ["prune", "s3://b/r", "--yes"],
    "import": ["import", "s3://b/r", "job"],
    "export to": ["export", "job", "s3://b/r"],
    "export from": ["export", "gs://b/r", "out"],
    "run": ["run", "--spec", "{}", "--out", "r0.json", "--scratch", "gs://b/r"],
    "doctor": ["doctor", "--scratch", "s3://b/r"],
    "ceilings": ["ceilings", "--out", "s3://b/r.json"],
    "tune": ["tune", "s3://b/r", "--iteration-s", "1", "--state-bytes", "1M"],
    "data": ["data", "prepare", "--data-dir", "s3://b/r"],
    "trace": ["trace", "show", "s3://b/r"],
    "shadow": ["shadow", "serve", "--token-file", "s3://b/r"],
    "launch": ["launch", "--hostfile", "s3://h", "--logs", "logs", "--", "true"],
}


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_a_url_is_refused_and_nothing_is_made(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, (ConfigError, SystemExit)), done.exception
    if isinstance(done.exception, ConfigError):
        assert "is a URL" in str(done.exception)
    else:
        pytest.fail(f"the command line itself refused: {done.output}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["slot-0000.lgs", "job.json", "verdicts.json", "global.json", "lock"])
@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_fifo_is_not_waited_for(command: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "slot-0001.lgs").write_bytes(b"")
    os.mkfifo(tmp_path / name)
    done = CliRunner().invoke(app, [command, str(tmp_path)])
    assert done.exception is None or isinstance(done.exception, (LastgoodError, SystemExit)), repr(done.exception)
    if name == "job.json":
        assert done.exit_code and "is a FIFO" in f"{done.exception} {done.output}".replace("\n", " ")
