"""What is advised where ssh fails, followed to the letter with an ssh server of the test's own on loopback."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lastgood.cluster.hostfile import parse_hostfile
from lastgood.cluster.launch.job import launch
from lastgood.cluster.ssh.remote import Remote, SshOptions
from tests.cluster.support.sshd import Sshd
from tests.suggestions.following import advice, follows, refusal
from tests.suggestions.packages import debian_package_of

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    """Its users' keys are those of the folder `home`, beside its own."""
    folder = tmp_path_factory.mktemp("server")
    more = f"AuthorizedKeysFile {folder}/home/.ssh/authorized_keys {folder}/key.pub\nSetEnv HOME={folder}/home\n"
    (folder / "home").mkdir()
    with Sshd(folder, more) as made:
        yield made


def login(config: Path, host: str = "node") -> None:
    assert Remote(SshOptions(config)).run(host, ["true"], 60).rc == 0


def changed(server: Sshd, folder: Path, old: str, new: str) -> Path:
    """Its configuration of ssh with something else in it."""
    text = server.config.read_text()
    assert old in text
    path = folder / "ssh_config"
    path.write_text(text.replace(old, new))
    return path


def new_key(path: Path) -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True, timeout=60)
    return path


def test_a_key_that_is_not_known_there(server: Sshd, tmp_path: Path) -> None:
    key = new_key(tmp_path / "other")
    config = changed(server, tmp_path, f"{server.folder}/key", str(key))
    message = refusal(lambda: login(config))
    assert "name its user and key in the ssh configuration" in message
    login(server.config)

    config = changed(server, tmp_path, f"{server.folder}/key", str(key))
    # Forced: the key that this login has here in place of a password would else be taken for the one to copy.
    copy = [advice(message, r"copy it there with (ssh-copy-id)"), "-f", "-i", f"{key}.pub", "-F", server.config, "node"]
    (tmp_path / ".ssh").mkdir()
    here = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run(copy, env=here, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    login(config)


@follows("if the host was installed again, remove the old key with ssh-keygen -R; if not, somebody is in between")
def test_a_host_that_was_made_anew(server: Sshd, tmp_path: Path) -> None:
    place = f"[127.0.0.1]:{server.port}"
    known = tmp_path / "known_hosts"
    old = new_key(tmp_path / "old_host_key").with_suffix(".pub").read_text()
    known.write_text(f"{place} {old}")
    config = changed(server, tmp_path, f"{server.folder}/known_hosts", str(known))
    message = refusal(lambda: login(config))
    command = advice(message, r"remove the old key with (ssh-keygen -R);").split()
    subprocess.run([*command, place, "-f", known], check=True, capture_output=True, timeout=60)

    message = refusal(lambda: login(config))
    assert "compare its fingerprint, or add it to known_hosts" in message
    scan = ["ssh-keyscan", "-t", "ed25519", "-p", str(server.port), "127.0.0.1"]
    shown = subprocess.run(scan, check=True, capture_output=True, text=True, timeout=60).stdout
    (line,) = [line for line in shown.splitlines() if not line.startswith("#")]
    assert line.split()[1:] == (server.folder / "host_key.pub").read_text().split()[:2]
    with known.open("a") as file:
        file.write(f"{line}\n")
    login(config)


def test_a_name_that_is_not_known(server: Sshd, tmp_path: Path) -> None:
    message = refusal(lambda: login(server.config, "stranger.invalid"))
    assert advice(message, "correct the hostfile, or add the name to the ssh configuration")
    login(changed(server, tmp_path, "Host node", "Host node stranger.invalid"), "stranger.invalid")


@follows("start one (Debian, Ubuntu: apt-get install openssh-server), or give its port in the ssh configuration")
def test_a_host_without_an_ssh_server(server: Sshd, tmp_path: Path) -> None:
    message = refusal(lambda: login(server.config, "dead"))
    port = re.findall(r"Port (\d+)", server.config.read_text())[1]
    login(changed(server, tmp_path, f"Port {port}", f"Port {server.port}"), "dead")
    (tmp_path / "started").mkdir()
    with Sshd(tmp_path / "started", port=int(port)) as started:
        login(started.config)
    assert debian_package_of("sshd") == advice(message, r"apt-get install (\S+)\)")


def test_a_configuration_that_ssh_does_not_take(server: Sshd, tmp_path: Path) -> None:
    message = refusal(lambda: login(changed(server, tmp_path, "User root", "Userr root")))
    assert advice(message, "mend the configuration")
    login(server.config)


@follows("{}: SSH_CONNECTION does not say there from where ssh came and to which address")
@pytest.mark.parametrize("way", ["cleared", "no TCP"])
def test_a_host_that_does_not_know_from_where_it_is_reached(server: Sshd, tmp_path: Path, way: str) -> None:
    def launched(config: Path) -> None:
        hosts = parse_hostfile("node slots=1\n")
        remote = Remote(SshOptions(config))
        launch(["true"], hosts, "ssh", log_dir=tmp_path / "logs", timeout_s=100, remote=remote, python=sys.executable)

    if way == "no TCP":
        sshd = shutil.which("sshd", path="/usr/sbin:/usr/bin")
        proxy = f"Port {server.port}\nProxyCommand {sshd} -i -f {server.folder}/sshd_config"
        message = refusal(lambda: launched(changed(server, tmp_path, f"Port {server.port}", proxy)))
        assert "reach it over TCP" in message
    else:
        (tmp_path / "clearing").mkdir()
        clearing = 'ForceCommand env -u SSH_CONNECTION sh -c "$SSH_ORIGINAL_COMMAND"\n'
        with Sshd(tmp_path / "clearing", clearing) as strange:
            message = refusal(lambda: launched(strange.config))
        assert "sshd's ForceCommand" in message
    launched(server.config)
