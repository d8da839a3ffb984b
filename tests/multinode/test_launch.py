"""`lastgood launch` over real ssh, on a testbed of two nodes."""

from __future__ import annotations

import importlib.util
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from lastgood.cluster.hostfile import Hostfile, parse_hostfile
from lastgood.cluster.launch.job import launch
from lastgood.cluster.launch.order import How
from lastgood.cluster.ssh.remote import Remote, SshOptions
from lastgood.cluster.testbed.testbed import Testbed
from lastgood.errors import HostError, LaunchError
from tests.multinode.support.processes import processes_with
from tests.support.patience import wait_until

pytestmark = pytest.mark.root
SUM_RANKS = str(Path(__file__).parent / "support" / "sum_ranks.py")
NO_DEEPSPEED = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="lastgood[deepspeed] is not installed"
)
WAYS = [
    "torchrun",
    "ssh",
    *(
        pytest.param(
            how,
            marks=[
                pytest.mark.slow,
                NO_DEEPSPEED,
                pytest.mark.skipif(shutil.which(program) is None, reason=f"{program} is not installed"),
            ],
        )
        for how, program in (("deepspeed", "pdsh"), ("openmpi", "mpirun"))
    ),
]
# DeepSpeed looks for an accelerator, and its launcher takes each host's slots for devices.
ENV = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def remote(bed: Testbed) -> Remote:
    return Remote(SshOptions(config=bed.ssh_config))


def hosts_of(bed: Testbed, *slots: int) -> Hostfile:
    return parse_hostfile("".join(f"vm{number} slots={count}\n" for number, count in enumerate(slots, start=1)))


def sleepers(mark: str) -> list[psutil.Process]:
    return [process for process in processes_with(mark) if process.name() == "sleep"]


