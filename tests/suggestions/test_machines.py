"""Suggestions about disks and hosts' logins, followed to the letter."""

from __future__ import annotations

from pathlib import Path

from lastgood.cluster.provision.inventory import Connection
from lastgood.experiments.ceilings.disk import _nameless_file
from tests.suggestions.following import advice, follows, refusal


def opened(folder: Path) -> None:
    with _nameless_file(folder):
        pass


@follows("{}: cannot make a file here: {}; choose another --scratch")
def test_a_scratch_folder_that_takes_no_files(tmp_path):
    advice(refusal(lambda: opened(Path("/proc"))), "choose another --scratch")
    opened(tmp_path)


@follows(
    "--ssh-config: there is no file {}; leave it out to use your own ~/.ssh/config",
    "--user: {} is no user name; give one as on the hosts, such as ubuntu",
)
def test_how_hosts_are_logged_in_to(tmp_path):
    advice(refusal(Connection(tmp_path / "none").check), "leave it out")
    name = advice(refusal(Connection(user="a b").check), r"such as (\w+)")
    Connection(user=name).check()
