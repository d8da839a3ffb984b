"""Whether nodes have room for a run over ranks: asked over real ssh, of a node whose disk is nearly full."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from lastgood.cluster.hostfile import parse_hostfile
from lastgood.cluster.launch.order import How
from lastgood.cluster.ssh.remote import Remote, SshOptions
from lastgood.cluster.testbed.testbed import Testbed
from lastgood.errors import HostError
from lastgood.experiments.multirank.capacity import check_room
from lastgood.experiments.records.spec import RunSpec
from lastgood.experiments.services.place import Place
from tests.experiments.support.rank_runs import spec_of

pytestmark = pytest.mark.root


def spec(megabytes: int) -> RunSpec:
    options = {"pool_bytes": 1 << 20, "chunk_bytes": 65536}
    return spec_of(nodes=2, workload_options={"megabytes": megabytes}, system_options=options)


def place(bed: Testbed, launcher: How = "torchrun", second: str = "vm2", patience_s: int = 10) -> Place:
    remote = Remote(SshOptions(config=bed.ssh_config, connect_timeout_s=patience_s))
    return Place(launcher, parse_hostfile(f"vm1 slots=1\n{second} slots=1\n"), remote, None)


def test_a_node_without_room_on_its_disk_is_named(bed: Testbed, tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=9m", "tmpfs", str(tmp_path)]
    assert bed.remote().run("vm2", mount, 20).rc == 0
    try:
        check_room(spec(1), place(bed), tmp_path / "scratch", print)
        with pytest.raises(HostError) as caught:
            check_room(spec(10), place(bed), tmp_path / "scratch", print)
        assert str(caught.value).startswith("vm2: blob 10 MB ddp 2 pccheck f2 r0 needs at least ")
        assert f"of disk for its rank, and 9 MiB are free in {tmp_path}; choose" in str(caught.value)
    finally:
        bed.remote().run("vm2", ["umount", str(tmp_path)], 20)
    check_room(spec(10), place(bed), tmp_path / "scratch", print)


def test_nodes_of_one_machine_share_its_memory(bed: Testbed, tmp_path: Path) -> None:
    # Too much for both together, whatever other processes give back meanwhile.
    whole = psutil.virtual_memory().total
    with pytest.raises(HostError, match=r"vm1, vm2 \(one machine\): .* of memory for its 2 ranks"):
        check_room(spec(int(0.55 * whole / 10**6)), place(bed), tmp_path, print)


def test_only_hosts_that_slurm_reaches_may_be_silent(bed: Testbed, tmp_path: Path) -> None:
    lines: list[str] = []
    with pytest.raises(HostError, match="no-such-host"):
        check_room(spec(1), place(bed, second="no-such-host", patience_s=1), tmp_path, lines.append)
    assert lines == []
    check_room(spec(1), place(bed, "srun", "no-such-host", 1), tmp_path, lines.append)
    assert len(lines) == 1 and lines[0].startswith("memory and disk were not checked: no-such-host: ")
