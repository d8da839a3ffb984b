"""DPDK's program: its command line everywhere; and, where it was built, files and interfaces into the ring."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from lastgood.cluster.testbed.testbed import why_no_testbed
from lastgood.errors import ConfigError, HostError
from lastgood.mirror.capture.dpdk import DpdkPort, dpdk_program, run_dpdk
from lastgood.mirror.capture.ring import RingReader, RingWriter
from lastgood.units import MIB
from tests.mirror.capture.support.captures import Shot, pcap, rows_of, shots
from tests.mirror.capture.support.links import a_link

Rows = list[tuple[bytes, int, int, int, int]]


@pytest.fixture
def ring() -> Iterator[Path]:
    place = Path(f"/dev/shm/lastgood-test-{os.getpid()}-{time.monotonic_ns()}")
    yield place
    place.unlink(missing_ok=True)


@pytest.fixture
def needs_program() -> None:
    try:
        dpdk_program()
    except ConfigError as error:
        pytest.skip(str(error))


def words(port: DpdkPort) -> str:
    return " ".join(port.words(Path("program"), 5, 1 << 20))


def test_the_command_line_of_devices_and_addresses() -> None:
    one = words(DpdkPort("net_af_packet0,iface=mir0", core=3))
    assert one.startswith("program -l 3 ") and "--no-huge -m " in one and "--no-pci" in one
    assert (
        "--vdev=net_af_packet0,iface=mir0,framesz=65408,blocksz=2093056,framecnt=512 -- 5 1048576 65408 1 1024 0 0"
        in one
    )
    two = words(DpdkPort("0000:81:00.0", queues=4, dma=2, dma_devices=("0000:00:04.0", "0000:00:04.1"), hugepages=True))
    assert "-a 0000:81:00.0 -a 0000:00:04.0 -a 0000:00:04.1 -- 5 1048576 9216 4 8192 2 0" in two
    assert "--no-huge" not in two and "--no-pci" not in two and "--vdev" not in two
    assert "--vdev=dma_skeleton0 --vdev=dma_skeleton1" in words(DpdkPort("net_pcap0,rx_pcap=/x", dma=2))


@pytest.mark.parametrize(
    "settings",
    [
        {"device": "eth0 --file-prefix=x"},
        {"device": "-a"},
        {"device": ""},
        {"device": "net_pcap0", "queues": 0},
        {"device": "net_pcap0", "dma": 17},
        {"device": "net_pcap0", "dma": 2, "dma_devices": ("0000:00:04.0",)},
        {"device": "net_pcap0", "dma": 1, "dma_devices": ("eth0",)},
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        DpdkPort(**settings)  # type: ignore[arg-type]


def captured(ring: Path, port: DpdkPort, stop: threading.Event, until: int) -> tuple[Rows, dict[str, dict[str, int]]]:
    """What comes out of the ring, and the counters."""
    found: Rows = []
    counters: list[dict[str, dict[str, int]]] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            counters.append(run_dpdk(port, writer, stop))
        except HostError as error:
            failed.append(error)
            writer.end()

    with closing(RingWriter(ring, 64 * MIB, 1)) as writer, closing(RingReader(ring)) as reader:
        running = threading.Thread(target=run)
        running.start()
        deadline = time.monotonic() + 60
        while (batch := reader.read(1000, 0.2)) is not None and time.monotonic() < deadline:
            found += rows_of(batch)
            if len(found) >= until:
                stop.set()
        stop.set()
        running.join(30)
    if failed:
        raise failed[0]
    return found, counters[0]


@pytest.mark.parametrize("dma", [0, 2])
@pytest.mark.usefixtures("needs_program")
def test_a_file_comes_complete_by_processor_and_by_dma(tmp_path: Path, ring: Path, dma: int) -> None:
    # Frames of several buffers too.
    frames = [one for one in shots(400, most=1500) if one.data] + [Shot(bytes([i]) * 9000, 0) for i in range(20)]
    path = tmp_path / "in.pcap"
    path.write_bytes(pcap(frames))
    port = DpdkPort(f"net_pcap0,rx_pcap={path}", frame_bytes=2048, buffers=2048, dma=dma, idle_end_s=0.5)
    found, counters = captured(ring, port, threading.Event(), len(frames) + 1)
    assert [row[0] for row in found] == [one.data for one in frames]
    source = counters["source"]
    assert source["frames"] == len(frames) and source["queue_dropped"] == source["dma_errors"] == 0
    assert (source["copies_by_dma"] > 0) == (dma > 0)
    assert counters["ring"]["taken_frames"] == len(frames) and counters["ring"]["dropped_frames"] == 0


@pytest.mark.usefixtures("needs_program")
def test_a_port_that_is_not_there_is_said(ring: Path) -> None:
    with pytest.raises(HostError, match="exit code"):
        captured(ring, DpdkPort("net_pcap0,rx_pcap=/no/such/file"), threading.Event(), 1)


@pytest.mark.root
@pytest.mark.usefixtures("needs_program")
def test_an_interface_into_the_ring(ring: Path) -> None:
    reason = why_no_testbed()
    if reason is not None:
        pytest.skip(reason)
    sent = [bytes.fromhex("0200000000aa0200000000bb88b5") + bytes([i % 251]) * (60 + i) for i in range(1400)]
    with a_link() as link, closing(link.raw()) as sender:
        stop = threading.Event()

        def send() -> None:
            while not stop.is_set():  # until the port is up
                for one in sent[:10]:
                    sender.send(one)
                time.sleep(0.05)

        sending = threading.Thread(target=send)
        sending.start()
        found, counters = link.near(
            lambda: captured(ring, DpdkPort("net_af_packet0,iface=near", buffers=512), stop, 200)
        )
        sending.join(10)
    assert {row[0] for row in found} == set(sent[:10])
    assert counters["source"]["frames"] >= 200
