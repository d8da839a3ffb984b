"""All stages of a mirror node as processes of their own: the same as `mirror run`, and an end for each of them."""

from __future__ import annotations

import contextlib
import json
import lzma
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lastgood.cli import app
from lastgood.errors import ConfigError
from lastgood.mirror.capture.frames import ETHERNET
from lastgood.mirror.capture.ring import LEAST_RING_BYTES, RingWriter
from lastgood.mirror.job.describe import describe
from lastgood.mirror.job.description import write_job
from lastgood.mirror.job.factory import Training
from lastgood.mirror.node.status import read_status
from tests.mirror.support.training import make
from tests.support.patience import PATIENCE, wait_until

SAMPLES = Path(__file__).parents[1] / "mirror" / "samples"
CORE = "0"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "capture.pcap").write_bytes(lzma.decompress((SAMPLES / "gloo-2.pcap.xz").read_bytes()))
    model, optimizer, _ = make()
    write_job(describe(Training(model, optimizer), ranks=2), tmp_path / "job.json")
    return tmp_path


@contextlib.contextmanager
def started(folder: Path, stage: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "lastgood", "mirror", stage, *words]
    with (folder / f"{stage}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait(30)
        assert process.stdout is not None
        process.stdout.close()


def words(folder: Path, *more: str) -> list[str]:
    return ["--job", str(folder / "job.json"), *more]


def update(folder: Path, *more: str) -> list[str]:
    return words(folder, "--dir", str(folder / "node"), "--ring", str(folder / "r3"), "--listen", "127.0.0.1:0", *more)


@pytest.mark.timeout(180)
def test_dump_parse_extract_and_update_are_a_mirror_node(folder: Path) -> None:
    one, two, three = (str(folder / name) for name in ("r1", "r2", "r3"))
    with contextlib.ExitStack() as stack:
        dump = ["--pcap", str(folder / "capture.pcap"), "--ring", one, "--ring-size", "4MiB", "--core", CORE]
        stages = [
            stack.enter_context(started(folder, "dump", *dump)),
            stack.enter_context(started(folder, "parse", *words(folder, "--ring", one, "--out", two, "--core", CORE))),
            stack.enter_context(
                started(folder, "extract", *words(folder, "--watch", "10.77.0.1", "--ring", two, "--out", three))
            ),
        ]
        done = CliRunner().invoke(app, ["mirror", "update", *update(folder, "--once")])
        assert done.exit_code == 0, done.output
        told = []
        for stage in stages:
            assert stage.wait(60 * PATIENCE) == 0
            assert stage.stdout is not None
            told.append(json.loads(stage.stdout.read().splitlines()[-1]))
    status = read_status(folder / "node")
    assert 3 in status.held and status.iteration == 4, status
    assert status.counters["capture"]["ring_missing_frames"] == 0
    assert told[1]["parse"]["payload_bytes"] > 0 and told[2]["extract"]["complete"] > 0
    assert status.counters["extract"] == told[2]["extract"]
    assert not (folder / "r2").exists() and not (folder / "r3").exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_stage_that_is_killed_ends_those_after_it_and_the_node_serves_on(folder: Path) -> None:
    one, two, three = (folder / name for name in ("r1", "r2", "r3"))
    with (
        closing(RingWriter(one, LEAST_RING_BYTES, ETHERNET)),  # a dump that captures nothing
        started(folder, "parse", *words(folder, "--ring", str(one), "--out", str(two))) as parse,
        started(
            folder, "extract", *words(folder, "--watch", "10.77.0.1", "--ring", str(two), "--out", str(three))
        ) as extract,
        started(folder, "update", *update(folder)) as node,
    ):
        wait_until((folder / "node" / "status.json").exists, lambda: (folder / "update.log").read_text(), 60)
        parse.kill()
        code = extract.wait(60 * PATIENCE)
        said = (folder / "extract.log").read_text()
        assert code == 1 and "its parser has died; start all stages again" in said, said
        wait_until(lambda: "has died" in (folder / "update.log").read_text(), "the node hears of it", 60)
        assert node.poll() is None
        node.terminate()
        assert node.wait(60 * PATIENCE) == 0
    assert read_status(folder / "node").stands == "ended"


def test_there_is_one_source(folder: Path) -> None:
    both = ["--ring", str(folder / "r1"), "--pcap", str(folder / "capture.pcap")]
    result = CliRunner().invoke(app, ["mirror", "parse", *words(folder, *both)])
    assert isinstance(result.exception, ConfigError)
