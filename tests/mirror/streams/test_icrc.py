"""ICRC and CRC-32: the native variants against zlib, and the checksum of packets against scapy."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood import _native
from lastgood.mirror.generate.packets import Path as Route
from lastgood.mirror.generate.packets import write_packets
from lastgood.mirror.streams.icrc import icrc
from lastgood.mirror.streams.ip import IpPacket, ip_packet


@pytest.mark.parametrize("variant", _native.crc32_variants())
@settings(max_examples=150, deadline=None)
@given(
    size=st.one_of(st.integers(0, 130), st.integers(0, 5000), st.sampled_from([255, 256, 511, 512, 513, 4096])),
    seed=st.integers(0, 2**32 - 1),
    fill=st.randoms(use_true_random=False),
)
def test_each_variant_is_crc_32(variant: str, size: int, seed: int, fill) -> None:
    data = fill.randbytes(size)
    assert _native.crc32(data, seed, variant=variant) == zlib.crc32(data, seed)


def test_there_is_a_portable_variant_and_no_other_name() -> None:
    assert _native.crc32_variants()[-1] == "portable"
    with pytest.raises(ValueError, match="no CRC-32 variant 'x'"):
        _native.crc32(b"", variant="x")


def route(six: bool = True, options: bytes = b"", vlans: tuple[int, ...] = ()) -> Route:
    ends = ("fd00::1", "fd00::2") if six else ("10.0.0.1", "10.0.0.2")
    return Route(b"\x02\0\0\0\0\1", b"\x02\0\0\0\0\2", *ends, 50000, vlans, options)


OPTIONS = {
    "ipv4": (False, b""),
    "ipv4 options": (False, b"\x94\x04\x00\x00"),
    "ipv6": (True, b""),
    "ipv6 extension": (True, bytes(2) + b"\x05\x02\0\0\1\0"),
}


@pytest.mark.parametrize("kind", OPTIONS)
@settings(max_examples=60, deadline=None)
@given(payload=st.binary(max_size=300))
def test_native_and_plain_icrc_agree(kind: str, payload: bytes) -> None:
    six, options = OPTIONS[kind]
    (packet,) = write_packets(7, 1, payload, 0x1000, 5, 4096)
    frame = route(six, options).frame(packet)
    ip = ip_packet(memoryview(frame), len(frame), 1)
    assert isinstance(ip, IpPacket)
    body, sent = frame[14:-4], int.from_bytes(frame[-4:], "little")
    assert icrc(body, ip.begin - 14) == sent
    assert _native.icrc(body, ip.begin - 14) == sent


@pytest.mark.parametrize("kind", ["ipv4", "ipv4 options", "ipv6"])
def test_scapy_computes_the_same_icrc(kind: str) -> None:
    scapy = pytest.importorskip("scapy.all")
    roce = pytest.importorskip("scapy.contrib.roce")
    six, options = OPTIONS[kind]
    for size in (0, 1, 5, 600):
        for number, packet in enumerate(write_packets(0x123456, 0xFFFFFE, bytes(range(200)) * 3, 1 << 40, 5, 256)):
            frame = route(six, options).frame(packet[: 28 + size] if number == 0 else packet)
            parsed = scapy.Ether(frame)
            bth = parsed[roce.BTH]
            assert (bth.dqpn, bth.psn) == (0x123456, (0xFFFFFE + number) % 2**24)
            sent = bth.icrc
            del bth.icrc
            assert scapy.Ether(bytes(parsed))[roce.BTH].icrc == sent


def test_a_packet_without_its_headers_has_no_checksum() -> None:
    with pytest.raises(ValueError, match="headers"):
        _native.icrc(bytes(30), 20)
