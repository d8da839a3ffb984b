"""`Remote` with real ssh servers: results, errors that name the host, and commands that end with their connection."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from lastgood.cluster.ssh.remote import Completed, Remote, RemoteProcess, SshOptions
from lastgood.cluster.testbed.testbed import Testbed
from lastgood.errors import HostError
from tests.support import patience

pytestmark = pytest.mark.root

# A child that leaves its session and closes its output, as workers of a launcher do.
FAMILY = "setsid sleep 612 >/dev/null 2>&1 & echo ready; exec sleep 612"


def wait_until(what: str, reached: Callable[[], bool], seconds: float = 60) -> None:
    patience.wait_until(reached, what, seconds, every_s=0.05)


def processes(bed: Testbed, node: str) -> int:
    return next(status.processes for status in bed.status() if status.name == node)


def test_output_errors_exit_code_and_input_arrive(bed: Testbed) -> None:
    done = bed.remote().run("vm1", ["sh", "-c", "cat; echo no >&2; exit 3"], 20, input=b"x" * 300_000)
    assert (done.rc, done.stdout, done.stderr) == (3, b"x" * 300_000, b"no\n")
    assert bed.remote().run("vm1", ["sh", "-c", "exit 255"], 20).rc == 255


def test_everywhere_at_the_same_time(bed: Testbed) -> None:
    results = bed.remote().run_everywhere(["vm1", "vm2"], ["hostname"], 20)
    assert [result.text for result in results.values() if isinstance(result, Completed)] == ["vm1", "vm2"]


def test_a_missing_command_too_much_output_and_too_much_time_name_the_host(bed: Testbed) -> None:
    remote = bed.remote()
    with pytest.raises(HostError, match=r"^vm1: there is no command 'no-such-program'"):
        remote.run("vm1", ["no-such-program"], 20)
    with pytest.raises(HostError, match=r"^vm1: the command wrote more than 1000 bytes: yes"):
        remote.run("vm1", ["yes"], 20, max_output_bytes=1000)
    # A host that is too busy to take the connection within that second is told by ssh.
    with pytest.raises(HostError, match=r"^vm1: (no answer within \d+ s .*: sleep 600|does not answer within 1 s)"):
        remote.run("vm1", ["sleep", "600"], 1)


def test_another_key_is_refused_and_an_unknown_host_key_as_well(bed: Testbed, tmp_path: Path) -> None:
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    text = bed.ssh_config.read_text()
    (tmp_path / "other_key").write_text(text.replace(str(bed.folder / "id_ed25519"), str(key)))
    with pytest.raises(HostError, match=r"^vm1: refuses this key; .*ssh-copy-id"):
        Remote(SshOptions(tmp_path / "other_key")).run("vm1", ["true"], 20)
    (tmp_path / "other_host").write_text(text.replace(str(bed.folder / "known_hosts"), "/dev/null"))
    with pytest.raises(HostError, match=r"^vm1: has a host key that is not known here"):
        Remote(SshOptions(tmp_path / "other_host")).run("vm1", ["true"], 20)


def started(bed: Testbed, node: str, **how: int) -> RemoteProcess:
    process = bed.remote().start(node, ["bash", "-c", FAMILY], stdout=subprocess.PIPE, **how)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def test_a_started_command_gets_environment_and_folder_and_gives_its_exit_code(bed: Testbed) -> None:
    argv = ["sh", "-c", 'echo "$GREETING"; pwd; exit 5']
    env = {"GREETING": "it's $HOME"}
    with bed.remote().start("vm1", argv, env=env, cwd="/usr", stdout=subprocess.PIPE) as process:
        assert process.wait(60) == 5
        assert process.stdout is not None
        assert process.stdout.read() == b"it's $HOME\n/usr\n"


def test_killing_the_local_ssh_ends_the_command_and_its_daemons(bed: Testbed) -> None:
    before = processes(bed, "vm1")
    with started(bed, "vm1", grace_s=1) as process:
        assert processes(bed, "vm1") > before
        os.kill(process.pid, signal.SIGKILL)
        wait_until("the end of all that it had started", lambda: processes(bed, "vm1") <= before)


def test_terminate_ends_it_in_order(bed: Testbed) -> None:
    before = processes(bed, "vm1")
    with started(bed, "vm1") as process:
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    wait_until("the end of all that it had started", lambda: processes(bed, "vm1") <= before)


def test_a_cut_cable_ends_the_command_on_the_node(bed: Testbed) -> None:
    before = processes(bed, "vm2")
    with started(bed, "vm2", silence_s=2, grace_s=1) as process:
        bed.cut("vm2")
        # Seen without the network, which is gone: the command, its daemon and its keeper.
        wait_until("the end of the command in the node", lambda: not sleepers(bed, "vm2"))
        os.kill(process.pid, signal.SIGKILL)  # it would notice by itself, 15 s later
        bed.heal("vm2")
    wait_until("the end of its session", lambda: processes(bed, "vm2") <= before)


@pytest.mark.slow
def test_a_cut_cable_is_noticed_here_too(bed: Testbed) -> None:
    """By ssh itself: three questions that nobody answers, five seconds apart."""
    with started(bed, "vm2", silence_s=2, grace_s=1) as process:
        bed.cut("vm2")
        with pytest.raises(HostError, match=r"^vm2: stopped answering; .*Timeout, server"):
            process.wait(3 * 5 + 30)
        assert process.poll() == 255
    bed.heal("vm2")


def sleepers(bed: Testbed, node: str) -> list[str]:
    """The commands of the FAMILY that run in a node."""
    from lastgood.cluster.testbed.net import namespace_of, processes_in

    found = []
    for pid in processes_in(namespace_of(bed.name, node)):
        try:
            found.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return [command for command in found if command.startswith("sleep 612")]
