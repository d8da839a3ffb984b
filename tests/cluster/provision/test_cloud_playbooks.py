"""The playbooks that create and end cloud VMs: AWS as moto plays it on loopback, Google's by its syntax only.

They need Ansible's collections and moto: pip install -c constraints.txt ansible boto3 'moto[server]'
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import pty
import re
import subprocess
import termios
import threading
from pathlib import Path

import pytest

from lastgood.cluster.hostfile import read_hostfile
from lastgood.cluster.provision.playbook import find_ansible

boto3 = pytest.importorskip("boto3", reason="boto3 is not installed")
pytest.importorskip("moto", reason="moto is not installed")
pytest.importorskip("flask_cors", reason="moto's server is not installed: pip install 'moto[server]'")
pytest.importorskip("ansible_collections.amazon.aws", reason="Ansible's collections are not here: pip install ansible")

pytestmark = pytest.mark.slow  # each call of ansible-playbook takes some seconds

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "install" / "ansible"
REGION = "us-east-1"
TIMEOUT_S = 300
OLDER = {
    "ami_id": "ami-0noble0000000000",
    "name": "ubuntu/images/hvm-ssd-gp3/ubuntu-noble-24.04-amd64-server-20250101",
    "owner_id": "099720109477",
    "state": "available",
    "architecture": "x86_64",
    "root_device_name": "/dev/sda1",
    "virtualization_type": "hvm",
    "hypervisor": "xen",
    "creation_date": "2025-01-01T00:00:00.000Z",
    "description": "Ubuntu 24.04",
    "image_type": "machine",
    "platform": None,
    "public": True,
    "root_device_type": "ebs",
    "sriov": "simple",
}
UBUNTU = {**OLDER, "ami_id": "ami-0noble0000000001", "creation_date": "2025-06-01T00:00:00.000Z"}


@pytest.fixture(scope="module")
def moto_url(tmp_path_factory):
    images = tmp_path_factory.mktemp("moto") / "amis.json"
    images.write_text(json.dumps([OLDER, UBUNTU]))
    os.environ["MOTO_AMIS_PATH"] = str(images)  # read when moto is imported
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()
    del os.environ["MOTO_AMIS_PATH"]


class Aws:
    """Calls the playbook for one region of moto's, and asks moto what there is."""

    def __init__(self, url, folder):
        self.url, self.folder = url, folder
        self.key, self.hostfile = folder / "key.pub", folder / "hosts"
        self.key.write_text("ssh-ed25519 AAAA a@b\n")
        secret = "moto-takes-any"  # Ansible masks it in what it prints
        self.ec2 = boto3.client("ec2", REGION, endpoint_url=url, aws_access_key_id=secret, aws_secret_access_key=secret)
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        self.environment |= {
            "AWS_ACCESS_KEY_ID": secret,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_URL": url,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": str(folder / "none"),
            "AWS_SHARED_CREDENTIALS_FILE": str(folder / "none"),
            "ANSIBLE_LOCALHOST_WARNING": "false",
            "LC_ALL": "C.UTF-8",
            "PWD": str(folder),
        }

    def vms(self, run=None):
        """The instances that have not ended: all, or those of one run."""
        pages = self.ec2.get_paginator("describe_instances").paginate()
        found = [one for page in pages for some in page["Reservations"] for one in some["Instances"]]
        found = [one for one in found if one["State"]["Name"] not in ("shutting-down", "terminated")]
        return [one for one in found if run is None or tags(one).get("run") == run]

    def play(self, *, answer=None, **variables):
        """Code and output of one call; `answer` is typed at a terminal, of which there is none otherwise."""
        given = [f"{name}={value}" for name, value in {"region": REGION, **variables}.items()]
        command = [find_ansible(), FOLDER / "cloud_aws.yml", *(word for one in given for word in ("-e", one))]
        shared = {"cwd": self.folder, "env": self.environment}
        if answer is not None:
            return at_terminal(command, answer, **shared)
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=TIMEOUT_S, **output, **shared)
        return done.returncode, done.stdout

    def create(self, *, answer=None, **variables):
        """A call that asks for VMs. moto's have no SSH server, and addresses that lead nowhere."""
        wanted = {"run": "fig8", "machine": "p3.8xlarge", "ssh_key": "key.pub", "ssh_wait_s": 0}
        return self.play(answer=answer, **{**wanted, **variables})


