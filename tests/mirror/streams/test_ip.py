from __future__ import annotations

import struct

import pytest

from lastgood.mirror.capture.frames import COOKED, COOKED_V2, ETHERNET
from lastgood.mirror.streams.ip import TCP, IpPacket, Left, ip_packet
from lastgood.mirror.streams.tcp import Segment, tcp_segment
from tests.mirror.support.frames import tcp_frame

FOUR = (("10.0.0.1", 4000), ("10.0.0.2", 5000))
SIX = (("fd00::1", 4000), ("fd00::2", 5000))
PAYLOAD = b"the payload of the segment"


def read(frame: bytes, length: int | None = None, link: int = ETHERNET) -> tuple[Segment, bytes] | Left:
    view = memoryview(frame)
    packet = ip_packet(view, len(frame) if length is None else length, link)
    if isinstance(packet, Left):
        return packet
    assert packet.protocol == TCP
    segment = tcp_segment(view, packet)
    if isinstance(segment, Left):
        return segment
    return segment, frame[segment.begin : segment.captured]


@pytest.mark.parametrize("ends", [FOUR, SIX], ids=["IPv4", "IPv6"])
@pytest.mark.parametrize("link", [ETHERNET, COOKED, COOKED_V2])
@pytest.mark.parametrize("tags", [(), (0x81000007,), (0x88A80005, 0x81000007)], ids=["plain", "VLAN", "double VLAN"])
@pytest.mark.parametrize("padding", [0, 17])
def test_finds_the_payload_by_the_length_fields(ends, link, tags, padding):
    frame = tcp_frame(*ends, 99, PAYLOAD, link=link, tags=tags, padding=padding, options=b"\1\1\1\1", acknowledgement=5)
    found = read(frame, link=link)
    assert not isinstance(found, Left)
    segment, payload = found
    assert payload == PAYLOAD
    assert (segment.source_port, segment.destination_port, segment.sequence, segment.acknowledgement) == (
        4000,
        5000,
        99,
        5,
    )


def test_reads_behind_ip_options_and_extension_headers():
    found = read(tcp_frame(*FOUR, 1, PAYLOAD, ip_options=b"\1" * 8))
    assert not isinstance(found, Left) and found[1] == PAYLOAD
    extensions = (
        (0, bytes((0, 1, 4, 0, 0, 0, 0))),
        (43, bytes((1,)) + bytes(14)),
        (60, bytes((0,)) + bytes(6)),
        (44, bytes((0, 0, 0, 0, 0, 0, 9))),
        (51, bytes((2,)) + bytes(14)),
    )
    found = read(tcp_frame(*SIX, 1, PAYLOAD, extensions=extensions))
    assert not isinstance(found, Left) and found[1] == PAYLOAD


def test_a_frame_of_more_than_64_kib_has_no_length_of_its_own():
    payload = bytes(range(256)) * 300
    found = read(tcp_frame(*FOUR, 1, payload))
    assert not isinstance(found, Left) and found[1] == payload
    jumbo = struct.pack(">BBBBI", 6, 0, 0xC2, 4, 8 + 20 + len(payload))
    frame = bytearray(tcp_frame(*SIX, 1, payload[:1000], extensions=((0, jumbo[1:]),)))
    frame[-1000:] = payload
    frame[18:20] = bytes(2)
    found = read(bytes(frame))
    assert not isinstance(found, Left) and found[1] == payload


@pytest.mark.parametrize("fragment", [0x2000, 1, 0x2001])
def test_fragments_are_named(fragment):
    assert read(tcp_frame(*FOUR, 1, PAYLOAD, fragment=fragment)) is Left.FRAGMENT
    extension = (44, bytes((0,)) + struct.pack(">H", 1 if fragment & 0x2000 else 8) + bytes(4))
    assert read(tcp_frame(*SIX, 1, PAYLOAD, extensions=(extension,))) is Left.FRAGMENT


@pytest.mark.parametrize("ends", [FOUR, SIX], ids=["IPv4", "IPv6"])
def test_a_cut_frame_keeps_what_is_there_of_the_payload(ends):
    whole = tcp_frame(*ends, 1, PAYLOAD)
    headers = len(whole) - len(PAYLOAD)
    for size in range(len(whole)):
        found = read(whole[:size], len(whole))
        if size < headers:
            assert found is Left.SHORT
        else:
            assert not isinstance(found, Left)
            segment, payload = found
            assert payload == PAYLOAD[: size - headers]
            assert segment.end - segment.begin == len(PAYLOAD)


def test_lengths_that_contradict_each_other_are_named():
    for ends, at in ((FOUR, 16), (SIX, 18)):
        frame = bytearray(tcp_frame(*ends, 1, PAYLOAD))
        frame[at : at + 2] = b"\x7f\xff"
        assert read(bytes(frame)) is Left.DAMAGED
    frame = bytearray(tcp_frame(*FOUR, 1, PAYLOAD))
    frame[14] = 0x44
    assert read(bytes(frame)) is Left.DAMAGED
    frame[14] = 0x45
    frame[34 + 12] = 0x40
    assert read(bytes(frame)) is Left.DAMAGED
    frame[34 + 12] = 0xF0
    assert read(bytes(frame)) is Left.DAMAGED


def test_what_is_no_ip_is_named():
    assert read(b"\xff" * 12 + b"\x08\x06" + bytes(46)) is Left.NOT_IP
    assert read(b"\xff" * 12 + b"\x81\x00\x00\x01\x81\x00\x00\x01\x81\x00\x00\x01" + bytes(46)) is Left.NOT_IP
    assert read(b"", 0) is Left.SHORT
    assert read(tcp_frame(*FOUR, 1, PAYLOAD), link=147) is Left.LINK


def test_every_byte_string_has_an_answer():
    frame = tcp_frame(*SIX, 1, PAYLOAD, extensions=((0, bytes((0, 1, 4, 0, 0, 0, 0))),))
    for at in range(len(frame)):
        for value in (0, 1, 4, 0x7F, 0xFF):
            changed = bytearray(frame)
            changed[at] = value
            packet = ip_packet(memoryview(changed), len(changed), ETHERNET)
            if isinstance(packet, IpPacket):
                assert packet.begin <= packet.end <= len(changed)
                segment = tcp_segment(memoryview(changed), packet)
                if isinstance(segment, Segment):
                    assert packet.begin + 20 <= segment.begin <= segment.captured <= segment.end <= len(changed)
