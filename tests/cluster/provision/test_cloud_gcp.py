"""GCP, with Google's own client over HTTP to a recorder that checks each request's shape (gcp_recorder.py)."""

from __future__ import annotations

import pytest

from lastgood.cluster.hostfile import read_hostfile
from lastgood.errors import ConfigError, ProvisionError
from tests.cluster.support import recorded_gcp
from tests.cluster.support.cloud_calls import cloud, listed
from tests.cluster.support.recorded_gcp import ZONE, create, place

compute_v1 = pytest.importorskip("google.cloud.compute_v1")

gcp = recorded_gcp.gcp


def test_vms_are_created_as_pccheck_had_them_listed_and_destroyed(gcp, tmp_path):
    key = tmp_path / "key.pub"
    key.write_text("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHvOX ada@home\n")
    hosts = tmp_path / "hosts"
    done = create(
        gcp, "--count", 2, "--name", "fig8", "--ssh-public-key", key, "--hostfile", hosts, "--address", "private"
    )
    assert done.exception is None, done.output
    undo = f"lastgood provision cloud destroy --provider gcp --project proj-1 --endpoint {gcp.url} --name fig8 --yes"
    assert done.stderr.index(f"to destroy what this creates: {undo}") < done.stderr.index("created 1 of 2: fig8-1")
    instance = gcp.instances[ZONE, "fig8-1"]
    disk = instance.disks[0]
    assert disk.auto_delete and disk.initialize_params.disk_size_gb == 1000
    assert disk.initialize_params.disk_type.endswith("/pd-ssd")
    assert instance.scheduling.on_host_maintenance == "TERMINATE" and instance.scheduling.provisioning_model == ""
    labels = dict(instance.labels)
    assert labels.pop("created")[8] == "t"
    assert labels == {"project": "lastgood", "run": "fig8", "owner": "ada-l"}
    (item,) = instance.metadata.items
    assert item.key == "ssh-keys" and item.value.startswith("ubuntu:ssh-ed25519 AAAA")
    assert [host.name for host in read_hostfile(hosts).hosts] == ["10.0.0.1", "10.0.0.2"]

    vms = listed(*place(gcp))
    assert [(vm["name"], vm["state"], vm["zone"], vm["address"]) for vm in vms] == [
        ("fig8-1", "running", ZONE, "34.0.0.1"),
        ("fig8-2", "running", ZONE, "34.0.0.2"),
    ]
    with pytest.raises(ConfigError, match="would destroy 2 VMs"):
        raise cloud("destroy", *place(gcp), "--name", "fig8").exception
    gone = cloud("destroy", *place(gcp), "--name", "fig8", "--yes")
    assert gone.exception is None and "2 VMs destroyed" in gone.stderr
    assert gcp.instances == {}


@pytest.mark.parametrize("ignore_filters", [False, True])
def test_only_vms_with_the_labels_are_seen_and_destroyed(gcp, ignore_filters):
    gcp.ignore_filters = ignore_filters
    for run in ("fig8", "fig9"):
        assert create(gcp, "--name", run).exception is None
    stranger = compute_v1.Instance(
        name="payroll", zone="zones/europe-west4-a", labels={"run": "fig8"}, status="RUNNING"
    )
    gcp.instances["europe-west4-a", "payroll"] = stranger
    assert [vm["run"] for vm in listed(*place(gcp))] == ["fig8", "fig9"]
    assert [vm["run"] for vm in listed(*place(gcp), "--name", "fig9")] == ["fig9"]
    assert cloud("destroy", *place(gcp), "--name", "fig8", "--yes").exception is None
    assert sorted(name for _, name in gcp.instances) == ["fig9-1", "payroll"]