def at_terminal(command, answer, **shared):
    """Run a command in a session with a terminal of its own, and type `answer` once it asks."""
    ours, theirs = pty.openpty()

    def take_terminal():
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=take_terminal,
        **shared,
    )
    os.close(theirs)
    limit = threading.Timer(TIMEOUT_S, process.kill)
    limit.start()
    printed, answered = b"", False
    try:
        while True:
            try:
                some = os.read(ours, 4096)
            except OSError:  # a terminal that nobody holds any more
                some = b""
            if not some:
                return process.wait(TIMEOUT_S), printed.decode()
            printed += some
            if not answered and b"Type yes to go on" in printed:
                os.write(ours, answer.encode() + b"\r")
                answered = True
    finally:
        limit.cancel()
        process.kill()
        process.wait()
        os.close(ours)


def tags(vm):
    return {tag["Key"]: tag["Value"] for tag in vm.get("Tags", [])}


def changed(printed):
    return int(re.findall(r"changed=(\d+)", printed)[-1])


@pytest.fixture
def aws(moto_url, tmp_path):
    from urllib.request import Request, urlopen

    with urlopen(Request(f"{moto_url}/moto-api/reset", method="POST"), timeout=30) as answer:
        assert answer.status == 200
    return Aws(moto_url, tmp_path)


def test_vms_from_creation_to_end(aws):
    wanted = {"ImageId": UBUNTU["ami_id"], "InstanceType": "m5.xlarge", "MinCount": 1, "MaxCount": 1}
    stranger = aws.ec2.run_instances(**wanted)["Instances"][0]["InstanceId"]

    code, printed = aws.create(count=2, yes="true", disk_gb=1000)
    assert code == 0, printed
    assert f"cloud_aws.yml -e region={REGION} -e run=fig8 -e state=absent" in printed
    vms = aws.vms("fig8")
    assert len(vms) == 2
    for vm in vms:
        assert tags(vm) == {"project": "lastgood", "run": "fig8", "Name": "fig8"}
        assert (vm["InstanceType"], vm["ImageId"], vm["State"]["Name"]) == ("p3.8xlarge", UBUNTU["ami_id"], "running")
        assert attribute(aws, vm, "instanceInitiatedShutdownBehavior") == "terminate"
        assert [disk["Size"] for disk in disks(aws, vm)] == [1000]
    hosts = read_hostfile(aws.hostfile)
    assert {host.name: host.slots for host in hosts.hosts} == {vm["PublicIpAddress"]: 4 for vm in vms}

    code, printed = aws.create(count=2)
    assert (code, changed(printed)) == (0, 0), printed
    assert aws.vms("fig8") == vms

    code, printed = aws.play(state="list")
    assert code == 0, printed
    assert all(vm["InstanceId"] in printed and vm["PublicIpAddress"] in printed for vm in vms)
    assert stranger not in printed

    code, printed = aws.play(state="absent", run="fig8")
    assert code == 0, printed
    assert [vm["InstanceId"] for vm in aws.vms()] == [stranger]
    assert [disk for vm in vms for disk in disks(aws, vm)] == []
    code, printed = aws.play(state="absent", run="fig8")
    assert (code, changed(printed)) == (0, 0), printed


def disks(aws, vm):
    of_vm = [{"Name": "attachment.instance-id", "Values": [vm["InstanceId"]]}]
    return aws.ec2.describe_volumes(Filters=of_vm)["Volumes"]


