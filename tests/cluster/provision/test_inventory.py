"""From hostfile to inventory, and what is refused before anything starts."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from lastgood.cluster.hostfile import parse_hostfile
from lastgood.cluster.provision import playbook
from lastgood.cluster.provision.facts import read_report
from lastgood.cluster.provision.inventory import Connection, make_inventory
from lastgood.cluster.provision.playbook import Provisioning, find_ansible, provision_hosts
from lastgood.errors import ConfigError, ProvisionError

HOSTS = parse_hostfile("vm1 slots=4\nvm2 slots=1\n")


def group(connection):
    return make_inventory(HOSTS, connection)["all"]["children"]["lastgood"]


def test_hosts_keep_their_names_and_slots():
    assert group(Connection())["hosts"] == {"vm1": {"lastgood_slots": 4}, "vm2": {"lastgood_slots": 1}}


def test_ssh_never_asks_and_takes_the_given_configuration(tmp_path):
    config = tmp_path / "an ssh config"
    config.write_text("Host vm1\n")
    variables = group(Connection(ssh_config=config, user="ubuntu", accept_new_keys=True))["vars"]
    words = shlex.split(variables["ansible_ssh_common_args"])
    expected = ["-o", "BatchMode=yes", "-F", str(config), "-o", "StrictHostKeyChecking=accept-new"]
    assert words == expected and variables["ansible_user"] == "ubuntu"
    assert "accept-new" not in group(Connection())["vars"]["ansible_ssh_common_args"]


@pytest.mark.parametrize(
    ("connection", "said"),
    [
        (Connection(ssh_config=Path("no/such/file")), "--ssh-config: there is no file"),
        (Connection(user="-oProxyCommand=x"), "--user: '-oProxyCommand=x' is no user name"),
    ],
)
def test_a_connection_that_cannot_work(connection, said):
    with pytest.raises(ConfigError, match=said):
        make_inventory(HOSTS, connection)


@pytest.mark.parametrize("target", ["relative", "~root/x", "/srv/../etc", "/a b", "~/x; reboot", "/{{ 1 }}"])
def test_a_target_that_a_shell_or_ansible_would_misread(tmp_path, target):
    with pytest.raises(ConfigError, match="--target"):
        provision_hosts(Provisioning(root=tmp_path, hostfile=HOSTS, target=target))


def test_no_ansible_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setattr(playbook.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"pip install 'lastgood\[provision\]'"):
        find_ansible()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "ended without a report"),
        ("{", "not a report"),
        ('{"hosts": []}', "no word of vm1"),
        ('{"hosts": [{"host": "vm1"}]}', "not a report"),
    ],
)
def test_a_report_that_is_none(tmp_path, text, said):
    path = tmp_path / "report.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ProvisionError, match=said):
        read_report(path, ["vm1"])
