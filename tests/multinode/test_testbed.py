"""A real testbed: nodes reach each other by ssh, faults are what they say, and nothing is ever left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lastgood.cli import app
from lastgood.cluster.hostfile import Hostfile, read_hostfile
from lastgood.cluster.testbed import state as testbed_state
from lastgood.cluster.testbed.net import namespace_of, processes_in
from lastgood.cluster.testbed.testbed import Testbed
from lastgood.errors import ConfigError, HostError
from tests.support import patience

pytestmark = pytest.mark.root


def wait_until(what: str, reached: Callable[[], bool], seconds: float = 60) -> None:
    patience.wait_until(reached, what, seconds, every_s=0.05)


def states(bed: Testbed) -> dict[str, str]:
    return {status.name: status.state for status in bed.status()}


def what_stays(bed: Testbed) -> dict[str, tuple[str, int]]:
    """State and first process of each node. Others come and go: those of the ssh session before, for instance."""
    return {name: (state, min(processes_in(namespace_of(bed.name, name)))) for name, state in states(bed).items()}


def from_vm1(bed: Testbed, *command: str, patience_s: int = 20):
    """A command on vm2, asked for by vm1."""
    ssh = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={patience_s}", "vm2", *command]
    return bed.remote().run("vm1", ssh, 60)


def left_of(name: str) -> list[str]:
    """Everything of a testbed that can be found: namespaces, links, files, mounts, processes."""
    found = [path.name for path in Path("/run/netns").glob(f"lgtb-{name}-*")]
    found += [path.name for path in Path("/sys/class/net").glob(f"lgtb-{name}*")]
    found += [path.name for path in testbed_state.RUN.glob(f"{name}*")]
    found += [line for line in Path("/proc/self/mounts").read_text().splitlines() if f"lgtb-{name}-" in line]
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if f"lgtb-{name}-" in command or f"{testbed_state.RUN}/{name}" in command:
            found.append(command)
    return found


@pytest.fixture
def own_name(needs_testbed: None) -> Iterator[str]:
    """The name of a testbed that the test makes itself; removed at the end, if it is still there."""
    name = f"u{os.getpid()}"
    yield name
    Testbed.remove(name)


def maker(name: str, *, then: str, guarded: bool = False) -> subprocess.Popen[bytes]:
    """A process of its own that makes a testbed."""
    program = (
        "import sys, time; from lastgood.cluster.testbed.testbed import Testbed\n"
        "print('go', flush=True)\n"
        f"bed = Testbed.up(2, name={name!r}, guarded={guarded})\n{then}"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"go\n"
    return process


def test_nodes_have_names_and_addresses_and_reach_each_other_and_the_machine(bed: Testbed) -> None:
    assert bed.hostfile.names == ("vm1", "vm2")
    assert states(bed) == {"vm1": "up", "vm2": "up"}
    assert bed.remote().run("vm2", ["hostname"], 20).text == "vm2"
    assert bed.remote().run(bed.address("vm2"), ["hostname"], 20).text == "vm2"
    # Plain ssh inside: no option, no key, no question.
    assert from_vm1(bed, "hostname").text == "vm2"
    with socket.create_server((bed.host_address, 0)) as server:
        server.settimeout(20)
        port = server.getsockname()[1]
        done = bed.remote().run("vm1", ["bash", "-c", f"exec 3<>/dev/tcp/testbed-host/{port}"], 20)
        assert done.rc == 0, done.stderr
        _, (address, _) = server.accept()
    assert address == bed.address("vm1")
    resolved = bed.remote().run("vm1", ["getent", "hosts", "vm1", "vm2"], 20).text.split()
    assert resolved[::2] == [bed.address("vm1"), bed.address("vm2")]
    assert bed.remote().run("vm1", ["ls", "/sys/class/net"], 20).text.split() == ["eth0", "lo"]


def test_a_node_sees_its_own_processes_only_and_its_shared_memory_is_its_own(bed: Testbed) -> None:
    here = f"/dev/shm/lastgood-testbed-{os.getpid()}"
    bed.remote().run("vm1", ["sh", "-c", f"echo mine > {here}"], 20)
    assert bed.remote().run("vm1", ["cat", here], 20).text == "mine"
    assert bed.remote().run("vm2", ["cat", here], 20).rc == 1
    assert not Path(here).exists()
    pids = bed.remote().run("vm1", ["sh", "-c", "echo /proc/[0-9]*"], 20).text.split()
    assert "/proc/1" in pids and len(pids) < 20


def test_up_again_changes_nothing_and_other_settings_are_refused(bed: Testbed) -> None:
    key, before = (bed.folder / "vm1" / "host_key.pub").read_text(), what_stays(bed)
    again = Testbed.up(2, name=bed.name)
    assert (again.folder, again.settings, what_stays(again)) == (bed.folder, bed.settings, before)
    assert (bed.folder / "vm1" / "host_key.pub").read_text() == key
    for other in ({"nodes": 3}, {"rate": "1gbit"}, {"slots": 2}, {"state": Path("/run/elsewhere")}):
        with pytest.raises(ConfigError, match=f"testbed down --name {bed.name}"):
            Testbed.up(**{"nodes": 2, "name": bed.name, **other})
    assert what_stays(bed) == before


def test_cut_is_seen_by_peers_in_bounded_time_and_heal_lets_old_connections_go_on(bed: Testbed) -> None:
    with bed.remote().start("vm2", ["sh", "-c", "sleep 2; echo still here"], stdout=subprocess.PIPE) as waiting:
        assert from_vm1(bed, "true").rc == 0
        bed.cut("vm2")
        assert states(bed) == {"vm1": "up", "vm2": "cut"}
        assert from_vm1(bed, "true", patience_s=1).rc == 255
        with pytest.raises(HostError, match=r"^vm2: does not answer within 1 s"):
            bed.remote(connect_timeout_s=1).run("vm2", ["true"], 60)
        bed.heal("vm2")
        assert states(bed)["vm2"] == "up"
        assert waiting.wait(60) == 0
        assert waiting.stdout is not None
        assert waiting.stdout.read() == b"still here\n"
    assert from_vm1(bed, "hostname").text == "vm2"


def test_a_paused_node_takes_connections_and_does_nothing(bed: Testbed) -> None:
    counter = f"/dev/shm/counter-{os.getpid()}"
    # The number is there whole at any moment, also when the node is paused.
    count = f"i=0; while :; do i=$((i + 1)); echo $i > {counter}.new; mv {counter}.new {counter}; sleep 0.02; done"
    with bed.remote().start("vm2", ["sh", "-c", count], grace_s=0):
        wait_until("the first counts", lambda: bed.remote().run("vm2", ["cat", counter], 20).text > "0")
        bed.pause("vm2")
        assert states(bed) == {"vm1": "up", "vm2": "paused"}
        with socket.create_connection((bed.address("vm2"), 22), timeout=60) as connection:
            connection.settimeout(0.5)
            with pytest.raises(TimeoutError):
                connection.recv(1)
        with pytest.raises(HostError, match=r"^vm2: does not answer within 1 s"):
            bed.remote(connect_timeout_s=1).run("vm2", ["true"], 20)
        bed.resume("vm2")
        assert states(bed)["vm2"] == "up"
        first = int(bed.remote().run("vm2", ["cat", counter], 20).text)
        wait_until("more counts", lambda: int(bed.remote().run("vm2", ["cat", counter], 20).text) > first)


LISTENER = "import socket; s = socket.create_server(('', 9)); c, _ = s.accept(); c.send(b'!'); c.recv(1); c.recv(1)"


def test_a_killed_node_is_lost_silently_with_its_memory_and_comes_back_with_its_key(bed: Testbed) -> None:
    memory = f"/dev/shm/lost-{os.getpid()}"
    bed.remote().run("vm2", ["touch", memory], 20)
    with bed.remote().start("vm2", [sys.executable, "-c", LISTENER], stderr=subprocess.DEVNULL) as lost:
        connection = None
        end = time.monotonic() + 60
        while connection is None:
            try:
                connection = socket.create_connection((bed.address("vm2"), 9), timeout=2)
            except OSError:
                assert time.monotonic() < end, "waited 60 s for the listener in vm2"
                time.sleep(0.05)
        with connection:
            assert connection.recv(1) == b"!"
            bed.kill("vm2")
            assert states(bed) == {"vm1": "up", "vm2": "killed"}
            assert bed.status()[1].processes == 0
            connection.settimeout(0.5)
            with pytest.raises(TimeoutError):  # no reset, no end: nobody says anything
                connection.recv(1)
        lost.kill()  # its ssh would notice by itself, 15 s later
        for act in (bed.cut, bed.heal, bed.pause, bed.resume):
            with pytest.raises(HostError, match="testbed restart vm2"):
                act("vm2")
        bed.kill("vm2")
        assert from_vm1(bed, "true", patience_s=1).rc == 255
        bed.restart("vm2")
    assert states(bed)["vm2"] == "up"
    assert from_vm1(bed, "hostname").text == "vm2"
    assert bed.remote().run("vm2", ["ls", memory], 20).rc != 0


def test_up_makes_a_damaged_testbed_whole(bed: Testbed) -> None:
    bed.kill("vm1")
    bed.cut("vm2")
    bed.pause("vm2")
    assert states(bed) == {"vm1": "killed", "vm2": "cut and paused"}
    assert states(Testbed.up(2, name=bed.name)) == {"vm1": "up", "vm2": "up"}
    assert from_vm1(bed, "hostname").text == "vm2"


def test_nodes_that_are_not_there_are_named(bed: Testbed) -> None:
    for act in (bed.cut, bed.kill, bed.restart, bed.address):
        with pytest.raises(ConfigError, match="its nodes are vm1, vm2"):
            act("vm3")


def queues(name: str, node: str) -> list[dict[str, object]]:
    """The one queue at each end of a node's link, with its kind and rate in bits per second."""
    found = []
    for space, device in ((node, "eth0"), ("br", node)):
        command = ["tc", "-json", "-n", f"lgtb-{name}-{space}", "qdisc", "show", "dev", device]
        (queue,) = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=20).stdout)
        found.append({"kind": queue["kind"], "rate": queue.get("options", {}).get("rate", 0) * 8})
    return found


