"""The cluster file for AWS is one that AWS ParallelCluster takes, and has what the sbatch files ask for."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).parents[3] / "evaluation" / "dcp"
SCHEMA = """
import json, sys, yaml
from pcluster.schemas.cluster_schema import ClusterSchema
cluster = ClusterSchema(cluster_name="dcp").load(yaml.safe_load(open(sys.argv[1])))
queue = cluster.scheduling.queues[0]
print(json.dumps([cluster.scheduling.scheduler, queue.name, queue.compute_resources[0].instance_types]))
"""


def directives(name):
    """#SBATCH options of a batch file."""
    return dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", (FOLDER / name).read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", ["savebatch.sbatch", "loadbatch.sbatch", "batch.sbatch", "waitbatch.sbatch"])
def test_its_queue_has_the_nodes_that_the_batch_files_ask_for(name):
    (queue,) = yaml.safe_load((FOLDER / "cluster.yaml").read_text())["Scheduling"]["SlurmQueues"]
    asked = directives(name)
    assert asked["partition"] == queue["Name"]
    (resource,) = queue["ComputeResources"]
    assert int(asked["nodes"]) <= resource["MaxCount"]
    # AWS: 4xlarge of all families has 16 CPUs.
    assert (asked["cpus-per-task"], resource["InstanceType"].rpartition(".")[2]) == ("16", "4xlarge")


@pytest.mark.slow  # it installs AWS ParallelCluster, a hundred packages that bind others' versions, into a venv
@pytest.mark.timeout(600)
def test_parallelcluster_takes_it(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True, timeout=120)
    python = tmp_path / "venv" / "bin" / "python"
    install = [python, "-m", "pip", "install", "-q", "aws-parallelcluster>=3.10"]
    subprocess.run(install, check=True, timeout=400, capture_output=True)
    done = subprocess.run(
        [python, "-c", SCHEMA, FOLDER / "cluster.yaml"],
        env={"AWS_DEFAULT_REGION": "us-east-2", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == ["slurm", "train", ["c7i.4xlarge"]]
