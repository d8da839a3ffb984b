"""Real captures of NCCL over RoCEv2: every write accounted for, headers as scapy reads them, sums right."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest

from lastgood.mirror.streams.ip import IpPacket, ip_packet
from lastgood.mirror.streams.messages import Parser
from lastgood.mirror.streams.roce import RoceParser
from lastgood.wire.nccl import messages, nccl_broadcast, nccl_layout
from lastgood.wire.ring import is_final
from tests.mirror.support.captures import captures
from tests.mirror.support.plain.roce import Packet, PlainRoceParser, roce_packet
from tests.mirror.support.roce_messages import Found, file_batches, read_batches

SUMS = (
    "allreduce+p2p", "allreduce+partial_p2p", "allreduce+partial_p2p_new", "allreduce_addstep", "rdma32",
)  # fmt: skip
LIVES = {
    "iter_40000_p2p": 1, "iter_40000_p2p_iter2": 2, "iter_40000_p2p_iter10": 20, "iter_40000_p2p_iter10_2": 20,
    "iter_40000_p2p_iter10_3": 20,
}  # fmt: skip
"""And how many iterations they show."""
ALL = (*SUMS, *LIVES, "iter_80000", "iter_80000_p2p")
FIRST, MIDDLE, LAST, LAST_IMMEDIATE, ONLY, ONLY_IMMEDIATE = 6, 7, 8, 9, 10, 11


@pytest.fixture(params=[RoceParser, PlainRoceParser])
def make(request: pytest.FixtureRequest) -> Callable[[], Parser]:
    return request.param


def parsed(make: Callable[[], Parser], name: str) -> tuple[Found, dict[str, int]]:
    parser = make()
    return read_batches(parser, file_batches(captures("rocev2-captures") / f"{name}.pcapng")), parser.counters()


@cache
def packets(name: str) -> list[tuple[bytes, IpPacket, Packet | str]]:
    found = []
    for batch in file_batches(captures("rocev2-captures") / f"{name}.pcapng"):
        for number in range(len(batch)):
            frame = batch.frame(number)
            ip = ip_packet(frame, int(batch.table[number]["length"]), int(batch.table[number]["link"]))
            if isinstance(ip, IpPacket):
                packet = roce_packet(frame, ip)
                if packet != "other_traffic":
                    found.append((bytes(frame), ip, packet))
    return found


# -- headers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_headers_are_those_that_scapy_reads(name: str) -> None:
    """Its contribution has BTH, AETH and the ICRC; RETH and the immediate are defined here."""
    captures("rocev2-captures")
    scapy = pytest.importorskip("scapy.all")
    roce = pytest.importorskip("scapy.contrib.roce")

    class RETH(scapy.Packet):
        name = "RETH"
        fields_desc = [  # noqa: RUF012 - as scapy has it
            scapy.XLongField("va", 0),
            scapy.XIntField("rkey", 0),
            scapy.IntField("dmalen", 0),
        ]

    class ImmDt(scapy.Packet):
        name = "ImmDt"
        fields_desc = [scapy.XIntField("data", 0)]  # noqa: RUF012

    right = writes = 0
    for frame, ip, packet in packets(name):
        ether = scapy.Ether(frame)
        bth = ether[roce.BTH]
        sent = bth.icrc
        if isinstance(packet, str):
            right += packet != "wrong_checksums"
            assert packet in ("wrong_checksums", "connection_datagrams")
            continue
        right += 1
        if right % 16 == 0:  # it takes long
            assert bth.compute_icrc(None) == struct.pack("!I", sent)
        assert (bth.opcode, bth.dqpn, bth.psn) == (packet.opcode, packet.queue, packet.psn)
        assert ether.sport == packet.port and ether.dport == 4791
        body = frame[ip.begin + 20 : ip.begin + 20 + (ip.end - ip.begin - 24)]
        if packet.opcode in (FIRST, ONLY, ONLY_IMMEDIATE):
            reth = RETH(body[:16])
            assert (reth.va, reth.rkey, reth.dmalen) == (packet.address, packet.rkey, packet.length)
            body = body[16:]
        if packet.opcode in (LAST_IMMEDIATE, ONLY_IMMEDIATE):
            assert ImmDt(body[:4]).data == int.from_bytes(packet.immediate, "big")
            body = body[4:]
        if packet.opcode == 17:
            assert bth[roce.AETH].syndrome == packet.syndrome
            continue
        writes += 1
        assert frame[packet.begin : packet.end] == (body[: -bth.padcount] if bth.padcount else body)
    assert writes > 0


# -- every write -----------------------------------------------------------------------------------------------------


@dataclass
class Writes:
    """The writes of one queue pair, by a reading of their own: messages and what is left of them."""

    complete: list[bytes] = field(default_factory=list)
    pending: bytes = b""
    ready: int = 0
    size: int = 0
    next_psn: int = 0
    broken: bool = False


def writes_of(name: str) -> dict[tuple[bytes, int], Writes]:
    queues: dict[tuple[bytes, int], Writes] = {}
    for frame, ip, packet in packets(name):
        if isinstance(packet, str) or packet.opcode == 17:
            continue
        queue = queues.setdefault((ip.source, packet.queue), Writes())
        queue.broken |= packet.psn != queue.next_psn
        queue.next_psn = packet.psn + 1
        payload = frame[packet.begin : packet.end]
        if packet.opcode == ONLY and packet.length == 32 and len(payload) == 32:
            queue.ready += 1
            continue
        queue.pending += payload
        if packet.opcode == FIRST:
            queue.size = packet.length
        if packet.opcode in (LAST_IMMEDIATE, ONLY_IMMEDIATE):
            assert int.from_bytes(packet.immediate, "little") == len(queue.pending) or queue.broken
            queue.complete.append(queue.pending)
            queue.pending = b""
    return queues


def lines_of(content: bytes, flag: int | None) -> bytes:
    """Data of LL, all of whose flags are `flag`; None: it is data."""
    if flag is None:
        return content
    words = np.frombuffer(content, "<u4").reshape(-1, 4)
    assert (words[:, 1::2] == flag).all()
    return np.ascontiguousarray(words[:, ::2]).tobytes()


@pytest.mark.parametrize("name", ALL)
def test_every_write_is_accounted_for(make: Callable[[], Parser], name: str) -> None:
    found, counters = parsed(make, name)
    queues = writes_of(name)
    assert counters["writes"] == sum(
        1 for *_, packet in packets(name) if isinstance(packet, Packet) and packet.opcode < 12
    )
    assert counters["clear_to_send"] == sum(queue.ready for queue in queues.values())
    assert counters.get("wrong_checksums", 0) == (7 if name == "rdma32" else 0)
    assert "odd_packets" not in counters and "repeated_packets" not in counters and "late_packets" not in counters
    data = {queue: one for (_, queue), one in queues.items() if one.complete or one.pending}
    assert {flow.detail["queue_pair"] for flow in found.flows.values()} == set(data)
    for index, flow in found.flows.items():
        queue = data[flow.detail["queue_pair"]]
        of_flow = found.of(index)
        simple = is_p2p(queue)
        if queue.broken:
            assert name == "iter_80000" and counters["lost_packets"] > 0
            continue
        assert flow.detail["from_the_beginning"] is True
        for number, content in enumerate(queue.complete):
            assert of_flow[number].complete
            assert bytes(of_flow[number].content) == lines_of(content, None if simple else number + 1)
        if queue.pending:
            (last,) = of_flow[len(queue.complete) :]
            assert last.nbytes == queue.size // 2 and not last.complete
            assert bytes(last.content[: len(queue.pending) // 2]) == lines_of(queue.pending, len(queue.complete) + 1)
            assert last.known.count(1) == len(queue.pending) // 2
        else:
            assert len(of_flow) == len(queue.complete)


def is_p2p(queue: Writes) -> bool:
    """NCCL's send of plain floats: no lines, every message as large as the first one."""
    return len({len(one) for one in queue.complete}) == 1 and len(queue.complete[0]) in (3616, 7712, 16384, 19520)


