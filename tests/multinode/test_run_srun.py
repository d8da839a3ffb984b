"""`lastgood run --how srun`: a measured run whose ranks a real Slurm starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.experiments.support.rank_runs import Job, proved, spec_of
from tests.multinode.support.slurm_cluster import SlurmCluster

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def test_two_nodes_of_slurm(slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in slurm.env.items():
        monkeypatch.setenv(name, value)
    hosts = tmp_path / "hosts"
    hosts.write_text("node1 slots=2\nnode2 slots=1\n")
    job = Job(tmp_path, tmp_path / "data")
    try:
        record = proved(job, spec_of(nodes=2, ranks=3), "--hostfile", str(hosts), "--how", "srun")
    finally:
        if job.process is not None:
            job.process.kill()
            job.process.wait(60)
    assert record.ranks is not None
    assert (record.ranks.launcher, record.ranks.hosts) == ("srun", ["node1", "node2"])
    assert record.counts.durable == 2
    assert record.ranks.bytes_per_disk == 3 * record.workload.state_bytes
    said = job.log.read_text()
    assert said.count("memory and disk were not checked: node") == 2, said
    slurm.wait_for("end of all jobs", lambda: not slurm.call("squeue", "--noheader").stdout, 30)