def seconds_for(bed: Testbed, node: str, mib: int) -> float:
    begin = time.monotonic()
    assert bed.remote().run(node, ["wc", "-c"], 60, input=b"x" * (mib << 20)).text == str(mib << 20)
    return time.monotonic() - begin


def test_the_rate_of_one_node_is_set_while_it_runs_and_stays_after_a_restart(bed: Testbed) -> None:
    before = what_stays(bed)
    told = CliRunner().invoke(app, ["testbed", "rate", "vm2", "20mbit", "--name", bed.name])
    assert told.exit_code == 0, told.output
    assert what_stays(bed) == before
    assert queues(bed.name, "vm2") == [{"kind": "tbf", "rate": 20_000_000}] * 2
    assert queues(bed.name, "vm1") == [{"kind": "noqueue", "rate": 0}] * 2
    assert seconds_for(bed, "vm2", 4) > 1.5  # 1.68 s at 20 Mbit/s, but for what the bucket holds
    bed.restart("vm2")
    assert queues(bed.name, "vm2") == [{"kind": "tbf", "rate": 20_000_000}] * 2
    bed.set_rate("vm2", "1gbit")
    assert seconds_for(bed, "vm2", 4) < 1.5
    again = Testbed.up(2, name=bed.name)
    assert again.settings.node_rates_bits_per_s == {}
    assert queues(bed.name, "vm2") == [{"kind": "noqueue", "rate": 0}] * 2
    with pytest.raises(ConfigError, match="its nodes are vm1, vm2"):
        again.set_rate("vm3", "1gbit")