# -- sums ------------------------------------------------------------------------------------------------------------


def ring_flows(found: Found, channels: int) -> Iterator[tuple[list[Any], list[Any]]]:
    """Flows of the all-reduce of 5000 int32 with their messages in NCCL 2.19's layout."""
    layout = nccl_layout(5000, 4, 2, channels=channels, version="2.19", protocol="ll")
    plans: dict[tuple[int, ...], list[Any]] = {}
    for rank in range(2):
        for channel in range(channels):
            plan = [one for one in messages(layout, rank, protocol="ll") if one.send.chunk.channel == channel]
            plans[tuple(4 * one.elements for one in plan)] = plan
    assert len(plans) == 2 * channels
    for flow in found.flows:
        of_flow = found.of(flow)
        plan = plans.get(tuple(one.nbytes for one in of_flow[:2]))
        if plan is not None and len(of_flow) > 1:
            yield of_flow, plan


@pytest.mark.parametrize("name", SUMS)
def test_every_sum_is_right(make: Callable[[], Parser], name: str) -> None:
    found, _ = parsed(make, name)
    result = np.zeros(5000, "<i4")
    times = np.zeros(5000, int)
    flows = 0
    for of_flow, plan in ring_flows(found, 2):
        flows += 1
        for message, one in zip(of_flow, plan, strict=False):
            assert message.complete
            content = np.frombuffer(bytes(message.content), "<i4")
            where = np.arange(one.start, one.start + one.elements) % 10
            if is_final(2, one.send.step):
                result[one.start : one.start + one.elements] = content
                times[one.start : one.start + one.elements] += 1
            assert (content == (2 if is_final(2, one.send.step) else 1) * where).all()
    assert flows == 4 and (times == 1).all()
    assert (result == 2 * (np.arange(5000) % 10)).all()


