"""From a DeepSpeed hostfile to an Ansible inventory."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lastgood.cluster.hostfile import Hostfile
from lastgood.errors import ConfigError

__all__ = ["GROUP", "Connection", "make_inventory"]

GROUP = "lastgood"
"""The inventory's group, which install/ansible/provision.yml works on."""

_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}")


@dataclass(frozen=True)
class Connection:
    """How ssh reaches the hosts.

    `ssh_config` takes the place of the user's own configuration. `accept_new_keys` trusts a host that was never seen
    before, as a fresh VM; a changed key is refused always. With `ask_become_pass` a sudo password is asked for.
    """

    ssh_config: Path | None = None
    user: str | None = None
    accept_new_keys: bool = False
    ask_become_pass: bool = False

    def check(self) -> None:
        """Raise ConfigError for a configuration that is not there and a user name that is none."""
        if self.ssh_config is not None and not self.ssh_config.is_file():
            raise ConfigError(
                f"--ssh-config: there is no file {self.ssh_config}; leave it out to use your own ~/.ssh/config"
            )
        if self.user is not None and not _USER.fullmatch(self.user):
            raise ConfigError(f"--user: {self.user!r} is no user name; give one as on the hosts, such as ubuntu")


def make_inventory(hostfile: Hostfile, connection: Connection) -> dict[str, Any]:
    """The inventory, in the form that Ansible reads as YAML or JSON: every host by its name, with its slots.

    No prompt can appear: ssh runs in batch mode, and a host key that is not known ends the host's play.
    """
    connection.check()
    options = ["-o", "BatchMode=yes"]
    if connection.ssh_config is not None:
        options += ["-F", str(connection.ssh_config.absolute())]
    if connection.accept_new_keys:
        options += ["-o", "StrictHostKeyChecking=accept-new"]
    variables: dict[str, Any] = {"ansible_ssh_common_args": shlex.join(options)}
    if connection.user is not None:
        variables["ansible_user"] = connection.user
    hosts = {host.name: {"lastgood_slots": host.slots} for host in hostfile.hosts}
    return {"all": {"children": {GROUP: {"hosts": hosts, "vars": variables}}}}
