from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "storage" / "support"))
sys.path.insert(0, str(Path(__file__).parents[2] / "crash" / "support"))

from replay import build_shim

from tests.checkpointers.support.job_of_ranks import Job, Proxy, Server
from tests.support.s3_server import bucket, server, url

__all__ = ["bucket", "server", "url"]


@pytest.fixture(scope="session")
def rank_server(tmp_path_factory):
    server = Server(build_shim("faulty_disk.c", tmp_path_factory.mktemp("shim")))
    yield server
    server.end()


@pytest.fixture
def make_job(rank_server, tmp_path):
    made = []

    def make(world=2):
        made.append(Job(rank_server, tmp_path / f"job-{len(made)}", world))
        return made[-1]

    yield make
    for job in made:
        job.kill()


@pytest.fixture
def make_proxy():
    made = []

    def make(target):
        made.append(Proxy(target))
        return made[-1]

    yield make
    for proxy in made:
        proxy.end()
