from __future__ import annotations

import random
import struct

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lastgood.mirror.streams.nccl_sockets import NcclSocketParser, NcclSockets, task_bytes
from tests.mirror.support.frames import Captured, Messages, read
from tests.mirror.support.gloo_wire import Line, Script, Turn

MAGIC = struct.pack("<Qi", 0x564AB9F2FC4B9D6C, 3)
PORT = 7000


def lines(data: bytes, flag: int) -> bytes:
    """Protocol LL: a flag after every 4 bytes."""
    words = np.frombuffer(data, "<u4")
    return np.stack([words, np.full_like(words, flag)], 1).tobytes()


def payloads(seed: int, count: int, protocol: str) -> list[tuple[bytes, bytes]]:
    """What is meant, and what is on the wire."""
    draw = random.Random(seed)
    found = []
    step = 0
    for _ in range(count):
        kind = protocol if protocol != "mixed" else draw.choice(["simple", "ll"])
        if kind == "ll":
            data = draw.randbytes(8 * draw.choice([1, 2, 9, 100, 4096]))
            step += 1
            found.append((data, lines(data, step)))
        else:
            data = draw.choice([b"", bytes(16), struct.pack("<f", 1.0) * 8, draw.randbytes(draw.randrange(1, 400))])
            data = draw.choice([data, data, draw.randbytes(draw.choice([65_536, 150_001]))])
            step += 2
            found.append((data, data))
    return found


def conversation(seed: int, wires: list[bytes], sockets: int, inline: int) -> list[Captured]:
    """The frames of one set: all connections are opened, then messages flow over them in any order between them."""
    draw = random.Random(seed)
    content = [bytearray(MAGIC + bytes((index,))) for index in range(sockets + 1)]
    turn = 0
    for wire in wires:
        content[sockets] += struct.pack("<i", len(wire))
        if not sockets or len(wire) <= inline:
            content[sockets] += wire
            continue
        size = task_bytes(len(wire), sockets)
        for at in range(0, len(wire), size):
            content[turn] += wire[at : at + size]
            turn = (turn + 1) % sockets
    opened, rest = [], []
    for index, one in enumerate(content):
        script = Script([Turn(0, bytes(one[:13])), Turn(0, bytes(one[13:]))])
        ends = (("10.0.0.1", 5000 + index), ("10.0.0.2", PORT))
        frames = Line(script, seed + index, largest=3000, ends=ends).frames(close=False)
        head = next(
            at for at in range(4, len(frames)) if sum(len(f.content) - 54 for f in frames[3 : at + 1]) >= len(one[:13])
        )
        opened += frames[: head + 1]
        rest.append(frames[head + 1 :])
    while any(rest):
        row = draw.choice([row for row in rest if row])
        opened.append(row.pop(0))
    return [Captured(one.content, at) for at, one in enumerate(opened)]


@settings(max_examples=15)
@given(
    seed=st.integers(0, 10**6),
    sockets=st.sampled_from([0, 1, 4]),
    protocol=st.sampled_from(["simple", "ll", "mixed"]),
    version=st.sampled_from(["2.19", "2.28"]),
    known=st.booleans(),
)
def test_messages_come_without_their_flags(seed, sockets, protocol, version, known):
    sent = payloads(seed, 20, protocol)
    options = NcclSockets(version, protocol if known and protocol != "mixed" else "auto")
    frames = conversation(seed, [wire for _, wire in sent], sockets, options.inline)
    found = read(NcclSocketParser(nccl=options), frames, 30)
    assert len(found.flows) == 1 and not found.resynced and not found.refused
    flow = found.flows[0]
    assert (flow.source, flow.destination, flow.destination_port) == ("10.0.0.1", "10.0.0.2", PORT)
    assert [bytes(message.content) for message in found.of(0)] == [data for data, _ in sent]
    assert all(message.complete for message in found.all.values())
    assert found.closed == [0]


@settings(max_examples=15, derandomize=True)
@example(seed=168932, sockets=4, protocol="ll", rate=0.1)
@given(
    seed=st.integers(0, 10**6),
    sockets=st.sampled_from([0, 1, 4]),
    protocol=st.sampled_from(["simple", "ll", "mixed"]),
    rate=st.sampled_from([0.01, 0.1]),
)
def test_after_loss_what_is_given_is_right(seed, sockets, protocol, rate):
    sent = payloads(seed, 20, protocol)
    frames = conversation(seed, [wire for _, wire in sent], sockets, 128)
    draw = random.Random(seed)
    found = read(NcclSocketParser(), [one for one in frames if draw.random() >= rate], 30)
    check(found, sent)


def check(found: Messages, sent: list[tuple[bytes, bytes]]) -> None:
    """Messages are numbered from the first one on; each byte that came is the one that was sent at its place."""
    for (_, number), message in found.all.items():
        data, wire = sent[number]
        meant = data if message.nbytes == len(data) else wire
        assert message.nbytes == len(meant)
        assert 0 not in message.known, "each byte came, or is said to be lost"
        for known, ours, theirs in zip(message.known, message.content, meant, strict=True):
            assert known != 1 or ours == theirs


def test_a_size_that_is_lost_ends_the_set_and_says_so():
    sent = payloads(3, 20, "simple")
    frames = conversation(3, [wire for _, wire in sent], 1, 128)
    control = [at for at, one in enumerate(frames) if one.content[35] == 5001 & 0xFF and len(one.content) > 54]
    del frames[control[len(control) // 2]]
    found = read(NcclSocketParser(), frames, 30)
    assert [text for _, text in found.resynced if "size" in text or "bytes" in text]
    check(found, sent)


def test_a_set_that_was_not_captured_from_its_beginning_is_refused():
    sent = payloads(4, 20, "simple")
    frames = conversation(4, [wire for _, wire in sent], 0, 128)
    found = read(NcclSocketParser(), frames[10:], 30)
    assert not found.all and len(found.refused) == 1


def test_hostile_sizes_take_no_memory():
    wires = [b"x" * 10]
    for size in (-1, (1 << 31) - 1):
        frames = conversation(1, wires, 0, 128)
        frames = [
            Captured(one.content.replace(struct.pack("<i", 10), struct.pack("<i", size)), one.time_ns) for one in frames
        ]
        found = read(NcclSocketParser(), frames, 30)
        assert found.resynced or found.all


@pytest.mark.parametrize("wrong", [0, 3, 15])
def test_a_wrong_flag_loses_the_message(wrong):
    data = bytes(range(128))
    wire = bytearray(lines(data, 1))
    wire[wrong * 8 + 4] ^= 1
    parser = NcclSocketParser(nccl=NcclSockets(protocol="ll"))
    found = read(parser, conversation(1, [bytes(wire)], 1, 0), 30)
    (message,) = found.all.values()
    assert set(message.known) == {2} and parser.counters()["bad_flags"] == 1
