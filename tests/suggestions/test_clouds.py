"""Suggestions of clouds, played by moto and by the recorder of GCP's requests, followed to the letter."""

from __future__ import annotations

import shlex

import pytest

from lastgood.cluster.provision.cloud_aws import _UBUNTU
from tests.cluster.support.cloud_calls import cloud, listed
from tests.suggestions.following import advice, follows, hear

boto3 = pytest.importorskip("boto3")
pytest.importorskip("moto")
pytest.importorskip("flask")
pytest.importorskip("google.cloud.compute_v1")

from tests.cluster.support import moto_aws as of_aws  # noqa: E402 - needs what was looked for above
from tests.cluster.support import recorded_gcp as of_gcp  # noqa: E402

pytestmark = pytest.mark.slow  # moto's server, boto3 and Google's client are loaded

moto_server, aws, gcp = of_aws.moto_server, of_aws.aws, of_gcp.gcp


def refused(done):
    """What an unsuccessful call says."""
    assert done.exit_code != 0
    return hear(str(done.exception))


def refused_once(aws, code, *arguments, status=400):
    """What it says after `code` of EC2, which is asked again after a status of 500."""
    for number in range(1, 9):
        aws.refuse("RunInstances", number, status, code, "because")
    message = refused(of_aws.create(aws, "--name", "run", *arguments))
    aws.refusals.clear()
    return message


@follows("nothing of run {} was created as far as is known")
@pytest.mark.parametrize("code", ["InsufficientInstanceCapacity", "Unsupported"])
def test_a_machine_that_is_not_to_be_had(aws, code):
    message = refused_once(aws, code)
    assert f"another {advice(message, r'another (--zone)')}" in message
    assert of_aws.create(aws, "--name", "run", advice(message, r"another (--zone)"), "us-east-1b").exception is None
    command = advice(message, r"`lastgood provision cloud (list)`")
    assert [vm["zone"] for vm in listed(*of_aws.place(aws))] == ["us-east-1b"] and command == "list"


@follows("AWS has no machine of this type free there; try another --zone, or later")
def test_a_zone_without_a_free_machine(aws):
    option = advice(refused_once(aws, "InsufficientInstanceCapacity"), r"try another (--zone)")
    assert of_aws.create(aws, "--name", "run", option, "us-east-1b").exception is None


@follows("this type is not offered there; try another --zone or region")
def test_a_zone_without_this_type(aws):
    option = advice(refused_once(aws, "Unsupported"), r"try another (--zone)")
    assert of_aws.create(aws, "--name", "run", option, "us-east-1b").exception is None


@follows("the account's quota of spot VMs is used up; leave --spot out")
def test_a_quota_of_spot_machines(aws):
    advice(refused_once(aws, "MaxSpotInstanceCountExceeded", "--spot"), "leave --spot out")
    assert of_aws.create(aws, "--name", "run").exception is None


@follows("spot machines of this type cost more than on demand now; leave --spot out")
def test_a_price_of_spot_machines(aws):
    advice(refused_once(aws, "SpotMaxPriceTooLow", "--spot"), "leave --spot out")
    assert of_aws.create(aws, "--name", "run").exception is None


@follows("there is no image {}; name one with --image")
def test_an_image_that_is_not_there(aws, monkeypatch):
    monkeypatch.setattr("lastgood.cluster.provision.cloud_aws._UBUNTU", _UBUNTU.replace("noble", "none"))
    option = advice(refused(of_aws.create(aws, "--name", "run")), r"name one with (--image)")
    assert of_aws.create(aws, "--name", "run", option, of_aws.UBUNTU["ami_id"]).exception is None


@follows("AWS does not know these credentials; check AWS_ACCESS_KEY_ID")
def test_credentials_that_aws_does_not_know(aws, monkeypatch):
    variable = advice(refused_once(aws, "AuthFailure"), r"check (\w+)")
    monkeypatch.setenv(variable, "another")
    assert of_aws.create(aws, "--name", "run").exception is None


