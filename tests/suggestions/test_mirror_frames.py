"""What messages about captured and generated frames suggest, followed."""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lastgood.cli import app
from lastgood.cli._mirror_stages import pin
from lastgood.errors import ConfigError
from lastgood.mirror.capture import dpdk
from lastgood.mirror.capture.dpdk import DpdkPort, dpdk_program
from lastgood.mirror.capture.files import CaptureFile
from lastgood.mirror.capture.interface import InterfaceSource
from lastgood.mirror.capture.keep import FrameKeeper
from lastgood.mirror.capture.ring import LEAST_RING_BYTES, RingReader, RingWriter
from lastgood.mirror.generate.life import seeded_life
from lastgood.mirror.generate.output import send_frames
from lastgood.mirror.generate.traffic import RingTraffic, Wire
from tests.mirror.capture.support.captures import pcap, read_all, shots
from tests.suggestions.following import advice, follows, hear, refusal
from tests.suggestions.source_texts import ROOT

_CAP_NET_RAW = 13
_CAP_VERSION = 0x20080522


@pytest.fixture
def ring() -> Iterator[Path]:
    place = Path(f"/dev/shm/lastgood-test-{os.getpid()}-{time.monotonic_ns()}")
    yield place
    place.unlink(missing_ok=True)


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    """A file with 20 frames."""
    (tmp_path / "in.pcap").write_bytes(pcap(shots(20)))
    return tmp_path / "in.pcap"


