"""Calls of `lastgood provision cloud` in this process."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from lastgood.cli import app


def cloud(*arguments):
    """A call's exit status, the error that it raised, stdout and stderr."""
    return CliRunner().invoke(app, ["provision", "cloud", *map(str, arguments)])


def listed(*arguments):
    """What `list --json` prints."""
    done = cloud("list", "--json", *arguments)
    assert done.exception is None, done.output
    return json.loads(done.stdout)