# -- DDP's lives -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LIVES)
def test_final_chunks_are_twice_the_partial_ones_and_what_was_sent_beside(
    make: Callable[[], Parser], name: str
) -> None:
    iterations = LIVES[name]
    found, _ = parsed(make, name)
    by_count = sorted(found.flows, key=lambda flow: len(found.of(flow)))
    (p2p,) = [flow for flow in by_count if len({one.nbytes for one in found.of(flow)}) == 1]
    sender = next(flow for flow in found.flows if len(found.of(flow)) > 2 and found.of(flow)[1].nbytes == 32)
    back = [flow for flow in found.flows if flow not in (p2p, sender)]
    layout = nccl_layout(5000, 4, 2, version="2.19", protocol="ll")
    first, second = (chunk.elements * 4 for chunk in layout.chunks())
    assert (first, second) == (12288, 7712)

    def floats(content: bytes) -> Any:
        return np.frombuffer(bytes(content), "<f4")

    sent = found.of(sender)
    # The count of parameters, sizes and strides, the weights (one chunk of a broadcast), then the first iteration,
    # the order of buckets, their sizes, and the other iterations.
    assert np.frombuffer(bytes(sent[0].content), "<i8").tolist() == [1]
    assert np.frombuffer(bytes(sent[1].content), "<i8").tolist() == [1, 5000, 5000, 1]
    assert [chunk.elements for chunk in nccl_broadcast(20_000, 2, version="2.19", protocol="ll")] == [sent[2].nbytes]
    gradients = sent[3:5]
    if iterations > 1:
        assert np.frombuffer(bytes(sent[5].content), "<i4").tolist() == [0, 1]
        assert np.frombuffer(bytes(sent[6].content), "<i4")[0] == 1
        gradients = gradients + sent[7:]
    assert len(gradients) == 2 * iterations == 2 * len(found.of(p2p))
    answers = found.of(back[0])[1:] if back else []
    assert len(answers) in (0, 2 * iterations)
    for step in range(iterations):
        partial, final = gradients[2 * step : 2 * step + 2]
        assert (partial.nbytes, final.nbytes) == (second, first)
        assert np.isfinite(floats(final.content)).all() and floats(final.content).any()
        # The chunk that comes back as final went out as partial: both ranks have the same data, so it is its double.
        assert (floats(found.of(p2p)[step].content) == 2 * floats(partial.content)).all()
        if answers:
            came_partial, came_final = answers[2 * step : 2 * step + 2]
            assert (came_partial.nbytes, came_final.nbytes) == (first, second)
            assert (floats(final.content) == 2 * floats(came_partial.content)).all()
            assert (floats(came_final.content) == 2 * floats(partial.content)).all()
            assert bytes(came_final.content) == bytes(found.of(p2p)[step].content)


@pytest.mark.parametrize("name", ["iter_80000", "iter_80000_p2p"])
def test_a_broadcast_of_more_than_a_chunk_is_two_messages(make: Callable[[], Parser], name: str) -> None:
    found, _ = parsed(make, name)
    (sizes,) = [
        [one.nbytes for one in found.of(flow)][:6]
        for flow in found.flows
        if [one.nbytes for one in found.of(flow)][:2] == [8, 32]
    ]
    chunks = [chunk.elements for chunk in nccl_broadcast(40_000, 2, version="2.19", protocol="ll")]
    of_ring = [4 * chunk.elements for chunk in nccl_layout(10_000, 4, 2, version="2.19", protocol="ll").chunks()]
    assert sizes == [8, 32, *chunks, *reversed(of_ring)]
