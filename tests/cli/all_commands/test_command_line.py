"""What holds of every command: version, panels of the help, completion, mistyped names, quiet, progress, exit codes."""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from typer.main import get_command
from typer.testing import CliRunner

from lastgood import errors
from lastgood.cli import CHECKPOINTS, CLUSTER, PAPERS, REPRODUCE, app
from lastgood.cli._output import Progress, be_quiet, console
from lastgood.errors import ConfigError, LastgoodError

ROOT = Path(__file__).resolve().parents[3]
TOP = get_command(app)


def call(*words):
    return CliRunner().invoke(app, [*map(str, words)], env={"COLUMNS": "200"})


def test_version():
    done = call("--version")
    assert (done.exit_code, done.stdout) == (0, f"lastgood {importlib.metadata.version('lastgood')}\n")


def test_help_shows_every_command_in_a_panel():
    shown = {name: command for name, command in TOP.commands.items() if not command.hidden}
    panels = {command.rich_help_panel for command in shown.values()}
    assert panels == {CHECKPOINTS, REPRODUCE, CLUSTER, PAPERS}
    text = call("--help").stdout
    at = [text.index(f" {panel} ") for panel in (CHECKPOINTS, REPRODUCE, CLUSTER, PAPERS)]
    assert at == sorted(at)
    assert all(re.search(rf"│ {name} +", text) for name in shown)


def complete(words: str) -> list[str]:
    environment = {
        **os.environ,
        "_LASTGOOD_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    program = Path(sys.executable).with_name("lastgood")
    done = subprocess.run([program], env=environment, capture_output=True, text=True, timeout=60)
    return done.stdout.split()


def test_the_shell_completes_commands_options_and_examples():
    assert "status" in complete("lastgood sta")
    assert complete("lastgood status --max") == ["--max-age"]
    assert complete("lastgood examples copy gpt") == ["gpt_ddp"]


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["statsu"], "status"),
        (["examples", "cpoy"], "copy"),
        (["status", ".", "--max-aeg", "3"], "--max-age"),
        (["plan", "fig8", "--config", "pairs={ronds: 1}"], "rounds"),
        (["plan", "fig8", "--config", "systems=none,pcheck"], "pccheck"),
        (["examples", "copy", "gpt_dpd", "."], "gpt_ddp"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_what_is_mistyped_names_its_neighbour(words, meant, monkeypatch):
    monkeypatch.chdir(ROOT)
    done = call(*words)
    said = str(done.exception) if isinstance(done.exception, LastgoodError) else done.output
    assert done.exit_code in (1, 2) and re.search(
        rf"(?i)(did you mean|possible options)[^?]*{meant}", re.sub(r"\s+", " ", said)
    ), said


def test_quiet_leaves_out_notices_and_nothing_else(tmp_path):
    try:
        loud = call("examples", "copy", "gpt_ddp", tmp_path / "a")
        quiet = call("examples", "copy", "gpt_ddp", tmp_path / "b", "--quiet")
        assert "train.py" in loud.stderr and (quiet.stdout, quiet.stderr) == ("", "")
        assert json.loads(call("examples", "list", "--json", "--quiet").stdout)
        assert isinstance(call("examples", "copy", "none", tmp_path, "--quiet").exception, ConfigError)
    finally:
        be_quiet(False)
    assert not console.quiet


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=120)


def test_progress_tells_rate_and_time_left_once_it_takes_long():
    to = terminal()
    with Progress("verify", 1 << 30, to=to, after_s=0.01) as progress:
        end = time.monotonic() + 60
        while "GiB" not in to.file.getvalue() and time.monotonic() < end:
            progress.advance(1 << 20)
            time.sleep(0.01)
    text = to.file.getvalue()
    assert "verify" in text and re.search(r"[KMG]i?B/s|\?", text) and re.search(r"\d:\d\d:\d\d|-:--:--", text)


@pytest.mark.parametrize(
    ("to", "options"),
    [
        (Console(file=io.StringIO(), force_terminal=False), {"after_s": 0.0}),
        (Console(file=io.StringIO(), force_terminal=True, quiet=True), {"after_s": 0.0}),
        (terminal(), {"after_s": 0.0, "shown": False}),
        (terminal(), {}),
    ],
    ids=["no terminal", "quiet", "json", "short"],
)
def test_progress_is_silent(to, options):
    with Progress("verify", 100, to=to, **options) as progress:
        progress.advance(50)
        time.sleep(0.1)
    assert to.file.getvalue() == ""


def test_examples_are_listed_and_copied_whole(tmp_path):
    listed = json.loads(call("examples", "list", "--json").stdout)
    assert set(listed) == {path.name for path in (ROOT / "examples").iterdir() if path.is_dir()} - {"__pycache__"}
    assert all(listed.values()), "each says what it is"
    assert call("examples", "copy", "gpt_ddp", tmp_path).exit_code == 0
    for path in (ROOT / "examples" / "gpt_ddp").glob("*.*"):
        assert (tmp_path / "gpt_ddp" / path.name).read_bytes() == path.read_bytes()
    assert "is there already" in str(call("examples", "copy", "gpt_ddp", tmp_path).exception)


def test_the_page_of_exit_codes_names_every_error():
    page = (ROOT / "docs" / "exit-codes.md").read_text()
    kinds = [kind for name in errors.__all__ if issubclass(kind := getattr(errors, name), LastgoodError)]
    for kind in kinds:
        row = next(line for line in page.splitlines() if line.startswith("|") and f"`{kind.__name__}`" in line)
        assert row.split("|")[1].strip() == str(kind.exit_code), kind
