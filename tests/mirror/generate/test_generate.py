"""Generated traffic: the same for a seed, readable by others, and its truth what a ring gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from lastgood.errors import ConfigError
from lastgood.mirror.generate.faults import FaultyMirror, MirrorFaults
from lastgood.mirror.generate.life import DdpLife, seeded_life
from lastgood.mirror.generate.output import batches, write_pcapng
from lastgood.mirror.generate.packets import Path as Route
from lastgood.mirror.generate.packets import acknowledge, negative_acknowledge, write_packets
from lastgood.mirror.generate.traffic import Frame, RingTraffic, Wire, reduced
from lastgood.mirror.streams.roce import RoceParser
from tests.mirror.support.rebuild_ring import rebuild
from tests.mirror.support.roce_messages import file_batches, read_batches


def life_of(seed: int, ranks: int = 3) -> DdpLife:
    return seeded_life(seed, ranks=ranks, steps=3, shapes=[(30, 20), (20,), (9,)], first_cap_bytes=500, cap_bytes=2000)


def frames_of(seed: int, faults: MirrorFaults | None = None, wire: Wire | None = None) -> list[Frame]:
    traffic = RingTraffic(3, wire or Wire(mtu=256), [0, 2], seed, nak_every=6)
    return list(FaultyMirror(faults or MirrorFaults(), seed).frames(traffic.frames(life_of(seed).collectives())))


def test_the_same_seed_makes_the_same_frames() -> None:
    faults = MirrorFaults(0.05, 2, 0.05, 0.05, 4, 0.05, 0.05)
    assert frames_of(7, faults) == frames_of(7, faults)
    assert frames_of(7, faults) != frames_of(8, faults)
    assert {frame.port for frame in frames_of(7)} == {0, 2}


def test_collectives_are_those_of_a_ddp_start() -> None:
    life = life_of(1)
    found = [(one.kind, one.content, one.parts[0].nbytes, one.step) for one in life.collectives()]
    parameters = 4 * (600 + 20 + 9)
    assert found[:4] == [
        ("allgather", "count", 8, None),
        ("broadcast", "sizes", 8 * 2 * 4, None),
        ("broadcast", "parameters", parameters, None),
        ("allreduce", "gradient", parameters, 0),
    ]
    assert found[4:6] == [("broadcast", "bucket-order", 16, 1), ("broadcast", "bucket-sizes", 4, 1)]
    assert life.buckets() == ((2, 1, 0),)
    capped = seeded_life(1, ranks=2, steps=2, shapes=[(10,), (20,), (30,)], first_cap_bytes=100, cap_bytes=1000)
    assert capped.buckets() == ((2,), (1, 0))
    order, sizes = [one.parts[0].tolist() for one in capped.collectives() if one.content.startswith("bucket")]
    assert order == [2, 1, 0, 2] and sizes == [1, 2]


def test_buffers_come_before_each_forward() -> None:
    plain = life_of(1)
    buffers = tuple((np.full(4, step, "<f4"),) for step in range(3))
    life = DdpLife(plain.names, plain.weights, plain.gradients, buffers)
    contents = [(one.content, one.step) for one in life.collectives()]
    assert contents[2:6] == [("parameters", None), ("parameters", None), ("buffers", 0), ("gradient", 0)]
    assert contents.index(("bucket-sizes", 1)) < contents.index(("buffers", 1))


def test_the_truth_is_the_sum_in_the_ring_s_order() -> None:
    (collective,) = [one for one in life_of(3).collectives() if one.step == 0]
    wire = Wire()
    found = reduced(collective.parts, wire)
    np.testing.assert_allclose(found, np.sum(collective.parts, axis=0, dtype=np.float64), rtol=1e-4, atol=1e-6)
    whole = np.array([1, 2, 3, 4], "<i4")
    assert (reduced([whole] * 5, wire) == 5 * whole).all()


def test_packets_are_those_that_scapy_reads() -> None:
    scapy = pytest.importorskip("scapy.all")
    roce = pytest.importorskip("scapy.contrib.roce")
    route = Route(b"\2\0\0\0\0\1", b"\2\0\0\0\0\2", "fd00::1", "fd00::2", 51000, (5, 6))
    packets = write_packets(0xABCDEF, 0xFFFFFF, bytes(700), 0x123456789A, 0x55, 256, immediate=b"\1\2\3\4")
    for number, (packet, opcode) in enumerate(zip(packets, (6, 7, 9), strict=True)):
        ether = scapy.Ether(route.frame(packet))
        assert [tag.vlan for tag in ether.iterpayloads() if hasattr(tag, "vlan") and tag.name in ("802.1Q", "802_1AD")]
        assert ether[scapy.IPv6].src == "fd00::1" and ether[scapy.UDP].sport == 51000
        bth = ether[roce.BTH]
        assert (bth.opcode, bth.dqpn, bth.psn) == (opcode, 0xABCDEF, (0xFFFFFF + number) % 2**24)
    ack = scapy.Ether(route.frame(acknowledge(1, 2, 3)))
    assert ack[roce.AETH].syndrome == 0 and ack[roce.AETH].msn == 3
    nak = scapy.Ether(route.frame(negative_acknowledge(1, 2, 3)))
    assert nak[roce.AETH].syndrome == 0x60
    four = scapy.Ether(
        Route(b"\2" * 6, b"\4" * 6, "10.0.0.1", "10.0.0.2", 5, options=b"\x94\x04\0\0").frame(packets[0])
    )
    checksum = four[scapy.IP].chksum
    del four[scapy.IP].chksum
    assert scapy.Ether(bytes(four))[scapy.IP].chksum == checksum


def test_a_file_gives_what_memory_gives(tmp_path: Path) -> None:
    frames = frames_of(5)
    assert write_pcapng(tmp_path / "it.pcapng", frames) == len(frames)
    of_file = [
        bytes(batch.frame(number)) for batch in file_batches(tmp_path / "it.pcapng") for number in range(len(batch))
    ]
    of_memory = [bytes(batch.frame(number)) for batch in batches(frames) for number in range(len(batch))]
    assert of_file == of_memory == [frame.data for frame in frames]
    times = [int(row["time_ns"]) for batch in batches(frames, bits_per_s=1e9) for row in batch.table]
    assert times == sorted(times)
    total = 8 * sum(len(frame.data) + 24 for frame in frames)
    assert times[-1] - times[0] == pytest.approx(total, rel=0.01), "1 bit a nanosecond"


def test_faults_are_as_often_as_said() -> None:
    frames = [Frame(0, bytes(100))] * 40_000
    mirror = FaultyMirror(MirrorFaults(0.1, 4, 0.05, 0.05, 3, 0.05, 0.05), 1)
    passed = list(mirror.frames(frames))
    found = mirror.counters
    assert found["lost"] == pytest.approx(4000, rel=0.15)
    assert len(passed) == 40_000 - found["lost"] + found["duplicated"]
    for name in ("duplicated", "corrupted", "truncated", "reordered"):
        assert found[name] == pytest.approx(0.05 * 36_000, rel=0.15)


def test_what_cannot_be_is_refused() -> None:
    for wrong in (
        lambda: Wire(mtu=1500),
        lambda: RingTraffic(3, Wire(), [3]),
        lambda: RingTraffic(1, Wire(), [0]),
        lambda: MirrorFaults(loss=2),
        lambda: MirrorFaults(burst=0),
        lambda: seeded_life(1, ranks=1, steps=1, shapes=[(1,)]),
        lambda: seeded_life(1, ranks=2, steps=1, shapes=[]),
    ):
        with pytest.raises(ConfigError):
            wrong()


def test_the_command_writes_frames_and_their_truth(tmp_path: Path) -> None:
    from lastgood.cli.mirror import app

    out, truth = tmp_path / "it.pcapng", tmp_path / "it.npz"
    arguments = [
        "--seed",
        "3",
        "--ranks",
        "2",
        "--steps",
        "2",
        "--parameters",
        "30x20,20",
        "--protocol",
        "ll",
        "--mtu",
        "1024",
    ]
    run = CliRunner().invoke(app, ["generate", "--out", str(out), "--truth", str(truth), *arguments])
    assert run.exit_code == 0, run.output
    life = seeded_life(3, ranks=2, steps=2, shapes=[(30, 20), (20,)])
    traffic = RingTraffic(2, Wire("ll", mtu=1024), [0], 3)
    slots = rebuild(read_batches(RoceParser(), file_batches(out)), life, traffic)
    assert all(slot.complete for slot in slots)
    known = np.load(truth)
    assert known["gradient/0/0"].tobytes() == bytes(slots[2].content) == slots[2].truth
    assert known["weight/p0"].tobytes() + known["weight/p1"].tobytes() == slots[1].truth
    assert known["bucket/1/0"].tolist() == [1, 0]
    again = CliRunner().invoke(app, ["generate", "--out", str(out), *arguments])
    assert again.exit_code != 0
