"""A real ssh server on loopback, with keys of its own, in which root logs in."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

from lastgood.ports import free_ports
from lastgood.processes import die_with_parent


class Sshd:
    """An sshd with keys of its own, and the ssh configuration that leads to it as `node`; `dead` leads nowhere.

    `more` are lines before all others of the server's configuration: sshd takes the first of each kind.
    With `port` it listens there.
    """

    def __init__(self, folder: Path, more: str = "", port: int | None = None) -> None:
        self.folder = folder
        program = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
        if os.geteuid() != 0:
            pytest.skip("needs root: an sshd logs its users in")
        if program is None or shutil.which("ssh-keygen") is None:
            pytest.skip("there is no sshd (Debian: openssh-server)")
        for name in ("host_key", "key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name]
            subprocess.run(command, check=True, timeout=60)
        free, dead = free_ports(2)
        self.port = port or free
        (folder / "sshd_config").write_text(
            f"{more}ListenAddress 127.0.0.1\nPort {self.port}\nHostKey {folder}/host_key\nPidFile none\nUsePAM no\n"
            "StrictModes no\n"
            f"AuthorizedKeysFile {folder}/key.pub\nPermitRootLogin prohibit-password\nPasswordAuthentication no\n"
        )
        host_key = (folder / "host_key.pub").read_text().strip()
        (folder / "known_hosts").write_text(f"[127.0.0.1]:{self.port} {host_key}\n")
        common = (
            f"HostName 127.0.0.1\nUser root\nIdentityFile {folder}/key\nIdentitiesOnly yes\nStrictHostKeyChecking yes\n"
        )
        common += f"UserKnownHostsFile {folder}/known_hosts\n"
        self.config = folder / "ssh_config"
        self.config.write_text(f"Host node\nPort {self.port}\n{common}Host dead\nPort {dead}\n{common}")
        # Debian's package makes it as well; it stays, since another sshd may have found it by now.
        Path("/run/sshd").mkdir(exist_ok=True)
        parent = os.getpid()
        self._log = (folder / "sshd.log").open("w")
        self._process = subprocess.Popen(
            [program, "-D", "-e", "-f", folder / "sshd_config"],
            stdin=subprocess.DEVNULL,
            stderr=self._log,
            preexec_fn=lambda: die_with_parent(parent),
        )
        self._wait()

    def __enter__(self) -> Sshd:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _wait(self) -> None:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            except OSError:
                assert self._process.poll() is None, (self.folder / "sshd.log").read_text()
                assert time.monotonic() < deadline, "sshd does not listen"
                time.sleep(0.05)
            else:
                return

    def end(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()
        self._log.close()
