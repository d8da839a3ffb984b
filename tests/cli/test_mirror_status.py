"""`lastgood mirror status` and `resync`: what is said of a node, and by which exit code."""

from __future__ import annotations

import os

import pytest
from typer.testing import CliRunner

from lastgood.cli import app
from lastgood.errors import CheckpointError
from lastgood.mirror.node.resync import REQUEST_FILE
from lastgood.mirror.node.status import NodeStatus, write_status


def said(folder, *words):
    return CliRunner().invoke(app, ["mirror", *words, "--dir", str(folder)])


def status(stands, **more):
    return NodeStatus(os.getpid(), "127.0.0.1:7300", stands, "ab" * 16, 2, 9, (8, 9), (5,), **more)


@pytest.mark.parametrize(("stands", "code"), [("follows", 0), ("waits", 0), ("blind", 3), ("ended", 1)])
def test_the_exit_code_says_how_a_node_stands(stands, code, tmp_path):
    write_status(tmp_path, status(stands, blind="blind since step 10, because a hole" if stands == "blind" else ""))
    found = said(tmp_path, "status", "--json")
    assert found.exit_code == code
    assert '"held": [' in found.output


def test_a_node_that_is_gone_is_not_taken_for_one_that_runs(tmp_path):
    write_status(tmp_path, NodeStatus(2**22 - 3, "127.0.0.1:7300", "follows", None, 0, 0, (), ()))
    assert said(tmp_path, "status").exit_code == 1
    assert isinstance(said(tmp_path, "stop").exception, CheckpointError), "nobody holds the folder"


def test_where_nothing_ever_ran(tmp_path):
    assert isinstance(said(tmp_path, "status").exception, CheckpointError)


def test_a_request_for_a_resync_is_left_for_the_node(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    assert said(tmp_path, "resync", "--from", str(tmp_path / "checkpoints")).exit_code == 0
    assert (tmp_path / REQUEST_FILE).read_text().strip() == str(tmp_path / "checkpoints")
    assert said(tmp_path, "resync", "--from", str(tmp_path / "none")).exit_code != 0
