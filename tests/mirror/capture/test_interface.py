"""Captures on real links: all sizes, tags, checksums, drops, and interfaces that go away."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from lastgood.cluster.testbed.testbed import why_no_testbed
from lastgood.errors import ConfigError, HostError
from lastgood.mirror.capture.frames import NO_CHECKSUM, OWN, TRUNCATED, VLAN_RESTORED
from lastgood.mirror.capture.interface import InterfaceSource
from lastgood.units import MIB
from tests.mirror.capture.support.captures import rows_of
from tests.mirror.capture.support.links import Link, a_link

pytestmark = pytest.mark.root
HEAD = bytes.fromhex("0200000000aa0200000000bb")
"""To an address that nobody has: only a promiscuous interface sees it."""
KIND = struct.pack(">H", 0x88B5)


@pytest.fixture(scope="module")
def link() -> Iterator[Link]:
    reason = why_no_testbed()
    if reason is not None:
        pytest.skip(reason)
    with a_link() as made:
        yield made


def capture(link: Link, **options: int) -> InterfaceSource:
    return link.near(lambda: InterfaceSource("near", **{"ring_bytes": 4 * MIB, **options}))


def collect(source: InterfaceSource, count: int, wait_s: float = 10) -> list[tuple[bytes, int, int, int, int]]:
    """`count` frames of this test's kind, and all others of it that are there already."""
    found: list[tuple[bytes, int, int, int, int]] = []
    deadline = time.monotonic() + wait_s
    while len(found) < count and time.monotonic() < deadline:
        batch = source.read(100, 0.1)
        assert batch is not None
        found += [row for row in rows_of(batch) if KIND in row[0][12:26]]
    return found


def test_frames_of_all_sizes_come_as_they_were_sent(link: Link) -> None:
    sent = [HEAD + KIND + bytes([n % 251]) * n for n in (0, 1, 46, 1000, 1500, 9000, 60_000, 65_530)]
    before = time.time_ns()
    with closing(capture(link)) as source, closing(link.raw()) as sender:
        for frame in sent:
            sender.send(frame)
        found = collect(source, len(sent))
        assert [row[0] for row in found] == sent
        assert all(row[1] == len(row[0]) and not row[3] & TRUNCATED for row in found)
        assert all(before <= row[2] <= time.time_ns() for row in found)
        assert source.counters()["truncated"] == source.counters()["kernel_dropped"] == 0


@pytest.mark.parametrize("tags", [[(0x8100, 0x6007)], [(0x88A8, 5)], [(0x88A8, 5), (0x8100, 77)]])
def test_tags_are_in_their_place(link: Link, tags: list[tuple[int, int]]) -> None:
    frame = HEAD + b"".join(struct.pack(">HH", *tag) for tag in tags) + KIND + bytes(100)
    with closing(capture(link)) as source, closing(link.raw()) as sender:
        sender.send(frame)
        (row,) = collect(source, 1)
        assert row[0] == frame and row[1] == len(frame)
        assert row[3] & VLAN_RESTORED and source.counters()["vlan_restored"] >= 1


def test_checksums_that_were_left_to_a_card_are_marked_and_own_frames_too(link: Link) -> None:
    def datagrams(name: str) -> socket.socket:
        one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        one.bind((name, 0))
        return one

    far, near = link.far(lambda: datagrams(link.far_address)), link.near(lambda: datagrams(link.near_address))
    with closing(capture(link)) as source, closing(far), closing(near):
        far.sendto(b"\x88\xb5from far", (link.near_address, near.getsockname()[1]))
        near.sendto(b"\x88\xb5from near", (link.far_address, far.getsockname()[1]))
        found: dict[bytes, int] = {}
        deadline = time.monotonic() + 10
        while len(found) < 2 and time.monotonic() < deadline:
            batch = source.read(100, 0.1)
            assert batch is not None
            found |= {row[0][44:]: row[3] for row in rows_of(batch) if b"\x88\xb5from" in row[0]}
        assert found[b"from far"] & NO_CHECKSUM and not found[b"from far"] & OWN
        assert found[b"from near"] & OWN


