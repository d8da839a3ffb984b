"""An S3 server inside one run of the suite: started, used by its ranks alone, and ended with it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lastgood.experiments.dcp.places import S3Access
from lastgood.experiments.dcp.watch import ServerWatch
from lastgood.experiments.services.object_store import REGION, ObjectServer
from lastgood.storage.objects.s3 import parse_s3

__all__ = ["OWN_BUCKET", "RunningServer", "own_server"]

OWN_BUCKET: Final = "lastgood"
_KEY: Final = "AWS_ACCESS_KEY_ID"
_SECRET: Final = "AWS_SECRET_ACCESS_KEY"


@dataclass(frozen=True)
class RunningServer:
    """One that is up."""

    access: S3Access
    watch: ServerWatch
    name: str
    """For records."""


@contextlib.contextmanager
def own_server(folder: Path, url: str) -> Iterator[RunningServer]:
    """A server with the bucket of `url`, up inside the ``with``. `folder` keeps its data and its keys.

    Its keys are in this process's environment meanwhile, where ranks of this machine find them, and others of AWS are
    not. Raises as `ObjectServer`.
    """
    before = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    for name in before:
        del os.environ[name]
    try:
        with ObjectServer(folder, (parse_s3(url)[0],)) as server:
            os.environ[_KEY] = server.credentials.access_key_id
            os.environ[_SECRET] = server.credentials.secret_access_key
            yield RunningServer(
                S3Access(region=REGION, endpoint_url=server.endpoint_url),
                ServerWatch(pid=server.pid, metrics_url=server.metrics_url, folder=str(server.data)),
                f"{server.version}, of the run's own",
            )
    finally:
        for name in (_KEY, _SECRET):
            os.environ.pop(name, None)
        os.environ.update(before)
