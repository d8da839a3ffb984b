"""A testbed's nodes from inside: keys, configuration files, and the ssh server that is each node's first process.

A node is a set of namespaces: network, processes, host name, mounts and System V memory. Its ssh server is process 1 of
its process namespace, so that when it is killed, the kernel kills everything in the node with it.
"""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path
from typing import Final

from lastgood.cluster.hostfile import Host, render_hostfile
from lastgood.cluster.testbed.net import namespace_of, processes_in, program, run_program
from lastgood.cluster.testbed.state import BedState
from lastgood.errors import HostError, StorageError
from lastgood.files import read_end, storage_errors, write_atomically

__all__ = ["HOST_NAME", "start_node", "wait_for_node", "write_material"]

HOST_NAME = "testbed-host"
"""How nodes call the machine itself."""
_START_S = 60.0
_LOG_BYTES = 2000
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# Covers are mounts inside the node's own mount namespace: the machine's files stay as they are. What is not there on
# this machine needs no cover. A sysfs of the node's own shows its own network devices; some containers refuse one, and
# then the machine's is seen. Shared memory is the node's own, and is gone when the node is.
_FIRST_PROCESS: Final = r"""
set -eu
name=$1 state=$2 sshd=$3
echo "$name" > /proc/sys/kernel/hostname
cover() { if [ -e "$2" ] && [ -e "$1" ]; then mount --bind "$2" "$1"; fi; }
cover /etc/hosts "$state/hosts"
cover /etc/resolv.conf "$state/resolv.conf"
cover /etc/ssh/ssh_config "$state/ssh_config"
cover /etc/shadow "$state/shadow"
mount -t sysfs sysfs /sys || true
mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs /dev/shm
mkdir -p /run/sshd
exec "$sshd" -D -e -f "$state/$name/sshd_config"
"""

_SSHD_CONFIG: Final = """\
Port 22
AddressFamily inet
HostKey {folder}/{node}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile none
# The folder's owner is root and nobody else sees it; its parents are the user's choice.
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UseDNS no
PrintMotd no
PrintLastLog no
MaxStartups 200
MaxSessions 100
# A client whose cable is cut says nothing: after 15 s its session counts as over.
ClientAliveInterval 5
ClientAliveCountMax 3
SetEnv LASTGOOD_SSH_CONFIG={folder}/ssh_config
Subsystem sftp internal-sftp
"""

_SSH_CONFIG_HEAD: Final = """\
Host {patterns}
    User root
    IdentityFile {folder}/id_ed25519
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    GlobalKnownHostsFile /dev/null
    StrictHostKeyChecking yes
    HostKeyAlgorithms ssh-ed25519
    KexAlgorithms curve25519-sha256
    UpdateHostKeys no
    PasswordAuthentication no
    LogLevel ERROR
"""


def write_material(folder: Path, state: BedState) -> None:
    """Make keys and write all configuration files, fresh. Raises StorageError or HostError."""
    addresses = {node: state.address(node) for node in state.node_names}
    _make_key(folder / "id_ed25519", f"testbed {state.name}")
    known = []
    for node, address in addresses.items():
        own = folder / node
        own.mkdir(exist_ok=True)
        _make_key(own / "host_key", f"{node} of testbed {state.name}")
        kind, key = (own / "host_key.pub").read_text(encoding="ascii").split()[:2]
        known.append(f"{node},{address} {kind} {key}\n")
        _write(own / "sshd_config", _SSHD_CONFIG.format(folder=folder, node=node))
    _write(folder / "authorized_keys", (folder / "id_ed25519.pub").read_text(encoding="ascii"))
    _write(folder / "known_hosts", "".join(known))
    places = [f"Host {node}\n    HostName {address}\n" for node, address in addresses.items()]
    patterns = " ".join([*addresses, *addresses.values()])
    _write(folder / "ssh_config", "".join(places) + _SSH_CONFIG_HEAD.format(patterns=patterns, folder=folder))
    names = {"127.0.0.1": "localhost", "::1": "localhost ip6-localhost", state.host_address: HOST_NAME}
    lines = [f"{address} {name}\n" for address, name in names.items()]
    lines += [f"{address} {node}\n" for node, address in addresses.items()]
    _write(folder / "hosts", "".join(lines))
    # Nothing outside is reached, so that unknown names fail at once and not after a name server's silence.
    _write(
        folder / "resolv.conf", "# A testbed has no name server.\nnameserver 127.0.0.1\noptions timeout:1 attempts:1\n"
    )
    if _root_is_locked():
        _write(folder / "shadow", "root:*:19000:0:99999:7:::\n")
    comment = f"testbed {state.name}; reach it with ssh -F {folder}/ssh_config"
    _write(folder / "hostfile", render_hostfile([Host(node, state.slots) for node in addresses], comment))


def start_node(folder: Path, state: BedState, node: str) -> None:
    """Start a node's first process in its network namespace, which must be there. Does not wait for the ssh server."""
    own_namespaces = ["--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc", "--kill-child"]
    command = [program("setsid"), "--fork", program("nsenter")]
    command += [f"--net=/run/netns/{namespace_of(state.name, node)}", "--", program("unshare"), *own_namespaces]
    # The machine's later mounts are seen in the node, the node's own stay there.
    command += ["--propagation", "slave", "--", "/bin/sh", "-c", _FIRST_PROCESS, "lastgood-node"]
    command += [node, str(folder), program("sshd")]
    with (folder / node / "sshd.log").open("ab") as log:
        subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={"PATH": _PATH, "LANG": "C.UTF-8"},
            cwd="/",
            timeout=_START_S,
            check=True,
        )


def wait_for_node(folder: Path, state: BedState, node: str) -> None:
    """Wait until a node's ssh server answers from this machine. Raises HostError, with the end of the server's log."""
    space = namespace_of(state.name, node)
    begin = time.monotonic()
    while True:
        try:
            with socket.create_connection((state.address(node), 22), timeout=2) as connection:
                if connection.recv(4) == b"SSH-":
                    return
        except OSError:
            pass
        waited_s = time.monotonic() - begin
        ended = waited_s > 1 and not processes_in(space)
        if ended or waited_s > _START_S:
            why = "ended" if ended else f"does not answer on {state.address(node)} port 22 within {_START_S:g} s"
            raise HostError(f"{node}: its ssh server {why}; its log ends with: {_log_tail(folder / node / 'sshd.log')}")
        time.sleep(0.02)


def _log_tail(path: Path) -> str:
    try:
        return read_end(path, _LOG_BYTES).decode(errors="replace").strip() or "nothing"
    except (OSError, StorageError) as error:
        return f"({error})"


def _make_key(path: Path, comment: str) -> None:
    run_program("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path))


def _root_is_locked() -> bool:
    """Whether root's account is locked: without PAM, sshd lets nobody in then, whatever key they have."""
    try:
        with Path("/etc/shadow").open(encoding="utf-8", errors="replace") as file:
            return any(line.startswith("root:!") for line in file)
    except OSError:
        return False


def _write(path: Path, text: str) -> None:
    with storage_errors(path, "writing a testbed's file"):
        write_atomically(path, text.encode())