def test_several_interfaces_share_one_ring_in_order_and_others_stay_out(link: Link) -> None:
    for name in ("one", "two", "other"):
        link.ip(0, "link", "add", name, "type", "veth", "peer", "name", f"{name}-far")
        for end in (name, f"{name}-far"):
            link.ip(0, "link", "set", end, "addrgenmode", "none", "up")

    def senders() -> dict[str, socket.socket]:
        made = {}
        for name in ("one", "other", "two"):
            made[name] = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
            made[name].bind((f"{name}-far", 0))
        return made

    ends = link.near(senders)
    source = link.near(lambda: InterfaceSource("one", also=["two"], ring_bytes=4 * MIB))
    with closing(source):
        sent = []
        for number in range(60):
            name = ("one", "other", "two")[number % 3]
            frame = HEAD + KIND + bytes([number]) * 80
            ends[name].send(frame)
            sent += [frame] * (name != "other")
        assert [row[0] for row in collect(source, len(sent))] == sent
        assert source.read(10, 0.05) is not None
        link.ip(0, "link", "del", "two")
        deadline = time.monotonic() + 10
        while source.read(10, 0.1) is not None:
            assert time.monotonic() < deadline
    for end in ends.values():
        end.close()
    with pytest.raises(ConfigError, match="once"):
        InterfaceSource("lo", also=["lo"])


def test_own_frames_can_be_left_out(link: Link) -> None:
    source = link.near(lambda: InterfaceSource("near", ring_bytes=4 * MIB, own_frames=False))

    def send() -> None:
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0) as one:
            one.bind(("near", 0))
            one.send(HEAD + KIND + b"mine" + bytes(60))

    with closing(source), closing(link.raw()) as sender:
        link.near(send)
        sender.send(HEAD + KIND + b"theirs" + bytes(60))
        assert [row[0][14:20] for row in collect(source, 1)] == [b"theirs"]


def test_what_a_full_ring_loses_is_counted(link: Link) -> None:
    frame, count = HEAD + KIND + bytes(1000), 2000
    with closing(capture(link, ring_bytes=256 << 10, block_bytes=128 << 10)) as source, closing(link.raw()) as sender:
        for _ in range(count):
            sender.send(frame)
        time.sleep(0.1)
        found = collect(source, count, wait_s=1)
        counters = source.counters()
        assert 100 < len(found) < count
        # Nothing else speaks on this link.
        assert len(found) + counters["kernel_dropped"] == count
        assert counters["kernel_dropped"] == source.counters()["kernel_dropped"], "counted once"


def test_a_link_that_goes_down_and_up_is_gone_on_with(link: Link) -> None:
    with closing(capture(link)) as source, closing(link.raw()) as sender:
        link.ip(0, "link", "set", "near", "down")
        deadline = time.monotonic() + 10
        while not source.counters()["interface_downs"] and time.monotonic() < deadline:
            assert len(source.read(10, 0.1) or ()) == 0
        link.ip(0, "link", "set", "near", "up")
        sender.send(HEAD + KIND + b"again" + bytes(60))
        assert len(collect(source, 1)) == 1
        assert source.counters()["interface_downs"] == 1


def test_an_interface_that_is_removed_ends_its_source(link: Link) -> None:
    link.ip(0, "link", "add", "brief", "type", "veth", "peer", "name", "brief2")
    link.ip(0, "link", "set", "brief", "up")
    with closing(link.near(lambda: InterfaceSource("brief", ring_bytes=MIB, block_bytes=256 << 10))) as source:
        link.ip(0, "link", "del", "brief")
        deadline = time.monotonic() + 10
        while source.read(10, 0.1) is not None:
            assert time.monotonic() < deadline


def test_a_batch_outlives_its_source(link: Link) -> None:
    with closing(link.raw()) as sender:
        source = capture(link)
        sender.send(HEAD + KIND + bytes(500))
        deadline = time.monotonic() + 10
        batch = source.read(10, 0.1)
        while not batch and time.monotonic() < deadline:
            batch = source.read(10, 0.1)
        assert batch is not None
        source.close()
        source.close()
        assert rows_of(batch)[0][0][:12] == HEAD and source.read(10, 0.1) is None
        assert source.counters()["frames"] == 1


def test_what_cannot_be_captured_is_said(link: Link) -> None:
    with pytest.raises(HostError, match="no such interface"):
        InterfaceSource("nothing0", ring_bytes=MIB, block_bytes=256 << 10)
    with pytest.raises(ConfigError, match="power of two"):
        InterfaceSource("lo", block_bytes=100_000)
    with pytest.raises(ConfigError, match="two blocks"):
        InterfaceSource("lo", ring_bytes=MIB)
