"""GCP as the recorder plays it on loopback: a fixture, and calls of `lastgood provision cloud` to it."""

from __future__ import annotations

import pytest

from tests.cluster.support.cloud_calls import cloud

ZONE = "us-central1-a"


@pytest.fixture
def gcp():
    from tests.cluster.support.gcp_recorder import Recorder

    with Recorder() as recorder:
        yield recorder
    assert recorder.faults == []


def place(gcp):
    return ["--provider", "gcp", "--project", "proj-1", "--endpoint", gcp.url]


def create(gcp, *arguments, machine="a2-highgpu-1g"):
    return cloud("create", *place(gcp), "--zone", ZONE, "--machine", machine, "--owner", "Ada L", *arguments)
