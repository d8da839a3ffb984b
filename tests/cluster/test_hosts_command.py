"""`lastgood hosts`: making a hostfile, and checking hosts that are not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lastgood.cli import app
from lastgood.cluster.hostfile import read_hostfile
from lastgood.errors import ConfigError
from lastgood.ports import free_ports


def lastgood(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_make_writes_the_file_and_says_what_ssh_needs(tmp_path: Path) -> None:
    out = tmp_path / "hosts"
    done = lastgood("hosts", "make", "10.0.0.1", "10.0.0.2", "--slots", 4, "--out", out, "--user", "ubuntu")
    assert done.exit_code == 0, done.output
    made = read_hostfile(out)
    assert (made.names, made.slots) == (("10.0.0.1", "10.0.0.2"), 8)
    for line in (
        "Host 10.0.0.1 10.0.0.2",
        "User ubuntu",
        "ssh-keygen -t ed25519",
        "ssh-copy-id -i ~/.ssh/lastgood.pub ubuntu@10.0.0.2",
        f"lastgood hosts check {out}",
    ):
        assert line in done.stdout


def test_make_does_not_replace_other_hosts_unasked(tmp_path: Path) -> None:
    out = tmp_path / "hosts"
    assert lastgood("hosts", "make", "a", "b", "--out", out).exit_code == 0
    assert lastgood("hosts", "make", "a", "b", "--out", out).exit_code == 0
    refused = lastgood("hosts", "make", "c", "--out", out)
    assert isinstance(refused.exception, ConfigError)
    assert "--force" in str(refused.exception)
    assert read_hostfile(out).names == ("a", "b")
    assert lastgood("hosts", "make", "c", "--out", out, "--force").exit_code == 0
    assert read_hostfile(out).names == ("c",)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "a"], "already on line"),
        (["root@a"], "ssh configuration"),
        (["a", "--slots", "0"], "give it 1 to"),
        (["a", "--user", "a b"], "user's name"),
    ],
)
def test_make_refuses_what_is_no_host(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = lastgood("hosts", "make", *arguments, "--out", tmp_path / "hosts")
    assert isinstance(done.exception, ConfigError)
    assert message in str(done.exception)
    assert not (tmp_path / "hosts").exists()


def test_check_of_hosts_that_do_not_answer_names_each_and_fails(tmp_path: Path) -> None:
    (port,) = free_ports()
    hosts, config = tmp_path / "hosts", tmp_path / "ssh_config"
    hosts.write_text("127.0.0.1 slots=1\n127.0.0.2 slots=1\n")
    config.write_text(f"Host *\n    Port {port}\n    StrictHostKeyChecking yes\n")
    done = lastgood("hosts", "check", hosts, "--ssh-config", config, "--json")
    assert done.exit_code == 1, done.output
    report = json.loads(done.stdout)
    assert report["ok"] is False
    assert [(one["host"], one["what"]) for one in report["findings"]] == [("127.0.0.1", "ssh"), ("127.0.0.2", "ssh")]
    for finding in report["findings"]:
        assert "no ssh server answers" in finding["found"]
        assert "openssh-server" in finding["to_do"]
    shown = lastgood("hosts", "check", hosts, "--ssh-config", config)
    assert shown.exit_code == 1
    assert shown.stdout.count("not reached") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ports", "1"], "write it as 29500-29509"),
        (["--ports", "9-1"], "range of ports"),
        (["--min-free", "much"], "--min-free"),
        (["--ssh-config", "/no/such/file"], "no such ssh configuration"),
    ],
)
def test_check_refuses_wrong_options(arguments: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("127.0.0.1 slots=1\n")
    done = lastgood("hosts", "check", tmp_path / "hosts", *arguments)
    assert isinstance(done.exception, ConfigError)
    assert message in str(done.exception)