def attribute(aws, vm, name):
    answer = aws.ec2.describe_instance_attribute(InstanceId=vm["InstanceId"], Attribute=name)
    return answer[name[0].upper() + name[1:]]["Value"]


def test_spot_vms_and_a_smaller_count(aws, monkeypatch):
    from moto.ec2.models.instances import InstanceBackend

    # moto starts VMs on demand whatever their template says, so what it says is looked at.
    used, look_up = [], InstanceBackend._get_template_from_args

    def noted(backend, argument):
        used.append(look_up(backend, argument))
        return used[-1]

    monkeypatch.setattr(InstanceBackend, "_get_template_from_args", noted)
    code, printed = aws.create(count=2, spot="true", yes="true", slots=2, address="private", zone="us-east-1b")
    assert code == 0, printed
    vms = aws.vms("fig8")
    assert len(vms) == 2 and used
    market = used[-1].data["InstanceMarketOptions"]
    assert market["MarketType"] == "spot"
    assert market["SpotOptions"] == {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
    assert {vm["Placement"]["AvailabilityZone"] for vm in vms} == {"us-east-1b"}
    assert {host.name: host.slots for host in read_hostfile(aws.hostfile).hosts} == {
        vm["PrivateIpAddress"]: 2 for vm in vms
    }
    assert aws.ec2.describe_launch_templates()["LaunchTemplates"] == []
    code, printed = aws.create(count=1)
    assert code != 0 and "to end 1 of the 2 VMs of run fig8, answer yes or call with -e yes=true" in printed
    assert len(aws.vms("fig8")) == 2
    code, printed = aws.create(count=1, yes="true")
    assert code == 0, printed
    assert len(aws.vms("fig8")) == 1


def test_nothing_is_bought_unless_somebody_says_yes(aws):
    code, printed = aws.create(count=2)
    assert code != 0 and "to create 2 x p3.8xlarge for run fig8" in printed
    code, printed = aws.create(count=2, answer="no")
    assert code != 0 and "nothing was done" in printed
    assert aws.vms() == []
    code, printed = aws.create(count=2, answer="yes")
    assert code == 0, printed
    assert len(aws.vms("fig8")) == 2


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"run": "*", "state": "absent"}, "give -e run=NAME, up to 40 of a-z"),
        ({"run": "", "state": "absent"}, "give -e run=NAME, up to 40 of a-z"),
        ({"state": "gone"}, "-e state=present, absent or list"),
        ({"count": "0"}, "count from 1 to 64"),
        ({"machine": ""}, "give -e machine=TYPE"),
        ({"region": ""}, "give -e region=REGION"),
        ({"ssh_key": "/etc/hostname"}, "not one line of a public key"),
        ({"machine": "m5.xlarge"}, "run fig8 has VMs already, of p3.8xlarge and running"),
    ],
)
def test_what_cannot_be_meant_is_refused(aws, variables, said):
    aws.ec2.run_instances(
        ImageId=UBUNTU["ami_id"],
        InstanceType="p3.8xlarge",
        MinCount=1,
        MaxCount=1,
        TagSpecifications=[
            {
                "ResourceType": "instance",
                "Tags": [{"Key": "project", "Value": "lastgood"}, {"Key": "run", "Value": "fig8"}],
            }
        ],
    )
    before = aws.vms()
    code, printed = aws.create(yes="true", **variables)
    assert code != 0 and said in printed, printed
    assert aws.vms() == before


@pytest.mark.parametrize("name", ["cloud_aws.yml", "cloud_gcp.yml"])
def test_the_playbooks_syntax(name):
    pytest.importorskip("ansible_collections.google.cloud", reason="google.cloud is not here: pip install ansible")
    done = subprocess.run(
        [find_ansible(), "--syntax-check", FOLDER / name],
        env={**os.environ, "LC_ALL": "C.UTF-8"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
