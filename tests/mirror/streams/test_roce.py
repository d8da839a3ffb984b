"""RoCEv2 to messages: generated rings without and with faults, hand-made packets, and the native parser's twin."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lastgood.errors import ConfigError
from lastgood.mirror.capture.frames import FrameBatch
from lastgood.mirror.generate.faults import FaultyMirror, MirrorFaults
from lastgood.mirror.generate.life import DdpLife, seeded_life
from lastgood.mirror.generate.output import batches
from lastgood.mirror.generate.packets import Path, acknowledge, negative_acknowledge, write_packets
from lastgood.mirror.generate.traffic import RingTraffic, Wire
from lastgood.mirror.streams.ll import encode
from lastgood.mirror.streams.messages import Parser
from lastgood.mirror.streams.roce import RoceParser
from tests.mirror.support.plain.roce import PlainRoceParser
from tests.mirror.support.rebuild_ring import rebuild, right_where_known
from tests.mirror.support.roce_messages import Found, batch_of, read_batches

PARSERS = {"native": RoceParser, "plain": PlainRoceParser}
SHAPES = [(40, 30), (30,), (7,), (64, 9)]


@pytest.fixture(params=PARSERS)
def make(request: pytest.FixtureRequest) -> Callable[..., Parser]:
    return PARSERS[request.param]


def small_life(ranks: int, seed: int = 1, steps: int = 3) -> DdpLife:
    return seeded_life(seed, ranks=ranks, steps=steps, shapes=SHAPES, first_cap_bytes=1000, cap_bytes=3000)


def captured(
    life: DdpLife, traffic: RingTraffic, faults: MirrorFaults | None = None, seed: int = 0, limit: int = 97
) -> list[FrameBatch]:
    mirror = FaultyMirror(faults or MirrorFaults(), seed)
    return list(batches(mirror.frames(traffic.frames(life.collectives())), limit=limit))


# -- whole rings -----------------------------------------------------------------------------------------------------

WIRES = {
    "simple": Wire(mtu=1024),
    "ll": Wire("ll", mtu=256, six=False),
    "two channels": Wire("simple", "2.30", 2, 2048, vlans=(7,)),
    "old": Wire("ll", "2.19", 2, 1024, vlans=(5, 6)),
    "old simple": Wire("simple", "2.19", 2, 512, six=False, options=b"\x94\x04\0\0"),
    "adaptive": Wire("ll", "2.19", 1, 256, "write"),
    "adaptive packets": Wire("simple", "2.28", 1, 256, "packets"),
    "extension": Wire("ll", mtu=4096, options=bytes(2) + b"\x05\x02\0\0\1\0"),
}


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("name", WIRES)
def test_everything_that_passes_is_read(make: Callable[..., Parser], name: str, ranks: int) -> None:
    life = small_life(ranks)
    if name.startswith("adaptive"):
        life = seeded_life(1, ranks=ranks, steps=2, shapes=[(100, 90), (30,), (80, 80)], first_cap_bytes=10_000)
    traffic = RingTraffic(ranks, WIRES[name], [0], nak_every=5)
    parser = make()
    found = read_batches(parser, captured(life, traffic))
    slots = rebuild(found, life, traffic)
    assert all(right_where_known(slots)) and all(slot.complete for slot in slots)
    assert not found.resynced and not found.closed
    counters = parser.counters()
    assert counters["repeated_packets"] > 0 and counters["negative_acknowledgements"] > 0
    assert counters["clear_to_send"] > 0 and "lost_packets" not in counters and "odd_packets" not in counters
    assert (counters.get("immediates", 0) > 0) == name.startswith("adaptive")
    assert all(flow.transport == "roce" and flow.destination_port == 4791 for flow in found.flows.values())


@pytest.mark.parametrize("name", ["simple", "ll", "adaptive", "adaptive packets"])
@pytest.mark.parametrize("loss", [0.001, 0.02, 0.2])
def test_what_is_lost_is_said_and_the_rest_is_right(make: Callable[..., Parser], name: str, loss: float) -> None:
    life = seeded_life(1, ranks=3, steps=2, shapes=[(70, 50), (30,), (60, 60)], first_cap_bytes=10_000)
    healed = 0
    for seed in range(4 if make is RoceParser else 1):
        traffic = RingTraffic(3, WIRES[name], [0], seed, nak_every=7)
        faults = MirrorFaults(loss, 1 + seed, 0.02, 0.02, 4, 0.002, 0.001)
        found = read_batches(make(), captured(life, traffic, faults, seed))
        slots = rebuild(found, life, traffic)
        assert all(right_where_known(slots))
        healed += sum(slot.complete for slot in slots)
    assert healed > 0 or loss > 0.001 or make is PlainRoceParser


def test_two_watched_neighbours_heal_each_other() -> None:
    life = small_life(4, steps=4)
    complete = []
    for watched in ([0], [0, 1]):
        complete.append(0)
        for seed in range(6):
            traffic = RingTraffic(4, WIRES["simple"], watched)
            found = read_batches(RoceParser(), captured(life, traffic, MirrorFaults(0.02), seed))
            slots = rebuild(found, life, traffic)
            assert all(right_where_known(slots))
            complete[-1] += sum(slot.complete for slot in slots)
    assert complete[1] > complete[0]


# -- the twin --------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 10**6),
    name=st.sampled_from(sorted(WIRES)),
    protocol=st.sampled_from(["auto", "auto", "own", "ll128"]),
    loss=st.sampled_from([0.0, 0.01, 0.1, 0.4]),
    patience=st.sampled_from([2, 50, 1024]),
    waiting=st.sampled_from([2000, 64 << 20]),
    limit=st.integers(1, 200),
    skip=st.integers(0, 60),
)
def test_native_and_plain_parsers_give_the_same(
    seed: int, name: str, protocol: str, loss: float, patience: int, waiting: int, limit: int, skip: int
) -> None:
    wire = WIRES[name]
    life = seeded_life(seed, ranks=2 + seed % 3, steps=2, shapes=[(50, 40), (9,)], first_cap_bytes=4000)
    traffic = RingTraffic(life.ranks, wire, [seed % 2], seed, nak_every=seed % 4 * 3)
    faults = MirrorFaults(loss, 1 + seed % 3, loss / 2, loss / 2, 5, loss / 5, loss / 5)
    frames = captured(life, traffic, faults, seed, limit)[skip if limit < 10 else 0 :]
    options = {"protocol": wire.protocol if protocol == "own" else protocol}
    both = []
    for kind in (RoceParser, PlainRoceParser):
        parser = kind(patience=patience, most_waiting_bytes=waiting, **options)
        both.append((read_batches(parser, frames), parser.counters()))
    (native, native_counters), (plain, plain_counters) = both
    assert native.flows == plain.flows
    assert native.events == plain.events
    assert native_counters == plain_counters


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_damaged_frames_harm_nobody_and_are_read_alike(seed: int) -> None:
    dice = random.Random(seed)
    life = seeded_life(seed, ranks=2, steps=1, shapes=[(30, 9)])
    traffic = RingTraffic(2, WIRES[dice.choice(sorted(WIRES))], [0])
    frames = []
    for batch in captured(life, traffic):
        for number in range(len(batch)):
            data = bytearray(batch.frame(number))
            for _ in range(dice.randrange(3)):
                data[dice.randrange(min(len(data), 90))] = dice.randrange(256)
            frames.append(bytes(data[: dice.choice([len(data), dice.randrange(len(data))])]))
    link = dice.choice([1, 1, 1, 113, 276, 9])
    both = []
    for kind in (RoceParser, PlainRoceParser):
        parser = kind()
        both.append((read_batches(parser, [batch_of(frames, link=link)]).events, parser.counters()))
    assert both[0] == both[1]
    assert both[0][1]["frames"] == len(frames)


# -- packets by hand -------------------------------------------------------------------------------------------------

GO = Path(b"\x02\0\0\0\0\1", b"\x02\0\0\0\0\2", "10.0.0.1", "10.0.0.2", 50000)
BACK = GO.back()
MTU = 256
QUEUE, ACK_QUEUE = 0x11, 0x22


def size_of(nbytes: int, order: str = "little") -> bytes:
    return nbytes.to_bytes(4, order)  # type: ignore[arg-type]


def stream(sizes: list[int], psn: int = 0, **options: Any) -> tuple[list[bytes], list[bytes]]:
    """Frames of messages one after another, and the messages."""
    frames, contents = [], []
    for number, size in enumerate(sizes):
        content = bytes((number * 31 + at * 7) % 251 for at in range(size))
        immediate = size_of(size, options.get("order", "little"))
        rkey = options.get("rkey", 9)
        for packet in write_packets(QUEUE, psn, content, 0x5000 + 4096 * (number % 4), rkey, MTU, immediate=immediate):
            frames.append(GO.frame(packet))
            psn += 1
        contents.append(content)
    return frames, contents


def acked(psn: int) -> bytes:
    return BACK.frame(acknowledge(ACK_QUEUE, psn, 0))


def ready(psn: int) -> bytes:
    (packet,) = write_packets(ACK_QUEUE, psn, bytes(32), 0x9000 + 256 * psn, 3, MTU)
    return BACK.frame(packet)


def read_frames(parser: Parser, frames: list[bytes]) -> Found:
    return read_batches(parser, [batch_of(frames)])


def contents_of(found: Found, flow: int = 0) -> list[bytes]:
    return [bytes(one.content) for one in found.of(flow)]


def test_sizes_from_nothing_to_several_packets(make: Callable[..., Parser]) -> None:
    frames, contents = stream([0, 1, 2, 3, 4, 255, 256, 257, 512, 1000, 0])
    found = read_frames(make(protocol="simple"), frames)
    assert contents_of(found) == contents
    assert found.flows[0].detail == {"queue_pair": QUEUE, "from_the_beginning": True}
    assert (found.flows[0].source, found.flows[0].destination) == ("10.0.0.1", "10.0.0.2")
    assert found.flows[0].source_port == 50000


def test_frames_may_be_padded(make: Callable[..., Parser]) -> None:
    frames, contents = stream([1, 700])
    assert contents_of(read_frames(make(), [frame + bytes(9) for frame in frames])) == contents


@pytest.mark.parametrize("order", ["little", "big"])
def test_the_last_packet_tells_where_a_message_without_its_first_begins(
    make: Callable[..., Parser], order: str
) -> None:
    frames, contents = stream([600, 1000, 600], order=order)
    del frames[3]  # the first packet of the second message
    parser = make(protocol="simple")
    found = read_frames(parser, [*frames, acked(9)])
    assert not found.resynced
    first, second, third = found.of(0)
    assert (bytes(first.content), bytes(third.content)) == (contents[0], contents[2])
    assert bytes(second.content[MTU:]) == contents[1][MTU:] and second.known.count(1) == 1000 - MTU
    assert second.known.count(2) == MTU
    assert parser.counters()["lost_packets"] == 1 and parser.counters()["lost_bytes"] == MTU


def test_a_hole_is_final_with_the_acknowledgement_of_a_later_packet(make: Callable[..., Parser]) -> None:
    frames, _ = stream([1000, 1000])
    parser = make(protocol="simple")
    found = Found()
    found.add(parser.feed(batch_of([*frames[:2], *frames[3:6]])))
    assert found.of(0)[0].known.count(1) == 2 * MTU, "what comes behind the hole waits"
    found.add(parser.feed(batch_of([acked(1)])))
    assert found.of(0)[0].known.count(2) == 0
    found.add(parser.feed(batch_of([acked(2)])))
    assert found.of(0)[0].known.count(2) == MTU and len(found.of(0)) == 2
    found.add(parser.feed(batch_of([frames[2]])))
    assert parser.counters()["late_packets"] == 1
    found.add(parser.feed(batch_of([BACK.frame(negative_acknowledge(ACK_QUEUE, 7, 0))])))
    assert found.of(0)[1].known.count(2) == MTU, "a negative one says that all before it has come"
    found.add(parser.finish())
    assert parser.counters()["lost_packets"] == 2 and found.of(0)[1].known.count(0) == 0


def test_without_acknowledgements_patience_ends(make: Callable[..., Parser]) -> None:
    frames, contents = stream([1000] * 6)
    parser = make(protocol="simple", patience=5)
    found = Found()
    found.add(parser.feed(batch_of([*frames[:2], *frames[3:8]])))
    assert "lost_packets" not in parser.counters()
    found.add(parser.feed(batch_of(frames[8:9])))
    assert parser.counters()["lost_packets"] == 1
    found.add(parser.feed(batch_of(frames[9:])))
    found.add(parser.finish())
    assert contents_of(found)[1:] == contents[1:]


def test_packets_out_of_order_are_put_in_order(make: Callable[..., Parser]) -> None:
    frames, contents = stream([700, 0, 300, 1000])
    random.Random(1).shuffle(frames)
    parser = make(protocol="simple")
    found = read_frames(parser, [*frames, *frames])
    assert contents_of(found) == contents
    assert parser.counters()["repeated_packets"] == len(frames)


def test_one_lost_message_keeps_the_numbers_and_two_do_not(make: Callable[..., Parser]) -> None:
    frames, contents = stream([100, 200, 100, 600])
    found = read_frames(make(protocol="simple"), [frames[0], *frames[2:], acked(9)])
    assert found.messages[0][1] is None and not found.resynced
    assert [bytes(found.messages[0][number].content) for number in (0, 2, 3)] == [contents[0], *contents[2:]]
    found = read_frames(make(protocol="simple"), [frames[0], *frames[3:], acked(9)])
    assert [flow for flow, _ in found.resynced] == [0]
    assert bytes(found.messages[0][1].content) == contents[3], "numbers go on, as if nothing were missing"


def test_flags_of_ll_count_what_is_lost(make: Callable[..., Parser]) -> None:
    frames = []
    for number in range(6):
        payload = encode(bytes(8 * number), number + 1)
        for packet in write_packets(QUEUE, number, payload, 0x5000, 9, MTU, immediate=size_of(len(payload))):
            frames.append(GO.frame(packet))
    del frames[1:4]
    found = read_frames(make(protocol="ll"), [*frames, acked(5)])
    assert not found.resynced
    assert {number: None if one is None else one.nbytes for number, one in found.messages[0].items()} == {
        0: 0, 1: None, 2: None, 3: None, 4: 32, 5: 40,
    }  # fmt: skip


def test_simple_data_that_look_like_lines_are_not_taken_for_ll(make: Callable[..., Parser]) -> None:
    contents = [
        np.ones(64, "<f4").tobytes(),
        np.full(64, 1, "<i4").tobytes(),
        np.zeros(64, "<i8").tobytes(),
        np.full(64, -1, "<i8").tobytes(),
    ]
    frames = []
    for number, content in enumerate(contents):
        for packet in write_packets(QUEUE, number, content, 0x5000, 9, 4096, immediate=size_of(len(content))):
            frames.append(GO.frame(packet))
    found = read_frames(make(protocol="simple"), frames)
    assert contents_of(found) == contents
    found = read_frames(make(), frames)
    assert [bytes(one.content) for one in found.of(0)][:1] == contents[:1]
    assert [one.nbytes for one in found.of(0)][2:] == [512, 512]


def test_psn_wraps_and_a_late_capture_begins_at_a_message(make: Callable[..., Parser]) -> None:
    frames, contents = stream([1000, 600, 1000], psn=0xFFFFFD)
    found = read_frames(make(protocol="simple"), frames)
    assert contents_of(found) == contents
    assert found.flows[0].detail["from_the_beginning"] is False
    parser = make(protocol="simple")
    found = read_frames(parser, frames[2:])
    assert contents_of(found) == contents[1:] and not found.resynced
    assert parser.counters()["packets_before_start"] == 2


def test_a_queue_pair_that_is_used_again_is_another_flow(make: Callable[..., Parser]) -> None:
    first, before = stream([1000, 100])
    second, after = stream([300, 0, 100], rkey=10)
    parser = make(protocol="simple")
    found = read_frames(parser, [*first, *first, *second])
    assert contents_of(found, 0) == before and contents_of(found, 1) == after
    assert found.closed == [0]
    assert parser.counters()["repeated_packets"] == len(first) and parser.counters()["reused_queue_pairs"] == 1


def test_strangers_are_counted_and_left(make: Callable[..., Parser]) -> None:
    frames, contents = stream([300])
    bth = write_packets(QUEUE, 0, b"x" * 8, 0, 0, MTU)[0]
    strangers = {
        "congestion_notices": GO.frame(b"\x81" + bth[1:]),
        "connection_datagrams": GO.frame(b"\x64\x40\xff\xff\0\0\0\1" + bth[8:]),
        "strangers": GO.frame(b"\x04" + bth[1:]),
        "wrong_checksums": frames[0][:-1] + bytes([frames[0][-1] ^ 1]),
        "damaged_headers": GO.frame(bth[:12] + b"1234"),
        "other_traffic": Path(GO.source_mac, GO.destination_mac, GO.source, GO.destination, 5).frame(bth)[:36]
        + b"\0\1" + GO.frame(bth)[38:],
        "not_ip": bytes(60),
        "short_frames": bytes(10),
        "unpaired_acknowledgements": acked(3),
        "clear_to_send": ready(0),
    }  # fmt: skip
    parser = make()
    found = read_frames(parser, [*strangers.values(), *frames])
    assert contents_of(found) == contents and len(found.flows) == 1
    counters = parser.counters()
    assert all(counters[name] == 1 for name in strangers), counters


def test_a_cut_frame_is_counted(make: Callable[..., Parser]) -> None:
    frames, _ = stream([300])
    batch = batch_of([frames[0][:-20]])
    batch.table["length"] = len(frames[0])
    parser = make()
    parser.feed(batch)
    assert parser.counters() == {"frames": 1, "truncated_packets": 1}


def test_memory_is_bounded(make: Callable[..., Parser]) -> None:
    frames, contents = stream([1000] * 8)
    parser = make(protocol="simple", most_waiting_bytes=2000)
    found = read_frames(parser, [frames[0], *frames[2:]])
    assert parser.counters()["holes_given_up"] == 1
    assert contents_of(found)[1:] == contents[1:]


def test_the_end_of_the_source_is_a_loss(make: Callable[..., Parser]) -> None:
    frames, contents = stream([1000])
    found = read_frames(make(protocol="simple"), frames[:2])
    (message,) = found.of(0)
    assert bytes(message.content[: 2 * MTU]) == contents[0][: 2 * MTU]
    assert message.known.count(2) == 1000 - 2 * MTU


def test_a_wrong_flag_costs_its_packet_only(make: Callable[..., Parser]) -> None:
    payload = bytearray(encode(bytes(range(240)), 1))
    payload[MTU + 4] ^= 1
    frames = [GO.frame(one) for one in write_packets(QUEUE, 0, bytes(payload), 0, 9, MTU, immediate=size_of(480))]
    parser = make()
    (message,) = read_frames(parser, frames).of(0)
    assert message.nbytes == 240 and message.known == bytes([1]) * 128 + bytes([2]) * 112
    assert parser.counters()["wrong_flags"] == 1


def test_ll128_gives_its_data(make: Callable[..., Parser]) -> None:
    lines = np.zeros((4, 128), np.uint8)
    lines[:, :120] = np.arange(480).reshape(4, 120)
    lines[:, 120] = 1
    frames = [GO.frame(one) for one in write_packets(QUEUE, 0, lines.tobytes(), 0, 9, MTU, immediate=size_of(512))]
    (message,) = read_frames(make(protocol="ll128"), frames).of(0)
    assert bytes(message.content) == lines[:, :120].tobytes()


def test_an_unknown_protocol_is_refused(make: Callable[..., Parser]) -> None:
    with pytest.raises(ConfigError, match="ll128, not 'tree'"):
        make(protocol="tree")


# -- several queue pairs a connection --------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [False, True])
def test_queue_pairs_of_a_connection_are_flows_of_their_own(make: Callable[..., Parser], split: bool) -> None:
    life = small_life(2)
    wire = Wire(mtu=1024, queue_pairs=3, split_data=split)
    alone = RingTraffic(2, WIRES["simple"], [0], nak_every=5)
    traffic = RingTraffic(2, wire, [0], nak_every=5)
    found = read_batches(make(protocol="simple", striped=True), captured(life, traffic))
    whole = read_batches(make(protocol="simple"), captured(life, alone))
    assert len(found.flows) == 3 * len(whole.flows) and not found.resynced

    def bytes_of(read: Found) -> int:
        return sum(len(one.content) for flow in read.messages.values() for one in flow.values())

    def count(read: Found) -> int:
        return sum(map(len, read.messages.values()))

    assert bytes_of(found) == bytes_of(whole)
    assert count(found) == count(whole) * (3 if split else 1)


def test_the_immediate_of_a_part_says_nothing_of_its_own_size(make: Callable[..., Parser]) -> None:
    """It is the size of all parts. Here it fits the packets that are lost, which were other messages."""
    path = Path(b"\2" * 6, b"\4" * 6, "fd00::1", "fd00::2", 50000)
    mtu, size = 256, (4 * 256 + 100).to_bytes(4, "little")
    packets = write_packets(1, 0, b"a" * 300, 1 << 20, 7, mtu, immediate=(300).to_bytes(4, "little"))
    packets += write_packets(1, 2, b"b" * 256, 2 << 20, 7, mtu, immediate=(256).to_bytes(4, "little"))
    packets += write_packets(1, 3, b"c" * 256, 3 << 20, 7, mtu, immediate=(256).to_bytes(4, "little"))
    packets += write_packets(1, 4, b"d" * 612, 4 << 20, 7, mtu, immediate=size)
    packets += write_packets(1, 7, b"e" * 612, 5 << 20, 7, mtu, immediate=size)
    frames = [path.frame(packet) for packet in packets]
    kept = [*frames[:2], *frames[5:]]
    acks = [path.back().frame(acknowledge(2, 9, 5))]
    sizes = {}
    for striped in (False, True):
        found = read_batches(make(protocol="simple", striped=striped), [batch_of([*kept, *acks])])
        (messages,) = found.messages.values()
        sizes[striped] = [one.nbytes for one in messages.values()]
    assert 1124 in sizes[False], "otherwise this shows nothing"
    assert sizes[True] == [300, 612]