@follows("or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
def test_no_credentials_of_aws(aws, monkeypatch):
    variables = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    for name in variables:
        monkeypatch.delenv(name)
    message = refused(of_aws.create(aws, "--name", "run"))
    for name in advice(message, r"or set (\w+ and \w+)").split(" and "):
        monkeypatch.setenv(name, "testing")
    assert of_aws.create(aws, "--name", "run").exception is None


@follows(
    "this would destroy {} VMs and their disks",
    "there are {} VMs of this name already; choose another, or end them",
    "--name {}: not a name that every cloud takes",
    "--count {}: give 1 to {}",
)
def test_names_and_numbers_of_vms(aws):
    name = advice(
        refused(of_aws.create(aws, "--name", "Run 1")), "give up to 40 of a-z, 0-9 and dashes, a letter first"
    )
    most = advice(refused(of_aws.create(aws, "--name", "run", "--count", 65, "--yes")), r"give 1 to (\d+)")
    assert name and int(most) < 65
    assert of_aws.create(aws, "--name", "run-1", "--count", 1).exception is None
    message = refused(of_aws.create(aws, "--name", "run-1"))
    assert of_aws.create(aws, "--name", "another").exception is None
    end = shlex.split(advice(message, r"end them: lastgood provision cloud (.*)"))
    yes = advice(refused(cloud(*[word for word in end if word != "--yes"])), r"add (--yes)")
    assert cloud(*[word for word in end if word != "--yes"], yes).exception is None
    assert {vm["run"] for vm in listed(*of_aws.place(aws))} == {"another"}
    assert of_aws.create(aws, "--name", "run-1").exception is None


@follows(
    "GCP: --zone is needed to create VMs, such as us-central1-a", "Give --project, or run `gcloud config set project"
)
def test_what_gcp_needs(gcp, monkeypatch):
    monkeypatch.delenv("GOOGLE_CLOUD_PROJECT", raising=False)
    wanted = ["--machine", "a2-highgpu-1g", "--name", "run", "--owner", "a"]
    message = refused(cloud("create", *of_gcp.place(gcp), *wanted))
    zone = advice(message, r"such as (\S+)$")
    given = ["--provider", "gcp", "--endpoint", gcp.url, advice(message, r"(--zone) is"), zone, *wanted]
    option = advice(refused(cloud("create", *given)), r"Give (--project)")
    assert cloud("create", *given, option, "proj-1").exception is None


@follows("Google has no machine of this type free in this zone; try another --zone")
def test_a_zone_of_gcp_without_a_free_machine(gcp):
    gcp.refuse_insert[1] = (503, "ZONE_RESOURCE_POOL_EXHAUSTED", "no room", "operation")
    option = advice(refused(of_gcp.create(gcp, "--name", "run")), r"try another (--zone)")
    wanted = ["--machine", "a2-highgpu-1g", "--name", "run", "--owner", "a"]
    assert cloud("create", *of_gcp.place(gcp), option, "us-central1-b", *wanted).exception is None


@follows("a VM of this name is there already, without the project's tag; choose another --name")
def test_a_name_of_gcp_that_is_taken(gcp):
    gcp.refuse_insert[1] = (409, "alreadyExists", "there", "request")
    advice(refused(of_gcp.create(gcp, "--name", "run")), r"choose another (--name)")
    assert of_gcp.create(gcp, "--name", "another").exception is None


@follows("next: lastgood provision run {} --user ubuntu --accept-new-keys --reboot")
def test_vms_that_are_there(aws, tmp_path):
    from typer.testing import CliRunner

    from lastgood.cli import app

    done = of_aws.create(aws, "--name", "run", "--hostfile", tmp_path / "hosts")
    told = next(line for line in hear(done.stderr).splitlines() if line.startswith("next: "))
    called = CliRunner().invoke(app, [*shlex.split(told.removeprefix("next: lastgood ")), "--target", "no"])
    assert "--target: 'no'" in str(called.exception), "what is asked for before hosts are reached"
