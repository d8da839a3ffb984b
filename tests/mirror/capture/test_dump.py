"""The dump stage as a process: from a file to another process, kept frames, limits, and a stop by signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lastgood.cli import app
from lastgood.errors import HostError, LastgoodError
from lastgood.mirror.capture.dump import Dump
from lastgood.mirror.capture.files import CaptureFile
from lastgood.mirror.capture.frames import FrameBatch
from lastgood.mirror.capture.memory import check_memory
from lastgood.mirror.capture.ring import LEAST_RING_BYTES, RingReader, RingWriter, read_report
from tests.mirror.capture.support.captures import batch_of, pcap, read_all, shots


@pytest.fixture
def ring() -> Iterator[Path]:
    place = Path(f"/dev/shm/lastgood-test-{os.getpid()}-{time.monotonic_ns()}")
    yield place
    place.unlink(missing_ok=True)


def start(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lastgood", "mirror", "dump", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_file_comes_complete_to_another_process_and_is_kept(tmp_path: Path, ring: Path) -> None:
    frames = shots(5000, most=1500)
    capture, kept = tmp_path / "in.pcap", tmp_path / "kept.pcapng"
    capture.write_bytes(pcap(frames, ">", nano=True))
    process = start("--pcap", str(capture), "--ring", str(ring), "--ring-size", "2MiB", "--keep", str(kept))
    try:
        with closing(RingReader(ring, wait_s=60)) as reader:
            assert read_all(reader, 500) == [one.row for one in frames]
            assert reader.counters()["source_frames"] == 5000 and not reader.writer_died
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait(10)
    assert process.returncode == 0, err
    assert "memory:" in err and "2 MiB" in err
    counters = json.loads(out.splitlines()[-1])
    assert counters["ring"]["taken_frames"] == counters["keep"]["kept_frames"] == 5000
    assert counters["ring"]["dropped_frames"] == 0
    assert not ring.exists()
    with closing(CaptureFile(kept)) as source:
        assert read_all(source) == [one.row for one in frames]


def test_a_signal_ends_it_in_time_though_nobody_reads(tmp_path: Path, ring: Path) -> None:
    capture = tmp_path / "in.pcap"
    capture.write_bytes(pcap(shots(3000, most=1500)))
    process = start("--pcap", str(capture), "--ring", str(ring), "--ring-size", "1028KiB", "--patience", "600")
    try:
        deadline = time.monotonic() + 60
        while not ring.exists() or not read_report(ring):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait(10)
    assert process.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["ring"]["offered_frames"] < 3000
    assert not ring.exists()


class Script:
    """A source that gives what it is told to."""

    link_type = 1

    def __init__(self, batches: list[FrameBatch]) -> None:
        self.batches = batches

    def read(self, limit: int, timeout_s: float) -> FrameBatch | None:
        return self.batches.pop(0) if self.batches else None

    def counters(self) -> dict[str, int]:
        return {"kernel_dropped": 3}

    def close(self) -> None:
        pass


def test_an_interface_is_never_waited_for(ring: Path) -> None:
    import threading

    batches = [batch_of(shots(200, most=60_000)) for _ in range(3)]
    with closing(RingWriter(ring, LEAST_RING_BYTES, 1)) as writer:
        begin = time.monotonic()
        reports: list[dict[str, dict[str, int]]] = []
        Dump(Script(batches), ring=writer, patience_s=600).run(threading.Event(), reports.append)
        assert time.monotonic() - begin < 30
        counters = reports[-1]["ring"]
        assert counters["offered_frames"] == 600 and counters["dropped_frames"] > 400
        assert reports[-1]["source"]["kernel_dropped"] == 3
        assert read_report(ring)["source"] == {"kernel_dropped": 3}


def test_memory_that_is_not_there_is_refused_with_all_needs() -> None:
    check_memory({"ring": 100}, 100)
    with pytest.raises(HostError, match=r"ring: 64 MiB; kernel ring: 256 MiB; together: 320 MiB"):
        check_memory({"ring": 64 << 20, "kernel ring": 256 << 20}, 300 << 20)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "one of --interface, --pcap and --dpdk"),
        (("--pcap", "x", "--interface", "y"), "one of --interface, --pcap and --dpdk"),
        (("--interface", "nothing0", "--ring-size", "900TiB"), "of memory free"),
        (("--pcap", "/no/such/file", "--ring", "-"), "/no/such/file"),
    ],
)
def test_what_is_asked_for_wrongly_is_said(words: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(app, ["mirror", "dump", *words])
    assert isinstance(result.exception, LastgoodError) and said in str(result.exception)