def test_spot(gcp):
    assert create(gcp, "--name", "cheap", "--spot", machine="e2-standard-4").exception is None
    scheduling = gcp.instances[ZONE, "cheap-1"].scheduling
    assert scheduling.provisioning_model == "SPOT" and scheduling.instance_termination_action == "DELETE"
    assert [vm["spot"] for vm in listed(*place(gcp))] == [True]
    assert create(gcp, "--name", "dear", machine="e2-standard-4").exception is None
    assert gcp.instances[ZONE, "dear-1"].scheduling == compute_v1.Scheduling()


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        ((403, "QUOTA_EXCEEDED", "Quota 'GPUS_ALL_REGIONS' exceeded", "operation"), "the project's quota is used up"),
        ((403, "quotaExceeded", "Quota exceeded", "request"), "the project's quota is used up"),
        ((503, "ZONE_RESOURCE_POOL_EXHAUSTED", "no room", "operation"), "Google has no machine of this type free"),
    ],
)
def test_a_refusal_after_three_of_four_says_what_exists_and_how_to_end_it(gcp, refusal, said):
    gcp.refuse_insert[4] = refusal
    done = create(gcp, "--name", "big", "--count", 4, "--yes")
    assert isinstance(done.exception, ProvisionError)
    message = str(done.exception)
    assert message.startswith(
        "3 of 4 VMs of run big exist and cost money: big-1, big-2, big-3; to destroy them: lastgood"
    )
    assert f"VM 4 of 4 failed: GCP proj-1: creating a a2-highgpu-1g in {ZONE}: {said}" in message
    command = message.partition("lastgood provision cloud ")[2].partition(";")[0].split()
    assert cloud(*command).exception is None
    assert gcp.instances == {}


@pytest.mark.parametrize(
    ("status", "reason", "said"),
    [
        # No credentials go to a stand-in, so the client finds out by itself that it cannot renew them.
        (401, "authError", "there are no credentials; run `gcloud auth application-default login`"),
        (403, "accessNotConfigured", "the Compute Engine API is off in this project"),
        (404, "notFound", "no such project, zone, machine type or image"),
        (400, "invalid", r"Google refused it \(invalid: because"),
    ],
)
def test_refusals_in_plain_words(gcp, status, reason, said):
    gcp.refuse_insert[1] = (status, reason, "because", "request")
    with pytest.raises(ProvisionError, match=rf"^nothing of run run was created .*{said}"):
        raise create(gcp, "--name", "run").exception


def test_the_recorder_refuses_wrong_shapes():
    """The oracle can fail: an unknown field, and a VM with a GPU that claims that it can be moved."""
    import json
    import urllib.error
    import urllib.request

    from tests.cluster.support.gcp_recorder import Recorder

    good = {
        "name": "vm",
        "machineType": f"zones/{ZONE}/machineTypes/a2-highgpu-1g",
        "disks": [
            {"boot": True, "initializeParams": {"sourceImage": "i", "diskType": f"zones/{ZONE}/diskTypes/pd-ssd"}}
        ],
        "networkInterfaces": [{"accessConfigs": [{"name": "External NAT"}]}],
        "scheduling": {"onHostMaintenance": "TERMINATE"},
    }
    wrong = [{**good, "machine_kind": "x"}, {**good, "scheduling": {}}, {**good, "labels": {"a": "Ada L"}}]
    with Recorder() as recorder:
        url = f"{recorder.url}/compute/v1/projects/proj-1/zones/{ZONE}/instances"
        assert urllib.request.urlopen(url, json.dumps(good).encode(), timeout=60).status == 200
        for body in wrong:
            with pytest.raises(urllib.error.HTTPError):
                urllib.request.urlopen(url, json.dumps(body).encode(), timeout=60)
    assert len(recorder.faults) == len(wrong)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--provider", "gcp", "--endpoint", "http://example.com"], "only a stand-in on this machine"),
        (["--provider", "gcp", "--region", "us-central1"], "--region is for AWS"),
        (["--provider", "gcp", "--endpoint", "http://127.0.0.1:1"], "which project"),
        (["--provider", "gcp", "--project", "p", "--name", "x OR labels.run=y"], "not a name"),
    ],
)
def test_what_cannot_work_is_refused(arguments, said):
    with pytest.raises(ConfigError, match=said):
        raise cloud("list", *arguments).exception


def test_a_zone_is_needed_to_create(gcp):
    with pytest.raises(ConfigError, match="--zone is needed"):
        raise cloud("create", *place(gcp), "--machine", "a2-highgpu-1g", "--name", "run").exception


def test_without_credentials(monkeypatch, tmp_path):
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    with pytest.raises(ProvisionError, match="there are no credentials; run `gcloud auth application-default login`"):
        raise cloud("list", "--provider", "gcp", "--project", "proj-1").exception