@pytest.fixture
def own_signals() -> Iterator[None]:
    """A command that ends by signals leaves them as they were."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def dumped(line: str) -> str:
    """What a dump says, which must succeed."""
    done = CliRunner().invoke(app, ["mirror", "dump", *shlex.split(line)])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


def refused(line: str) -> str:
    """What an unsuccessful dump says."""
    done = CliRunner().invoke(app, ["mirror", "dump", *shlex.split(line)])
    assert done.exit_code != 0, done.output
    return hear(str(done.exception))


@follows(
    "name one of --interface, --pcap and --dpdk",
    "--keep {}: is there already; name a new file",
)
def test_a_dump_takes_frames_from_one_place_into_a_new_file(capture: Path, tmp_path: Path, own_signals: None) -> None:
    (tmp_path / "kept").touch()
    option = advice(refused("--ring -"), r"one of --interface, (--pcap) and --dpdk")
    message = refused(f"{option} {capture} --ring - --keep {tmp_path / 'kept'}")
    advice(message, "name a new file")
    dumped(f"{option} {capture} --ring - --keep {tmp_path / 'new'}")
    with closing(CaptureFile(tmp_path / "new")) as kept:
        assert len(read_all(kept)) == 20
    with closing(FrameKeeper(tmp_path / "newer", 1 << 20)):
        assert (tmp_path / "newer").exists()


@follows("--core {}: {}; this process may use {}")
def test_a_dump_runs_on_a_core_that_there_is() -> None:
    before = os.sched_getaffinity(0)
    try:
        message = refusal(lambda: pin(1000))
        core = int(advice(message, r"may use \[(\d+)"))
        pin(core)
        assert os.sched_getaffinity(0) == {core}
    finally:
        os.sched_setaffinity(0, before)


# -- DPDK --


@follows("{} was not built: install DPDK's files (Debian, Ubuntu: apt-get install libdpdk-dev pkg-config), then")
def test_the_program_for_dpdk_is_built_with_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as without:
        without.setattr(dpdk, "_PROGRAM", "no-such-program")
        message = refusal(dpdk_program)
    packages = advice(message, r"apt-get install ([^)]+)\)").split()
    build = (ROOT / "native" / "CMakeLists.txt").read_text()
    asked = advice(build, r"pkg_check_modules\(DPDK QUIET (\w+)>=")
    assert packages == [f"{asked}-dev", "pkg-config"]
    if shutil.which("pkg-config") is None or shutil.which("dpkg") is None:
        pytest.skip("needs Debian, and pkg-config")
    where = ["pkg-config", "--variable=pcfiledir", asked]
    folder = subprocess.run(where, capture_output=True, text=True, timeout=60).stdout.strip()
    if not folder:
        pytest.skip("DPDK's files are not installed")
    owner = subprocess.run(
        ["dpkg", "-S", f"{folder}/{asked}.pc"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert owner.partition(":")[0] == packages[0]
    assert dpdk_program().is_file()


@follows("--dpdk fills a ring, and keeps no file: give --ring a path, and no --keep")
def test_dpdk_fills_a_ring(capture: Path, ring: Path, own_signals: None) -> None:
    device = f"--dpdk net_pcap0,rx_pcap={capture}"
    advice(refused(f"{device} --ring -"), "give --ring a path")
    advice(refused(f"{device} --ring {ring} --keep {ring}.kept"), "and no --keep")
    try:
        dpdk_program()
    except ConfigError as error:
        assert str(error) == refused(f"{device} --ring {ring} --ring-size 2MiB")
        pytest.skip(str(error))
    said = dumped(f"{device} --ring {ring} --ring-size 2MiB --seconds 1")
    assert '"offered_frames": 20, "dropped_frames": 0' in said


@follows("--queues: 1 to 64; --dma: 0 to 16, with as many --dma-device or none")
def test_how_many_queues_and_engines_dpdk_has() -> None:
    device = "0000:81:00.0"
    message = refusal(lambda: DpdkPort(device, queues=65))
    least, most = map(int, re.findall(r"--queues: (\d+) to (\d+)", message)[0])
    assert DpdkPort(device, queues=least) and DpdkPort(device, queues=most)
    message = refusal(lambda: DpdkPort(device, dma=2, dma_devices=("0000:00:04.0",)))
    advice(message, "with as many --dma-device or none")
    assert DpdkPort(device, dma=1, dma_devices=("0000:00:04.0",)) and DpdkPort(device, dma=16)


# -- rings --


@follows("{}: there is no ring of frames; start `lastgood mirror dump --ring {}`")
def test_a_ring_that_nobody_fills(ring: Path, capture: Path) -> None:
    command = advice(refusal(lambda: RingReader(ring)), r"start `lastgood (mirror dump --ring \S+)`")
    words = [sys.executable, "-m", "lastgood", *shlex.split(command), "--pcap", str(capture), "--ring-size", "2MiB"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        with closing(RingReader(ring, wait_s=60)) as reader:
            assert len(read_all(reader)) == 20
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait(10)
    assert process.returncode == 0, said


@follows("{}: another process fills this ring; end it, or name another --ring")
def test_a_ring_that_another_process_fills(ring: Path) -> None:
    other = ring.with_name(f"{ring.name}-2")
    first = RingWriter(ring, LEAST_RING_BYTES, 1)
    try:
        advice(refusal(lambda: RingWriter(ring, LEAST_RING_BYTES, 1)), "end it, or name another --ring")
        RingWriter(other, LEAST_RING_BYTES, 1).close()
    finally:
        first.close()
        other.unlink(missing_ok=True)
    RingWriter(ring, LEAST_RING_BYTES, 1).close()


@follows("{}: is no ring of frames; name another --ring, or move it away")
def test_something_else_than_a_ring(ring: Path, tmp_path: Path) -> None:
    other = ring.with_name(f"{ring.name}-2")
    ring.write_text("somebody's notes")
    message = refusal(lambda: RingWriter(ring, LEAST_RING_BYTES, 1))
    advice(message, "name another --ring, or move it away")
    try:
        RingWriter(other, LEAST_RING_BYTES, 1).close()
    finally:
        other.unlink(missing_ok=True)
    shutil.move(ring, tmp_path / "notes")
    RingWriter(ring, LEAST_RING_BYTES, 1).close()
    assert (tmp_path / "notes").read_text() == "somebody's notes"


@follows("{}: {}; remove it, and start `lastgood mirror dump` again")
def test_a_damaged_ring(ring: Path) -> None:
    ring.write_bytes(b"LGFRAMES".ljust(LEAST_RING_BYTES, b"\xff"))
    advice(refusal(lambda: RingReader(ring)), "remove it, and start `lastgood mirror dump` again")
    ring.unlink()
    with closing(RingWriter(ring, LEAST_RING_BYTES, 1)), closing(RingReader(ring)) as reader:
        assert reader.other_lives()


# -- the right to raw frames --


class Rights:
    """This thread's effective capabilities, as a number with a bit for each."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._head = struct.pack("Ii", _CAP_VERSION, 0)
        self._data = ctypes.create_string_buffer(24)
        if self._libc.capget(self._head, self._data):
            pytest.skip(f"capget: {os.strerror(ctypes.get_errno())}")
        self._words = struct.unpack("6I", self._data.raw)
        self.effective = self._words[0] | self._words[3] << 32

    def take(self, effective: int) -> None:
        low, high = effective & 0xFFFFFFFF, effective >> 32
        data = struct.pack("6I", low, *self._words[1:3], high, *self._words[4:])
        if self._libc.capset(self._head, data):
            raise OSError(ctypes.get_errno(), "capset")

    @contextmanager
    def only(self, effective: int) -> Iterator[None]:
        self.take(effective)
        try:
            yield
        finally:
            self.take(self.effective)


@pytest.mark.root
@follows("capturing needs root, or CAP_NET_RAW", "sending raw frames needs root (CAP_NET_RAW): {}")
def test_the_right_to_capture_and_to_send() -> None:
    rights = Rights()
    if not rights.effective >> _CAP_NET_RAW & 1:
        pytest.skip("needs root, with CAP_NET_RAW")
    traffic = RingTraffic(2, Wire(), [0])
    frames = list(traffic.frames(seeded_life(1, ranks=2, steps=1, shapes=[(8, 4)]).collectives()))[:1]

    def capture() -> None:
        InterfaceSource("lo", ring_bytes=2 << 20, block_bytes=1 << 20).close()

    def send() -> None:
        assert send_frames("lo", frames, bits_per_s=1e9) == 1

    with rights.only(rights.effective & ~(1 << _CAP_NET_RAW)):
        for refused_call in (capture, send):
            advice(refusal(refused_call), "needs root.*CAP_NET_RAW")
    capture()
    send()
    with rights.only(1 << _CAP_NET_RAW):
        capture()
        send()