@pytest.mark.parametrize("how", ["ssh", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_ranks_meet_over_the_network(bed: Testbed, remote: Remote, tmp_path: Path, how: How) -> None:
    value = "$red \"q\" 'a' `b` \\ %n %% é"
    result = launch(
        [sys.executable, SUM_RANKS, "a b", "$c"],
        hosts_of(bed, 2, 1),
        how,
        log_dir=tmp_path,
        timeout_s=100,
        env={**ENV, "COLOUR": value},
        remote=remote,
    )
    assert [(one.rank, one.host) for one in result.ranks] == [(0, "vm1"), (1, "vm1"), (2, "vm2")]
    for rank in range(3):
        text = (tmp_path / f"rank-{rank:05d}.log").read_text()
        assert f"rank {rank} of 3: sum 6, interface eth0, ['a b', '$c']" in text
        assert f"colour {value!r}" in text


@pytest.mark.slow
@pytest.mark.parametrize("how", WAYS)
def test_ranks_of_three_nodes_are_where_the_hostfile_says(
    needs_testbed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: How
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/usr/share/none")
    hosts = parse_hostfile("vm3 slots=1\nvm1 slots=2\nvm2 slots=1\n")
    logs = tmp_path / "with blanks"
    with Testbed.up(3, name=f"u{os.getpid()}", guarded=True) as bed:
        launch(
            ["sh", "-c", "echo rank $RANK local $LOCAL_RANK of $WORLD_SIZE on $(hostname); pwd; echo $PYTHONPATH >&2"],
            hosts,
            how,
            log_dir=logs,
            timeout_s=100,
            env=ENV,
            remote=Remote(SshOptions(config=bed.ssh_config)),
            cwd="/usr",
        )
    # DeepSpeed's own launcher counts on from the host before: 1 and 0, not 0 and 1.
    locals_of_vm1 = (1, 0) if how == "deepspeed" else (0, 1)
    places = [("vm3", 0), ("vm1", locals_of_vm1[0]), ("vm1", locals_of_vm1[1]), ("vm2", 0)]
    for rank, (host, local) in enumerate(places):
        line, folder, python_path = (logs / f"rank-{rank:05d}.log").read_text().splitlines()
        assert (line, folder) == (f"rank {rank} local {local} of 4 on {host}", "/usr")
        if how not in ("torchrun", "ssh"):  # DeepSpeed passes it on, with a folder of its own before it
            assert python_path.split(":")[-1] == "/usr/share/none" and "blanks" not in python_path


@pytest.mark.slow
@pytest.mark.parametrize("how", WAYS)
def test_a_failed_rank_is_named_and_ends_the_job(bed: Testbed, remote: Remote, tmp_path: Path, how: How) -> None:
    mark = "7123.25"
    code = f"if [ $RANK = 1 ]; then echo the reason; exit 5; fi; sleep {mark}"
    with pytest.raises(LaunchError, match=r"rank 1 on vm2 ended with exit status 5(?s:.*)the reason"):
        launch(["sh", "-c", code], hosts_of(bed, 1, 1), how, log_dir=tmp_path, timeout_s=100, env=ENV, remote=remote)
    wait_for(lambda: not sleepers(mark), lambda: "end of the other rank")


@pytest.mark.slow
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("victim", ["launch", "launchers here", "launchers there", "ctrl-c"])
def test_ranks_outlive_nobody(bed: Testbed, tmp_path: Path, how: How, victim: str) -> None:
    mark = f"8123.{secrets.randbelow(10**6)}"
    hostfile = tmp_path / "hosts"
    hostfile.write_text("vm1 slots=1\nvm2 slots=1\n")
    code = "from lastgood.cli import main; main()"
    command = [sys.executable, "-c", code, "launch", "--how", how, "--hostfile", str(hostfile)]
    command += [
        "--ssh-config",
        str(bed.ssh_config),
        *(word for pair in ENV.items() for word in ("--env", "=".join(pair))),
    ]
    command += ["--logs", str(tmp_path / "logs"), "--", "sleep", mark]
    started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        wait_for(lambda: len(sleepers(mark)) == 2, lambda: f"two ranks; {started.poll()}")
        ranks = sleepers(mark)
        # `sleep` is a rank's program; its parent is the wrapper, and that one's parent the launcher on the node.
        there = [process.parent().parent() for process in ranks]
        here = psutil.Process(started.pid).children(recursive=True)
        if victim == "launch":
            started.kill()
        elif victim == "ctrl-c":
            os.killpg(started.pid, signal.SIGINT)
        else:
            for process in here if victim == "launchers here" else there[:1]:
                process.kill()
        _, alive = psutil.wait_procs([*ranks, *there, *here], timeout=25)
        assert not alive, alive
        _, error = started.communicate(timeout=60)
        if victim.startswith("launchers"):
            assert started.returncode == 1
            assert re.search(r"rank [01] on vm[12]|1 on vm2", error), error
    finally:
        started.kill()
        started.wait()


@pytest.mark.slow
@pytest.mark.parametrize("how", [way for way in WAYS if isinstance(way, str) or way.values == ("openmpi",)])
def test_a_lost_node_ends_the_job_within_bounds(bed: Testbed, remote: Remote, tmp_path: Path, how: How) -> None:
    mark = f"9123.{secrets.randbelow(10**6)}"
    began = time.monotonic()
    there: list[psutil.Process] = []

    def cut() -> None:
        wait_for(lambda: len(sleepers(mark)) == 2, lambda: "two ranks")
        there.extend(parent for one in sleepers(mark) for parent in one.parents()[:2])
        bed.cut("vm2")

    cutter = threading.Thread(target=cut)
    cutter.start()
    try:
        lost = r"rank 1 on vm2 failed|((torchrun|ssh) on vm2|deepspeed) ended before rank 1 on vm2"
        with pytest.raises(LaunchError, match=lost):
            launch(["sleep", mark], hosts_of(bed, 1, 1), how, log_dir=tmp_path, timeout_s=100, env=ENV, remote=remote)
        assert time.monotonic() - began < 90
        # On the other side of the cut nobody can tell the rank and its launcher; they find out by themselves.
        wait_for(lambda: not sleepers(mark), lambda: "end of the rank that was cut off", 60)
        _, alive = psutil.wait_procs(there, timeout=60)
        assert len(there) == 4 and not alive, alive
    finally:
        cutter.join(60)
        bed.heal("vm2")


def test_hosts_that_are_not_reached_are_named(bed: Testbed, remote: Remote, tmp_path: Path) -> None:
    hosts = parse_hostfile("vm1 slots=1\nno-such-host slots=1\n")
    with pytest.raises(HostError, match="no-such-host"):
        launch(["true"], hosts, "torchrun", log_dir=tmp_path, timeout_s=100, remote=remote)
    bed.cut("vm2")
    with pytest.raises(HostError, match="vm2: does not answer within 4 s"):
        patient = Remote(SshOptions(config=bed.ssh_config, connect_timeout_s=4))
        launch(["true"], hosts_of(bed, 1, 1), "torchrun", log_dir=tmp_path, timeout_s=100, remote=patient)
    stranger = tmp_path / "ssh_config"
    text = Path(bed.ssh_config).read_text()
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True, timeout=30)
    stranger.write_text(re.sub(r"(?m)^(\s*IdentityFile\s+).*$", rf"\g<1>{key}", text))
    with pytest.raises(HostError, match=r"vm1.*refuses this key"):
        refused = Remote(SshOptions(config=stranger))
        launch(["true"], hosts_of(bed, 1), "torchrun", log_dir=tmp_path, timeout_s=100, remote=refused)


def test_without_a_launcher_ranks_meet_where_they_are_told(bed: Testbed, remote: Remote, tmp_path: Path) -> None:
    launch(
        ["sh", "-c", "echo $MASTER_ADDR $MASTER_PORT"],
        hosts_of(bed, 1, 1),
        "ssh",
        log_dir=tmp_path,
        timeout_s=100,
        remote=remote,
        master_addr="vm1",
        master_port=29778,
    )
    assert [(tmp_path / f"rank-0000{rank}.log").read_text() for rank in range(2)] == ["vm1 29778\n"] * 2


def test_a_port_in_use_is_named(bed: Testbed, remote: Remote, tmp_path: Path) -> None:
    code = "import socket, time; s = socket.create_server(('', 29777)); print('on', flush=True); time.sleep(60)"
    with remote.start("vm1", [sys.executable, "-c", code], stdout=subprocess.PIPE) as taken:
        assert taken.stdout is not None
        assert taken.stdout.readline() == b"on\n"
        ways = {"log_dir": tmp_path, "timeout_s": 100, "remote": remote}
        with pytest.raises(HostError, match="vm1: port 29777 is in use there; choose another, or none, and a free one"):
            launch(["true"], hosts_of(bed, 1), "torchrun", master_port=29777, **ways)
        for chosen in (29776, None):
            launch(["true"], hosts_of(bed, 1), "ssh", master_port=chosen, **ways)


def wait_for(found: Callable[[], object], what: Callable[[], str], timeout_s: float = 90.0) -> None:
    wait_until(found, what, timeout_s, every_s=0.1)
