"""Suggestions of `lastgood stellatrain train` and `node`, followed to the letter."""

from __future__ import annotations

import socket

import pytest
from typer.testing import CliRunner

from lastgood.cli import app, stellatrain_node
from lastgood.errors import LastgoodError
from lastgood.ports import free_ports
from tests.suggestions.following import advice, follows, hear

RIGHT = {
    "--master-ip-address": "127.0.0.1",
    "--my-ip-address": "127.0.0.1",
    "--world-size": "2",
    "--num-gpus": "0",
    "--rank": "0",
}


@pytest.fixture
def trained(monkeypatch):
    """What a call comes to that is right: the training of a node that it begins."""
    begun = []
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")  # a node sets them for its process
    monkeypatch.setattr(stellatrain_node, "train", lambda **given: begun.append(given))
    return begun


def call(**changed):
    options = {**RIGHT, **{f"--{name.replace('_', '-')}": value for name, value in changed.items()}}
    done = CliRunner().invoke(app, ["stellatrain", "node", *[word for pair in options.items() for word in pair]])
    if isinstance(done.exception, LastgoodError):
        return hear(str(done.exception))
    assert done.exit_code == 0, done.output
    return ""


@follows("--rank {}: with --world-size {} ranks go from 0 to {}")
def test_a_rank_that_is_there(trained):
    message = call(rank="7", port=str(free_ports()[0]))
    right = advice(message, r"from 0 to (\d+)$")
    assert call(rank=right) == "" and len(trained) == 1


@follows("--port {}: {}; name another on all nodes")
def test_another_port(trained):
    with socket.create_server(("127.0.0.1", 0)) as other:
        message = call(port=str(other.getsockname()[1]))
    assert advice(message, "name another on all nodes")
    assert call(port=str(free_ports()[0])) == "" and len(trained) == 1


@follows("the sparse engine trains on CPUs so far; give 0")
def test_no_gpus(trained):
    message = call(num_gpus="1", port=str(free_ports()[0]))
    right = advice(message, r"give (\d)$")
    assert call(num_gpus=right, port=str(free_ports()[0])) == "" and len(trained) == 1


@follows("no folder of CLASS/IMAGE; digits and dummy need none")
def test_data_that_is_there(trained, tmp_path):
    message = call(dataset=str(tmp_path), port=str(free_ports()[0]))
    for name in advice(message, r"; (\w+ and \w+) need none$").split(" and "):
        assert call(dataset=name, port=str(free_ports()[0])) == ""
    (tmp_path / "CLASS").mkdir()
    (tmp_path / "CLASS" / "IMAGE").touch()
    assert call(dataset=str(tmp_path), port=str(free_ports()[0])) == "" and len(trained) == 3


@follows("needs a place for its checkpoints: --directory FOLDER")
def test_a_place_for_checkpoints(tmp_path):
    words = ["stellatrain", "train", "--system", "pccheck", "--config", f"data_dir={tmp_path / 'none'}"]
    message = hear(str(CliRunner().invoke(app, words).exception))
    more = advice(message, r"(--directory FOLDER)$").replace("FOLDER", str(tmp_path / "job")).split()
    again = CliRunner().invoke(app, [*words, *more])
    assert "lastgood data prepare" in str(again.exception)  # there is no data, which comes next


@follows("needs the token that its server has: --token-file FILE")
def test_a_token_for_the_controllers_server(tmp_path):
    token = tmp_path / "token"
    token.write_text("x" * 32)
    token.chmod(0o600)
    words = ["stellatrain", "train", "--controller", "127.0.0.1:1", "--config", f"data_dir={tmp_path / 'none'}"]
    message = hear(str(CliRunner().invoke(app, words).exception))
    more = advice(message, r"(--token-file FILE)$").replace("FILE", str(token)).split()
    again = CliRunner().invoke(app, [*words, *more])
    assert "lastgood data prepare" in str(again.exception)  # there is no data, which comes next


@follows("--surface is for --controller own; a server elsewhere is given it")
def test_a_surface_for_the_controller_of_rank_0(tmp_path):
    surface = tmp_path / "surface.json"
    surface.write_text('{"samples": [8, 64], "compressions": [0, 0.9], "lags": [[0, 0.1], [0.1, 0.2]]}')
    words = ["stellatrain", "train", "--surface", str(surface), "--config", f"data_dir={tmp_path / 'none'}"]
    message = hear(str(CliRunner().invoke(app, words).exception))
    again = CliRunner().invoke(app, [*words, *advice(message, "--controller own").split()])
    assert "lastgood data prepare" in str(again.exception)  # there is no data, which comes next
    (tmp_path / "token").write_text("x" * 32)
    (tmp_path / "token").chmod(0o600)
    elsewhere = ["serve", "--token-file", str(tmp_path / "token"), "--port", "0", "--seconds", "0"]
    assert CliRunner().invoke(app, ["stellatrain", *elsewhere, "--surface", str(surface)]).exit_code == 0
