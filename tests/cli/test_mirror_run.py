"""`lastgood mirror dump` and `mirror run` as two processes with a ring between them: stages on cores of their own."""

from __future__ import annotations

import lzma
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lastgood.cli import app
from lastgood.errors import ConfigError
from lastgood.mirror.job.describe import describe
from lastgood.mirror.job.description import write_job
from lastgood.mirror.job.factory import Training
from lastgood.mirror.node.status import read_status
from tests.mirror.support.training import make
from tests.support.patience import PATIENCE

SAMPLES = Path(__file__).parents[1] / "mirror" / "samples"


@pytest.mark.timeout(120)
def test_a_node_reads_what_a_dump_of_its_own_puts_into_the_ring(tmp_path):
    (tmp_path / "capture.pcap").write_bytes(lzma.decompress((SAMPLES / "gloo-2.pcap.xz").read_bytes()))
    model, optimizer, _ = make()
    write_job(describe(Training(model, optimizer), ranks=2), tmp_path / "job.json")
    ring = ("--ring", str(tmp_path / "ring"))
    program = [sys.executable, "-m", "lastgood", "mirror", "dump", "--pcap", str(tmp_path / "capture.pcap"), *ring]
    with subprocess.Popen([*program, "--ring-size", "4MiB"], stdout=subprocess.DEVNULL) as dump:
        try:
            words = ["--job", str(tmp_path / "job.json"), "--watch", "10.77.0.1", "--dir", str(tmp_path / "node")]
            done = CliRunner().invoke(app, ["mirror", "run", *words, *ring, "--listen", "127.0.0.1:0", "--once"])
            assert done.exit_code == 0, done.output
            assert dump.wait(30 * PATIENCE) == 0
        finally:
            dump.kill()
    status = read_status(tmp_path / "node")
    assert 3 in status.held and status.iteration == 4
    assert status.counters["capture"]["ring_missing_frames"] == 0


def test_there_is_one_source(tmp_path):
    model, optimizer, _ = make()
    write_job(describe(Training(model, optimizer), ranks=2), tmp_path / "job.json")
    words = ["mirror", "run", "--job", str(tmp_path / "job.json"), "--watch", "10.77.0.1", "--dir", str(tmp_path)]
    for given in ([], ["--ring", "a", "--pcap", "b"], ["--ring", "a", "--interface", "b"]):
        assert isinstance(CliRunner().invoke(app, [*words, *given]).exception, ConfigError)
