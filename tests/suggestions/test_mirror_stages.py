"""What messages about stages in processes of their own suggest, followed."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from lastgood.cli import mirror_parse
from lastgood.mirror.handover.parsed import unpack_parsed
from lastgood.mirror.handover.pipe import EXTRACTED, PARSED, PipeReader, PipeWriter
from lastgood.mirror.job.description import write_job
from tests.mirror.capture.support.captures import pcap, shots
from tests.mirror.support.small_job import small_job
from tests.suggestions.following import advice, follows, refusal


@pytest.fixture
def job(tmp_path: Path) -> Path:
    write_job(small_job(), tmp_path / "job.json")
    (tmp_path / "in.pcap").write_bytes(pcap(shots(20)))
    return tmp_path / "job.json"


@pytest.fixture
def no_signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A command that ends by signals leaves them as they were."""
    monkeypatch.setattr("signal.signal", lambda *_: None)
    yield


@follows("name one of --ring and --pcap")
def test_a_parser_takes_a_ring_or_a_file(job: Path, no_signals: None) -> None:
    given = {"job": job, "pcap": job.with_name("in.pcap"), "out": job.with_name("out"), "patience": 0.1}
    advice(refusal(lambda: mirror_parse.parse(**given, ring=job.with_name("ring"))), "name one of --ring and --pcap")
    mirror_parse.parse(**given)


@follows("{}: there is no such ring; start `lastgood {} --out {}`")
def test_a_stage_that_is_not_there(job: Path) -> None:
    ring = job.with_name("messages")
    message = refusal(lambda: PipeReader(ring, PARSED, most_bytes=1 << 20))
    command = advice(message, r"start `lastgood (mirror parse --out \S+)`")
    words = [sys.executable, "-m", "lastgood", *shlex.split(command), "--job", str(job)]
    process = subprocess.Popen([*words, "--pcap", str(job.with_name("in.pcap"))], stdout=subprocess.DEVNULL)
    try:
        with closing(PipeReader(ring, PARSED, most_bytes=1 << 20, wait_s=60)) as reader:
            counters = {}
            while (told := reader.read(30)) is not None:
                assert told
                counters = unpack_parsed(told, "the ring")[1]
        assert counters["parse"]["frames"] == 20
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait(10)


@follows("{}: this ring is not filled by `lastgood {}`; name that one's --out")
def test_the_ring_of_another_stage(tmp_path: Path) -> None:
    with (
        closing(PipeWriter(tmp_path / "messages", 2 << 20, PARSED)),
        closing(PipeWriter(tmp_path / "gradients", 2 << 20, EXTRACTED)),
    ):
        wrong = refusal(lambda: PipeReader(tmp_path / "messages", EXTRACTED, most_bytes=1 << 20))
        advice(wrong, "not filled by `lastgood mirror extract`; name that one's --out")
        PipeReader(tmp_path / "gradients", EXTRACTED, most_bytes=1 << 20).close()
