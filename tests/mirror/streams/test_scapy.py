"""scapy as an independent oracle: packets that it builds are read as it reads them."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood.mirror.capture.frames import COOKED, COOKED_V2, ETHERNET, NO_CHECKSUM
from lastgood.mirror.streams.ip import TCP as TCP_NUMBER
from lastgood.mirror.streams.ip import Left, ip_packet
from lastgood.mirror.streams.native import NativeGlooParser
from lastgood.mirror.streams.tcp import is_changed, tcp_segment
from tests.mirror.support.frames import Captured, batch, ones_sum
from tests.mirror.support.gloo_wire import header, slot
from tests.mirror.support.plain.gloo import GlooParser
from tests.mirror.support.twins import compare

inet = pytest.importorskip("scapy.layers.inet", reason="scapy is not installed")
inet6 = pytest.importorskip("scapy.layers.inet6")
l2 = pytest.importorskip("scapy.layers.l2")

options = st.lists(
    st.sampled_from([("NOP", None), ("Timestamp", (1, 2)), ("MSS", 1460), ("WScale", 7), ("SAckOK", b"")]), max_size=4
)


@st.composite
def packets(draw: st.DrawFn) -> tuple[object, bytes]:
    """A packet of scapy's, and its payload."""
    payload = draw(st.binary(max_size=200))
    tcp = inet.TCP(
        sport=draw(st.integers(0, 65535)),
        dport=draw(st.integers(0, 65535)),
        seq=draw(st.integers(0, (1 << 32) - 1)),
        ack=draw(st.integers(0, (1 << 32) - 1)),
        flags=draw(st.sampled_from(["A", "PA", "S", "SA", "FA", "R"])),
        options=draw(options),
    )
    if draw(st.booleans()):
        words = draw(st.integers(0, 5))
        net = inet.IP(src="10.1.2.3", dst="10.4.5.6", options=[inet.IPOption_NOP()] * (4 * words))
    else:
        net = inet6.IPv6(src="fd00::1", dst="fd00::2")
        for extension in draw(st.lists(st.sampled_from(["hop", "destination", "routing", "fragment"]), max_size=3)):
            net /= {
                "hop": inet6.IPv6ExtHdrHopByHop,
                "destination": inet6.IPv6ExtHdrDestOpt,
                "routing": inet6.IPv6ExtHdrRouting,
                "fragment": inet6.IPv6ExtHdrFragment,
            }[extension]()
    link = draw(st.sampled_from(["ether", "vlan", "double", "cooked", "cooked2"]))
    below = {
        "ether": l2.Ether(),
        "vlan": l2.Ether() / l2.Dot1Q(vlan=7),
        "double": l2.Ether() / l2.Dot1AD(vlan=5) / l2.Dot1Q(vlan=7),
        "cooked": l2.CookedLinux(),
        "cooked2": l2.CookedLinuxV2(),
    }[link]
    return below / net / tcp / payload, payload


@settings(max_examples=40)
@given(made=packets(), padding=st.integers(0, 20))
def test_segments_are_read_as_scapy_reads_them(made, padding):
    packet, payload = made
    frame = bytes(packet) + bytes(padding)
    link = {"CookedLinux": COOKED, "CookedLinuxV2": COOKED_V2}.get(type(packet).__name__, ETHERNET)
    found = ip_packet(memoryview(frame), len(frame), link)
    assert not isinstance(found, Left)
    assert found.protocol == TCP_NUMBER
    segment = tcp_segment(memoryview(frame), found)
    assert not isinstance(segment, Left)
    theirs = type(packet)(frame)[inet.TCP]
    assert (segment.source_port, segment.destination_port) == (theirs.sport, theirs.dport)
    assert (segment.sequence, segment.acknowledgement) == (theirs.seq, theirs.ack)
    assert segment.flags == int(theirs.flags) & 0xFF
    assert frame[segment.begin : segment.end] == payload
    compare(GlooParser(), NativeGlooParser(), [Captured(frame, 1, link)], 1)


def test_a_conversation_that_scapy_builds_is_read():
    content = struct.pack("<Q", 3) + header(2, slot(1), 50) + header(1, slot(1), 50) + b"x" * 50
    ends = {"sport": 5, "dport": 6}
    net = l2.Ether() / inet.IP(src="10.0.0.1", dst="10.0.0.2")
    frames = [bytes(net / inet.TCP(**ends, seq=9, flags="S"))]
    frames += [
        bytes(net / inet.TCP(**ends, seq=10 + at, flags="A") / content[at : at + 13])
        for at in range(0, len(content), 13)
    ]
    captured = [Captured(frame, number) for number, frame in enumerate(frames)]
    compare(GlooParser(), NativeGlooParser(), captured, 3)
    from tests.mirror.support.frames import read

    found = read(NativeGlooParser(), captured)
    assert [(message.opcode, message.slot, message.nbytes) for message in found.of(0)] == [
        (2, slot(1), 50),
        (1, slot(1), 50),
    ]
    assert found.all[0, 1].content == b"x" * 50


@settings(max_examples=20)
@given(made=packets(), where=st.integers(0, 10_000), change=st.integers(1, 255))
def test_a_segment_that_was_changed_on_the_way_is_left_aside(made, where, change):
    packet, _ = made
    frame = bytes(packet)
    link = {"CookedLinux": COOKED, "CookedLinuxV2": COOKED_V2}.get(type(packet).__name__, ETHERNET)
    found = ip_packet(memoryview(frame), len(frame), link)
    assert not isinstance(found, Left) and not is_changed(memoryview(frame), found)
    changed = bytearray(frame)
    changed[found.begin + where % (found.end - found.begin)] ^= change
    # As does a sender that leaves the sum to its card: with the sum of the pseudo-header, or with nothing.
    unsaid = {0, *pseudo_sums(found)}
    given = int.from_bytes(changed[found.begin + 16 : found.begin + 18], "big")
    assert is_changed(memoryview(changed), found) == (given not in unsaid)
    compare(GlooParser(), NativeGlooParser(), [Captured(bytes(changed), 1, link)], 1)
    parser = NativeGlooParser()
    parser.feed(batch([Captured(bytes(changed), 1, link, flags=NO_CHECKSUM)]))
    assert "wrong_checksums" not in parser.counters()


def pseudo_sums(found):
    """Without the length, as for cards that cut a segment up, and with it."""
    ends = found.source + found.destination + struct.pack(">H", TCP_NUMBER)
    return ones_sum(ends), ones_sum(ends + struct.pack(">I", found.end - found.begin))


@settings(max_examples=20)
@given(made=packets(), at=st.integers(0, 2))
def test_a_sum_that_was_left_to_a_card_says_nothing(made, at):
    packet, _ = made
    frame = bytearray(bytes(packet))
    link = {"CookedLinux": COOKED, "CookedLinuxV2": COOKED_V2}.get(type(packet).__name__, ETHERNET)
    found = ip_packet(memoryview(frame), len(frame), link)
    assert not isinstance(found, Left)
    given = (0, *pseudo_sums(found))[at]
    frame[found.begin + 16 : found.begin + 18] = given.to_bytes(2, "big")
    frame[-1] ^= 1
    assert not is_changed(memoryview(frame), found)
    compare(GlooParser(), NativeGlooParser(), [Captured(bytes(frame), 1, link)], 1)
