"""AWS, with boto3 over HTTP to moto's server on loopback; a proxy before it can refuse single requests."""

from __future__ import annotations

import pytest

from lastgood.cluster.hostfile import read_hostfile
from lastgood.errors import ConfigError, ProvisionError
from lastgood.ports import free_ports
from tests.cluster.support.cloud_calls import cloud, listed

pytest.importorskip("boto3")
pytest.importorskip("moto")
pytest.importorskip("flask")

from tests.cluster.support import moto_aws
from tests.cluster.support.moto_aws import REGION, UBUNTU, client, create, place

moto_server, aws = moto_aws.moto_server, moto_aws.aws


def test_vms_are_created_with_tags_listed_and_destroyed(aws, tmp_path):
    key = tmp_path / "key.pub"
    key.write_text("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHvOX ada@home\n")
    hosts = tmp_path / "hosts"
    options = ["--count", 2, "--name", "fig8", "--disk-gb", 100, "--ssh-public-key", key, "--hostfile", hosts]
    done = create(aws, *options)
    assert done.exception is None, done.output
    undo = f"lastgood provision cloud destroy --provider aws --region {REGION} --endpoint {aws.url} --name fig8 --yes"
    said = done.stderr
    assert said.index(f"to destroy what this creates: {undo}") < said.index("created 1 of 2: i-")
    instances = [one for part in client(aws).describe_instances()["Reservations"] for one in part["Instances"]]
    assert len(instances) == 2
    for number, instance in enumerate(sorted(instances, key=lambda one: str(one["Tags"])), start=1):
        tags = {tag["Key"]: tag["Value"] for tag in instance["Tags"]}
        assert tags.pop("created")[8] == "t"
        assert tags.pop("Name") in ("fig8-1", "fig8-2"), number
        assert tags == {"project": "lastgood", "run": "fig8", "owner": "ada-l"}
        assert instance["ImageId"] == UBUNTU["ami_id"] and instance["InstanceType"] == "m5.xlarge"
    for volume in client(aws).describe_volumes()["Volumes"]:
        assert volume["Size"] == 100 and volume["VolumeType"] == "gp3"
    assert aws.actions("RunInstances")[0]["InstanceInitiatedShutdownBehavior"] == ["terminate"]
    data = client(aws).describe_instance_attribute(InstanceId=instances[0]["InstanceId"], Attribute="userData")
    assert "UserData" in data and "UserData" in aws.actions("RunInstances")[0]
    vms = listed(*place(aws))
    assert [vm["name"] for vm in vms] == ["fig8-1", "fig8-2"]
    assert [host.name for host in read_hostfile(hosts).hosts] == [vm["address"] for vm in vms]

    told = cloud("destroy", *place(aws), "--name", "fig8")
    assert isinstance(told.exception, ConfigError)
    assert "would destroy 2 VMs and their disks: fig8-1 (i-" in str(told.exception)
    assert len(listed(*place(aws))) == 2
    gone = cloud("destroy", *place(aws), "--name", "fig8", "--yes")
    assert gone.exception is None and "2 VMs destroyed" in gone.stderr
    assert listed(*place(aws)) == []
    assert "nothing to do" in cloud("destroy", *place(aws), "--name", "fig8", "--yes").stderr


def test_only_vms_with_the_tags_are_seen_and_destroyed(aws):
    ec2 = client(aws)
    others = [{"Key": "project", "Value": "payroll"}, {"Key": "run", "Value": "fig8"}]
    for tags in (others, [{"Key": "run", "Value": "fig8"}]):
        specification = [{"ResourceType": "instance", "Tags": tags}]
        ec2.run_instances(ImageId=UBUNTU["ami_id"], MinCount=1, MaxCount=1, TagSpecifications=specification)
    for run in ("fig8", "fig9"):
        assert create(aws, "--name", run).exception is None
    assert [vm["run"] for vm in listed(*place(aws))] == ["fig8", "fig9"]
    assert [vm["run"] for vm in listed(*place(aws), "--name", "fig9")] == ["fig9"]
    assert cloud("destroy", *place(aws), "--name", "fig8", "--yes").exception is None
    running = ec2.describe_instances(Filters=[{"Name": "instance-state-name", "Values": ["running"]}])
    left = [one["Tags"] for part in running["Reservations"] for one in part["Instances"]]
    assert len(left) == 3
    assert [vm["run"] for vm in listed(*place(aws))] == ["fig9"]


