"""AWS as moto plays it on loopback, with a proxy before it that can refuse single requests; fixtures of both."""

from __future__ import annotations

import http.client
import json
import logging
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

import pytest

from tests.cluster.support.cloud_calls import cloud

boto3 = pytest.importorskip("boto3")
pytest.importorskip("moto")
pytest.importorskip("flask")

REGION = "us-east-1"
UBUNTU = {
    "ami_id": "ami-0noble0000000001",
    "name": "ubuntu/images/hvm-ssd-gp3/ubuntu-noble-24.04-amd64-server-20250601",
    "owner_id": "099720109477",
    "state": "available",
    "architecture": "x86_64",
    "root_device_name": "/dev/sda1",
    "virtualization_type": "hvm",
    "hypervisor": "xen",
    "creation_date": "2025-06-01T00:00:00.000Z",
    "description": "Ubuntu 24.04",
    "image_type": "machine",
    "platform": None,
    "public": True,
    "root_device_type": "ebs",
    "sriov": "simple",
}
OLDER = {**UBUNTU, "ami_id": "ami-0noble0000000000", "creation_date": "2025-01-01T00:00:00.000Z"}


class Proxy(ThreadingHTTPServer):
    """Passes requests on to moto, notes them, and refuses those that it was told to refuse."""

    daemon_threads = True

    def __init__(self, upstream):
        super().__init__(("127.0.0.1", 0), _Passing)
        self.upstream = upstream
        self.requests = []
        self.refusals = {}

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def actions(self, action):
        return [request for request in self.requests if request["Action"] == [action]]

    def refuse(self, action, number, status, code, message):
        """Answer the `number`-th `action` from now (from 1) with an error of EC2's form."""
        self.refusals[action, len(self.actions(action)) + number] = (status, code, message)


class _Passing(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        request = parse_qs(body.decode())
        self.server.requests.append(request)
        action = request["Action"][0]
        refusal = self.server.refusals.get((action, len(self.server.actions(action))))
        if refusal is not None:
            status, code, message = refusal
            error = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
            answer = f"<Response><Errors>{error}</Errors><RequestID>r</RequestID></Response>".encode()
        else:
            connection = http.client.HTTPConnection(*self.server.upstream, timeout=30)
            headers = {key: value for key, value in self.headers.items() if key.lower() != "host"}
            connection.request("POST", self.path, body, headers)
            response = connection.getresponse()
            status, answer = response.status, response.read()
            connection.close()
        self.send_response(status)
        self.send_header("Content-Type", "text/xml")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def moto_server(tmp_path_factory):
    images = tmp_path_factory.mktemp("moto") / "amis.json"
    images.write_text(json.dumps([OLDER, UBUNTU]))
    os.environ["MOTO_AMIS_PATH"] = str(images)  # read when moto is imported
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server.get_host_and_port()
    server.stop()
    del os.environ["MOTO_AMIS_PATH"]


@pytest.fixture
def aws(moto_server, monkeypatch, tmp_path):
    for key in [key for key in os.environ if key.startswith("AWS_")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    reset = http.client.HTTPConnection(*moto_server, timeout=30)
    reset.request("POST", "/moto-api/reset")
    assert reset.getresponse().status == 200
    reset.close()
    proxy = Proxy(moto_server)
    thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield proxy
    proxy.shutdown()
    thread.join(60)
    proxy.server_close()


def place(aws):
    return ["--provider", "aws", "--region", REGION, "--endpoint", aws.url]


def client(aws):
    return boto3.client("ec2", region_name=REGION, endpoint_url=aws.url)


def create(aws, *arguments, machine="m5.xlarge"):
    return cloud("create", *place(aws), "--machine", machine, "--owner", "Ada L", *arguments)