def test_a_delay_is_made_or_refused_clearly(bed: Testbed) -> None:
    try:
        bed.set_delay("vm2", "30ms")
    except HostError as error:
        assert "has no netem" in str(error)
        assert Testbed.load(bed.name).settings.node_delays_us == {}
        return
    ping = from_vm1(bed, "true")
    assert ping.returncode == 0
    bed.set_rate("vm2", "100mbit")
    assert Testbed.load(bed.name).settings.node_delays_us == {"vm2": 30_000}
    bed.set_delay("vm2", "0ms")
    assert queues(bed.name, "vm2")[0]["kind"] == "tbf"


def test_a_second_testbed_does_not_touch_the_first_and_leaves_nothing(bed: Testbed, own_name: str) -> None:
    hosts, before = Path("/etc/hosts").read_bytes(), what_stays(bed)
    with Testbed.up(1, name=own_name, rate="100mbit", slots=4) as other:
        assert other.settings.subnet != bed.settings.subnet
        assert other.hostfile.slots == 4
        assert other.remote().run("vm1", ["hostname"], 20).text == "vm1"
        # A link of 100 Mbit/s cannot carry 12 MiB in less than a second; without the limit it takes some 50 ms.
        begin = time.monotonic()
        assert other.remote().run("vm1", ["wc", "-c"], 60, input=b"x" * (12 << 20)).text == str(12 << 20)
        assert time.monotonic() - begin > 0.95
        for space, device in (("vm1", "eth0"), ("br", "vm1")):
            command = ["tc", "-json", "-n", f"lgtb-{own_name}-{space}", "qdisc", "show", "dev", device]
            (queue,) = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=20).stdout)
            assert (queue["kind"], queue["options"]["rate"]) == ("tbf", 100_000_000 // 8)
        assert left_of(own_name)
    assert left_of(own_name) == []
    assert what_stays(bed) == before
    assert Path("/etc/hosts").read_bytes() == hosts
    assert Testbed.remove(own_name) is False


@pytest.mark.parametrize(
    "after_s", [pytest.param(0.03, marks=pytest.mark.slow), 0.15, pytest.param(0.4, marks=pytest.mark.slow)]
)
def test_an_up_that_was_killed_is_removed(own_name: str, after_s: float) -> None:
    process = maker(own_name, then="time.sleep(60)")
    time.sleep(after_s)
    process.kill()
    process.communicate(timeout=60)
    Testbed.remove(own_name)
    assert left_of(own_name) == []
    with pytest.raises(ConfigError, match="there is no testbed"):
        Testbed.load(own_name)


def test_an_up_over_half_a_testbed_makes_a_whole_one(own_name: str) -> None:
    process = maker(own_name, then="time.sleep(60)")
    wait_until("the first namespace", lambda: Path(f"/run/netns/lgtb-{own_name}-br").exists())
    process.kill()
    process.communicate(timeout=60)
    with Testbed.up(1, name=own_name) as made:
        assert made.remote().run("vm1", ["hostname"], 20).text == "vm1"
    assert left_of(own_name) == []


def test_a_guard_removes_the_testbed_of_a_killed_process(own_name: str) -> None:
    process = maker(own_name, then="print('up', flush=True); time.sleep(60)", guarded=True)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    assert left_of(own_name)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    wait_until("the guard's work", lambda: left_of(own_name) == [])


def test_a_failure_on_the_way_leaves_nothing(own_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from lastgood.cluster.testbed import node as testbed_node

    monkeypatch.setattr(testbed_node, "_SSHD_CONFIG", "NoSuchOption yes\n")
    with pytest.raises(HostError, match=r"vm1: its ssh server ended; .*NoSuchOption"):
        Testbed.up(1, name=own_name)
    assert left_of(own_name) == []


def lastgood(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_commands(bed: Testbed, tmp_path: Path) -> None:
    name = ["--name", bed.name]
    up = lastgood("testbed", "up", "--nodes", 2, "--hostfile", tmp_path / "hosts", *name)
    assert up.exit_code == 0, up.output
    assert isinstance(read_hostfile(tmp_path / "hosts"), Hostfile)
    for command, state in [
        ("cut", "cut"),
        ("heal", "up"),
        ("pause", "paused"),
        ("resume", "up"),
        ("kill", "killed"),
        ("restart", "up"),
    ]:
        done = lastgood("testbed", command, "vm2", *name)
        assert done.exit_code == 0, done.output
        shown = lastgood("testbed", "status", "--json", *name)
        assert [node["state"] for node in json.loads(shown.stdout)["nodes"]] == ["up", state]
    assert "vm2" in lastgood("testbed", "status", *name).stdout
    assert lastgood("testbed", "down", "--name", "nosuchbed").exit_code == 0
    main = [sys.executable, "-c", "from lastgood.cli import main; main()"]
    command = [*main, "testbed", "exec", *name, "vm2", "--", "sh", "-c", "hostname; exit 4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("vm2\n", "", 4)
    assert lastgood("testbed", "cut", "vm2", *name).exit_code == 0
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as waiting:
        try:
            assert waiting.stderr is not None
            assert "vm2 is cut and will not answer: heal, resume or restart it" in waiting.stderr.readline()
        finally:
            waiting.kill()