def test_spot(aws):
    assert create(aws, "--name", "cheap", "--spot").exception is None
    (request,) = aws.actions("RunInstances")
    assert request["InstanceMarketOptions.MarketType"] == ["spot"]
    assert request["InstanceMarketOptions.SpotOptions.SpotInstanceType"] == ["one-time"]
    assert request["InstanceMarketOptions.SpotOptions.InstanceInterruptionBehavior"] == ["terminate"]
    assert create(aws, "--name", "dear").exception is None
    assert not [key for key in aws.actions("RunInstances")[1] if key.startswith("InstanceMarketOptions")]
    assert {vm["run"]: vm["spot"] for vm in listed(*place(aws))} == {"cheap": True, "dear": False}


def test_a_quota_after_three_of_four_says_what_exists_and_how_to_end_it(aws):
    aws.refuse("RunInstances", 4, 400, "VcpuLimitExceeded", "You have requested more vCPU capacity")
    done = create(aws, "--name", "big", "--count", 4)
    assert isinstance(done.exception, ProvisionError)
    said = str(done.exception)
    made = [vm["id"] for vm in listed(*place(aws))]
    assert len(made) == 3
    assert said.startswith("3 of 4 VMs of run big exist and cost money: ") and all(name in said for name in made)
    assert "VM 4 of 4 failed: AWS us-east-1: creating a m5.xlarge: the account's quota of vCPUs" in said
    (undo,) = {line for line in done.stderr.splitlines() if "lastgood provision cloud destroy" in line}
    command = undo.partition("lastgood provision cloud ")[2].split()
    assert f"lastgood provision cloud {' '.join(command)}" in said
    assert cloud(*command).exception is None
    assert listed(*place(aws)) == []


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("InsufficientInstanceCapacity", 500, "no machine of this type free there; try another --zone"),
        ("UnauthorizedOperation", 403, "these credentials may not do that; they need ec2 RunInstances"),
        ("AuthFailure", 401, "does not know these credentials"),
        ("SomethingNew", 400, r"AWS refused it \(SomethingNew: because\)"),
    ],
)
def test_refusals_in_plain_words(aws, code, status, said):
    for number in range(1, 9):  # the client asks again after a status of 500
        aws.refuse("RunInstances", number, status, code, "because")
    done = create(aws, "--name", "run")
    with pytest.raises(ProvisionError, match=rf"^nothing of run run was created .*{said}"):
        raise done.exception
    assert listed(*place(aws)) == []


def test_a_created_vm_whose_answer_is_lost_is_still_found(aws):
    # EC2 creates it, and the listing afterwards fails for good: the message names it all the same.
    for number in range(2, 30):
        aws.refuse("DescribeInstances", number, 403, "UnauthorizedOperation", "no")
    done = create(aws, "--name", "lost", "--count", 1)
    aws.refusals.clear()
    (vm,) = listed(*place(aws))
    assert f"1 of 1 VMs of run lost exist and cost money: {vm['id']}" in str(done.exception)


def test_without_credentials(aws, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(ProvisionError, match="there are no credentials; run `aws configure`"):
        raise create(aws, "--name", "run").exception


def test_nothing_listens(aws):
    (port,) = free_ports()
    done = cloud("list", "--provider", "aws", "--region", REGION, "--endpoint", f"http://127.0.0.1:{port}")
    with pytest.raises(ProvisionError, match="is the region right, and does this machine reach it"):
        raise done.exception


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--name", "run", "--count", 65], "--count 65: give 1 to 64"),
        (["--name", "Run 1"], "--name 'Run 1': not a name that every cloud takes"),
        (
            ["--name", "run", "--count", 60],
            r"60 x m5.xlarge cost about .* above --max-usd-per-hour 10; nothing was created",
        ),
        (["--name", "run", "--project", "p"], "--project is for GCP"),
    ],
)
def test_what_is_refused_creates_nothing(aws, arguments, said):
    with pytest.raises(ConfigError, match=said):
        raise create(aws, *(["--yes"] if "65" in map(str, arguments) else []), *arguments).exception
    assert aws.actions("RunInstances") == []


def test_a_name_that_is_taken_is_refused(aws):
    assert create(aws, "--name", "run").exception is None
    with pytest.raises(ConfigError, match="there are 1 VMs of this name already"):
        raise create(aws, "--name", "run").exception
    assert len(listed(*place(aws))) == 1


def test_a_private_key_is_never_sent(aws, tmp_path):
    key = tmp_path / "key"
    key.write_text("-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n")
    with pytest.raises(ConfigError, match=r"not one line of a public key; name the file that ends in .pub"):
        raise create(aws, "--name", "run", "--ssh-public-key", key).exception
    assert aws.requests == []


def test_no_region_is_asked_for():
    with pytest.raises(ConfigError, match="AWS: give --region"):
        raise cloud("list", "--provider", "aws").exception
